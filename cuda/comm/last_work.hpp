// SPDX-License-Identifier: Apache-2.0
// Work that may outlast those who started it, up to the end of the process.
#pragma once

namespace helix::cuda {

/// While one lives, the end of the process waits, up to three seconds: CUDA and NCCL are not torn down under
/// a thread that aborts communicators while the failure that it tells of has already ended main().
class LastWork {
 public:
  LastWork();
  LastWork(const LastWork&) = delete;
  LastWork& operator=(const LastWork&) = delete;
  ~LastWork();
};

}  // namespace helix::cuda
