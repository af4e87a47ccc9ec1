// SPDX-License-Identifier: Apache-2.0
// Ranks over peer memory, as threads that may share a GPU, and their data.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>

#include <helix/cuda/backend.hpp>
#include <helix/cuda/graph.hpp>
#include <helix/cuda/peer_comm.hpp>

#include "cuda/gpu.hpp"

namespace helix::test {

/// Ranks spread over the available GPUs.
inline std::vector<cuda::PeerComm> make_group(int size,
                                              std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  const int devices = std::min(size, cuda::device_count());
  std::vector<int> all(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) all[static_cast<std::size_t>(rank)] = rank % devices;
  return cuda::PeerComm::create_group(all, {.timeout = timeout, .use_nccl = false});
}

inline int device_of(const cuda::PeerComm& comm) {
  return comm.rank() % std::min(comm.size(), cuda::device_count());
}

template <class T>
using PeerBackend = cuda::Backend<cuda::PeerComm, T>;

template <class T>
cuda::Buffer on_device(const std::vector<T>& values) {
  cuda::Buffer buffer(std::max<std::size_t>(1, values.size() * sizeof(T)));
  HELIX_CUDA_CHECK(
      cudaMemcpy(buffer.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return buffer;
}

template <class T>
std::vector<T> on_host(const PeerBackend<T>& backend, const cuda::Buffer& buffer, std::size_t count,
                       const cuda::Stream& stream) {
  std::vector<T> values(count);
  backend.download(values.data(), buffer.data(), count * sizeof(T), stream);
  return values;
}

/// Values of any rank, so that each rank knows the inputs of the others.
template <class T>
std::vector<T> random_values(std::int64_t count, unsigned seed) {
  std::vector<T> values(static_cast<std::size_t>(count));
  std::uint32_t state = seed * 2654435761u + 12345u;
  for (T& value : values) {
    state = state * 1664525u + 1013904223u;
    value = T(static_cast<float>(static_cast<std::int32_t>(state)) * 0x1p-30f);  // in (-2, 2)
  }
  return values;
}

/// Replays a captured step 50 times; from time to time the ranks start one after another. Calls check(replay)
/// after some of the replays. All ranks of the group must call it.
template <class T, class Check>
void replay_apart(PeerBackend<T>& backend, const cuda::Graph& graph, const cuda::Stream& stream,
                  const Check& check) {
  cuda::PeerComm& comm = *backend.comms().kvp;
  const auto meet = [&] {
    comm.barrier(stream);
    backend.synchronize(stream);
  };
  meet();
  for (int replay = 0; replay < 50; ++replay) {
    if (replay % 7 == comm.rank()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    graph.replay(stream);
    if (replay % 9 == 0) check(replay);
  }
  backend.synchronize(stream);
  meet();
}

}  // namespace helix::test
