// SPDX-License-Identifier: Apache-2.0
// Launches of the products of a few tokens' experts.
#include <algorithm>
#include <cstdint>

#include <helix/dtype.hpp>
#include <helix/integers.hpp>

#include "cuda/linear/few_rows.hpp"
#include "cuda/linear/few_rows_launch.cuh"
#include "cuda/linear/product.cuh"
#include "cuda/moe/expert_items.cuh"
#include "cuda/moe/few_rows_experts.cuh"
#include "cuda/moe/few_rows_experts.hpp"
#include "cuda/runtime/divisor.cuh"
#include "cuda/runtime/tensor_map.cuh"

namespace helix::cuda {
namespace {

/// Launches the product of p.rows of the `in_rows` rows at p.in with each expert's weights.
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
  tail.top_k = Divisor(choices.top_k);
  tail.tiles_per_expert = Divisor(ceil_div(p.width, tiles.height));
  tail.num_tokens = p.rows;
  few_rows::launch_product<S>(p, in_rows, weights, tiles, tail, stream);
}

/// Tiles of 16 rows, for a product of down that has at most one such tile per SM.
using UpToEightNarrow = few_rows::Shape<8, 16, 8, 1>;
using UpToSixteenNarrow = few_rows::Shape<kMaxFewRows, 16, 5, 1>;

/// Launches both products. Gate and up use shape S; so does down, or shape Narrow if it has few features.
template <class S, class Narrow, class T>
void launch_both(const ExpertFfnArgs<T>& args, const Choices& choices, T* hidden,
                 const ExpertDistances& distances, int num_sms, cudaStream_t stream) {
  const auto num_experts = static_cast<std::int64_t>(args.local_experts.size());
  const ExpertWeights& first = args.local_experts.front();
  const std::int64_t tokens = args.in.extent(0);
  const std::int64_t most_chosen = std::min<std::int64_t>(choices.num_pairs, num_experts);

  using GateUp = ExpertsGateUp<S>;
  Product<T> gate_up = product_of(args.in, first.gate_up);
  gate_up.width /= 2;
  gate_up.out = hidden;
  gate_up.out_row = gate_up.width;
  const few_rows::Tiles features =
      few_rows::cut_runs(static_cast<int>(most_chosen), gate_up.width, GateUp::kHalves, gate_up.rows,
                         S::kTileWidth / GateUp::kHalves, num_sms * S::kBlocksPerSm);
  launch<S, GateUp>(gate_up, tokens, num_experts, distances.gate_up, features, choices, stream);

  // Down reads the choices before it waits: gate and up lets it start only after waiting for the router's
  // kernel.
  Product<T> down = product_of(TensorView<const T, 2>(hidden, {tokens, gate_up.width}), first.down);
  down.out = args.out.data();
  down.out_row = args.out.stride(0);
  const auto launch_down = [&]<class Shape>(Shape) {
    using Down = ExpertsDown<Shape>;
    const few_rows::Tiles features = few_rows::cut_runs(1, down.width, Down::kHalves, down.rows,
                                                        Shape::kTileWidth, num_sms * Shape::kBlocksPerSm);
    launch<Shape, Down>(down, most_chosen * tokens, num_experts, distances.down, features, choices, stream);
  };
  down.width <= num_sms* Narrow::kTileWidth ? launch_down(Narrow{}) : launch_down(S{});
}

/// Whether shape S takes these choices.
template <class S>
bool takes(std::int64_t tokens, std::int64_t num_pairs) {
  return tokens <= S::kRows && num_pairs <= FewRowsExperts<S>::kMaxPairs;
}

}  // namespace

std::int64_t few_rows_hidden_elements(std::int64_t tokens, std::int64_t top_k, std::int64_t ffn) {
  const std::int64_t rows = std::min<std::int64_t>(tokens, kMaxFewRows);
  return std::min<std::int64_t>(rows * top_k, most_few_rows_pairs(kMaxFewRows)) * rows * ffn;
}

template <class T>
bool multiply_few_rows_experts(const ExpertFfnArgs<T>& args, const ExpertDistances& distances,
                               const Choices& choices, T* hidden, int num_sms, cudaStream_t stream) {
  const std::int64_t tokens = args.in.extent(0);
  const ExpertWeights& first = args.local_experts.front();
  if (first.down.cols % kChunkColumns != 0 || !fits_few_rows(product_of(args.in, first.gate_up)))
    return false;
  if (takes<few_rows::OneOrTwo>(tokens, choices.num_pairs)) {
    launch_both<few_rows::OneOrTwo, few_rows::OneOrTwo>(args, choices, hidden, distances, num_sms, stream);
  } else if (takes<few_rows::UpToEight>(tokens, choices.num_pairs)) {
    launch_both<few_rows::UpToEight, UpToEightNarrow>(args, choices, hidden, distances, num_sms, stream);
  } else if (takes<few_rows::UpToSixteen>(tokens, choices.num_pairs)) {
    launch_both<few_rows::UpToSixteen, UpToSixteenNarrow>(args, choices, hidden, distances, num_sms, stream);
  } else {
    return false;
  }
  return true;
}

#define HELIX_INSTANTIATE(T)                                                                               \
  template bool multiply_few_rows_experts(const ExpertFfnArgs<T>&, const ExpertDistances&, const Choices&, \
                                          T*, int, cudaStream_t);
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
