// SPDX-License-Identifier: Apache-2.0
// attend: partial attention of a batch, its exchange and its combine, for any form of queries and keys.
#pragma once

#include <cstdint>

#include <helix/attention_buffers.hpp>
#include <helix/backend/layer.hpp>
#include <helix/hop_b.hpp>
#include <helix/integers.hpp>
#include <helix/kvp_all_to_all.hpp>
#include <helix/layer_config.hpp>
#include <helix/layer_weights.hpp>
#include <helix/lse_combine.hpp>
#include <helix/partial_attention.hpp>
#include <helix/range.hpp>
#include <helix/rank_shape.hpp>

namespace helix {

/// Arguments of attention_block().
template <LayerBackend B>
struct AttentionBlockArgs {
  using T = typename B::Activation;
  const AttentionWeights* weights = nullptr;
  const LayerConfig* config = nullptr;
  KvView kv;
  Batch batch;
  TensorView<const T, 2> in;           ///< [tokens, M], after the input norm.
  KvpAllToAll<B>* exchange = nullptr;  ///< Not read with KVP = 1, where decode_layer() still requires one.
  HopB<B>* hop_b = nullptr;            ///< Not read with KVP = 1, where decode_layer() still requires one.
  int slices = 1;                      ///< Number of slices, as HopB::resolve_slices() gives it.
  bool follows_layer = false;          ///< See ProjectQkvArgs::follows_layer.
  AttentionBuffers<T> buffers;
  TensorView<T, 2> out;  ///< [tokens, M], written: this rank's part of the sum over the stage.
};

namespace detail {

/// What one call of attend() reads, and where its combined heads go.
template <class T>
struct Attention {
  TensorView<const T, 3> q;  ///< [tokens of the step, Hq/TPA, D].
  KvView kv;
  Batch batch;                   ///< The whole step, or some of its sequences.
  const float* sinks = nullptr;  ///< [Hq/N] logits that join the denominator once, or null.
  TensorView<T, 3> combined;     ///< [tokens of the step, Hq/N, Dv]; only the rows of the batch are written.
  bool follows_prepare = false;  ///< See PartialAttentionArgs::follows_prepare.
};

/// Arguments of partial_attention() for `batch`, a slice of the step, into `target`.
template <LayerBackend B>
PartialAttentionArgs<typename B::Activation> partial_args(
    const AttentionBlockArgs<B>& args, const Attention<typename B::Activation>& attention, const Batch& batch,
    const PartialTarget<typename B::Activation>& target) {
  return {.q = attention.q,
          .batch = batch,
          .kv = attention.kv,
          .target = target,
          .scale = args.config->softmax_scale,
          .window = args.config->window,
          .soft_cap = args.config->soft_cap,
          .workspace = args.buffers.workspace,
          .follows_prepare = attention.follows_prepare};
}

/// Attention with KVP = 1, where the shard is the whole sequence. Without sinks attention writes straight to
/// `combined`.
template <LayerBackend B>
void attend_alone(B& backend, const AttentionBlockArgs<B>& args,
                  const Attention<typename B::Activation>& attention, typename B::Stream stream) {
  const AttentionBuffers<typename B::Activation>& buffers = args.buffers;
  const auto& out = attention.sinks == nullptr ? attention.combined : buffers.alone.out;
  helix::partial_attention(
      backend, partial_args(args, attention, attention.batch, {.out = out, .lse = buffers.alone.lse}),
      stream);
  if (attention.sinks == nullptr) return;
  helix::lse_combine(backend,
                     {.partial_out = {out.data(), {1, out.extent(0), out.extent(1), out.extent(2)}},
                      .partial_lse = {buffers.alone.lse.data(), {1, out.extent(0), out.extent(1)}},
                      .sinks = attention.sinks,
                      .out = attention.combined},
                     stream);
}

/// Attention with KVP > 1. Each slice's attention writes straight into the messages; its exchange and combine
/// overlap the attention of the next slice (HOP-B).
template <LayerBackend B>
void attend_sharded(B& backend, const AttentionBlockArgs<B>& args,
                    const Attention<typename B::Activation>& attention, typename B::Stream stream) {
  const Batch& batch = attention.batch;
  // Over windows the transfer overlaps attention without slices.
  const int slices = args.exchange->has_windows()
                         ? 1
                         : static_cast<int>(smaller<std::int64_t>(args.slices, batch.num_sequences()));
  const auto part_of = [&](int slice) {
    const Range sequences = split_evenly(batch.num_sequences(), slices, slice);
    return batch.slice(sequences.begin, sequences.size());
  };
  const auto messages_of = [&](int slice, const Batch& part) {
    return args.exchange->outgoing({.index = slice,
                                    .first_token = part.first_token(),
                                    .tokens = part.num_tokens(),
                                    .value_dim = attention.combined.extent(2)},
                                   part.positions + part.first_token());
  };
  args.hop_b->run(
      slices,
      [&](int slice, typename B::Stream on) {
        const Batch part = part_of(slice);
        helix::partial_attention(backend,
                                 partial_args(args, attention, part, messages_of(slice, part).target), on);
      },
      [&](int slice, typename B::Stream on) {
        const Batch part = part_of(slice);
        const auto combined = attention.combined.slice(0, part.first_token(), part.num_tokens());
        args.exchange->exchange_and_combine(messages_of(slice, part), attention.sinks, combined, on);
      },
      stream);
}

/// Exact attention of the batch: over this rank's shard, then combined with the other ranks'.
template <LayerBackend B>
void attend(B& backend, const RankShape& shape, const AttentionBlockArgs<B>& args,
            const Attention<typename B::Activation>& attention, typename B::Stream stream) {
  if (shape.kvp == 1) {
    attend_alone(backend, args, attention, stream);
  } else {
    attend_sharded(backend, args, attention, stream);
  }
}

}  // namespace detail
}  // namespace helix
