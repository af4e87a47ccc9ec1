// SPDX-License-Identifier: Apache-2.0
// The kernel for many query rows, host side: which calls it takes, and its launches.
#include <algorithm>

#include "cuda/attention/waves.cuh"
#include "cuda/kv_cache/paged_maps.cuh"

namespace helix::cuda {
namespace {

/// Query rows of a KV head from which this kernel is the fastest. 32 rows (drafts of 4 with 8 heads a KV
/// head, H200), by this kernel and without it: 8 sequences of 131072 tokens 974 and 996 us, 1 of 8192 tokens
/// 24.6 and 28.3, 8 of 8192 tokens 80.6 and 78.4.
constexpr std::int64_t kMinRows = 32;
constexpr int kCombineThreads = 256;
constexpr int kMaxBox = 256;  ///< Largest size of a box in a dimension.

/// L2 promotion of KV reads. 256 bytes would be read twice, by the boxes of both chunks of a row (8 sequences
/// of 131072 tokens, drafts of 8: 1073 us, 972 with 128 bytes).
constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;

/// Tokens of a KV tile: as many as registers and shared memory allow beside one buffer of queries. TFLOP/s of
/// 4096 query tokens after 28672, by tokens of a tile. D = 128: 128 553, 144 576, 160 596, 176 (spills
/// registers) 580. D = 96: 128 455, 160 483. D = 192 with Dv = 128: 64 503, 96 571, 112 541. D = 64: 96 443,
/// 128 446 after that context; 96 401, 128 389 without one.
constexpr int tile_tokens(int dim) {
  if (dim == 96 || dim == 128) return 160;
  return dim > 192 ? 64 : 96;
}

/// The instance for a head size. At D = 64 the exponentials take longer than the products, and a third warp
/// group helps; at D = 256 taking turns costs 3 %.
template <int kDim, int kValueDim>
using Sizes = WaveSizes<kDim, kValueDim, tile_tokens(kDim), (kDim == 64 ? 3 : 2), (kDim < 256)>;

/// Calls use(Sizes<...>*) for these head sizes. Returns false if they are not built.
template <class Use>
bool with_sizes(std::int64_t head_dim, std::int64_t value_dim, const Use& use) {
  const auto try_one = [&]<int kDim, int kValueDim>(Sizes<kDim, kValueDim>* sizes) {
    if (head_dim != kDim || value_dim != kValueDim) return false;
    use(sizes);
    return true;
  };
  return try_one(static_cast<Sizes<64, 64>*>(nullptr)) || try_one(static_cast<Sizes<96, 96>*>(nullptr)) ||
         try_one(static_cast<Sizes<128, 128>*>(nullptr)) || try_one(static_cast<Sizes<192, 128>*>(nullptr)) ||
         try_one(static_cast<Sizes<256, 256>*>(nullptr));
}

int rows_for(std::int64_t head_dim, std::int64_t value_dim) {
  int rows = 0;
  with_sizes(head_dim, value_dim, [&]<class S>(S*) { rows = S::kRows; });
  return rows;
}

template <class T, class S, template <int, int> class Copies>
void launch(const AttentionParams& p, WaveMaps& maps, const AttentionGrid& grid) {
  constexpr int kBytes = static_cast<int>(sizeof(WaveShared<S>));
  static_assert(kBytes <= 227 * 1024);
  const auto kernel = attend_waves<T, S, Copies>;
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

template <class T, class S>
void launch_pages(const AttentionParams& p, const KvView& kv, const AttentionGrid& grid) {
  WaveMaps maps;
  // If query tiles consist of whole tokens, each is a box.
  maps.has_queries = S::kRows % p.group == 0 && p.query_tile_rows % p.group == 0 && p.group <= kMaxBox &&
                     S::kRows / p.group <= kMaxBox &&
                     is_map_stride(std::int64_t{p.kv_heads} * p.group, 2 * p.q_head_stride) &&
                     is_map_stride(std::int64_t{p.first_token} + p.num_tokens, 2 * p.q_token_stride);
  if (maps.has_queries) {
    maps.q = query_rows_map(
        p.q, p.dtype,
        {p.head_dim, std::int64_t{p.kv_heads} * p.group, std::int64_t{p.first_token} + p.num_tokens},
        2 * p.q_head_stride, 2 * p.q_token_stride, p.group, S::kRows / p.group);
  }
  maps.box_tokens = box_tokens_of(kv.format, S::kTokens);
  if (maps.box_tokens < kSwizzleRows) return launch<T, S, WaveChunkCopies>(p, maps, grid);
  maps.k = paged_rows_map(p.k, p.dtype, S::kDim, kv, maps.box_tokens, kPromotion);
  maps.v = paged_rows_map(p.v, p.dtype, S::kValueDim, kv, maps.box_tokens, kPromotion);
  launch<T, S, BoxCopies>(p, maps, grid);
}

}  // namespace

const AttentionKernel kWaves{
    .fits =
        [](const AttentionCall& call) {
          const KvFormat& format = call.kv.format;
          return call.is_hopper && !format.is_latent && call.dtype == format.dtype &&
                 size_bytes(call.dtype) == 2 && rows_for(format.head_dim, format.value_dim) > 0 &&
                 call.q_alignment == 16 && call.kv_alignment == 16 && call.has_tensor_maps &&
                 call.most_rows >= kMinRows;
        },
    .query_tile_rows = rows_for,
    .sm_rows = rows_for,
    .has_fixed_query_tile = false,
    .most_query_tiles = kMaxWaveQueryTiles,
    .launch =
        [](const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
          with_sizes(p.head_dim, p.value_dim, [&]<class S>(S*) {
            if (call.dtype == DType::bf16) {
              launch_pages<bf16, S>(p, call.kv, grid);
            } else {
              launch_pages<f16, S>(p, call.kv, grid);
            }
          });
        }};

}  // namespace helix::cuda
