// SPDX-License-Identifier: Apache-2.0
// What a communicator does with a stream that names no queue.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>

#include <helix/contract/communicator.hpp>
#include <helix/cuda/runtime.hpp>
#include <helix/error.hpp>

namespace helix::test {

/// Each call refuses such a stream on the rank that gives it, and the group goes on.
template <class Comm>
void refuses_unnamed_stream(Comm& comm) {
  const cuda::Stream stream = cuda::Stream::create();
  const cuda::Stream unnamed;
  const cuda::Buffer data(std::size_t{4096} * static_cast<std::size_t>(comm.size()));
  std::byte* const in = data.data();
  std::byte* const out = in + 2048 * comm.size();
  const std::vector<std::int64_t> bytes(static_cast<std::size_t>(comm.size()), 64);
  const auto refuse = [&](const char* name, auto&& call) {
    try {
      call();
    } catch (const Error& error) {
      contract::require(error.code() == ErrorCode::invalid_argument, name, ": ", error.what());
      return;
    }
    contract::require(false, name, " takes a stream that names no queue");
  };
  refuse("all_reduce", [&] { comm.all_reduce(in, out, 16, DType::f32, unnamed); });
  refuse("reduce_scatter", [&] { comm.reduce_scatter(in, out, 16, DType::f32, unnamed); });
  refuse("all_gather", [&] { comm.all_gather(in, out, 64, unnamed); });
  refuse("all_to_all", [&] { comm.all_to_all(in, out, 64, unnamed); });
  refuse("all_to_all_v", [&] { comm.all_to_all_v(in, bytes, out, bytes, unnamed); });
  refuse("broadcast", [&] { comm.broadcast(in, 64, 0, unnamed); });
  refuse("barrier", [&] { comm.barrier(unnamed); });
  const std::vector<float> ones(16, 1.0f);
  std::vector<float> sums(16);
  HELIX_CUDA_CHECK(cudaMemcpy(in, ones.data(), 64, cudaMemcpyHostToDevice));
  comm.all_reduce(in, out, 16, DType::f32, stream);
  comm.synchronize(stream);
  HELIX_CUDA_CHECK(cudaMemcpy(sums.data(), out, 64, cudaMemcpyDeviceToHost));
  for (const float sum : sums)
    contract::require(sum == static_cast<float>(comm.size()), "the sum after refused calls is ", sum);
}

}  // namespace helix::test
