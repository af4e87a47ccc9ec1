// SPDX-License-Identifier: Apache-2.0
// What the products of a rank's experts work on: pairs of a token and one of its choices, sorted by expert
// and cut into items.
#pragma once

#include <cstdint>

namespace helix::cuda {

inline constexpr int kExpertsPerLaunch = 384;  // their pointers fit the 4 KiB of kernel parameters

/// Pairs of one expert, which share one read of its weights. count 0: nothing to do.
struct ExpertItem {
  std::int32_t expert;  // of local_experts
  std::int32_t begin;   // in ExpertBuffers::pairs
  std::int32_t count;
};

/// One projection of consecutive experts, by value in the kernel's parameters.
struct ExpertTable {
  int first;
  int count;
  const void* weights[kExpertsPerLaunch];
};

/// What both projections read and write. Grid: num_items blocks for each block of weight rows, so that the
/// items of one expert, which lie side by side, read its weights from L2 together.
template <class T, class Out = float>
struct ExpertProduct {
  const ExpertItem* items;
  const std::int32_t* pairs;
  const T* in;
  std::int64_t in_stride;
  int pairs_per_row;  // rows of `in` are tokens (top_k) or pairs (1)
  Out* out;
  int num_items;
  int cols;
  int width;  // columns of out
};

/// The weights of an item's expert; null: no pairs, or an expert of another launch.
__device__ __forceinline__ const void* weights_of(const ExpertItem& item, const ExpertTable& table) {
  const int index = item.expert - table.first;
  return item.count == 0 || index < 0 || index >= table.count ? nullptr : table.weights[index];
}

}  // namespace helix::cuda
