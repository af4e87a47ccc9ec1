// SPDX-License-Identifier: Apache-2.0
// What the products of a rank's experts work on: pairs of a token and one of its choices, sorted by expert
// and cut into items.
#pragma once

#include <cstdint>

#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

inline constexpr int kMaxLocalExperts = 4096;  // of a rank
inline constexpr int kExpertsPerLaunch = 384;  // their pointers fit the 4 KiB of kernel parameters

/// Pairs of one expert, which share one read of its weights. count 0: nothing to do.
struct ExpertItem {
  std::int32_t expert;  // of local_experts
  std::int32_t begin;   // in ExpertBuffers::pairs
  std::int32_t count;
  std::int32_t first_item;  // of the expert
  std::int32_t num_items;   // of the expert, all but the last of one size
};

/// The tokens' choices as the kernels read them.
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

/// Expert of a token's choice, of local_experts; -1: another rank's. From L2: what reads it while the kernel
/// ahead runs must not find what L1 has of the layer before.
__device__ __forceinline__ int local_expert(const Choices& choices, int token, int choice) {
  const std::int64_t id = __ldcg(choices.experts + token * choices.expert_stride + choice);
  const std::int64_t local = id - choices.first_expert;
  return local >= 0 && local < choices.num_experts ? static_cast<int>(local) : -1;
}
__device__ __forceinline__ int local_expert(const Choices& choices, int pair) {
  return local_expert(choices, pair / choices.top_k, pair % choices.top_k);
}

/// One projection of consecutive experts, by value in the kernel's parameters.
struct ExpertTable {
  int first;
  int count;
  const void* weights[kExpertsPerLaunch];
};

/// What both projections read and write. Items of one expert lie side by side, so that they read its weights
/// from L2 together.
template <class T, class Out = float>
struct ExpertProduct {
  Choices choices;
  const ExpertItem* items;             // null: blocks find them (find_item())
  const std::int32_t* num_used_items;  // of num_items, the first ones; with items
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

/// Up to these pairs, blocks find items themselves: a step of 14 layers of DeepSeek-V2-Lite's shape
/// takes 1.713 ms in place of 1.760 with 6 pairs. With 48 it took 3.95 in place of 3.89, as many blocks look
/// in vain (H100).
inline constexpr int kUnsortedPairs = kWarp;

/// An item of pairs that are not sorted: bit i of `mask` is pair i.
struct UnsortedItem {
  int expert;
  unsigned mask;
};

/// The item that begins with pair `index` of up to kUnsortedPairs; by a warp. Of one expert's pairs every
/// `item_pairs`-th begins an item, the others have none.
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
