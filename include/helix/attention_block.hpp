// SPDX-License-Identifier: Apache-2.0
// attention_block: projections, attention over the sharded cache, exchange, combine and output projection of
// a layer, up to this rank's part of the sum over the stage.
#pragma once

#include <cstdint>
#include <variant>

#include <helix/attend.hpp>
#include <helix/attention_buffers.hpp>
#include <helix/backend/layer.hpp>
#include <helix/latent_block.hpp>
#include <helix/layer_weights.hpp>
#include <helix/prepare_qkv.hpp>
#include <helix/rank_shape.hpp>

namespace helix {
namespace detail {

/// Query, key and value projection, rope, and the append of owned tokens. Returns the queries that attention
/// reads, [tokens, Hq/TPA, D].
template <LayerBackend B>
TensorView<const typename B::Activation, 3> project_queries(B& backend, const RankShape& shape,
                                                            const AttentionBlockArgs<B>& args,
                                                            const GqaWeights& weights,
                                                            typename B::Stream stream) {
  using T = typename B::Activation;
  const TensorView<T, 2> qkv = args.buffers.qkv;
  const std::int64_t tokens = qkv.extent(0);
  const auto heads_from = [&](std::int64_t column, std::int64_t heads, std::int64_t dim) {
    return TensorView<T, 3>(qkv.data() + column, {tokens, heads, dim}, {qkv.stride(0), dim, 1});
  };
  const std::int64_t k_begin = shape.query_heads * shape.head_dim;
  const std::int64_t v_begin = k_begin + shape.kv_heads * shape.head_dim;
  const TensorView<T, 3> q = heads_from(0, shape.query_heads, shape.head_dim);
  helix::project_qkv(backend,
                     {.linear = {.in = args.in, .weight = weights.qkv, .bias = weights.qkv_bias, .out = qkv},
                      .prepare = {.q = q,
                                  .k = heads_from(k_begin, shape.kv_heads, shape.head_dim),
                                  .v = heads_from(v_begin, shape.kv_heads, shape.value_dim),
                                  .q_norm = weights.q_norm,
                                  .k_norm = weights.k_norm,
                                  .epsilon = args.config->norm_epsilon,
                                  .rope = args.config->rope,
                                  .batch = args.batch,
                                  .kv = args.kv},
                      .follows_layer = args.follows_layer},
                     stream);
  return q;
}

/// Attention block of a layer with grouped queries, from its projections to its output projection.
template <LayerBackend B>
void attend_block(B& backend, const RankShape& shape, const AttentionBlockArgs<B>& args,
                  const GqaWeights& weights, typename B::Stream stream) {
  using T = typename B::Activation;
  const AttentionBuffers<T>& buffers = args.buffers;
  attend(backend, shape, args,
         {.q = project_queries(backend, shape, args, weights, stream),
          .kv = args.kv,
          .batch = args.batch,
          .sinks = weights.sinks,
          .combined = buffers.combined,
          .follows_prepare = true},
         stream);
  const TensorView<const T, 2> attended(buffers.combined.data(),
                                        {args.in.extent(0), shape.combined_heads * shape.value_dim});
  backend.linear(LinearArgs<T>{.in = attended, .weight = weights.o, .bias = weights.o_bias, .out = args.out},
                 stream);
}

}  // namespace detail

/// Runs the attention of a layer, from its normed input to this rank's part of the sum over the stage: out =
/// this rank's columns of W_o x the exact attention of its Hq/N heads. Collective over the KVP group. Queued
/// on `stream`; allocates nothing, capturable. Checks nothing: give what decode_layer() would accept. Source:
/// paper sections 2.1.1 to 2.1.3.
template <LayerBackend B>
void attention_block(B& backend, const RankShape& shape, const AttentionBlockArgs<B>& args,
                     typename B::Stream stream) {
  std::visit([&](const auto& weights) { detail::attend_block(backend, shape, args, weights, stream); },
             *args.weights);
}

}  // namespace helix
