// SPDX-License-Identifier: Apache-2.0
// How a host thread waits for queued collectives; shared by NcclComm and PeerComm.
#pragma once

#include <chrono>
#include <thread>

#include <cuda_runtime_api.h>

#include <helix/cuda/runtime.hpp>

namespace helix::cuda {

/// Whether queued work has ended: cudaSuccess, cudaErrorNotReady or what CUDA reports.
inline cudaError_t query(Stream stream) {
  return cudaStreamQuery(stream.handle());
}
inline cudaError_t query(const Event& event) {
  return cudaEventQuery(event.handle());
}

/// How long a wait spins; covers a decode step, for which a sleeping thread would wake late.
inline constexpr std::chrono::milliseconds kAwake{100};

/// Waits until `work`, a stream or an event, has ended: spins at first, then sleeps between looks. Calls
/// `throw_if_failed()` at each turn, before the work counts as done, and `look(waited)` each millisecond.
/// Either may throw; a caller that bounds the wait does so in `look`.
template <class Work, class ThrowIfFailed, class Look>
void wait_awake(const Work& work, const ThrowIfFailed& throw_if_failed, const Look& look) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kLook{1};
  const Clock::time_point begin = Clock::now();
  Clock::duration next_look = kLook;
  for (;;) {
    const cudaError_t status = query(work);
    throw_if_failed();
    if (status == cudaSuccess) return;
    if (status != cudaErrorNotReady)
      throw_on_error(static_cast<int>(status), "waiting for queued work", __FILE__, __LINE__);
    const Clock::duration waited = Clock::now() - begin;
    if (waited < next_look) {
      std::this_thread::yield();
      continue;
    }
    next_look = waited + kLook;
    look(waited);
    if (waited >= kAwake) std::this_thread::sleep_for(kLook);
  }
}

}  // namespace helix::cuda
