// SPDX-License-Identifier: Apache-2.0
// The attention of a block with latents (MLA): projections, attention and output.
#pragma once

#include <cstdint>

#include <helix/attend.hpp>
#include <helix/attention_buffers.hpp>
#include <helix/backend/layer.hpp>
#include <helix/layer_config.hpp>
#include <helix/layer_weights.hpp>
#include <helix/rank_shape.hpp>

namespace helix::detail {

/// Queries [tokens, Hq, nope + rope], not yet rotated.
template <LayerBackend B>
void project_latent_queries(B& backend, const RankShape& shape, const AttentionBlockArgs<B>& args,
                            const MlaWeights& weights, typename B::Stream stream) {
  using T = typename B::Activation;
  const AttentionBuffers<T>& buffers = args.buffers;
  const TensorView<T, 2> q_heads(buffers.q_heads.data(),
                                 {args.in.extent(0), shape.query_heads * shape.mla->qk_head_dim()});
  if (weights.q_a.empty()) {
    backend.linear(LinearArgs<T>{args.in, weights.q_b, {}, q_heads}, stream);
    return;
  }
  backend.linear(LinearArgs<T>{args.in, weights.q_a, {}, buffers.q_lora}, stream);
  backend.rms_norm(
      RmsNormArgs<T>{{}, buffers.q_lora, weights.q_a_norm, buffers.q_lora, args.config->latent_norm_epsilon},
      stream);
  backend.linear(LinearArgs<T>{buffers.q_lora, weights.q_b, {}, q_heads}, stream);
}

/// Queries absorbed into the latent space, [tokens, Hq, D].
template <LayerBackend B>
void absorb_queries(B& backend, const RankShape& shape, const AttentionBlockArgs<B>& args,
                    const MlaWeights& weights, typename B::Stream stream) {
  using T = typename B::Activation;
  const AttentionBuffers<T>& buffers = args.buffers;
  const MlaShape& mla = *shape.mla;
  backend.head_linear(HeadLinearArgs<T>{buffers.q_heads.slice(2, 0, mla.qk_nope_head_dim), weights.w_uk,
                                        buffers.q.slice(2, 0, mla.kv_lora_rank)},
                      stream);
  backend.rope(RopeArgs<T>{buffers.q_heads.slice(2, mla.qk_nope_head_dim, mla.qk_rope_head_dim),
                           buffers.q.slice(2, mla.kv_lora_rank, mla.qk_rope_head_dim), args.batch.positions,
                           args.config->rope},
               stream);
}

/// One latent row a token, and into the cache what this rank owns.
template <LayerBackend B>
void append_latents(B& backend, const RankShape& shape, const AttentionBlockArgs<B>& args,
                    const MlaWeights& weights, typename B::Stream stream) {
  using T = typename B::Activation;
  const AttentionBuffers<T>& buffers = args.buffers;
  const LayerConfig& config = *args.config;
  const MlaShape& mla = *shape.mla;
  backend.linear(LinearArgs<T>{args.in, weights.kv_a, {}, buffers.latent}, stream);
  const TensorView<T, 2> compressed = buffers.latent.slice(1, 0, mla.kv_lora_rank);
  backend.rms_norm(RmsNormArgs<T>{{}, compressed, weights.kv_a_norm, compressed, config.latent_norm_epsilon},
                   stream);
  const TensorView<T, 3> row(buffers.latent.data(), {args.in.extent(0), 1, mla.latent_dim()});
  const TensorView<T, 3> k_rope = row.slice(2, mla.kv_lora_rank, mla.qk_rope_head_dim);
  backend.rope(RopeArgs<T>{k_rope, k_rope, args.batch.positions, config.rope}, stream);
  backend.append_kv(AppendKvArgs<T>{row, {}, args.batch, args.kv}, stream);
}

/// Steps 2 to 8 of a layer with latents. W_UV takes each head out of the latent space after the combine.
template <LayerBackend B>
void attend_block(B& backend, const RankShape& shape, const AttentionBlockArgs<B>& args,
                  const MlaWeights& weights, typename B::Stream stream) {
  using T = typename B::Activation;
  const AttentionBuffers<T>& buffers = args.buffers;
  project_latent_queries(backend, shape, args, weights, stream);
  absorb_queries(backend, shape, args, weights, stream);
  append_latents(backend, shape, args, weights, stream);
  attend(backend, shape, args,
         {.q = buffers.q, .kv = args.kv, .batch = args.batch, .combined = buffers.combined}, stream);
  backend.head_linear(HeadLinearArgs<T>{buffers.combined, weights.w_uv, buffers.values}, stream);
  const TensorView<const T, 2> attended(buffers.values.data(),
                                        {args.in.extent(0), shape.combined_heads * shape.mla->v_head_dim});
  backend.linear(LinearArgs<T>{attended, weights.o, {}, args.out}, stream);
}

}  // namespace helix::detail
