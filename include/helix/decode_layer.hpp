// SPDX-License-Identifier: Apache-2.0
// decode_layer: one transformer layer under Helix Parallelism, the only orchestration of it, for every
// Backend.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string_view>
#include <variant>

#include <helix/backend.hpp>
#include <helix/error.hpp>
#include <helix/hop_b.hpp>
#include <helix/kvp_all_to_all.hpp>
#include <helix/layer_weights.hpp>
#include <helix/lse_combine.hpp>
#include <helix/partial_attention.hpp>
#include <helix/topology.hpp>
#include <helix/workspace.hpp>

namespace helix {

/// Sizes of multi-head latent attention that ModelShape does not hold.
struct MlaDims {
  std::int64_t q_lora = 0;     ///< 0: queries straight from hidden
  std::int64_t nope = 0;       ///< query/key dims without rope, a head
  std::int64_t rope = 0;       ///< rope dims, shared by all heads on the key side
  std::int64_t value = 0;      ///< value dims a head, after W_UV
  float norm_epsilon = 1e-6f;  ///< of the norms of the compressed queries and keys
};

/// How an MoE layer chooses experts; see RouteArgs.
struct RouterConfig {
  RouterScoring scoring = RouterScoring::softmax;
  std::int64_t top_k = 0;
  std::int64_t num_groups = 1;
  std::int64_t groups_kept = 1;
  bool normalize = false;
  float scale = 1.0f;
};

/// The numbers of one layer that are not weights. Equal on all ranks.
struct LayerConfig {
  float norm_epsilon = 1e-5f;
  float softmax_scale = 0.0f;
  std::int64_t window = 0;  ///< sliding window in tokens; 0: none
  float soft_cap = 0.0f;    ///< 0: none
  RopeView rope{};
  MlaDims mla{};          ///< for MlaWeights
  RouterConfig router{};  ///< for MoeWeights
};

/// The device state of one rank's exchanges, built once and shared by all layers, and the options of a call.
template <Backend B>
struct DecodeLayerOptions {
  KvpAllToAll<B>* exchange = nullptr;
  HopB<B>* hop_b = nullptr;
  int hop_b_slices = 0;  ///< slices of the batch whose exchanges overlap attention; 1: off; 0: chosen
  std::span<std::byte> workspace;  ///< decode_layer_workspace_bytes()
};

namespace detail {

/// Everything a layer writes besides hidden and the cache. T is the activation type.
template <class T>
struct LayerBuffers {
  TensorView<T, 2> normed;              // [tokens, M]
  TensorView<T, 2> projected;           // [tokens, M]: partial sums, all-reduced in place
  TensorView<T, 2> qkv;                 // GQA: [tokens, (Hq/TPA + 2 Hkv/TPA) D]
  TensorView<T, 2> q_lora;              // MLA: [tokens, q_lora]
  TensorView<T, 3> q_heads;             // MLA: [tokens, Hq, nope + rope]
  TensorView<T, 3> q;                   // MLA: [tokens, Hq, kv_lora + rope], absorbed
  TensorView<T, 2> latent;              // MLA: [tokens, kv_lora + rope]
  TensorView<T, 3> values;              // MLA: [tokens, Hq/N, v], after W_UV
  Partial<T> partial;                   // [tokens, Hq/TPA, Dv]; with KVP > 1 in the exchange's messages
  TensorView<T, 3> combined;            // [tokens, Hq/N, Dv]
  TensorView<T, 2> gate_up;             // [tokens, 2 F/N]
  TensorView<T, 2> activated;           // [tokens, F/N]
  TensorView<T, 2> router_logits;       // [tokens, E]
  TensorView<std::int32_t, 2> experts;  // [tokens, top_k]
  TensorView<float, 2> expert_weights;  // [tokens, top_k]
  std::span<std::byte> expert_workspace;
  std::span<std::byte> attention_workspace;
  std::span<std::byte> exchange_workspace;
};

template <Backend B, class T>
LayerBuffers<T> carve_layer_buffers(B& backend, const Topology& topo, int stage_rank,
                                    const LayerConfig& config, std::int64_t tokens, int max_slices,
                                    WorkspaceArena& arena) {
  const ModelShape& shape = topo.shape();
  const std::int64_t local_heads = topo.query_heads(stage_rank).size();
  const std::int64_t combined_heads = topo.combined_heads(stage_rank).size();
  const std::int64_t ffn = std::max(topo.ffn(stage_rank).size(), topo.shared_expert_ffn(stage_rank).size());
  const std::int64_t expert_ffn = topo.expert_ffn(stage_rank).size();
  const std::int64_t top_k = config.router.top_k;

  LayerBuffers<T> buffers;
  buffers.normed = arena.take<T, 2>({tokens, shape.hidden});
  buffers.projected = arena.take<T, 2>({tokens, shape.hidden});
  if (shape.is_mla) {
    buffers.q_lora = arena.take<T, 2>({tokens, config.mla.q_lora});
    buffers.q_heads = arena.take<T, 3>({tokens, local_heads, config.mla.nope + config.mla.rope});
    buffers.q = arena.take<T, 3>({tokens, local_heads, shape.head_dim});
    buffers.latent = arena.take<T, 2>({tokens, shape.head_dim});
    buffers.values = arena.take<T, 3>({tokens, combined_heads, config.mla.value});
  } else {
    const std::int64_t kv_heads = topo.kv_heads(stage_rank).size();
    buffers.qkv = arena.take<T, 2>(
        {tokens, local_heads * shape.head_dim + kv_heads * (shape.head_dim + shape.value_dim)});
  }
  if (topo.kvp() == 1) {
    buffers.partial.out = arena.take<T, 3>({tokens, local_heads, shape.value_dim});
    buffers.partial.lse = arena.take<float, 2>({tokens, local_heads});
  }
  buffers.combined = arena.take<T, 3>({tokens, combined_heads, shape.value_dim});
  buffers.gate_up = arena.take<T, 2>({tokens, 2 * ffn});
  buffers.activated = arena.take<T, 2>({tokens, ffn});
  if (shape.num_experts > 0) {
    buffers.router_logits = arena.take<T, 2>({tokens, shape.num_experts});
    buffers.experts = arena.take<std::int32_t, 2>({tokens, top_k});
    buffers.expert_weights = arena.take<float, 2>({tokens, top_k});
    buffers.expert_workspace =
        arena.take_bytes(backend.expert_ffn_workspace_bytes(tokens, top_k, shape.hidden, expert_ffn));
  }
  buffers.attention_workspace = arena.take_bytes(
      backend.partial_attention_workspace_bytes(tokens, local_heads, shape.head_dim, shape.value_dim));
  buffers.exchange_workspace = arena.take_bytes(
      KvpAllToAll<B>::workspace_bytes(topo.kvp(), tokens, local_heads, shape.value_dim, max_slices));
  return buffers;
}

/// Query, key and value projection, rope, and the append of owned tokens. Returns the queries that attention
/// reads.
template <Backend B, class T>
TensorView<const T, 3> project_gqa(B& backend, const Topology& topo, int stage_rank,
                                   const LayerConfig& config, const GqaWeights& weights, const KvView& kv,
                                   const Batch& batch, const LayerBuffers<T>& buffers,
                                   typename B::Stream stream) {
  const ModelShape& shape = topo.shape();
  const std::int64_t tokens = batch.num_tokens();
  const std::int64_t q_heads = topo.query_heads(stage_rank).size();
  const std::int64_t kv_heads = kv.num_heads;
  const std::int64_t row = buffers.qkv.extent(1);
  backend.linear(LinearArgs<T>{buffers.normed, weights.qkv, weights.qkv_bias, buffers.qkv}, stream);

  const std::int64_t k_begin = q_heads * shape.head_dim;
  const std::int64_t v_begin = k_begin + kv_heads * shape.head_dim;
  T* qkv = buffers.qkv.data();
  const TensorView<T, 3> q(qkv, {tokens, q_heads, shape.head_dim}, {row, shape.head_dim, 1});
  const TensorView<T, 3> k(qkv + k_begin, {tokens, kv_heads, shape.head_dim}, {row, shape.head_dim, 1});
  const TensorView<T, 3> v(qkv + v_begin, {tokens, kv_heads, shape.value_dim}, {row, shape.value_dim, 1});
  if (!weights.q_norm.empty())
    backend.head_rms_norm(HeadRmsNormArgs<T>{q, weights.q_norm, config.norm_epsilon}, stream);
  if (!weights.k_norm.empty())
    backend.head_rms_norm(HeadRmsNormArgs<T>{k, weights.k_norm, config.norm_epsilon}, stream);
  backend.rope(RopeArgs<T>{q, q, batch.positions, config.rope}, stream);
  backend.rope(RopeArgs<T>{k, k, batch.positions, config.rope}, stream);
  backend.append_kv(AppendKvArgs<T>{k, v, batch, kv}, stream);
  return q;
}

/// The same for MLA: queries absorbed into the latent space, one latent row a token into the cache.
template <Backend B, class T>
TensorView<const T, 3> project_mla(B& backend, const Topology& topo, const LayerConfig& config,
                                   const MlaWeights& weights, const KvView& kv, const Batch& batch,
                                   const LayerBuffers<T>& buffers, typename B::Stream stream) {
  const std::int64_t tokens = batch.num_tokens();
  const std::int64_t heads = topo.shape().num_query_heads;
  const std::int64_t latent_dim = topo.shape().value_dim;
  const MlaDims& mla = config.mla;

  const std::int64_t q_row = heads * (mla.nope + mla.rope);
  const TensorView<T, 2> q_heads_2d(buffers.q_heads.data(), {tokens, q_row});
  if (weights.q_a.empty()) {
    backend.linear(LinearArgs<T>{buffers.normed, weights.q_b, {}, q_heads_2d}, stream);
  } else {
    backend.linear(LinearArgs<T>{buffers.normed, weights.q_a, {}, buffers.q_lora}, stream);
    backend.rms_norm(RmsNormArgs<T>{{}, buffers.q_lora, weights.q_a_norm, buffers.q_lora, mla.norm_epsilon},
                     stream);
    backend.linear(LinearArgs<T>{buffers.q_lora, weights.q_b, {}, q_heads_2d}, stream);
  }
  backend.head_linear(HeadLinearArgs<T>{buffers.q_heads.slice(2, 0, mla.nope), weights.w_uk,
                                        buffers.q.slice(2, 0, latent_dim)},
                      stream);
  backend.rope(RopeArgs<T>{buffers.q_heads.slice(2, mla.nope, mla.rope),
                           buffers.q.slice(2, latent_dim, mla.rope), batch.positions, config.rope},
               stream);

  backend.linear(LinearArgs<T>{buffers.normed, weights.kv_a, {}, buffers.latent}, stream);
  const TensorView<T, 2> compressed = buffers.latent.slice(1, 0, latent_dim);
  backend.rms_norm(RmsNormArgs<T>{{}, compressed, weights.kv_a_norm, compressed, mla.norm_epsilon}, stream);
  const TensorView<T, 3> row(buffers.latent.data(), {tokens, 1, latent_dim + mla.rope});
  const TensorView<T, 3> k_rope = row.slice(2, latent_dim, mla.rope);
  backend.rope(RopeArgs<T>{k_rope, k_rope, batch.positions, config.rope}, stream);
  backend.append_kv(AppendKvArgs<T>{row, {}, batch, kv}, stream);
  return buffers.q;
}

/// partial = down(swiglu(gate_up(in))): this rank's slice of a dense FFN, before the all-reduce.
template <Backend B, class T>
void dense_ffn(B& backend, const DenseFfnWeights& weights, TensorView<const T, 2> in,
               const LayerBuffers<T>& buffers, TensorView<T, 2> out, typename B::Stream stream) {
  const std::int64_t ffn = weights.down.cols;
  const TensorView<T, 2> gate_up(buffers.gate_up.data(), {in.extent(0), 2 * ffn});
  const TensorView<T, 2> activated(buffers.activated.data(), {in.extent(0), ffn});
  backend.linear(LinearArgs<T>{in, weights.gate_up, weights.gate_up_bias, gate_up}, stream);
  backend.swiglu(SwigluArgs<T>{gate_up, activated}, stream);
  backend.linear(LinearArgs<T>{activated, weights.down, weights.down_bias, out}, stream);
}

/// Router on every rank, this rank's experts for all tokens, and its slice of the shared expert.
template <Backend B, class T>
void moe_ffn(B& backend, const Topology& topo, int stage_rank, const RouterConfig& router,
             const MoeWeights& weights, const LayerBuffers<T>& buffers, typename B::Stream stream) {
  const TensorView<T, 2> out = buffers.projected;
  if (weights.shared.down.empty()) {
    backend.fill_zero(out.data(), static_cast<std::size_t>(out.size()) * sizeof(T), stream);
  } else {
    dense_ffn<B, T>(backend, weights.shared, buffers.normed, buffers, out, stream);
  }
  backend.linear(LinearArgs<T>{buffers.normed, weights.router, {}, buffers.router_logits}, stream);
  backend.route(RouteArgs<T>{buffers.router_logits, weights.router_bias, router.scoring, router.num_groups,
                             router.groups_kept, router.normalize, router.scale, buffers.experts,
                             buffers.expert_weights},
                stream);
  backend.expert_ffn(
      ExpertFfnArgs<T>{buffers.normed, buffers.experts, buffers.expert_weights, weights.experts,
                       topo.experts(stage_rank).begin, out, buffers.expert_workspace},
      stream);
}

/// Throws Error(invalid_argument) unless the weights have the shapes of this rank's slices and the config's
/// numbers fit the model.
void check_layer_weights(const Topology& topo, int stage_rank, const LayerConfig& config,
                         const LayerWeights& weights);

/// All checks of a layer, before the first collective and on values that all ranks share (invariant 9).
template <Backend B, class T>
void check_layer(const Topology& topo, int stage_rank, const LayerConfig& config, const LayerWeights& weights,
                 const KvView& kv, const Batch& batch, TensorView<T, 2> hidden,
                 const DecodeLayerOptions<B>& options) {
  const ModelShape& shape = topo.shape();
  HELIX_EXPECTS(options.exchange != nullptr && options.hop_b != nullptr, ErrorCode::invalid_argument,
                "decode_layer: options.exchange and options.hop_b must be set; build one of each a rank and "
                "share them");
  HELIX_EXPECTS(
      hidden.extent(0) == batch.num_tokens() && hidden.extent(1) == shape.hidden && hidden.is_contiguous(),
      ErrorCode::invalid_argument, "decode_layer: hidden is [", hidden.extent(0), ", ", hidden.extent(1),
      "]; the batch and the model need a dense [", batch.num_tokens(), ", ", shape.hidden, "]");
  HELIX_EXPECTS(batch.first_token() == 0, ErrorCode::invalid_argument,
                "decode_layer: the batch starts at token ", batch.first_token(),
                "; pass a whole step, not a slice");
  const RankCoordinates at = topo.stage_coordinates(stage_rank);
  HELIX_EXPECTS(kv.head_dim == shape.head_dim && kv.value_dim == shape.value_dim &&
                    kv.is_mla == shape.is_mla && kv.num_heads == topo.kv_heads(stage_rank).size() &&
                    kv.layout.kvp() == topo.kvp() && kv.kvp_rank == at.kvp_rank,
                ErrorCode::invalid_argument, "decode_layer: the cache has ", kv.num_heads, " heads of ",
                kv.head_dim, "/", kv.value_dim, " as KVP rank ", kv.kvp_rank, " of ", kv.layout.kvp(),
                "; this rank of the topology stores ", topo.kv_heads(stage_rank).size(), " heads of ",
                shape.head_dim, "/", shape.value_dim, " as KVP rank ", at.kvp_rank, " of ", topo.kvp());
  HELIX_EXPECTS(options.hop_b_slices >= 0 && options.hop_b_slices <= options.hop_b->max_slices(),
                ErrorCode::invalid_argument, "decode_layer: hop_b_slices is ", options.hop_b_slices,
                "; HopB was built for up to ", options.hop_b->max_slices());
  const KvpAllToAllSpec& exchange = options.exchange->spec();
  HELIX_EXPECTS(batch.num_tokens() <= exchange.max_tokens &&
                    exchange.num_query_heads == topo.query_heads(stage_rank).size() &&
                    exchange.value_dim == shape.value_dim,
                ErrorCode::invalid_argument, "decode_layer: the exchange was built for ", exchange.max_tokens,
                " tokens of ", exchange.num_query_heads, " heads of ", exchange.value_dim, "; this step has ",
                batch.num_tokens(), " tokens of ", topo.query_heads(stage_rank).size(), " heads of ",
                shape.value_dim);
  check_layer_weights(topo, stage_rank, config, weights);
}

/// Steps 1 to 10 of the layer, queued; everything has been checked and laid out.
template <Backend B, class T>
void queue_layer(B& backend, const Topology& topo, const LayerConfig& config, const LayerWeights& weights,
                 const KvView& kv, const Batch& batch, TensorView<T, 2> hidden,
                 const DecodeLayerOptions<B>& options, int slices, const LayerBuffers<T>& buffers,
                 typename B::Stream stream) {
  const StageComms<typename B::Comm> comms = backend.comms();
  const int stage_rank = comms.stage->rank();
  const std::int64_t tokens = batch.num_tokens();
  const ModelShape& shape = topo.shape();
  const std::int64_t local_heads = topo.query_heads(stage_rank).size();
  const auto all_reduce = [&](TensorView<T, 2> x) {
    comms.stage->all_reduce(x.data(), x.data(), x.size(), kDTypeOf<T>, stream);
  };

  // 1-4: norm, projections, rope, append.
  backend.rms_norm(RmsNormArgs<T>{{}, hidden, weights.input_norm, buffers.normed, config.norm_epsilon},
                   stream);
  TensorView<const T, 3> q;
  if (const auto* gqa = std::get_if<GqaWeights>(&weights.attention)) {
    q = project_gqa<B, T>(backend, topo, stage_rank, config, *gqa, kv, batch, buffers, stream);
  } else {
    q = project_mla<B, T>(backend, topo, config, std::get<MlaWeights>(weights.attention), kv, batch, buffers,
                          stream);
  }

  const float* sinks = shape.is_mla ? nullptr : std::get<GqaWeights>(weights.attention).sinks;

  // 5-7: attention over the shard, exchange, combine; slice i's exchange overlaps slice i+1's attention
  // (HOP-B). Attention writes straight into the messages.
  std::size_t exchange_used = 0;
  typename KvpAllToAll<B>::Outgoing messages;  // of the slice at hand
  const auto part_of = [&](int slice) {
    const Range sequences = split_evenly(batch.num_sequences(), slices, slice);
    return batch.slice(sequences.begin, sequences.size());
  };
  options.hop_b->run(
      slices,
      [&](int slice, typename B::Stream on) {
        const Batch part = part_of(slice);
        Partial<T> partial = buffers.partial;
        if (topo.kvp() > 1) {
          const std::size_t bytes =
              KvpAllToAll<B>::workspace_bytes(topo.kvp(), part.num_tokens(), local_heads, shape.value_dim, 1);
          messages = options.exchange->outgoing(part.num_tokens(), batch.positions + part.first_token(),
                                                buffers.exchange_workspace.subspan(exchange_used, bytes));
          exchange_used += bytes;
          partial = messages.partial;
        }
        partial_attention(backend,
                          PartialAttentionArgs<T>{q, part, kv, partial.out, partial.lse, config.softmax_scale,
                                                  config.window, config.soft_cap, buffers.attention_workspace,
                                                  topo.kvp() > 1 ? part.first_token() : 0, messages.headers},
                          on);
      },
      [&](int slice, typename B::Stream on) {
        const Batch part = part_of(slice);
        const std::int64_t first = part.first_token();
        const std::int64_t count = part.num_tokens();
        const TensorView<T, 3> combined = buffers.combined.slice(0, first, count);
        if (topo.kvp() > 1) {
          options.exchange->exchange_and_combine(messages, sinks, combined, on);
          return;
        }
        const Partial<T> partial{buffers.partial.out.slice(0, first, count),
                                 buffers.partial.lse.slice(0, first, count)};
        const auto alone = options.exchange->exchange(partial, {}, on);
        lse_combine(backend, LseCombineArgs<T>{alone.out, alone.lse, sinks, combined, {}}, on);
      },
      stream);

  // 8: output projection over this rank's heads, all-reduce over N, residual, norm.
  TensorView<const T, 2> attended(buffers.combined.data(),
                                  {tokens, buffers.combined.extent(1) * shape.value_dim});
  if (const auto* gqa = std::get_if<GqaWeights>(&weights.attention)) {
    backend.linear(LinearArgs<T>{attended, gqa->o, gqa->o_bias, buffers.projected}, stream);
  } else {
    const auto& mla = std::get<MlaWeights>(weights.attention);
    backend.head_linear(HeadLinearArgs<T>{buffers.combined, mla.w_uv, buffers.values}, stream);
    attended = {buffers.values.data(), {tokens, buffers.values.extent(1) * config.mla.value}};
    backend.linear(LinearArgs<T>{attended, mla.o, {}, buffers.projected}, stream);
  }
  all_reduce(buffers.projected);
  backend.rms_norm(RmsNormArgs<T>{buffers.projected, hidden, weights.post_attention_norm, buffers.normed,
                                  config.norm_epsilon},
                   stream);

  // 9-10: FFN, one all-reduce over N sums slices and experts, residual.
  if (const auto* dense = std::get_if<DenseFfnWeights>(&weights.ffn)) {
    dense_ffn<B, T>(backend, *dense, buffers.normed, buffers, buffers.projected, stream);
  } else {
    moe_ffn<B, T>(backend, topo, stage_rank, config.router, std::get<MoeWeights>(weights.ffn), buffers,
                  stream);
  }
  all_reduce(buffers.projected);
  backend.rms_norm(RmsNormArgs<T>{buffers.projected, hidden, {}, {}, config.norm_epsilon}, stream);
}

}  // namespace detail

/// Bytes that decode_layer needs for steps of up to `max_tokens` tokens in up to `max_slices` HOP-B slices.
/// Local.
template <Backend B>
std::size_t decode_layer_workspace_bytes(B& backend, const Topology& topo, const LayerConfig& config,
                                         std::int64_t max_tokens, int max_slices) {
  WorkspaceArena measure;
  detail::carve_layer_buffers<B, typename B::Activation>(backend, topo, backend.comms().stage->rank(), config,
                                                         max_tokens, max_slices, measure);
  return measure.used_bytes();
}

/// One layer, in place on `hidden` [tokens, M] (dense, the same on all N ranks before and after). Attention
/// runs over this rank's KV shard under KVP x TPA, the exchange and the combine leave Hq/N exact heads a
/// rank, and the output projection and the FFN use all N ranks (TPF x EP). K and V of the step's tokens are
/// appended to the cache on the rank that owns each position; the cache must have room
/// (ShardedKVCache::append comes first).
///
/// Collective over the stage: every rank calls it with the same topology, config, batch and options. Queued
/// on `stream`; allocates nothing, does not synchronise, capturable. Source: paper sections 2.1-2.3.
/// @throws Error(invalid_argument) if shapes contradict each other, Error(capacity) if the workspace is too
/// small; both before the
///         first collective. A failure after that, thrown here or sticky on the stream, aborts the stage.
template <Backend B, class T>
void decode_layer(B& backend, const Topology& topo, const LayerConfig& config, const LayerWeights& weights,
                  const KvView& kv, const Batch& batch, TensorView<T, 2> hidden,
                  const DecodeLayerOptions<B>& options, typename B::Stream stream) {
  const StageComms<typename B::Comm> comms = backend.comms();
  const int stage_rank = comms.stage->rank();
  detail::check_layer<B, T>(topo, stage_rank, config, weights, kv, batch, hidden, options);
  const std::int64_t tokens = batch.num_tokens();
  if (tokens == 0) return;
  const int slices =
      options.hop_b->resolve_slices(options.hop_b_slices, batch.num_sequences(), topo.kvp(),
                                    topo.kvp() > 1 ? options.exchange->payload_bytes(tokens) : 0);
  WorkspaceArena arena(options.workspace);
  const auto buffers =
      detail::carve_layer_buffers<B, T>(backend, topo, stage_rank, config, tokens, slices, arena);
  const auto wake_others = [&](std::string_view reason) {
    comms.stage->abort(reason);
    comms.kvp->abort(reason);
  };
  try {
    detail::queue_layer<B, T>(backend, topo, config, weights, kv, batch, hidden, options, slices, buffers,
                              stream);
  } catch (const std::exception& failure) {
    wake_others(failure.what());
    throw;
  } catch (...) {
    wake_others("decode_layer: unknown failure");
    throw;
  }
}

}  // namespace helix

#include <helix/decode_layer-inl.hpp>
