// SPDX-License-Identifier: Apache-2.0
// The kernel for many query rows, host side: its instances, and their launches.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/attention/kernel.hpp"
#include "cuda/attention/waves.cuh"
#include "cuda/kv_cache/paged_maps.cuh"

namespace helix::cuda {

/// L2 promotion of KV reads. 256 bytes would be read twice, by the boxes of both chunks of a row (8 sequences
/// of 131072 tokens, drafts of 8: 1073 us, 972 with 128 bytes).
inline constexpr auto kWavePromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;

/// Tokens of a KV tile: as many as registers and shared memory allow beside one buffer of queries. TFLOP/s of
/// 4096 query tokens after 28672, by tokens of a tile. D = 128: 128 553, 144 576, 160 596, 176 (spills
/// registers) 580. D = 96: 128 455, 160 483. D = 192 with Dv = 128: 64 503, 96 571, 112 541. D = 64: 96 443,
/// 128 446 after that context; 96 401, 128 389 without one.
constexpr int wave_tile_tokens(int dim, int groups) {
  if (dim == 64) return groups == 2 ? 160 : 96;
  if (dim <= 128) return 160;
  return dim > 192 ? 64 : 96;
}

/// Warp groups that multiply. At D = 64 the exponentials take longer than the products, and a third one
/// helps; it leaves no registers for widening e4m3.
template <class KV>
constexpr int wave_groups(int dim) {
  return dim == 64 && sizeof(KV) == 2 ? 3 : 2;
}

/// The instance for a head size. At D = 256 taking turns costs 3 %.
template <class KV, int kDim, int kValueDim>
using WaveInstance = WaveSizes<kDim, kValueDim, wave_tile_tokens(kDim, wave_groups<KV>(kDim)),
                               wave_groups<KV>(kDim), (kDim < 256)>;

/// Calls use(WaveInstance<...>*) for these head sizes. Returns false if they are not built.
template <class KV, class Use>
bool with_wave_instance(std::int64_t head_dim, std::int64_t value_dim, const Use& use) {
  const auto try_one = [&]<int kDim, int kValueDim>() {
    if (head_dim != kDim || value_dim != kValueDim) return false;
    use(static_cast<WaveInstance<KV, kDim, kValueDim>*>(nullptr));
    return true;
  };
  return try_one.template operator()<64, 64>() || try_one.template operator()<80, 80>() ||
         try_one.template operator()<96, 96>() || try_one.template operator()<112, 112>() ||
         try_one.template operator()<128, 128>() || try_one.template operator()<192, 128>() ||
         try_one.template operator()<256, 256>();
}

/// Rows of a query tile; 0 for head sizes that are not built.
template <class KV>
int wave_query_tile_rows(std::int64_t head_dim, std::int64_t value_dim) {
  int rows = 0;
  with_wave_instance<KV>(head_dim, value_dim, [&]<class S>(S*) { rows = S::kRows; });
  return rows;
}

/// Whether a call has what every instance needs, besides KV of its type.
template <class KV>
bool fits_waves(const AttentionCall& call) {
  const KvFormat& format = call.kv.format;
  return call.is_hopper && !format.is_latent && size_bytes(call.dtype) == 2 &&
         wave_query_tile_rows<KV>(format.head_dim, format.value_dim) > 0 && call.q_alignment == 16 &&
         call.kv_alignment == 16;
}

/// The map of the queries, if query tiles consist of whole tokens: each is then a box.
template <class S>
void map_wave_queries(const AttentionParams& p, const AttentionCall& call, WaveMaps& maps) {
  constexpr int kMaxBox = 256;  // largest size of a box in a dimension
  maps.has_queries = call.has_query_map && S::kRows % p.group == 0 && p.query_tile_rows % p.group == 0 &&
                     p.group <= kMaxBox && S::kRows / p.group <= kMaxBox;
  if (!maps.has_queries) return;
  maps.q = query_rows_map(
      p.q, p.dtype,
      {p.head_dim, std::int64_t{p.kv_heads} * p.group, std::int64_t{p.first_token} + p.num_tokens},
      2 * p.q_head_stride, 2 * p.q_token_stride, p.group, S::kRows / p.group);
}

/// The maps of keys and values, with boxes of maps.box_tokens tokens.
template <class S>
void map_wave_rows(const AttentionParams& p, const KvView& kv, WaveMaps& maps) {
  maps.k = paged_rows_map(p.k, kv.format.dtype, S::kDim, kv, maps.box_tokens, kWavePromotion);
  maps.v = paged_rows_map(p.v, kv.format.dtype, S::kValueDim, kv, maps.box_tokens, kWavePromotion);
}

template <class T, class KV, class S, template <int, int> class Copies>
void launch_waves(const AttentionParams& p, WaveMaps& maps, const AttentionGrid& grid) {
  constexpr int kCombineThreads = 256;
  constexpr int kBytes = static_cast<int>(sizeof(WaveShared<S>));
  static_assert(kBytes <= 227 * 1024);
  const auto kernel = attend_waves<T, KV, S, Copies>;
  HELIX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const int blocks = std::max(1, grid.blocks / kBlocksPerSm);
  const int items = p.num_query_tiles * p.kv_heads;
  // If each item may have two splits or more. 8 x 128 rows in 16 splits: 28 us, 56 without.
  maps.combines_later = 2 * items <= blocks && items <= kMaxQueryTiles;
  launch_early(kernel, blocks, S::kThreads, kBytes, grid.stream, true, p, maps);
  if (maps.combines_later) {
    launch_early(combine_waves_later<kCombineThreads>,
                 grid_blocks(std::int64_t{items} * p.query_tile_rows, kCombineThreads / kWarp),
                 kCombineThreads, 0, grid.stream, true, p);
  }
}

}  // namespace helix::cuda
