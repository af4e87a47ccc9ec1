// SPDX-License-Identifier: Apache-2.0
// Lets a test make the system refuse threads. Not for sanitizers, which have a pthread_create of their own.
#pragma once

namespace helix::test {

/// Number of threads that this process has requested since the last refuse_threads(), including refused ones.
int num_threads_asked();

/// Resets the count to 0 and refuses `count` threads, beginning with number `first` (0 is the next), with
/// EAGAIN. A count of 0 refuses none.
void refuse_threads(int first, int count);

}  // namespace helix::test
