// SPDX-License-Identifier: Apache-2.0
// The launch of the kernel over latents of e4m3.
#include "cuda/attention/latent_e4m3.cuh"
#include "cuda/attention/latent_e4m3.hpp"
#include "cuda/kv_cache/paged_maps.cuh"
#include "cuda/runtime/launch.cuh"

namespace helix::cuda {
namespace {

/// Tensor maps of the pool's rows; none if no boxes divide its pages.
template <class K>
latent_e4m3::Maps maps_of(const AttentionParams& p, const KvView& kv) {
  latent_e4m3::Maps maps{};
  if (!has_latent_boxes(kv.format)) return maps;
  const int box = box_tokens_of(kv.format, kLatentTileTokens);
  const auto map_of = [&](std::byte* first, const PagedRows& rows, int columns, int chunks,
                          CUtensorMapSwizzle swizzle) {
    return rows_map<4>(first, DType::fp8_e4m3, {columns, kv.format.page_tokens, chunks, kv.num_pages},
                       {rows.token_bytes, columns, rows.page_bytes}, {columns, box, 1, 1},
                       CU_TENSOR_MAP_L2_PROMOTION_NONE, swizzle);
  };
  using latent_e4m3::kTileChunkColumns;
  maps.box_tokens = box;
  maps.latents = map_of(p.k.first, p.k, kTileChunkColumns, kLatentColumns / kTileChunkColumns,
                        CU_TENSOR_MAP_SWIZZLE_128B);
  maps.ropes = map_of(p.rope.first, p.rope, K::kRopeBytes, 1,
                      K::kIsMixed ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
  if constexpr (K::kIsMixed)
    maps.scales = map_of(p.k.first + kLatentColumns, p.k, K::kScaleBytes, 1, CU_TENSOR_MAP_SWIZZLE_NONE);
  return maps;
}

template <class K>
int launch(const AttentionParams& p, const KvView& kv, const AttentionGrid& grid) {
  constexpr int kBytes = static_cast<int>(sizeof(latent_e4m3::Shared<K>));
  const int blocks = latent_blocks(grid, K::kBlocks);
  const auto kernel = attend_latent_e4m3<K>;
  HELIX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  launch_early(kernel, static_cast<unsigned>(blocks), latent::kThreads, kBytes, grid.stream, true, p,
               maps_of<K>(p, kv));
  return blocks / K::kBlocks;
}

template <class T, bool kIsMixed>
int launch_rows(const AttentionParams& p, const KvView& kv, const AttentionGrid& grid) {
  using latent_e4m3::Kind;
  if (p.query_tile_rows > kGroupRows) return launch<Kind<T, 64, 2, kIsMixed>>(p, kv, grid);
  if (p.query_tile_rows > 32) return launch<Kind<T, 64, 1, kIsMixed>>(p, kv, grid);
  if (p.query_tile_rows > 16) return launch<Kind<T, 32, 1, kIsMixed>>(p, kv, grid);
  return launch<Kind<T, 16, 1, kIsMixed>>(p, kv, grid);
}

}  // namespace

int launch_latent_e4m3(const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
  if (call.kv.format.is_mixed()) return launch_rows<bf16, true>(p, call.kv, grid);
  return call.dtype == DType::bf16 ? launch_rows<bf16, false>(p, call.kv, grid)
                                   : launch_rows<f16, false>(p, call.kv, grid);
}

}  // namespace helix::cuda
