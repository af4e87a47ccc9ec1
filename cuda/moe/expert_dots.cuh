// SPDX-License-Identifier: Apache-2.0
// Products of experts in f32 arithmetic, for any types and any rows, with up to kMaxDotRows pairs at a time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/linear/dot_rows.cuh"
#include "cuda/moe/expert_items.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// The work of a block: an item, and some groups of weight rows.
struct ItemPart {
  ExpertItem item;
  const std::int32_t* pairs;  // sorted
  unsigned mask;              // of an UnsortedItem
  const void* weights;
  int warp;
  int groups;  // groups of this block
  int first_group;

  template <class T>
  __device__ __forceinline__ ItemPart(const ExpertProduct<T>& p, int splits, const ExpertTable& table)
      : pairs(p.pairs),
        mask(0),
        warp(static_cast<int>(threadIdx.x) / kWarp),
        groups(kDotWarps / splits),
        first_group(static_cast<int>(blockIdx.x / p.num_items) * groups) {
    const int index = static_cast<int>(blockIdx.x % p.num_items);
    if (p.items != nullptr) {
      item = p.items[index];
    } else {
      const UnsortedItem found = find_item(p.choices, index, kMaxDotRows);
      mask = found.mask;
      item = {found.expert, 0, min(__popc(mask), kMaxDotRows)};
    }
    weights = weights_of(item, table);
  }

  __device__ __forceinline__ int group_of_warp(int splits) const { return first_group + warp / splits; }
  /// The item's pair `r`.
  __device__ __forceinline__ int pair(int r) const {
    if (mask == 0) return pairs[item.begin + r];
    unsigned rest = mask;
    for (int i = 0; i < r; ++i) rest &= rest - 1;
    return __ffs(static_cast<int>(rest)) - 1;
  }
};

/// Calls body with kRows as a std::integral_constant: the least of 1, 2, 4 and kMaxDotRows that covers
/// `count`.
template <class Body>
__device__ __forceinline__ void with_row_count(int count, const Body& body) {
  if (count == 1) {
    body(std::integral_constant<int, 1>{});
  } else if (count == 2) {
    body(std::integral_constant<int, 2>{});
  } else if (count <= 4) {
    body(std::integral_constant<int, 4>{});
  } else {
    body(std::integral_constant<int, kMaxDotRows>{});
  }
}

/// The rows of `in` of an item's pairs. Past the end, repeats the last one; its sums are not stored.
template <int kRows, class T>
__device__ __forceinline__ void find_rows(const ExpertProduct<T>& p, const ItemPart& part,
                                          const T* (&rows)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    rows[r] = p.in + part.pair(min(r, part.item.count - 1)) / p.pairs_per_row * p.in_stride;
}

/// Features per group; gate and up take two rows each.
template <bool kIsGateUp>
inline constexpr int kDotFeatures = kIsGateUp ? kDotOutputs / 2 : kDotOutputs;

/// out[pair, f] = silu(gate) * up with gate = in . weight[f] and up = in . weight[width + f], or else in .
/// weight[f].
template <class T, class W, bool kIsGateUp, bool kVector>
__global__ void __launch_bounds__(kDotThreads, 2)
    expert_dot_kernel(const ExpertProduct<T> p, int splits, const __grid_constant__ ExpertTable table) {
  constexpr int kWidth = kVector ? 16 / static_cast<int>(sizeof(W)) : 1;
  constexpr int kFeatures = kDotFeatures<kIsGateUp>;
  __shared__ float partial[kDotWarps][kMaxDotRows * kDotOutputs];
  follow_previous();
  const ItemPart part(p, splits, table);
  if (part.weights == nullptr) return;
  const ExpertItem& item = part.item;
  const int first = part.group_of_warp(splits) * kFeatures;
  const W* weights[kDotOutputs];  // of gate and up, gate first
#pragma unroll
  for (int o = 0; o < kDotOutputs; ++o) {
    const int feature = min(first + o % kFeatures, p.width - 1);
    const std::int64_t row = o < kFeatures ? feature : std::int64_t{p.width} + feature;
    weights[o] = static_cast<const W*>(part.weights) + row * p.cols;
  }
  with_row_count(item.count, [&]<int kRows>(std::integral_constant<int, kRows>) {
    const T* rows[kRows];
    find_rows(p, part, rows);
    dot_rows<kWidth>(weights, rows, p.cols, part.warp % splits, splits, partial[part.warp]);
  });

  __syncthreads();
  const int sums = item.count * kFeatures;
  for (int i = static_cast<int>(threadIdx.x); i < part.groups * sums; i += kDotThreads) {
    const int group = i / sums;
    const int row = i % sums / kFeatures;
    const int o = i % kFeatures;
    const int feature = (part.first_group + group) * kFeatures + o;
    if (feature >= p.width) continue;
    float sum = 0.0f;
    float up = 0.0f;
    for (int split = 0; split < splits; ++split) {
      const float* from = partial[group * splits + split] + row * kDotOutputs + o;
      sum += from[0];
      if constexpr (kIsGateUp) up += from[kFeatures];
    }
    const std::int64_t pair = part.pair(row);
    p.out[pair * p.width + feature] = kIsGateUp ? swiglu(sum, up) : sum;
  }
}

}  // namespace helix::cuda
