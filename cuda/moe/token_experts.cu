// SPDX-License-Identifier: Apache-2.0
// Launches of the products of one token's experts.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include <helix/dtype.hpp>
#include <helix/integers.hpp>

#include "cuda/linear/few_rows_launch.cuh"
#include "cuda/linear/product.cuh"
#include "cuda/moe/expert_items.cuh"
#include "cuda/moe/token_experts.cuh"
#include "cuda/moe/token_experts.hpp"
#include "cuda/runtime/rows.cuh"
#include "cuda/runtime/tensor_map.cuh"

namespace helix::cuda {
namespace {

/// Bytes from one expert's weights to the next's, if they are always the same and a tensor map may have them.
std::optional<std::int64_t> distance_of(std::span<const ExpertWeights> experts,
                                        WeightView ExpertWeights::*projection, DType dtype) {
  const auto address = [&](std::size_t e) { return address_of((experts[e].*projection).data); };
  const std::uintptr_t distance = experts.size() > 1 ? address(1) - address(0) : 16;
  for (std::size_t e = 0; e < experts.size(); ++e) {
    if ((experts[e].*projection).dtype != dtype || address(e) != address(0) + e * distance) return {};
  }
  const auto bytes = static_cast<std::int64_t>(distance);
  constexpr std::int64_t kMostBytes = std::int64_t{1} << 40;  // of a map's strides
  if (bytes <= 0 || bytes >= kMostBytes || common_alignment({address(0), distance}) < 16) return {};
  return bytes;
}

/// The product of a row of `in` and of each expert's weights.
template <class S, class Tail, class T>
void launch(const Product<T>& p, std::int64_t in_rows, std::int64_t num_experts, std::int64_t distance,
            const few_rows::Tiles& tiles, const Choices& choices, cudaStream_t stream) {
  const std::int64_t row_bytes = p.cols * std::int64_t{sizeof(T)};
  const CUtensorMap weights =
      rows_map<5>(const_cast<void*>(p.weight), kDTypeOf<T>,
                  {kChunkColumns, p.width, Tail::kHalves, p.cols / kChunkColumns, num_experts},
                  {row_bytes, row_bytes * p.width, few_rows::kChunkRowBytes, distance},
                  {kChunkColumns, tiles.height, Tail::kHalves, S::kChunks, 1}, few_rows::kPromotion);
  Tail tail;
  tail.choices = choices;
  tail.tiles_per_expert = ceil_div(p.width, tiles.height);
  few_rows::launch_product<S>(p, in_rows, weights, tiles, tail, stream);
}

}  // namespace

template <class T>
bool multiply_token_experts(const ExpertFfnArgs<T>& args, const Choices& choices, T* hidden, int num_sms,
                            cudaStream_t stream) {
  using S = few_rows::OneOrTwo;
  static_assert(S::kTileWidth <= kMostTokenFeatures);
  const auto num_experts = static_cast<std::int64_t>(args.local_experts.size());
  const ExpertWeights& first = args.local_experts.front();
  const auto gate_up_distance = distance_of(args.local_experts, &ExpertWeights::gate_up, kDTypeOf<T>);
  const auto down_distance = distance_of(args.local_experts, &ExpertWeights::down, kDTypeOf<T>);
  if (args.in.extent(0) != 1 || args.experts.extent(1) > kMostTokenChoices ||
      args.in.extent(1) % kChunkColumns != 0 || first.down.cols % kChunkColumns != 0 ||
      address_of(args.in.data()) % 16 != 0 || !gate_up_distance || !down_distance)
    return false;
  const int most_blocks = num_sms * S::kBlocksPerSm;

  Product<T> gate_up = product_of(args.in, first.gate_up);
  gate_up.width /= 2;
  gate_up.out = hidden;
  gate_up.out_row = gate_up.width;
  launch<S, TokenGateUp>(gate_up, 1, num_experts, *gate_up_distance,
                         few_rows::cut_runs(choices.num_pairs, gate_up.width, TokenGateUp::kHalves, 1,
                                            S::kTileWidth / TokenGateUp::kHalves, most_blocks),
                         choices, stream);

  Product<T> down = product_of(TensorView<const T, 2>(hidden, {1, gate_up.width}), first.down);
  down.out = args.out.data();
  launch<S, TokenDown>(down, choices.num_pairs, num_experts, *down_distance,
                       few_rows::cut_runs(1, down.width, TokenDown::kHalves, 1, S::kTileWidth, most_blocks),
                       choices, stream);
  return true;
}

#define HELIX_INSTANTIATE(T) \
  template bool multiply_token_experts(const ExpertFfnArgs<T>&, const Choices&, T*, int, cudaStream_t);
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
