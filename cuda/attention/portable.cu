// SPDX-License-Identifier: Apache-2.0
// Partial attention for any sizes, types and layouts in plain f32: out = softmax(scale q k^T) v and its lse,
// exact but not tuned.
//
// A block has eight warps and up to eight query rows, which are in shared memory. Each warp takes every
// eighth key of a KV split: its lanes hold the key in registers and multiply it by one query row after
// another.
#include <helix/error.hpp>

#include "cuda/attention/combine.cuh"
#include "cuda/attention/kernel.hpp"
#include "cuda/kv_cache/mixed_rows.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {
namespace {

constexpr int kKvTileTokens = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;

/// Query rows that share a key, for rows of up to `per_lane` * 32 elements: as many as keep their sums in
/// registers.
constexpr int rows_of(int per_lane) {
  return per_lane <= 8 ? 8 : per_lane <= 18 ? 4 : 2;
}

int per_lane(std::int64_t head_dim, std::int64_t value_dim) {
  const std::int64_t widest = head_dim > value_dim ? head_dim : value_dim;
  for (int n : {4, 8, 18, 32}) {
    if (widest <= n * kWarp) return n;
  }
  throw Error(ErrorCode::unsupported, "partial_attention: head sizes ", head_dim, " and ", value_dim,
              "; the widest that is built is ", 32 * kWarp);
}

template <class KV, int kPerLane>
struct Portable {
  static constexpr int kRows = rows_of(kPerLane);
  using Plan = AttentionPlan<kKvTileTokens>;

  struct Shared {
    Plan plan;
    float warp_max[kWarps][kRows];
    float warp_sum[kWarps][kRows];
    float block_max[kRows];
    float block_sum[kRows];
  };

  /// Local tokens that each query row sees.
  struct Bounds {
    int begin[kRows];
    int end[kRows];
  };

  /// A warp's running results of each query row: max (base 2), sum of weights, and the lane's columns of the
  /// sum of values.
  struct Found {
    float max[kRows];
    float sum[kRows];
    float acc[kRows][kPerLane];
  };

  /// The rows of one token.
  struct TokenRows {
    const KV* key;   // columns below AttentionParams::key_columns
    const KV* rope;  // the others: column i is rope[i]
    const KV* value;
  };

  static __device__ void attend(const AttentionParams& p, Shared& s, float* memory) {
    const int sum_stride = static_cast<int>(partial_stride(p.value_dim));
    float* sums = memory;                          // [kRows][sum_stride]
    float* queries = memory + kRows * sum_stride;  // [kRows][head_dim]
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    find_target_place(p);
    make_plan(p, s.plan);
    const Schedule<Plan> schedule(p, s.plan);
    const WorkItem item = schedule.work_item(static_cast<int>(blockIdx.x));
    KvTileCursor at = item.start;
    for (int done = 0, count = 0; done < item.count; done += count) {
      count = min(item.count - done, at.num_kv_tiles - at.kv_tile);
      const QueryTile query_tile = s.plan.query_tiles[at.query_tile];
      load_queries(p, query_tile, at.head, queries);
      const Bounds bounds = bounds_of(p, query_tile);
      __syncthreads();
      Found found = nothing();
      const std::int32_t* pages = p.lists.pages + s.plan.first_page[at.query_tile];
      const int begin = s.plan.first_kv_tile_token(at.query_tile) + at.kv_tile * kKvTileTokens;
      const int first = ::max(begin, s.plan.begin_token[at.query_tile]);
      const int last = ::min(begin + count * kKvTileTokens, s.plan.end_token[at.query_tile]);
      for (int token = first + warp; token < last; token += kWarps)
        attend_token(p, rows_of_token(p, pages, at.head, token), token, queries, bounds, found);
      join_warps(p, s, query_tile, p.v_scale != nullptr ? p.v_scale[at.head] : 1.0f, found, sums, sum_stride);
      const SplitPartials partials{p, schedule.splits_of(at.query_tile, at.head)};
      const BlockResult<1> result{sums, 0, sum_stride, s.block_max, s.block_sum, kRows};
      write_split<true>(partials, query_tile, at.head, 0, query_tile.num_rows, result);
      combine_splits<true>(partials, query_tile, at.query_tile, at.head);
      at.advance(p, s.plan, count);
      __syncthreads();
    }
  }

 private:
  /// Loads the queries times all factors of their scores, with zeros past the last row.
  static __device__ __forceinline__ void load_queries(const AttentionParams& p, const QueryTile& query_tile,
                                                      int head, float* queries) {
    const float key_scale = p.scale * (p.k_scale != nullptr ? p.k_scale[head] : 1.0f);
    for (int i = static_cast<int>(threadIdx.x); i < kRows * p.head_dim; i += kThreads) {
      const int row = i / p.head_dim;
      queries[i] = 0.0f;
      if (row < query_tile.num_rows) {
        queries[i] =
            load_element(p.q, p.dtype,
                         query_tile.token(p, row) * p.q_token_stride +
                             query_tile.query_head(p, head, row) * p.q_head_stride + i % p.head_dim) *
            key_scale;
      }
    }
  }

  static __device__ __forceinline__ Bounds bounds_of(const AttentionParams& p, const QueryTile& query_tile) {
    Bounds bounds;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      TokenRange seen{0, 0};
      if (r < query_tile.num_rows) seen = visible(p, p.positions[query_tile.token(p, r)]);
      bounds.begin[r] = static_cast<int>(seen.begin);
      bounds.end[r] = static_cast<int>(seen.end);
    }
    return bounds;
  }

  static __device__ __forceinline__ Found nothing() {
    Found found;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      found.max[r] = -kInfinity;
      found.sum[r] = 0.0f;
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) found.acc[r][e] = 0.0f;
    }
    return found;
  }

  static __device__ __forceinline__ TokenRows rows_of_token(const AttentionParams& p,
                                                            const std::int32_t* pages, int head, int token) {
    const std::int64_t page = pages[token / p.page_tokens];
    const int in_page = token % p.page_tokens;
    return {reinterpret_cast<const KV*>(p.k.at(page, head, in_page)),
            rope_from_zero<KV>(p.rope.at(page, head, in_page), p.key_columns),
            reinterpret_cast<const KV*>(p.v.at(page, head, in_page))};
  }

  /// Adds one token to all query rows; one warp.
  static __device__ __forceinline__ void attend_token(const AttentionParams& p, const TokenRows& from,
                                                      int token, const float* queries, const Bounds& bounds,
                                                      Found& found) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    float k[kPerLane];
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) {
      const int i = lane + e * kWarp;
      k[e] = i < p.head_dim ? key_element(from.key, from.rope, i, p.key_columns) : 0.0f;
    }
    float weight[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float dot = 0.0f;
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) {
        const int i = lane + e * kWarp;
        if (i < p.head_dim) dot = fmaf(k[e], queries[r * p.head_dim + i], dot);
      }
      dot = warp_sum(dot);
      if (p.soft_cap > 0.0f) dot = p.soft_cap * tanhf(dot / p.soft_cap);
      weight[r] = 0.0f;
      if (token < bounds.begin[r] || token >= bounds.end[r]) continue;  // uniform in the warp
      dot *= kLog2E;
      const float top = fmaxf(found.max[r], dot);
      const float pivot = top == -kInfinity ? 0.0f : top;
      const float shrink = exp2f(found.max[r] - pivot);
      weight[r] = exp2f(dot - pivot);
      found.sum[r] = fmaf(found.sum[r], shrink, weight[r]);
      found.max[r] = top;
      if (shrink != 1.0f) {
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) found.acc[r][e] *= shrink;
      }
    }
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) {
      const int i = lane + e * kWarp;
      if (i < p.value_dim) {
        const float v = key_element(from.value, from.value, i, p.value_dim);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          // A row that does not see the token must not see its NaN either.
          if (weight[r] != 0.0f) found.acc[r][e] = fmaf(weight[r], v, found.acc[r][e]);
        }
      }
    }
  }

  /// Merges the warps' results in shared memory, in the order of the warps.
  static __device__ __forceinline__ void join_warps(const AttentionParams& p, Shared& s,
                                                    const QueryTile& query_tile, float value_scale,
                                                    const Found& found, float* sums, int sum_stride) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    if (lane == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        s.warp_max[warp][r] = found.max[r];
        s.warp_sum[warp][r] = found.sum[r];
      }
    }
    __syncthreads();
    if (threadIdx.x < kRows) {
      const int r = static_cast<int>(threadIdx.x);
      float top = -kInfinity;
      for (int w = 0; w < kWarps; ++w) top = fmaxf(top, s.warp_max[w][r]);
      float all = 0.0f;
      for (int w = 0; w < kWarps; ++w) {
        if (s.warp_sum[w][r] != 0.0f) all += s.warp_sum[w][r] * exp2f(s.warp_max[w][r] - top);
      }
      s.block_max[r] = top;
      s.block_sum[r] = all;
    }
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const bool is_empty = found.sum[r] == 0.0f;
          const float shrink = is_empty ? 0.0f : exp2f(found.max[r] - s.block_max[r]) * value_scale;
#pragma unroll
          for (int e = 0; e < kPerLane; ++e) {
            const int i = lane + e * kWarp;
            if (i < p.value_dim && r < query_tile.num_rows) {
              float* to = sums + r * sum_stride + i;
              *to = (w == 0 ? 0.0f : *to) + (is_empty ? 0.0f : found.acc[r][e] * shrink);
            }
          }
        }
      }
      __syncthreads();
    }
  }
};

template <class KV, int kPerLane>
__global__ __launch_bounds__(kThreads) void attend_portable(const __grid_constant__ AttentionParams p) {
  extern __shared__ float memory[];
  __shared__ typename Portable<KV, kPerLane>::Shared shared;
  prefetch_params(p);
  Portable<KV, kPerLane>::attend(p, shared, memory);
  finish_messages(p);
}

template <class KV, int kPerLane>
void launch(const AttentionParams& p, const AttentionGrid& grid) {
  const std::size_t bytes =
      static_cast<std::size_t>(rows_of(kPerLane) * (p.head_dim + partial_stride(p.value_dim))) *
      sizeof(float);
  attend_portable<KV, kPerLane><<<grid.blocks, kThreads, bytes, grid.stream>>>(p);
  HELIX_CHECK_LAUNCH();
}

}  // namespace

const AttentionKernel kPortable{
    .fits = [](const AttentionCall&) { return true; },
    .query_tile_rows = [](std::int64_t head_dim,
                          std::int64_t value_dim) { return rows_of(per_lane(head_dim, value_dim)); },
    .sm_rows = [](std::int64_t head_dim,
                  std::int64_t value_dim) { return kBlocksPerSm * rows_of(per_lane(head_dim, value_dim)); },
    .has_fixed_query_tile = true,
    .launch =
        [](const AttentionParams& p, const AttentionCall& call, const AttentionGrid& grid) {
          dispatch_rows(call.kv.format.dtype, [&]<class KV>(KV*) {
            switch (per_lane(p.head_dim, p.value_dim)) {
              case 4:
                return launch<KV, 4>(p, grid);
              case 8:
                return launch<KV, 8>(p, grid);
              case 18:
                return launch<KV, 18>(p, grid);
              default:
                return launch<KV, 32>(p, grid);
            }
          });
        }};

}  // namespace helix::cuda
