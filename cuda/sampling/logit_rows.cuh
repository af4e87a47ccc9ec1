// SPDX-License-Identifier: Apache-2.0
// One row of logits, divided into shards of the vocabulary, as the blocks of a cluster read it.
#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>

#include <cooperative_groups.h>

#include <helix/backend/vocabulary.hpp>
#include <helix/dtype.hpp>
#include <helix/error.hpp>

#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/rows.cuh"

namespace helix::cuda {

constexpr int kLogitThreads = 1024;  // threads of a block that reads logits
constexpr int kAtOnce = 8;           // consecutive logits that a thread loads before it uses them

/// The blocks that share a row: a cluster, whose blocks read each other's shared memory. On other GPUs than
/// Hopper a row has one block.
struct RowBlocks {
#if __CUDA_ARCH__ >= 900
  static __device__ int count() {
    return static_cast<int>(cooperative_groups::cluster_group::num_blocks());
  }
  static __device__ int rank() {
    return static_cast<int>(cooperative_groups::cluster_group::block_rank());
  }
  static __device__ void sync() {
    cooperative_groups::cluster_group::sync();
  }
  /// The counterpart of `mine`, in this block's shared memory, in that of block `rank`.
  template <class S>
  static __device__ const S& of(int rank, S& mine) {
    return *cooperative_groups::cluster_group::map_shared_rank(&mine, static_cast<unsigned>(rank));
  }
#else
  static __device__ int count() {
    return 1;
  }
  static __device__ int rank() {
    return 0;
  }
  static __device__ void sync() {
    __syncthreads();
  }
  template <class S>
  static __device__ const S& of(int, S& mine) {
    return mine;
  }
#endif
  static __device__ int row() {
    return static_cast<int>(blockIdx.x) / count();
  }
};

/// How many blocks share a row if `rows` rows are read at once by at most `most` blocks. Without clusters,
/// one.
inline int blocks_a_row(std::int64_t rows, std::int64_t most, bool has_clusters) {
  constexpr int kMax = 8;  // cluster size that any GPU with clusters supports
  int blocks = 1;
  while (has_clusters && blocks < kMax && 2 * blocks * rows <= most) blocks *= 2;
  return blocks;
}

/// Logits [shards, rows, width] as a launch argument.
template <class T>
struct LogitRows {
  const T* logits;
  std::int64_t shard_stride;
  std::int64_t row_stride;
  std::int64_t column_stride;
  int shards;
  int shard_runs;  // runs of kAtOnce columns that cover the width
  const std::int64_t* shard_begins;

  LogitRows(TensorView<const T, 3> view, const std::int64_t* begins)
      : logits(view.data()),
        shard_stride(view.stride(0)),
        row_stride(view.stride(1)),
        column_stride(view.stride(2)),
        shards(static_cast<int>(view.extent(0))),
        shard_runs(static_cast<int>((view.extent(2) + kAtOnce - 1) / kAtOnce)),
        shard_begins(begins) {
    HELIX_EXPECTS(view.extent(0) * ((view.extent(2) + kAtOnce - 1) / kAtOnce) * kAtOnce <= INT_MAX,
                  ErrorCode::unsupported, view.extent(0), " shards of ", view.extent(2),
                  " logits; this backend is built for up to 2^31 a row");
  }

  /// Whether rows are dense and aligned for vectors of kAtOnce elements.
  bool is_aligned() const {
    return column_stride == 1 &&
           common_alignment({address_of(logits), step_of<T>(shard_stride), step_of<T>(row_stride)}) == 16;
  }
};

/// Calls visit(logit, id) for this thread's share of row `number`, in increasing id. kIsAligned: rows are
/// dense and aligned for vectors of kAtOnce elements.
template <bool kIsAligned, class T, class Visit>
__device__ __forceinline__ void for_each_logit(const LogitRows<T>& rows, std::int64_t number,
                                               const Visit& visit) {
  const int runs = rows.shards * rows.shard_runs;
  const T* row = rows.logits + number * rows.row_stride;
  for (int run = RowBlocks::rank() * kLogitThreads + static_cast<int>(threadIdx.x); run < runs;
       run += RowBlocks::count() * kLogitThreads) {
    const int shard = run / rows.shard_runs;
    const std::int64_t first = static_cast<std::int64_t>(run % rows.shard_runs) * kAtOnce;
    const std::int64_t begin = rows.shard_begins[shard];
    const std::int64_t width = rows.shard_begins[shard + 1] - begin;  // the rest is padding
    if (first >= width) continue;
    const int count = static_cast<int>(min(width - first, std::int64_t{kAtOnce}));
    const T* logits = row + shard * rows.shard_stride;
    float values[kAtOnce];
    if (kIsAligned && count == kAtOnce) {
      load_vector(logits + first, values);
    } else {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        values[i] = i < count ? to_float(logits[(first + i) * rows.column_stride]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i < count) visit(values[i], static_cast<std::int32_t>(begin + first + i));
    }
  }
}

/// As above, for the block's own row.
template <bool kIsAligned, class T, class Visit>
__device__ __forceinline__ void for_each_logit(const LogitRows<T>& rows, const Visit& visit) {
  for_each_logit<kIsAligned>(rows, RowBlocks::row(), visit);
}

/// Low bits that keys of 16-bit types drop, as they are the same for all values of the type.
template <class T>
constexpr int kKeyShift = std::is_same_v<T, bf16>  ? 16
                          : std::is_same_v<T, f16> ? 13
                                                   : 0;

/// An integer in the order of `logit`, a number of type T.
template <class T>
__device__ __forceinline__ std::uint32_t key_of(float logit) {
  return ordered_bits(logit) >> kKeyShift<T>;
}

template <class T>
__device__ __forceinline__ float logit_of(std::uint32_t key) {
  constexpr std::uint32_t kDropped = (1u << kKeyShift<T>)-1;
  const std::uint32_t full = key << kKeyShift<T>;
  return __uint_as_float((full & 0x80000000u) != 0 ? full & 0x7fffffffu : ~(full | kDropped));
}

/// A logit and its id as one integer whose maximum is the greedy choice: larger if likelier, the lower id on
/// ties. NaN is above all, but its key is not ~0 (see peer_sealed.cuh); 0 is below all.
using Ranked = unsigned long long;

template <class T>
__device__ __forceinline__ Ranked ranked_of(float logit, std::int32_t id) {
  const std::uint32_t key = isnan(logit) ? ~1u : key_of<T>(logit);
  return static_cast<Ranked>(key) << 32 | ~static_cast<std::uint32_t>(id);
}

__device__ __forceinline__ std::uint32_t key_of_ranked(Ranked ranked) {
  return static_cast<std::uint32_t>(ranked >> 32);
}

/// The id of a row's largest logit; -1 if the row has a NaN or +inf, or nothing above -inf.
template <class T>
__device__ __forceinline__ std::int32_t token_of(Ranked largest) {
  const std::uint32_t key = key_of_ranked(largest);
  if (key <= key_of<T>(-kInfinity) || key >= key_of<T>(kInfinity)) return -1;
  return static_cast<std::int32_t>(~static_cast<std::uint32_t>(largest));
}

}  // namespace helix::cuda
