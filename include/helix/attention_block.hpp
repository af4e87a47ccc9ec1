// SPDX-License-Identifier: Apache-2.0
// attention_block: projections, attention over the sharded cache, exchange, combine and output projection of
// a layer, up to this rank's part of the sum over the stage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>

#include <helix/attention_buffers.hpp>
#include <helix/backend/layer.hpp>
#include <helix/hop_b.hpp>
#include <helix/kvp_all_to_all.hpp>
#include <helix/layer_config.hpp>
#include <helix/layer_weights.hpp>
#include <helix/lse_combine.hpp>
#include <helix/partial_attention.hpp>
#include <helix/prepare_qkv.hpp>
#include <helix/rank_shape.hpp>

namespace helix {

/// One call of attention_block.
template <LayerBackend B>
struct AttentionBlockArgs {
  using T = typename B::Activation;
  const AttentionWeights* weights = nullptr;
  const LayerConfig* config = nullptr;
  KvView kv;
  Batch batch;
  TensorView<const T, 2> in;           ///< [tokens, M], normed.
  KvpAllToAll<B>* exchange = nullptr;  ///< Not read with KVP = 1.
  HopB<B>* hop_b = nullptr;            ///< Not read with KVP = 1.
  int slices = 1;                      ///< Slices of the batch, resolved.
  AttentionBuffers<T> buffers;
  TensorView<T, 2> out;  ///< Sink: [tokens, M], this rank's part of the sum over the stage, written.
};

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
  backend.linear(LinearArgs<T>{args.in, weights.qkv, weights.qkv_bias, qkv}, stream);
  const auto heads_from = [&](std::int64_t column, std::int64_t heads, std::int64_t dim) {
    return TensorView<T, 3>(qkv.data() + column, {tokens, heads, dim}, {qkv.stride(0), dim, 1});
  };
  const std::int64_t k_begin = shape.query_heads * shape.head_dim;
  const std::int64_t v_begin = k_begin + shape.kv_heads * shape.head_dim;
  const TensorView<T, 3> q = heads_from(0, shape.query_heads, shape.head_dim);
  prepare_qkv(backend,
              {.q = q,
               .k = heads_from(k_begin, shape.kv_heads, shape.head_dim),
               .v = heads_from(v_begin, shape.kv_heads, shape.value_dim),
               .q_norm = weights.q_norm,
               .k_norm = weights.k_norm,
               .epsilon = args.config->norm_epsilon,
               .rope = args.config->rope,
               .batch = args.batch,
               .kv = args.kv},
              stream);
  return q;
}

/// The same for MLA: queries absorbed into the latent space, one latent row a token into the cache.
template <LayerBackend B>
TensorView<const typename B::Activation, 3> project_queries(B& backend, const RankShape& shape,
                                                            const AttentionBlockArgs<B>& args,
                                                            const MlaWeights& weights,
                                                            typename B::Stream stream) {
  using T = typename B::Activation;
  const AttentionBuffers<T>& buffers = args.buffers;
  const LayerConfig& config = *args.config;
  const MlaShape& mla = *shape.mla;
  const std::int64_t tokens = args.in.extent(0);

  const TensorView<T, 2> q_heads_2d(buffers.q_heads.data(), {tokens, shape.query_heads * mla.qk_head_dim()});
  if (weights.q_a.empty()) {
    backend.linear(LinearArgs<T>{args.in, weights.q_b, {}, q_heads_2d}, stream);
  } else {
    backend.linear(LinearArgs<T>{args.in, weights.q_a, {}, buffers.q_lora}, stream);
    backend.rms_norm(
        RmsNormArgs<T>{{}, buffers.q_lora, weights.q_a_norm, buffers.q_lora, config.latent_norm_epsilon},
        stream);
    backend.linear(LinearArgs<T>{buffers.q_lora, weights.q_b, {}, q_heads_2d}, stream);
  }
  backend.head_linear(HeadLinearArgs<T>{buffers.q_heads.slice(2, 0, mla.qk_nope_head_dim), weights.w_uk,
                                        buffers.q.slice(2, 0, mla.kv_lora_rank)},
                      stream);
  backend.rope(RopeArgs<T>{buffers.q_heads.slice(2, mla.qk_nope_head_dim, mla.qk_rope_head_dim),
                           buffers.q.slice(2, mla.kv_lora_rank, mla.qk_rope_head_dim), args.batch.positions,
                           config.rope},
               stream);

  backend.linear(LinearArgs<T>{args.in, weights.kv_a, {}, buffers.latent}, stream);
  const TensorView<T, 2> compressed = buffers.latent.slice(1, 0, mla.kv_lora_rank);
  backend.rms_norm(RmsNormArgs<T>{{}, compressed, weights.kv_a_norm, compressed, config.latent_norm_epsilon},
                   stream);
  const TensorView<T, 3> row(buffers.latent.data(), {tokens, 1, mla.latent_dim()});
  const TensorView<T, 3> k_rope = row.slice(2, mla.kv_lora_rank, mla.qk_rope_head_dim);
  backend.rope(RopeArgs<T>{k_rope, k_rope, args.batch.positions, config.rope}, stream);
  backend.append_kv(AppendKvArgs<T>{row, {}, args.batch, args.kv}, stream);
  return buffers.q;
}

inline const float* sinks_of(const GqaWeights& weights) {
  return weights.sinks;
}
inline const float* sinks_of(const MlaWeights&) {
  return nullptr;
}

template <LayerBackend B>
PartialAttentionArgs<typename B::Activation> attention_args(const AttentionBlockArgs<B>& args,
                                                            TensorView<const typename B::Activation, 3> q,
                                                            const Batch& batch,
                                                            const PartialSink<typename B::Activation>& sink) {
  return {.q = q,
          .batch = batch,
          .kv = args.kv,
          .sink = sink,
          .scale = args.config->softmax_scale,
          .window = args.config->window,
          .soft_cap = args.config->soft_cap,
          .workspace = args.buffers.workspace,
          .follows_prepare = std::holds_alternative<GqaWeights>(*args.weights)};
}

/// KVP = 1: the shard is the whole. Without sinks attention writes where the combine would.
template <LayerBackend B>
void attend_alone(B& backend, const AttentionBlockArgs<B>& args,
                  TensorView<const typename B::Activation, 3> q, const float* sinks,
                  typename B::Stream stream) {
  const AttentionBuffers<typename B::Activation>& buffers = args.buffers;
  const auto& out = sinks == nullptr ? buffers.combined : buffers.alone.out;
  partial_attention(backend, attention_args(args, q, args.batch, {.out = out, .lse = buffers.alone.lse}),
                    stream);
  if (sinks == nullptr) return;
  lse_combine(backend,
              {.partial_out = {out.data(), {1, out.extent(0), out.extent(1), out.extent(2)}},
               .partial_lse = {buffers.alone.lse.data(), {1, out.extent(0), out.extent(1)}},
               .sink = sinks,
               .out = buffers.combined},
              stream);
}

/// Attention of each slice straight into the messages, and its exchange and combine beside the attention of
/// the next (HOP-B).
template <LayerBackend B>
void attend_sharded(B& backend, const AttentionBlockArgs<B>& args,
                    TensorView<const typename B::Activation, 3> q, const float* sinks,
                    typename B::Stream stream) {
  // Over windows the transfer runs beside attention as it is.
  const int slices = args.exchange->has_windows() ? 1 : args.slices;
  const auto part_of = [&](int slice) {
    const Range sequences = split_evenly(args.batch.num_sequences(), slices, slice);
    return args.batch.slice(sequences.begin, sequences.size());
  };
  const auto messages_of = [&](int slice, const Batch& part) {
    return args.exchange->outgoing(
        {.index = slice, .first_token = part.first_token(), .tokens = part.num_tokens()},
        part.positions + part.first_token());
  };
  args.hop_b->run(
      slices,
      [&](int slice, typename B::Stream on) {
        const Batch part = part_of(slice);
        partial_attention(backend, attention_args(args, q, part, messages_of(slice, part).sink), on);
      },
      [&](int slice, typename B::Stream on) {
        const Batch part = part_of(slice);
        const auto combined = args.buffers.combined.slice(0, part.first_token(), part.num_tokens());
        args.exchange->exchange_and_combine(messages_of(slice, part), sinks, combined, on);
      },
      stream);
}

/// Output projection of this rank's combined heads.
template <LayerBackend B>
void project_output(B& backend, const RankShape& shape, const AttentionBlockArgs<B>& args,
                    const GqaWeights& weights, typename B::Stream stream) {
  using T = typename B::Activation;
  const TensorView<const T, 2> attended(args.buffers.combined.data(),
                                        {args.in.extent(0), shape.combined_heads * shape.value_dim});
  backend.linear(LinearArgs<T>{attended, weights.o, weights.o_bias, args.out}, stream);
}

/// The same for MLA, after W_UV has taken each head out of the latent space.
template <LayerBackend B>
void project_output(B& backend, const RankShape& shape, const AttentionBlockArgs<B>& args,
                    const MlaWeights& weights, typename B::Stream stream) {
  using T = typename B::Activation;
  const TensorView<T, 3>& values = args.buffers.values;
  backend.head_linear(HeadLinearArgs<T>{args.buffers.combined, weights.w_uv, values}, stream);
  const TensorView<const T, 2> attended(values.data(),
                                        {args.in.extent(0), shape.combined_heads * shape.mla->v_head_dim});
  backend.linear(LinearArgs<T>{attended, weights.o, {}, args.out}, stream);
}

}  // namespace detail

/// Steps 2 to 8 of a layer, up to the sum over the stage: out = this rank's columns of W_o x the exact
/// attention of its Hq/N heads. Collective over the KVP group. Queued on `stream`; allocates nothing,
/// capturable. Shapes are checked by decode_layer. Source: paper sections 2.1.1 to 2.1.3.
template <LayerBackend B>
void attention_block(B& backend, const RankShape& shape, const AttentionBlockArgs<B>& args,
                     typename B::Stream stream) {
  std::visit(
      [&](const auto& weights) {
        const auto q = detail::project_queries(backend, shape, args, weights, stream);
        if (shape.kvp == 1) {
          detail::attend_alone(backend, args, q, detail::sinks_of(weights), stream);
        } else {
          detail::attend_sharded(backend, args, q, detail::sinks_of(weights), stream);
        }
        detail::project_output(backend, shape, args, weights, stream);
      },
      *args.weights);
}

}  // namespace helix
