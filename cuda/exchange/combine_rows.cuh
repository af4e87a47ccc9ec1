// SPDX-License-Identifier: Apache-2.0
// The exact merge of partials, row by row: what every combine kernel does once the partials are there.
#pragma once

#include <cstdint>

#include <helix/backend/exchange.hpp>

#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/rows.cuh"

namespace helix::cuda {

constexpr int kCombineThreads = 256;

/// How a block of kCombineThreads splits over rows: `threads` (a power of two) each.
struct RowShare {
  int threads;

  /// The fewest threads that serve a row of `items` at once.
  explicit RowShare(std::int64_t items) : threads(1) {
    while (threads < kCombineThreads && threads < items) threads *= 2;
  }
  __host__ __device__ int rows() const { return kCombineThreads / threads; }

  __device__ int thread() const { return static_cast<int>(threadIdx.x) & (threads - 1); }
  __device__ unsigned row(unsigned block) const {
    return block * static_cast<unsigned>(rows()) + threadIdx.x / static_cast<unsigned>(threads);
  }
};

template <class T>
struct CombineRows {
  const T* partial_out;      // [ranks, tokens, heads, dim]
  const float* partial_lse;  // [ranks, tokens, heads]
  const float* sink;         // [heads] or null
  T* out;                    // [tokens, heads, dim]
  float* lse;                // [tokens, heads] or null
  std::int64_t partial_strides[3];
  std::int64_t partial_lse_strides[3];
  std::int64_t out_strides[2];
  std::int64_t lse_strides[2];
  std::int64_t tokens;
  int ranks;
  int heads;
  int dim;
  LseConvention convention;  // of partial_lse

  /// Natural log-sum-exp of `rank` in the row whose lse begins at `row`.
  template <bool kConverts>
  __device__ __forceinline__ float lse_of(const float* row, int rank) const {
    const float lse = row[rank * partial_lse_strides[0]];
    return kConverts ? to_natural(lse, convention) : lse;
  }
};

/// Partials of ranks [begin, begin + kRanks) of one row, all asked for at once.
template <class T, int kCount, int kRanks, bool kConverts>
struct PartialColumns {
  float lse[kRanks];
  Vector<T, kCount> out[kRanks];

  __device__ __forceinline__ void load(const CombineRows<T>& rows, const float* from_lse, const T* from_out,
                                       int begin) {
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const int rank = begin + r;
      lse[r] = -kInfinity;
      if (rank < rows.ranks) {
        lse[r] = rows.template lse_of<kConverts>(from_lse, rank);
        out[r] = *reinterpret_cast<const Vector<T, kCount>*>(from_out + rank * rows.partial_strides[0]);
      }
    }
  }
};

/// The largest log-sum-exp, NaN if one is: nothing is larger.
__device__ __forceinline__ float larger_lse(float max, float lse) {
  return lse > max || isnan(lse) ? lse : max;
}

/// Merges the row of `token` and `head` of partials that begin at `all_out` and `all_lse`; `share.threads`
/// threads, each of which has kCount columns and computes the weights itself, which costs less than sharing
/// them. Ranks in increasing order (invariant 7).
template <class T, int kCount, int kRanks, bool kConverts>
__device__ __forceinline__ void merge_partials(const CombineRows<T>& rows, const T* all_out,
                                               const float* all_lse, const RowShare& share,
                                               std::int64_t token, std::int64_t head) {
  const float* partial_lse =
      all_lse + token * rows.partial_lse_strides[1] + head * rows.partial_lse_strides[2];
  const T* partial_out = all_out + token * rows.partial_strides[1] + head * rows.partial_strides[2];
  const float sink = rows.sink != nullptr ? rows.sink[head] : -kInfinity;
  float max = sink;
  float sum = 0.0f;
  for (int i = share.thread() * kCount; i < rows.dim; i += share.threads * kCount) {
    PartialColumns<T, kCount, kRanks, kConverts> partials;
    partials.load(rows, partial_lse, partial_out + i, 0);
    max = sink;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) max = larger_lse(max, partials.lse[r]);
    for (int rank = kRanks; rank < rows.ranks; ++rank)
      max = larger_lse(max, rows.template lse_of<kConverts>(partial_lse, rank));
    const bool is_empty = max == -kInfinity;
    float mixed[kCount] = {};
    sum = is_empty ? 0.0f : expf(sink - max);
#pragma unroll 1
    for (int begin = 0; begin < rows.ranks; begin += kRanks) {
      if (begin > 0) partials.load(rows, partial_lse, partial_out + i, begin);
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if (partials.lse[r] == -kInfinity) continue;  // weight 0, whatever its out holds (invariant 6)
        const float weight = expf(partials.lse[r] - max);
        sum += weight;
#pragma unroll
        for (int j = 0; j < kCount; ++j) mixed[j] += weight * to_float(partials.out[r].elements[j]);
      }
    }
    const float inverse = is_empty ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int j = 0; j < kCount; ++j) mixed[j] *= inverse;
    store_vector(rows.out + token * rows.out_strides[0] + head * rows.out_strides[1] + i, mixed);
  }
  if (share.thread() == 0 && rows.lse != nullptr) {
    rows.lse[token * rows.lse_strides[0] + head * rows.lse_strides[1]] =
        max == -kInfinity ? -kInfinity : max + logf(sum);
  }
}

template <class T>
CombineRows<T> combine_rows(const LseCombineArgs<T>& args) {
  const auto& partial = args.partial_out;
  const auto& lse = args.partial_lse;
  return {partial.data(),
          lse.data(),
          args.sink,
          args.out.data(),
          args.lse.data(),
          {partial.stride(0), partial.stride(1), partial.stride(2)},
          {lse.stride(0), lse.stride(1), lse.stride(2)},
          {args.out.stride(0), args.out.stride(1)},
          {args.lse.stride(0), args.lse.stride(1)},
          args.out.extent(0),
          static_cast<int>(lse.extent(0)),
          static_cast<int>(args.out.extent(1)),
          static_cast<int>(args.out.extent(2)),
          args.convention};
}

/// Whether all rows are whole units of 16 bytes, and begin at such.
template <class T>
bool has_aligned_rows(const LseCombineArgs<T>& args) {
  const auto& partial = args.partial_out;
  return common_alignment({address_of(partial.data()), step_of<T>(partial.stride(0)),
                           step_of<T>(partial.stride(1)), step_of<T>(partial.stride(2)),
                           address_of(args.out.data()), step_of<T>(args.out.stride(0)),
                           step_of<T>(args.out.stride(1)), step_of<T>(args.out.extent(2))}) == 16;
}

}  // namespace helix::cuda
