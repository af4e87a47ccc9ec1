// SPDX-License-Identifier: Apache-2.0
// Threads that the system refuses when a test says so. Not for sanitizers, which have a pthread_create of
// their own.
#pragma once

namespace helix::test {

/// Threads that this process has asked for since the last refuse_threads(), refused ones included.
int num_threads_asked();

/// Counts from 0 again, and refuses the threads from number `first` on (0 is the next), `count` of them, with
/// EAGAIN; count 0: refuses none.
void refuse_threads(int first, int count);

}  // namespace helix::test
