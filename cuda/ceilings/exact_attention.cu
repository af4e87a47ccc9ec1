// SPDX-License-Identifier: Apache-2.0
// Exact attention, a block a query row, and random rows of DType::fp8_ds_mla for it to read.
#include <helix/kv_format.hpp>
#include <helix/synthetic_kv.hpp>

#include "cuda/ceilings/exact_attention.hpp"
#include "cuda/kv_cache/mixed_rows.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda::bench {
namespace {

constexpr int kWarps = 16;
constexpr int kMaxColumns = 576;  // most columns of a key
constexpr int kLaneColumns = (kMaxColumns + kWarp - 1) / kWarp;

/// One query row of a launch.
struct Row {
  std::int64_t slot;
  std::int64_t kv_head;
  TokenRange seen;  // local tokens
};

template <class T>
struct Problem {
  const T* q;
  std::int64_t q_token_stride, q_head_stride;
  std::int64_t group;
  const std::int32_t* query_offsets;
  const std::int64_t* positions;
  const std::int32_t* slots;
  KvView kv;
  double scale;
};

__device__ double sum_of_lanes(double x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

template <class T>
__device__ Row row_of(const Problem<T>& p, std::int64_t token, std::int64_t head) {
  int b = 0;
  while (p.query_offsets[b + 1] <= token) ++b;
  return {p.slots[b], head / p.group, p.kv.layout.visible(p.positions[token], 0, p.kv.kvp_rank)};
}

/// One block per row, one warp per 16th token, one lane per 32nd column.
template <class T, class KV>
__global__ __launch_bounds__(kWarps* kWarp) void attend_exactly(Problem<T> p, std::int64_t heads,
                                                                ExactRows to) {
  __shared__ double sums[kMaxColumns];
  __shared__ double tops[kWarps], totals[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t token = to.rows[blockIdx.x] / heads;
  const std::int64_t head = to.rows[blockIdx.x] % heads;
  const Row row = row_of(p, token, head);
  const KvFormat& format = p.kv.format;
  const auto dim = static_cast<int>(format.head_dim);
  const auto value_dim = static_cast<int>(format.value_dim);
  const auto key_columns = static_cast<int>(format.k_columns());
  const double key_scale = p.kv.k_scale != nullptr ? double{p.kv.k_scale[row.kv_head]} : 1.0;
  const double value_scale = format.is_latent          ? key_scale
                             : p.kv.v_scale != nullptr ? double{p.kv.v_scale[row.kv_head]}
                                                       : 1.0;
  double q[kLaneColumns];
  double acc[kLaneColumns];
  for (int e = 0; e < kLaneColumns; ++e) {
    const int i = lane + e * kWarp;
    q[e] = i < dim ? double{to_float(p.q[token * p.q_token_stride + head * p.q_head_stride + i])} : 0.0;
    acc[e] = 0.0;
  }
  double top = -HUGE_VAL;
  double total = 0.0;
  for (std::int64_t t = row.seen.begin + warp; t < row.seen.end; t += kWarps) {
    const std::int64_t page = p.kv.page_table[p.kv.first_page_of(row.slot) + t / format.page_tokens];
    const std::int64_t in_page = t % format.page_tokens;
    const KV* key = static_cast<const KV*>(p.kv.k) + format.k.at(page, row.kv_head, in_page);
    const auto* rope_begin = static_cast<const KV*>(p.kv.rope) + format.rope.at(page, row.kv_head, in_page);
    const KV* rope = rope_from_zero<KV>(reinterpret_cast<const std::byte*>(rope_begin), key_columns);
    const KV* value =
        format.is_latent ? key : static_cast<const KV*>(p.kv.v) + format.v.at(page, row.kv_head, in_page);
    double score = 0.0;
    for (int e = 0; e < kLaneColumns; ++e) {
      const int i = lane + e * kWarp;
      if (i < dim) score += q[e] * double{key_element(key, rope, i, key_columns)};
    }
    score = sum_of_lanes(score) * p.scale * key_scale;
    const double now = fmax(top, score);
    const double shrink = exp(top - now);
    const double weight = exp(score - now);
    top = now;
    total = total * shrink + weight;
    for (int e = 0; e < kLaneColumns; ++e) {
      const int i = lane + e * kWarp;
      if (i < value_dim) acc[e] = acc[e] * shrink + weight * double{key_element(value, value, i, value_dim)};
    }
  }
  if (lane == 0) tops[warp] = top, totals[warp] = total;
  for (int i = static_cast<int>(threadIdx.x); i < value_dim; i += kWarps * kWarp) sums[i] = 0.0;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) top = fmax(top, tops[w]);
  total = 0.0;
  for (int w = 0; w < kWarps; ++w) total += totals[w] > 0.0 ? totals[w] * exp(tops[w] - top) : 0.0;
  const double weight = totals[warp] > 0.0 ? exp(tops[warp] - top) * value_scale / total : 0.0;
  for (int w = 0; w < kWarps; ++w) {
    for (int e = 0; e < kLaneColumns && w == warp; ++e) {
      const int i = lane + e * kWarp;
      if (i < value_dim) sums[i] += acc[e] * weight;
    }
    __syncthreads();
  }
  for (int i = static_cast<int>(threadIdx.x); i < value_dim; i += kWarps * kWarp)
    to.out[std::int64_t{blockIdx.x} * value_dim + i] = sums[i];
  if (threadIdx.x == 0) to.lse[blockIdx.x] = top + log(total);
}

/// One warp per row. Values are uniform in [-a, a], with a different a every 128 columns.
__global__ void fill_rows(std::byte* pool, std::int64_t rows, int head_dim, int value_dim, unsigned seed) {
  const std::int64_t i = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarp;
  if (i >= rows) return;
  const std::int64_t latent = latent_extent(DType::fp8_ds_mla, value_dim);
  std::byte* row = pool + i * (latent + rope_extent(DType::fp8_ds_mla, head_dim - value_dim));
  const std::uint32_t key = synthetic_row_key(seed, 0, i, false);
  store_mixed_row(MixedRow<const float>{nullptr, row, row + latent, head_dim, value_dim}, [&](int column) {
    const auto group = static_cast<std::uint32_t>(head_dim + column / static_cast<int>(kScaledColumns));
    return synthetic_element(key, static_cast<std::uint32_t>(column)) *
           (1.5f + synthetic_element(key, group));
  });
}

}  // namespace

void fill_mixed_rows(void* pool, std::int64_t rows, std::int64_t head_dim, std::int64_t value_dim,
                     unsigned seed) {
  constexpr int kThreads = 256;
  fill_rows<<<grid_blocks(rows, kThreads / kWarp), kThreads>>>(
      static_cast<std::byte*>(pool), rows, static_cast<int>(head_dim), static_cast<int>(value_dim), seed);
  HELIX_CHECK_LAUNCH();
  HELIX_CUDA_CHECK(cudaDeviceSynchronize());
}

template <class T>
void launch_exact_attention(const PartialAttentionArgs<T>& args, const ExactRows& to, StreamHandle stream) {
  HELIX_EXPECTS(args.kv.format.head_dim <= kMaxColumns && args.window == 0 && args.soft_cap == 0.0f,
                ErrorCode::invalid_argument, "launch_exact_attention: head size ", args.kv.format.head_dim,
                ", window ", args.window, ", soft cap ", args.soft_cap, "; it takes up to ", kMaxColumns,
                " and neither of the others");
  const std::int64_t heads = args.q.extent(1);
  const Problem<T> problem{args.q.data(),
                           args.q.stride(0),
                           args.q.stride(1),
                           heads / args.kv.format.num_heads,
                           args.batch.query_offsets,
                           args.batch.positions,
                           args.batch.sequence_slots,
                           args.kv,
                           double{args.scale}};
  dispatch_rows(args.kv.format.dtype, [&]<class KV>(KV*) {
    attend_exactly<T, KV><<<static_cast<unsigned>(to.count), kWarps * kWarp, 0, stream>>>(problem, heads, to);
  });
  HELIX_CHECK_LAUNCH();
}

template void launch_exact_attention(const PartialAttentionArgs<bf16>&, const ExactRows&, StreamHandle);
template void launch_exact_attention(const PartialAttentionArgs<f16>&, const ExactRows&, StreamHandle);

}  // namespace helix::cuda::bench
