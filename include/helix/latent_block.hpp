// SPDX-License-Identifier: Apache-2.0
// The attention block of a layer with latents (MLA): projections, attention and output.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <variant>

#include <helix/attend.hpp>
#include <helix/attention_buffers.hpp>
#include <helix/backend/layer.hpp>
#include <helix/backend/optional.hpp>
#include <helix/integers.hpp>
#include <helix/layer_config.hpp>
#include <helix/layer_weights.hpp>
#include <helix/mla_prefill.hpp>
#include <helix/prepare_latent.hpp>
#include <helix/rank_shape.hpp>

namespace helix::detail {

/// Computes queries [tokens, Hq, nope + rope], not yet rotated, and latents, not yet normed.
template <LayerBackend B>
void project_latent_queries(B& backend, const RankShape& shape, const AttentionBlockArgs<B>& args,
                            const MlaWeights& weights, typename B::Stream stream) {
  using T = typename B::Activation;
  const AttentionBuffers<T>& buffers = args.buffers;
  backend.linear(
      LinearArgs<T>{.in = args.in, .weight = weights.qkv_a, .bias = weights.qkv_a_bias, .out = buffers.qkv_a},
      stream);
  if (shape.mla->q_lora_rank == 0) return;
  const TensorView<T, 2> q_heads(buffers.q_heads.data(),
                                 {args.in.extent(0), shape.query_heads * shape.mla->qk_head_dim()});
  backend.rms_norm(RmsNormArgs<T>{.residual = buffers.q_lora,
                                  .weight = weights.q_a_norm,
                                  .out = buffers.q_lora,
                                  .epsilon = args.config->latent_norm_epsilon},
                   stream);
  backend.linear(LinearArgs<T>{.in = buffers.q_lora, .weight = weights.q_b, .out = q_heads}, stream);
}

/// The rows of x that belong to the tokens of `batch`.
template <class T, int R>
TensorView<T, R> rows_of(const TensorView<T, R>& x, const Batch& batch) {
  return x.slice(0, batch.first_token(), batch.num_tokens());
}

/// Absorbs the queries of `batch` into the latent space. prepare_latents() has rotated their rope columns.
template <LayerBackend B>
void absorb_queries(B& backend, const RankShape& shape, const AttentionBlockArgs<B>& args,
                    const MlaWeights& weights, const Batch& batch, typename B::Stream stream) {
  using T = typename B::Activation;
  const MlaShape& mla = *shape.mla;
  const TensorView<T, 3> q_heads = rows_of(args.buffers.q_heads, batch);
  const TensorView<T, 3> q = rows_of(args.buffers.q, batch);
  backend.head_linear(HeadLinearArgs<T>{.in = q_heads.slice(2, 0, mla.qk_nope_head_dim),
                                        .weight = weights.w_uk,
                                        .out = q.slice(2, 0, mla.kv_lora_rank)},
                      stream);
}

/// Norms and rotates the latents, and appends those that this rank owns to the cache. Rotates the rope
/// columns of all queries too, though sequences that attend expanded do not use them.
template <LayerBackend B>
void prepare_latents(B& backend, const RankShape& shape, const AttentionBlockArgs<B>& args,
                     const MlaWeights& weights, typename B::Stream stream) {
  using T = typename B::Activation;
  const AttentionBuffers<T>& buffers = args.buffers;
  const LayerConfig& config = *args.config;
  const MlaShape& mla = *shape.mla;
  prepare_latent(
      backend,
      PrepareLatentArgs<T>{.latents = {buffers.latent.data(),
                                       {args.in.extent(0), 1, mla.latent_dim()},
                                       {buffers.latent.stride(0), mla.latent_dim(), 1}},
                           .norm = weights.kv_a_norm,
                           .epsilon = config.latent_norm_epsilon,
                           .q_in = buffers.q_heads.slice(2, mla.qk_nope_head_dim, mla.qk_rope_head_dim),
                           .q_out = buffers.q.slice(2, mla.kv_lora_rank, mla.qk_rope_head_dim),
                           .rope = config.rope,
                           .batch = args.batch,
                           .kv = args.kv},
      stream);
}

/// Runs absorbed attention of `batch`. After the combine W_UV takes each head out of the latent space.
template <LayerBackend B>
void attend_absorbed(B& backend, const RankShape& shape, const AttentionBlockArgs<B>& args,
                     const MlaWeights& weights, const Batch& batch, typename B::Stream stream) {
  using T = typename B::Activation;
  const AttentionBuffers<T>& buffers = args.buffers;
  absorb_queries(backend, shape, args, weights, batch, stream);
  attend(
      backend, shape, args,
      {.q = buffers.q, .kv = args.kv, .batch = batch, .combined = buffers.combined, .follows_prepare = true},
      stream);
  backend.head_linear(HeadLinearArgs<T>{.in = rows_of(buffers.combined, batch),
                                        .weight = weights.w_uv,
                                        .out = rows_of(buffers.values, batch)},
                      stream);
}

/// Calls use(first row, rows) for blocks of `rows` rows. Blocks have few different sizes, because backends
/// plan a product for each.
template <class Use>
void for_each_row_block(std::int64_t rows, const Use& use) {
  constexpr std::int64_t kMaxRows = 4096;
  for (std::int64_t first = 0; first < rows;) {
    const auto left = static_cast<std::uint64_t>(rows - first);
    const std::int64_t count = smaller(kMaxRows, static_cast<std::int64_t>(std::bit_floor(left)));
    use(first, count);
    first += count;
  }
}

/// Expands the first `local_tokens` tokens of the sequence in slot *slot to keys and values of each head.
/// Returns a view of them as a cache of one page. Tokens keep the order of the shard, so that its causal
/// bounds hold here too (invariant 4).
template <LayerBackend B>
KvView expand_latents(B& backend, const RankShape& shape, const AttentionBlockArgs<B>& args,
                      const MlaWeights& weights, const std::int32_t* slot, std::int64_t local_tokens,
                      typename B::Stream stream) {
  using T = typename B::Activation;
  const MlaShape& mla = *shape.mla;
  const ExpandedBuffers<T>& expanded = args.buffers.expanded;
  const std::int64_t heads = shape.query_heads;
  const std::int64_t page_tokens = ExpandedBuffers<T>::page_tokens(local_tokens);
  if (local_tokens > 0) {
    const TensorView<T, 2> read = expanded.latents.slice(0, 0, local_tokens);
    const TensorView<T, 2> rest = expanded.latents.slice(0, local_tokens, page_tokens - local_tokens);
    backend.read_latents(ReadLatentsArgs<T>{.kv = args.kv, .sequence_slot = slot, .rows = read}, stream);
    backend.fill_zero(rest.data(), static_cast<std::size_t>(rest.size()) * sizeof(T), stream);
  }
  for_each_row_block(local_tokens > 0 ? page_tokens : 0, [&](std::int64_t first_row, std::int64_t rows) {
    const TensorView<T, 2> latents = expanded.latents.slice(0, first_row, rows);
    const TensorView<T, 3> keys = expanded.keys.slice(0, first_row, rows);
    const auto shared_by_heads = [&](std::int64_t first, std::int64_t columns) {
      return TensorView<const T, 3>(latents.data() + first, {rows, heads, columns},
                                    {latents.stride(0), 0, 1});
    };
    backend.head_linear(HeadLinearArgs<T>{.in = shared_by_heads(0, mla.kv_lora_rank),
                                          .weight = weights.expand_k,
                                          .out = keys.slice(2, 0, mla.qk_nope_head_dim)},
                        stream);
    backend.rope(RopeArgs<T>{.in = shared_by_heads(mla.kv_lora_rank, mla.qk_rope_head_dim),
                             .out = keys.slice(2, mla.qk_nope_head_dim, mla.qk_rope_head_dim),
                             .positions = nullptr},
                 stream);  // a copy: the latents are rotated
    backend.linear(LinearArgs<T>{.in = latents.slice(1, 0, mla.kv_lora_rank),
                                 .weight = weights.expand_v,
                                 .out = {expanded.values.slice(0, first_row, rows).data(),
                                         {rows, heads * mla.v_head_dim}}},
                   stream);
  });
  backend.fill_zero(expanded.zero.data(), sizeof(std::int32_t), stream);
  KvView view;
  view.format = KvFormat::token_major(kDTypeOf<T>, heads, mla.qk_head_dim(), mla.v_head_dim, page_tokens);
  view.k = expanded.keys.data();
  view.v = expanded.values.data();
  view.num_pages = view.max_pages = 1;
  view.page_table = expanded.zero.data();
  view.layout = args.kv.layout;
  view.kvp_rank = args.kv.kvp_rank;
  return view;
}

/// Runs expanded attention of `batch`, which is one sequence. The partials that combine are of values.
template <LayerBackend B>
void attend_expanded(B& backend, const RankShape& shape, const AttentionBlockArgs<B>& args,
                     const MlaWeights& weights, Batch batch, typename B::Stream stream) {
  using T = typename B::Activation;
  const MlaShape& mla = *shape.mla;
  const AttentionBuffers<T>& buffers = args.buffers;
  const std::int64_t local_tokens = args.kv.layout.length(batch.lengths_host.front(), args.kv.kvp_rank);
  const KvView kv = expand_latents(backend, shape, args, weights, batch.sequence_slots, local_tokens, stream);
  const TensorView<T, 3> q_rope =
      rows_of(buffers.q_heads, batch).slice(2, mla.qk_nope_head_dim, mla.qk_rope_head_dim);
  backend.rope(RopeArgs<T>{.in = q_rope,
                           .out = q_rope,
                           .positions = batch.positions + batch.first_token(),
                           .rope = args.config->rope},
               stream);
  batch.sequence_slots = buffers.expanded.zero.data();
  attend(backend, shape, args, {.q = buffers.q_heads, .kv = kv, .batch = batch, .combined = buffers.values},
         stream);
}

/// Tokens of sequence `b` that the fullest rank expands; 0: the sequence attends absorbed. Under a window it
/// always does, as pages before the window may be gone. Equal on all ranks.
template <LayerBackend B>
std::int64_t expanded_tokens(const RankShape& shape, const LayerConfig& config, const MlaWeights& weights,
                             const KvLayout& layout, const Batch& batch, std::int64_t b) {
  if (!LatentReader<B> || weights.expand_k.empty() || batch.lengths_host.empty() || config.window > 0)
    return 0;
  const auto at = static_cast<std::size_t>(b);
  const std::int64_t length = batch.lengths_host[at];
  const MlaChunk chunk{.tokens = batch.query_offsets_host[at + 1] - batch.query_offsets_host[at],
                       .length = length,
                       .local_tokens = layout.length(length, 0),
                       .heads = shape.query_heads,
                       .kvp = shape.kvp};
  MlaPrefillCosts costs;
  if constexpr (requires { B::kMlaPrefillCosts; }) costs = B::kMlaPrefillCosts;
  return expands(config.mla_prefill, *shape.mla, chunk, costs) ? chunk.local_tokens : 0;
}

/// Most tokens that the fullest rank expands for a sequence of the batch; 0: none is expanded.
template <LayerBackend B>
std::int64_t most_expanded_tokens(const RankShape& shape, const LayerConfig& config,
                                  const AttentionWeights& weights, const KvLayout& layout,
                                  const Batch& batch) {
  const MlaWeights* const mla = std::get_if<MlaWeights>(&weights);
  std::int64_t most = 0;
  for (std::int64_t b = 0; mla != nullptr && b < batch.num_sequences(); ++b)
    most = larger(most, expanded_tokens<B>(shape, config, *mla, layout, batch, b));
  return most;
}

/// Calls use(sequences, whether they attend expanded) for the parts of the step in turn: each sequence that
/// attends expanded, and the absorbed ones between them.
template <LayerBackend B, class Use>
void for_each_part(const RankShape& shape, const AttentionBlockArgs<B>& args, const MlaWeights& weights,
                   const Use& use) {
  const Batch& batch = args.batch;
  std::int64_t begin = 0;
  const auto use_absorbed = [&](std::int64_t end) {
    const Batch part = batch.slice(begin, end - begin);
    if (part.num_tokens() > 0) use(part, false);
  };
  for (std::int64_t b = 0; b < batch.num_sequences(); ++b) {
    if (expanded_tokens<B>(shape, *args.config, weights, args.kv.layout, batch, b) == 0) continue;
    use_absorbed(b);
    use(batch.slice(b, 1), true);
    begin = b + 1;
  }
  use_absorbed(batch.num_sequences());
}

/// Attention block of a layer with latents, from its projections to its output projection.
template <LayerBackend B>
void attend_block(B& backend, const RankShape& shape, const AttentionBlockArgs<B>& args,
                  const MlaWeights& weights, typename B::Stream stream) {
  using T = typename B::Activation;
  project_latent_queries(backend, shape, args, weights, stream);
  prepare_latents(backend, shape, args, weights, stream);
  for_each_part(shape, args, weights, [&](const Batch& part, bool is_expanded) {
    if (!is_expanded) return attend_absorbed(backend, shape, args, weights, part, stream);
    if constexpr (LatentReader<B>) {
      attend_expanded(backend, shape, args, weights, part, stream);
    } else {
      HELIX_EXPECT_NO_MEMBER(B, read_latents, (const ReadLatentsArgs<Activation>&, Stream));
    }
  });
  const TensorView<const T, 2> attended(args.buffers.values.data(),
                                        {args.in.extent(0), shape.combined_heads * shape.mla->v_head_dim});
  backend.linear(LinearArgs<T>{.in = attended, .weight = weights.o, .bias = weights.o_bias, .out = args.out},
                 stream);
}

}  // namespace helix::detail
