// SPDX-License-Identifier: Apache-2.0
// all_of: gathers one host value from each rank of a NcclComm to all ranks.
#pragma once

#include <cstddef>
#include <vector>

#include <cuda_runtime_api.h>

#include <helix/cuda/nccl_comm.hpp>
#include <helix/cuda/runtime.hpp>

#include "cuda/runtime/device_scope.hpp"

namespace helix::cuda {

/// Returns the values of all ranks, by rank; T is trivially copyable. This rank uses `device`. Collective;
/// blocks the host. @throws what NcclComm::synchronize() throws.
template <class T>
std::vector<T> all_of(NcclComm& comm, int device, const T& own) {
  const DeviceScope scope(device);
  const Stream stream = Stream::create();
  std::vector<T> all(static_cast<std::size_t>(comm.size()));
  const Buffer sent(sizeof(T));
  const Buffer received(all.size() * sizeof(T));
  HELIX_CUDA_CHECK(cudaMemcpyAsync(sent.data(), &own, sizeof(T), cudaMemcpyHostToDevice, stream.handle()));
  comm.all_gather(sent.data(), received.data(), sizeof(T), stream);
  comm.synchronize(stream);
  HELIX_CUDA_CHECK(cudaMemcpyAsync(all.data(), received.data(), all.size() * sizeof(T),
                                   cudaMemcpyDeviceToHost, stream.handle()));
  cuda::synchronize(stream);
  return all;
}

}  // namespace helix::cuda
