// SPDX-License-Identifier: Apache-2.0
// The exact merge of partials, row by row, which all combine kernels share.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include <helix/backend/exchange.hpp>
#include <helix/error.hpp>
#include <helix/lse.hpp>

#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/rows.cuh"

namespace helix::cuda {

constexpr int kCombineThreads = 256;

/// How the kCombineThreads threads of a block are divided among rows: `threads` (a power of two) per row.
struct RowShare {
  int threads;

  /// Chooses the fewest threads that cover `items` items of a row at once.
  explicit RowShare(std::int64_t items) : threads(1) {
    while (threads < kCombineThreads && threads < items) threads *= 2;
  }
  __host__ __device__ int rows() const { return kCombineThreads / threads; }
  /// Blocks for `count` rows. @throws Error(unsupported) beyond 2^32 - 1 rows, which row() counts.
  unsigned blocks(std::int64_t count) const {
    HELIX_EXPECTS(count <= std::numeric_limits<std::uint32_t>::max(), ErrorCode::unsupported,
                  "exchange: tokens times heads are ", count, "; a GPU kernel counts up to ",
                  std::numeric_limits<std::uint32_t>::max(), ": exchange fewer tokens at once");
    return grid_blocks(count, rows());
  }

  __device__ int thread() const { return static_cast<int>(threadIdx.x) & (threads - 1); }
  __device__ unsigned row(unsigned block) const {
    return block * static_cast<unsigned>(rows()) + threadIdx.x / static_cast<unsigned>(threads);
  }
};

template <class T>
struct CombineRows {
  const T* partial_out;      // [ranks, tokens, heads, dim]
  const float* partial_lse;  // [ranks, tokens, heads]
  const float* sinks;        // [heads] or null
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
};

/// kCount columns of one row, from the ranks [begin, begin + kRanks).
template <class T, int kCount, int kRanks>
struct PartialColumns {
  float lse[kRanks];  // natural; -inf if there is no such rank
  Vector<T, kCount> out[kRanks];
};

/// One row's partials, in memory.
template <class T, bool kConverts>
struct PartialRowInMemory {
  const CombineRows<T>& rows;
  const T* row_out;
  const float* row_lse;

  /// The row (token, head) of the partials at `all_out` and `all_lse`.
  __device__ __forceinline__ PartialRowInMemory(const CombineRows<T>& of, const T* all_out,
                                                const float* all_lse, std::int64_t token, std::int64_t head)
      : rows(of),
        row_out(all_out + token * of.partial_strides[1] + head * of.partial_strides[2]),
        row_lse(all_lse + token * of.partial_lse_strides[1] + head * of.partial_lse_strides[2]) {}

  __device__ __forceinline__ float lse(int rank) const {
    const float lse = row_lse[rank * rows.partial_lse_strides[0]];
    return kConverts ? to_natural(lse, rows.convention) : lse;
  }
  /// Called between the merge of a row and its store; nothing to do here.
  __device__ __forceinline__ void before_store() const {}
  /// Issues all loads at once.
  template <int kCount, int kRanks>
  __device__ __forceinline__ void load(PartialColumns<T, kCount, kRanks>& to, int column, int begin) const {
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      const int rank = begin + r;
      to.lse[r] = -kInfinity;
      if (rank < rows.ranks) {
        to.lse[r] = lse(rank);
        to.out[r] =
            *reinterpret_cast<const Vector<T, kCount>*>(row_out + column + rank * rows.partial_strides[0]);
      }
    }
  }
};

/// Merges the row of `token` and `head` from `partials`, by `share.threads` threads. Each thread has kCount
/// columns and computes the weights itself, which costs less than sharing them. Ranks in increasing order
/// (invariant 7).
template <int kCount, int kRanks, class T, class Partials>
__device__ __forceinline__ void merge_partials(const CombineRows<T>& rows, const Partials& partials,
                                               const RowShare& share, std::int64_t token, std::int64_t head) {
  const float sink = rows.sinks != nullptr ? rows.sinks[head] : -kInfinity;
  float max = sink;
  float sum = 0.0f;
  for (int i = share.thread() * kCount; i < rows.dim; i += share.threads * kCount) {
    PartialColumns<T, kCount, kRanks> columns;
    partials.load(columns, i, 0);
    max = sink;
#pragma unroll
    for (int r = 0; r < kRanks; ++r) max = larger_lse(max, columns.lse[r]);
    for (int rank = kRanks; rank < rows.ranks; ++rank) max = larger_lse(max, partials.lse(rank));
    const bool is_empty = max == -kInfinity;
    float mixed[kCount] = {};
    sum = is_empty ? 0.0f : expf(sink - max);
#pragma unroll 1
    for (int begin = 0; begin < rows.ranks; begin += kRanks) {
      if (begin > 0) partials.load(columns, i, begin);
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if (columns.lse[r] == -kInfinity) continue;  // weight 0, whatever its out holds (invariant 6)
        const float weight = expf(columns.lse[r] - max);
        sum += weight;
#pragma unroll
        for (int j = 0; j < kCount; ++j) mixed[j] += weight * to_float(columns.out[r].elements[j]);
      }
    }
    const float inverse = is_empty ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int j = 0; j < kCount; ++j) mixed[j] *= inverse;
    partials.before_store();
    store_vector(rows.out + token * rows.out_strides[0] + head * rows.out_strides[1] + i, mixed);
  }
  if (share.thread() == 0 && rows.lse != nullptr) {
    rows.lse[token * rows.lse_strides[0] + head * rows.lse_strides[1]] =
        max == -kInfinity ? -kInfinity : max + logf(sum);
  }
}

/// Calls use(std::integral_constant<int, ranks that a thread loads at once>) for partials of `ranks` ranks.
template <class Use>
void with_ranks(int ranks, const Use& use) {
  if (ranks <= 2) {
    use(std::integral_constant<int, 2>{});
  } else if (ranks <= 4) {
    use(std::integral_constant<int, 4>{});
  } else {
    use(std::integral_constant<int, 8>{});
  }
}

/// Calls visit(token, head) for the rows of block `block` of `blocks`, in memory order: the tokens of one
/// head follow each other.
template <class T, class Visit>
__device__ __forceinline__ void for_rows_of_block(const CombineRows<T>& rows, const RowShare& share,
                                                  unsigned block, unsigned blocks, const Visit& visit) {
  const auto tokens = static_cast<unsigned>(rows.tokens);
  const unsigned num_rows = tokens * static_cast<unsigned>(rows.heads);
  const unsigned step = blocks * static_cast<unsigned>(share.rows());
  for (unsigned row = share.row(block); row < num_rows; row += step) visit(row % tokens, row / tokens);
}

template <class T>
CombineRows<T> combine_rows(const LseCombineArgs<T>& args) {
  const auto& partial = args.partial_out;
  const auto& lse = args.partial_lse;
  return {partial.data(),
          lse.data(),
          args.sinks,
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

/// Whether all rows begin at multiples of 16 bytes and are multiples of 16 bytes long.
template <class T>
bool has_aligned_rows(const LseCombineArgs<T>& args) {
  const auto& partial = args.partial_out;
  return common_alignment({address_of(partial.data()), step_of<T>(partial.stride(0)),
                           step_of<T>(partial.stride(1)), step_of<T>(partial.stride(2)),
                           address_of(args.out.data()), step_of<T>(args.out.stride(0)),
                           step_of<T>(args.out.stride(1)), step_of<T>(args.out.extent(2))}) == 16;
}

}  // namespace helix::cuda
