// SPDX-License-Identifier: Apache-2.0
// How a host thread waits for queued work with collectives, over NCCL and over windows alike.
#pragma once

#include <chrono>
#include <optional>

#include <cuda_runtime_api.h>

#include <helix/comm/bootstrap.hpp>
#include <helix/cuda/runtime.hpp>

namespace helix::cuda {

/// Whether queued work has ended: cudaSuccess, cudaErrorNotReady or what CUDA reports.
inline cudaError_t query(Stream stream) {
  return cudaStreamQuery(stream.handle());
}
inline cudaError_t query(const Event& event) {
  return cudaEventQuery(event.handle());
}

/// A decode step is waited for awake: a thread that sleeps comes late.
inline constexpr std::chrono::milliseconds kAwake{100};

/// Tells the watch of the job, where there is one, that this rank waits.
class BootstrapWait {
 public:
  explicit BootstrapWait(std::optional<comm::Bootstrap>& bootstrap) : bootstrap_(bootstrap) {
    if (bootstrap_) bootstrap_->begin_wait();
  }
  BootstrapWait(const BootstrapWait&) = delete;
  BootstrapWait& operator=(const BootstrapWait&) = delete;
  ~BootstrapWait() {
    if (bootstrap_) bootstrap_->end_wait();
  }

 private:
  std::optional<comm::Bootstrap>& bootstrap_;
};

}  // namespace helix::cuda
