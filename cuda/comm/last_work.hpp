// SPDX-License-Identifier: Apache-2.0
// Work that may outlast the thread that started it, until the process ends.
#pragma once

namespace helix::cuda {

/// While one lives, the end of the process waits, at most three seconds. Otherwise CUDA and NCCL could be
/// torn down while a thread still aborts communicators, because main() ended on the failure that caused the
/// abort.
class LastWork {
 public:
  LastWork();
  LastWork(const LastWork&) = delete;
  LastWork& operator=(const LastWork&) = delete;
  ~LastWork();
};

}  // namespace helix::cuda
