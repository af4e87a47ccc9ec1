// SPDX-License-Identifier: Apache-2.0
// ffn_block: the feed-forward half of a layer, dense or experts, up to this rank's part of the sum over the
// stage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>

#include <helix/backend/layer.hpp>
#include <helix/backend/optional.hpp>
#include <helix/integers.hpp>
#include <helix/layer_config.hpp>
#include <helix/layer_weights.hpp>
#include <helix/rank_shape.hpp>
#include <helix/workspace.hpp>

namespace helix {

/// What an FFN block writes besides its result. T is the activation type.
template <class T>
struct FfnBuffers {
  TensorView<T, 2> gate_up;             ///< [tokens, 2 F/N].
  TensorView<T, 2> activated;           ///< [tokens, F/N].
  TensorView<float, 2> router_logits;   ///< [tokens, E].
  TensorView<std::int32_t, 2> experts;  ///< [tokens, top_k].
  TensorView<float, 2> expert_weights;  ///< [tokens, top_k].
  std::span<std::byte> workspace;

  /// Takes the buffers from `arena`, or measures them.
  template <LayerBackend B>
  static FfnBuffers carve(B& backend, const RankShape& shape, std::int64_t tokens, WorkspaceArena& arena) {
    const std::int64_t ffn = larger(shape.ffn, shape.shared_ffn);
    FfnBuffers buffers;
    buffers.gate_up = arena.take<T, 2>({tokens, 2 * ffn});
    buffers.activated = arena.take<T, 2>({tokens, ffn});
    if (shape.num_experts > 0) {
      buffers.router_logits = arena.take<float, 2>({tokens, shape.num_experts});
      buffers.experts = arena.take<std::int32_t, 2>({tokens, shape.top_k});
      buffers.expert_weights = arena.take<float, 2>({tokens, shape.top_k});
      buffers.workspace = arena.take_bytes(
          backend.expert_ffn_workspace_bytes(tokens, shape.top_k, shape.hidden, shape.expert_ffn));
    }
    return buffers;
  }
};

/// Arguments of ffn_block().
template <LayerBackend B>
struct FfnBlockArgs {
  using T = typename B::Activation;
  const FfnWeights* weights = nullptr;
  const LayerConfig* config = nullptr;
  TensorView<const T, 2> in;  ///< [tokens, M], after the norm.
  FfnBuffers<T> buffers;
  TensorView<T, 2> out;  ///< [tokens, M], written: this rank's part of the sum over the stage.
};

namespace detail {

/// Queues this rank's slice of a dense FFN: out = down(swiglu(gate_up(in))).
template <LayerBackend B>
void queue_ffn(B& backend, const RankShape&, const FfnBlockArgs<B>& args, const DenseFfnWeights& weights,
               typename B::Stream stream) {
  using T = typename B::Activation;
  const std::int64_t tokens = args.in.extent(0);
  const std::int64_t ffn = weights.down.cols;
  const TensorView<T, 2> gate_up(args.buffers.gate_up.data(), {tokens, 2 * ffn});
  const TensorView<T, 2> activated(args.buffers.activated.data(), {tokens, ffn});
  const LinearSwigluArgs<T> halves{args.in, weights.gate_up, weights.gate_up_bias, gate_up, activated};
  if constexpr (requires { backend.linear_swiglu(halves, stream); }) {
    backend.linear_swiglu(halves, stream);
  } else {
    HELIX_EXPECT_NO_MEMBER(B, linear_swiglu, (const LinearSwigluArgs<Activation>&, Stream));
    backend.linear(
        LinearArgs<T>{.in = args.in, .weight = weights.gate_up, .bias = weights.gate_up_bias, .out = gate_up},
        stream);
    backend.swiglu(SwigluArgs<T>{.gate_up = gate_up, .out = activated}, stream);
  }
  backend.linear(
      LinearArgs<T>{.in = activated, .weight = weights.down, .bias = weights.down_bias, .out = args.out},
      stream);
}

/// Queues the router, which every rank runs, this rank's experts for all tokens, and its slice of the shared
/// expert.
template <LayerBackend B>
void queue_ffn(B& backend, const RankShape& shape, const FfnBlockArgs<B>& args, const MoeWeights& weights,
               typename B::Stream stream) {
  using T = typename B::Activation;
  const FfnBuffers<T>& buffers = args.buffers;
  const RouterConfig& router = args.config->router;
  const bool has_shared = !weights.shared.down.empty();
  if (!has_shared)
    backend.fill_zero(args.out.data(), static_cast<std::size_t>(args.out.size()) * sizeof(T), stream);
  backend.router_logits(
      RouterLogitsArgs<T>{.in = args.in, .weight = weights.router, .out = buffers.router_logits}, stream);
  backend.route(RouteArgs{.logits = buffers.router_logits,
                          .bias = weights.router_bias,
                          .scoring = router.scoring,
                          .num_groups = router.num_groups,
                          .groups_kept = router.groups_kept,
                          .normalize = router.normalize,
                          .scale = router.scale,
                          .experts = buffers.experts,
                          .weights = buffers.expert_weights},
                stream);
  // After the choice of experts, which takes long and reads little: the shared expert's weights arrive
  // meanwhile.
  if (has_shared) queue_ffn(backend, shape, args, weights.shared, stream);
  backend.expert_ffn(ExpertFfnArgs<T>{.in = args.in,
                                      .experts = buffers.experts,
                                      .weights = buffers.expert_weights,
                                      .local_experts = weights.experts,
                                      .first_expert = shape.experts.begin,
                                      .out = args.out,
                                      .workspace = buffers.workspace},
                     stream);
}

}  // namespace detail

/// Runs the FFN of a layer, from its normed input to this rank's part of the sum over the stage. A dense FFN
/// is column- and row-parallel over N. An MoE runs the slices of this rank's experts (TPF x EP) for all
/// tokens, and its slice of the shared expert. Local. Queued on `stream`; allocates nothing, capturable.
/// Checks nothing: give what decode_layer() would accept. Source: paper section 2.2.
template <LayerBackend B>
void ffn_block(B& backend, const RankShape& shape, const FfnBlockArgs<B>& args, typename B::Stream stream) {
  std::visit([&](const auto& weights) { detail::queue_ffn(backend, shape, args, weights, stream); },
             *args.weights);
}

}  // namespace helix
