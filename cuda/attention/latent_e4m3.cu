// SPDX-License-Identifier: Apache-2.0
// The launch of the kernel over latents of e4m3.
#include "cuda/attention/latent_e4m3.cuh"
#include "cuda/attention/latent_e4m3.hpp"
#include "cuda/runtime/launch.cuh"

namespace helix::cuda {
namespace {

template <class K>
int launch(const AttentionParams& p, const AttentionGrid& grid) {
  constexpr int kBytes = static_cast<int>(sizeof(latent_e4m3::Shared<K>));
  const int blocks = latent_blocks(grid, K::kBlocks);
  const auto kernel = attend_latent_e4m3<K>;
  HELIX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  launch_early(kernel, static_cast<unsigned>(blocks), latent::kThreads, kBytes, grid.stream, true, p);
  return blocks / K::kBlocks;
}

template <class T, bool kIsMixed>
int launch_rows(const AttentionParams& p, const AttentionGrid& grid) {
  using latent_e4m3::Kind;
  if (p.query_tile_rows > kGroupRows) return launch<Kind<T, 64, 2, kIsMixed>>(p, grid);
  if (p.query_tile_rows > 32) return launch<Kind<T, 64, 1, kIsMixed>>(p, grid);
  if (p.query_tile_rows > 16) return launch<Kind<T, 32, 1, kIsMixed>>(p, grid);
  return launch<Kind<T, 16, 1, kIsMixed>>(p, grid);
}

}  // namespace

int launch_latent_e4m3(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
  if (call.kv.format.is_mixed()) return launch_rows<bf16, true>(p, grid);
  return call.dtype == DType::bf16 ? launch_rows<bf16, false>(p, grid) : launch_rows<f16, false>(p, grid);
}

}  // namespace helix::cuda
