// SPDX-License-Identifier: Apache-2.0
// The work of the expert products: pairs of a token and one of its choices, sorted by expert and divided into
// items.
#pragma once

#include <cstdint>

#include <helix/limits.hpp>

#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

inline constexpr int kMaxLocalExperts = static_cast<int>(kMaxRoutedExperts);  // of a rank
inline constexpr int kExpertsPerLaunch = 384;  // their pointers fit in the 4 KiB of kernel parameters

/// Pairs of one expert, which share one read of its weights. count 0: no work.
struct ExpertItem {
  std::int32_t expert;  // index in local_experts
  std::int32_t begin;   // index in ExpertBuffers::pairs
  std::int32_t count;
  std::int32_t first_item;  // the expert's first item
  std::int32_t num_items;   // items of the expert; all but the last have one size
};

/// The tokens' choices.
struct Choices {
  const std::int32_t* experts;
  std::int64_t expert_stride;  // between tokens
  const float* weights;
  std::int64_t weight_stride;
  std::int64_t first_expert;
  int num_experts;  // of this rank
  int top_k;
  int num_pairs;
};

/// The expert of a token's choice, as an index in local_experts; -1: another rank's. Read with __ldcg: L1 may
/// hold the previous layer's choices.
__device__ __forceinline__ int local_expert(const Choices& choices, int token, int choice) {
  const std::int64_t id = __ldcg(choices.experts + token * choices.expert_stride + choice);
  const std::int64_t local = id - choices.first_expert;
  return local >= 0 && local < choices.num_experts ? static_cast<int>(local) : -1;
}
__device__ __forceinline__ int local_expert(const Choices& choices, int pair) {
  return local_expert(choices, pair / choices.top_k, pair % choices.top_k);
}

/// One projection of consecutive experts, passed by value in kernel parameters.
struct ExpertTable {
  int first;
  int count;
  const void* weights[kExpertsPerLaunch];
};

/// Arguments of either projection. The items of one expert are adjacent, so that they read its weights from
/// L2 together.
template <class T, class Out = float>
struct ExpertProduct {
  Choices choices;
  const ExpertItem* items;             // null: blocks find them (find_item())
  const std::int32_t* num_used_items;  // the first of num_items; with `items`
  const std::int32_t* pairs;
  const T* in;
  std::int64_t in_stride;
  int pairs_per_row;  // rows of `in` are tokens (top_k) or pairs (1)
  Out* out;
  int num_items;
  int cols;
  int width;  // columns of out
};

/// The weights of an item's expert. Null if the item has no pairs, or its expert belongs to another launch.
__device__ __forceinline__ const void* weights_of(const ExpertItem& item, const ExpertTable& table) {
  const int index = item.expert - table.first;
  return item.count == 0 || index < 0 || index >= table.count ? nullptr : table.weights[index];
}

/// With up to this many pairs, blocks find items themselves: a step of 14 layers of DeepSeek-V2-Lite's shape
/// takes 1.713 ms instead of 1.760 with 6 pairs. With 48 it took 3.95 instead of 3.89, because many blocks
/// look in vain (H100).
inline constexpr int kUnsortedPairs = kWarp;

/// An item of pairs that are not sorted: bit i of `mask` is pair i.
struct UnsortedItem {
  int expert;
  unsigned mask;
};

/// The item that begins with pair `index` of up to kUnsortedPairs pairs. Called by a warp. Every
/// `item_pairs`-th pair of an expert begins an item; the other pairs begin none.
__device__ __forceinline__ UnsortedItem find_item(const Choices& choices, int index, int item_pairs) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int own = lane < choices.num_pairs ? local_expert(choices, lane) : -1;
  const int expert = __shfl_sync(~0u, own, index);
  const unsigned mask = __ballot_sync(~0u, own == expert);
  const int before = __popc(mask & ((1u << index) - 1));
  if (expert < 0 || before % item_pairs != 0) return {expert, 0};
  return {expert, mask >> index << index};
}

}  // namespace helix::cuda
