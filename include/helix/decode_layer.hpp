// SPDX-License-Identifier: Apache-2.0
// decode_layer: one transformer layer under Helix Parallelism. This is the only orchestration of a layer, for
// every backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string_view>
#include <utility>

#include <helix/attention_block.hpp>
#include <helix/backend/layer.hpp>
#include <helix/error.hpp>
#include <helix/ffn_block.hpp>
#include <helix/latent_block.hpp>
#include <helix/layer_checks.hpp>
#include <helix/mla_prefill.hpp>
#include <helix/reduce_norm.hpp>

namespace helix {

/// Options of one decode_layer() call: this rank's exchange objects, which all layers share, and the
/// workspace.
template <LayerBackend B>
struct DecodeLayerOptions {
  /// This rank's exchange, shared by all layers and built for the largest step. Required with KVP = 1 too.
  KvpAllToAll<B>* exchange = nullptr;
  /// This rank's overlap pipeline, shared by all layers. Must have no more slices than `exchange` is built
  /// for. Required with KVP = 1 too.
  HopB<B>* hop_b = nullptr;
  /// Slices of the batch whose exchanges overlap attention; 1: off; 0: the library chooses.
  int hop_b_slices = 0;
  /// Workspace of decode_layer_workspace_bytes(), aligned to 16 bytes. Size it with LayerInput::normed if
  /// `normed` is given. The workspace, `hidden` and `normed` must not overlap.
  std::span<std::byte> workspace;
  /// [tokens, M], dense. On entry it holds `hidden` after this layer's input norm, on return `hidden` after
  /// `next_norm`. A stack thus ends one layer and begins the next in one operation. Empty: the layer norms
  /// its input itself.
  TensorView<typename B::Activation, 2> normed{};
  /// [1, M], input norm of the next layer, only with `normed`. Empty: the content of `normed` on return is
  /// undefined.
  WeightView next_norm{};
  /// Whether the work queued just before is a layer of the same batch and page table. The backend may then
  /// read positions, slots and page lists while that layer still runs.
  bool follows_layer = false;
};

/// What a layer gets as input: its hidden states alone, or also options.normed.
enum class LayerInput { hidden, normed };

namespace detail {

/// Everything a layer writes besides hidden and the cache.
template <class T>
struct LayerBuffers {
  TensorView<T, 2> normed;   // [tokens, M]; empty if the caller brings it
  TensorView<T, 2> summand;  // [tokens, M]: this rank's part of a sum over the stage
  AttentionBuffers<T> attention;
  FfnBuffers<T> ffn;

  template <LayerBackend B>
  static LayerBuffers carve(B& backend, const RankShape& shape, std::int64_t tokens,
                            std::int64_t expanded_tokens, LayerInput input, WorkspaceArena& arena) {
    LayerBuffers buffers;
    if (input == LayerInput::hidden) buffers.normed = arena.take<T, 2>({tokens, shape.hidden});
    buffers.summand = arena.take<T, 2>({tokens, shape.hidden});
    buffers.attention = AttentionBuffers<T>::carve(backend, shape, tokens, expanded_tokens, arena);
    buffers.ffn = FfnBuffers<T>::carve(backend, shape, tokens, arena);
    return buffers;
  }
};

/// Queues the whole layer. All arguments have been checked.
template <LayerBackend B>
void queue_layer(B& backend, const RankShape& shape, const LayerConfig& config, const LayerWeights& weights,
                 const KvView& kv, const Batch& batch, TensorView<typename B::Activation, 2> hidden,
                 const DecodeLayerOptions<B>& options, const LayerBuffers<typename B::Activation>& buffers,
                 typename B::Stream stream) {
  using T = typename B::Activation;
  const bool is_normed = options.normed.data() != nullptr;
  const TensorView<T, 2> normed = is_normed ? options.normed : buffers.normed;
  if (!is_normed) {
    backend.rms_norm(
        RmsNormArgs<T>{
            .residual = hidden, .weight = weights.input_norm, .out = normed, .epsilon = config.norm_epsilon},
        stream);
  }
  const int slices =
      options.hop_b->resolve_slices(options.hop_b_slices, batch.num_sequences(), shape.kvp,
                                    shape.kvp > 1 ? options.exchange->payload_bytes(batch.num_tokens()) : 0);
  helix::attention_block(backend, shape,
                         AttentionBlockArgs<B>{.weights = &weights.attention,
                                               .config = &config,
                                               .kv = kv,
                                               .batch = batch,
                                               .in = normed,
                                               .exchange = options.exchange,
                                               .hop_b = options.hop_b,
                                               .slices = slices,
                                               .follows_layer = options.follows_layer,
                                               .buffers = buffers.attention,
                                               .out = buffers.summand},
                         stream);
  helix::reduce_norm(backend,
                     {.summand = buffers.summand,
                      .residual = hidden,
                      .weight = weights.post_attention_norm,
                      .out = normed,
                      .epsilon = config.norm_epsilon},
                     stream);
  helix::ffn_block(backend, shape,
                   FfnBlockArgs<B>{.weights = &weights.ffn,
                                   .config = &config,
                                   .in = normed,
                                   .buffers = buffers.ffn,
                                   .out = buffers.summand},
                   stream);
  helix::reduce_norm(backend,
                     {.summand = buffers.summand,
                      .residual = hidden,
                      .weight = is_normed ? options.next_norm : WeightView{},
                      .out = normed,
                      .epsilon = config.norm_epsilon},
                     stream);
}

}  // namespace detail

/// Workspace bytes that decode_layer() needs for steps of up to `max_tokens` tokens. LayerInput::normed
/// leaves out the [max_tokens, M] buffer of the normed input; that size is enough only for calls that give
/// options.normed. `mla_prefill` must be that of the layers' LayerConfig. Local.
/// @throws Error(invalid_argument) unless max_tokens is in [0, kMaxStepTokens] and mla_prefill.max_tokens in
/// [0, kMaxPageTokens].
template <LayerBackend B>
std::size_t decode_layer_workspace_bytes(B& backend, const RankShape& shape, std::int64_t max_tokens,
                                         LayerInput input = LayerInput::hidden,
                                         const MlaPrefill& mla_prefill = {}) {
  HELIX_EXPECTS(max_tokens >= 0 && max_tokens <= kMaxStepTokens && mla_prefill.max_tokens >= 0 &&
                    mla_prefill.max_tokens <= kMaxPageTokens,
                ErrorCode::invalid_argument, "decode_layer_workspace_bytes: max_tokens is ", max_tokens,
                " and mla_prefill.max_tokens ", mla_prefill.max_tokens, "; they must be in [0, ",
                kMaxStepTokens, "] and [0, ", kMaxPageTokens, "]");
  WorkspaceArena measure;
  detail::LayerBuffers<typename B::Activation>::carve(backend, shape, max_tokens, mla_prefill.room(), input,
                                                      measure);
  return measure.used_bytes();
}

/// Runs one layer in place on `hidden` [tokens, M], which is dense and equal on all N ranks before and after.
/// Attention runs over this rank's KV shard under KVP x TPA. The exchange and the combine leave each rank the
/// exact attention of Hq/N heads. The output projection and the FFN use all N ranks (TPF x EP). K and V of
/// the step's tokens are appended to the cache on the rank that owns each position; call
/// ShardedKVCache::append() first to make room, so that positions are below its length(): operations see only
/// that there are pages.
///
/// Collective over the stage: every rank calls it with its own RankShape of the same topology, and with equal
/// config and batch, equal hop_b_slices and follows_layer, and `normed` and `next_norm` given on all ranks or
/// on none. Queued on `stream`; allocates nothing, does not synchronise, capturable. The memory that views
/// point to, and the list of experts in `weights`, must stay valid until the queued work has ended. Source:
/// paper sections 2.1-2.3.
/// @throws Error(invalid_argument) if shapes contradict each other, an address is missing or a number of the
/// config is not finite; Error(capacity) if the workspace is too small. Both come before the first
/// collective.
///
/// An error in what is one rank's own (its weights, biases, addresses or workspace) may be thrown on that
/// rank alone, while the others wait in the exchange. Its caller must then call abort() of both
/// communicators, which wakes the others; else they get Error(timeout). A later failure, thrown here or
/// sticky on the stream, aborts the stage. That includes Error(unsupported) for sizes that the backend is not
/// built for (partial_attention(), RouteArgs, ExpertFfnArgs).
template <LayerBackend B>
void decode_layer(B& backend, const RankShape& shape, const LayerConfig& config, const LayerWeights& weights,
                  const KvView& kv, const Batch& batch, TensorView<typename B::Activation, 2> hidden,
                  const DecodeLayerOptions<B>& options, typename B::Stream stream) {
  detail::check_layer(backend, shape, config, weights, kv, batch, hidden, options);
  if (batch.num_tokens() == 0) return;
  const auto input = options.normed.data() != nullptr ? LayerInput::normed : LayerInput::hidden;
  const std::int64_t expanded =
      detail::most_expanded_tokens<B>(shape, config, weights.attention, kv.layout, batch);
  const auto carve = [&](WorkspaceArena arena) {
    using Buffers = detail::LayerBuffers<typename B::Activation>;
    auto buffers = Buffers::carve(backend, shape, batch.num_tokens(), expanded, input, arena);
    return std::pair(buffers, arena.used_bytes());
  };
  const std::size_t needed = carve(WorkspaceArena()).second;
  HELIX_EXPECTS(options.workspace.size() >= needed, ErrorCode::capacity, "decode_layer: the workspace has ",
                options.workspace.size(), " bytes; ", batch.num_tokens(), " tokens need ", needed,
                ": size it with decode_layer_workspace_bytes()");
  const auto buffers = carve(WorkspaceArena(options.workspace)).first;
  const auto wake_others = [&](std::string_view reason) {
    const auto comms = backend.comms();
    comms.stage->abort(reason);
    comms.kvp->abort(reason);
  };
  try {
    detail::queue_layer(backend, shape, config, weights, kv, batch, hidden, options, buffers, stream);
  } catch (const std::exception& failure) {
    wake_others(failure.what());
    throw;
  } catch (...) {
    wake_others("decode_layer: unknown failure");
    throw;
  }
}

/// Does not compile: the error names T and the activation type of B.
template <LayerBackend B, detail::OtherActivation<B> T>
void decode_layer(B&, const RankShape&, const LayerConfig&, const LayerWeights&, const KvView&, const Batch&,
                  TensorView<T, 2>, const DecodeLayerOptions<B>&, typename B::Stream) {
  detail::refuse_activation<T, B>();
}

}  // namespace helix
