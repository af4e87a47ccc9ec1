// SPDX-License-Identifier: Apache-2.0
// Partial attention for any sizes and types, in plain f32: exact, and no more than that.
//
// Each warp takes every eighth key of a tile: its lanes hold the row and walk the queries, which are in
// shared memory.
#include <helix/error.hpp>

#include "cuda/attention/merge.cuh"

namespace helix::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;

/// Query rows that share a key, for rows of up to kPerLane * 32 elements: their sums stay in registers.
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
__global__ __launch_bounds__(kThreads) void attend_portable(const __grid_constant__ AttentionParams p) {
  constexpr int kRows = rows_of(kPerLane);
  extern __shared__ float shared[];
  __shared__ AttentionPlan plan;
  __shared__ float warp_max_of[kWarps][kRows];
  __shared__ float warp_sum_of[kWarps][kRows];
  __shared__ float block_max[kRows];
  __shared__ float block_sum[kRows];
  const int sum_stride = static_cast<int>(partial_stride(p.value_dim));
  float* sums = shared;                          // [kRows][sum_stride]
  float* queries = shared + kRows * sum_stride;  // [kRows][head_dim]

  prefetch_params(p);
  make_plan(p, plan);
  const Schedule schedule(p, plan);
  const TileRun run = schedule.tiles_of(static_cast<int>(blockIdx.x));
  if (run.count == 0) return finish_messages(p);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  TileCursor at = run.start;

  for (int done = 0, count = 0; done < run.count; done += count) {
    count = min(run.count - done, at.tiles - at.tile);
    const RowBlock rows = plan.rows[at.row_block];
    const float key_scale = p.scale * (p.k_scale != nullptr ? p.k_scale[at.head] : 1.0f);
    const float value_scale = p.v_scale != nullptr ? p.v_scale[at.head] : 1.0f;
    for (int i = static_cast<int>(threadIdx.x); i < kRows * p.head_dim; i += kThreads) {
      const int row = i / p.head_dim;
      queries[i] = row < rows.num_rows ? load_element(p.q, p.dtype,
                                                      rows.token(p, row) * p.q_token_stride +
                                                          rows.query_head(p, at.head, row) * p.q_head_stride +
                                                          i % p.head_dim) *
                                             key_scale
                                       : 0.0f;
    }
    int row_begin[kRows];
    int row_end[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      TokenRange seen{0, 0};
      if (r < rows.num_rows) seen = visible(p, p.positions[rows.token(p, r)]);
      row_begin[r] = static_cast<int>(seen.begin);
      row_end[r] = static_cast<int>(seen.end);
    }
    __syncthreads();

    float max[kRows];
    float sum[kRows];
    float acc[kRows][kPerLane];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      max[r] = -kInfinity;
      sum[r] = 0.0f;
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) acc[r][e] = 0.0f;
    }
    const std::int32_t* pages = p.page_table + plan.slot[at.row_block] * p.max_pages;
    const int begin = plan.first_token_of_tiles(at.row_block) + at.tile * kTileTokens;
    const int first = ::max(begin, plan.begin_token[at.row_block]);
    const int last = ::min(begin + count * kTileTokens, plan.end_token[at.row_block]);
    for (int token = first + warp; token < last; token += kWarps) {
      const std::int64_t offset = pages[token / p.page_tokens] * p.page_bytes + at.head * p.head_bytes +
                                  token % p.page_tokens * p.row_bytes;
      const auto* key = reinterpret_cast<const KV*>(p.keys + offset);
      const auto* value = reinterpret_cast<const KV*>(p.values + offset);
      float k[kPerLane];
#pragma unroll
      for (int e = 0; e < kPerLane; ++e)
        k[e] = lane + e * kWarp < p.head_dim ? to_float(key[lane + e * kWarp]) : 0.0f;
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
        if (token < row_begin[r] || token >= row_end[r]) continue;  // uniform in the warp
        dot *= kLog2E;
        const float top = fmaxf(max[r], dot);
        const float pivot = top == -kInfinity ? 0.0f : top;
        const float shrink = exp2f(max[r] - pivot);
        weight[r] = exp2f(dot - pivot);
        sum[r] = fmaf(sum[r], shrink, weight[r]);
        max[r] = top;
        if (shrink != 1.0f) {
#pragma unroll
          for (int e = 0; e < kPerLane; ++e) acc[r][e] *= shrink;
        }
      }
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) {
        const int i = lane + e * kWarp;
        if (i < p.value_dim) {
          const float v = to_float(value[i]);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            // A row that does not see the token must not see its NaN either.
            if (weight[r] != 0.0f) acc[r][e] = fmaf(weight[r], v, acc[r][e]);
          }
        }
      }
    }

    // The warps' results, in order.
    if (lane == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        warp_max_of[warp][r] = max[r];
        warp_sum_of[warp][r] = sum[r];
      }
    }
    __syncthreads();
    if (threadIdx.x < kRows) {
      const int r = static_cast<int>(threadIdx.x);
      float top = -kInfinity;
      for (int w = 0; w < kWarps; ++w) top = fmaxf(top, warp_max_of[w][r]);
      float all = 0.0f;
      for (int w = 0; w < kWarps; ++w) {
        if (warp_sum_of[w][r] != 0.0f) all += warp_sum_of[w][r] * exp2f(warp_max_of[w][r] - top);
      }
      block_max[r] = top;
      block_sum[r] = all;
    }
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float shrink = sum[r] == 0.0f ? 0.0f : exp2f(max[r] - block_max[r]) * value_scale;
#pragma unroll
          for (int e = 0; e < kPerLane; ++e) {
            const int i = lane + e * kWarp;
            if (i < p.value_dim && r < rows.num_rows) {
              float* to = sums + r * sum_stride + i;
              *to = (w == 0 ? 0.0f : *to) + (sum[r] == 0.0f ? 0.0f : acc[r][e] * shrink);
            }
          }
        }
      }
      __syncthreads();
    }
    const Contributions all{p, schedule.blocks_of(at.row_block, at.head)};
    const BlockResult<1> found{sums, 0, sum_stride, block_max, block_sum, kRows};
    hand_in(all, rows, at.head, 0, rows.num_rows, found);
    finish_row_block(all, rows, at.row_block, at.head);
    at.advance(p, plan, count);
    __syncthreads();
  }
  finish_messages(p);
}

template <class KV, int kPerLane>
void launch(const AttentionParams& p, int blocks, StreamHandle stream) {
  const std::size_t bytes =
      static_cast<std::size_t>(rows_of(kPerLane) * (p.head_dim + partial_stride(p.value_dim))) *
      sizeof(float);
  attend_portable<KV, kPerLane><<<blocks, kThreads, bytes, stream>>>(p);
  HELIX_CHECK_LAUNCH();
}

}  // namespace

int portable_rows(std::int64_t head_dim, std::int64_t value_dim) {
  return rows_of(per_lane(head_dim, value_dim));
}

void launch_portable_attention(const AttentionParams& p, DType kv_dtype, int blocks, StreamHandle stream) {
  dispatch(kv_dtype, [&]<class KV>(KV*) {
    switch (per_lane(p.head_dim, p.value_dim)) {
      case 4:
        return launch<KV, 4>(p, blocks, stream);
      case 8:
        return launch<KV, 8>(p, blocks, stream);
      case 18:
        return launch<KV, 18>(p, blocks, stream);
      default:
        return launch<KV, 32>(p, blocks, stream);
    }
  });
}

}  // namespace helix::cuda
