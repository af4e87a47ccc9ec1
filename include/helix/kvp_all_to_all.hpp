// SPDX-License-Identifier: Apache-2.0
// KvpAllToAll: exchanges head slices of partial attention across a KVP group in one packed message a peer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <helix/backend.hpp>
#include <helix/error.hpp>
#include <helix/partial_attention.hpp>

namespace helix {

/// Sizes of a rank's exchanges; equal on all ranks.
struct KvpAllToAllSpec {
  std::int64_t max_tokens = 0;       ///< of one exchange
  std::int64_t num_query_heads = 0;  ///< Hq/TPA
  std::int64_t value_dim = 0;        ///< Dv
};

/// One rank's end of the exchange. Owns a device-side count of exchanges: each message carries it with a hash
/// of its tokens' positions, and a rank that skipped or repeated a step is an Error(out_of_step) on the
/// stream, not a wrong result (invariant 13). The bytes that travel do not depend on the context. Source:
/// paper section 2.1.2.
template <Backend B>
class KvpAllToAll {
 public:
  using T = typename B::Activation;
  using Stream = typename B::Stream;

  /// @throws Error(invalid_argument) if the KVP width does not divide the query heads.
  KvpAllToAll(B& backend, const KvpAllToAllSpec& spec)
      : backend_(&backend),
        spec_(spec),
        kvp_(backend.comms().kvp->size()),
        epoch_(backend.allocate(sizeof(std::uint64_t))) {
    HELIX_EXPECTS(spec.num_query_heads >= 1 && spec.num_query_heads % kvp_ == 0 && spec.value_dim >= 1 &&
                      spec.max_tokens >= 0,
                  ErrorCode::invalid_argument, "KvpAllToAll: ", spec.num_query_heads,
                  " query heads over KVP ", kvp_, ", value_dim ", spec.value_dim, ", max_tokens ",
                  spec.max_tokens, "; KVP must divide the heads and sizes be positive");
  }

  const KvpAllToAllSpec& spec() const { return spec_; }

  /// Bytes that `num_exchanges` exchanges of `tokens` tokens in all need at once: HOP-B has one in flight a
  /// slice. A multiple of 256, and at least the sum over the exchanges of what each needs alone, so that one
  /// workspace can be cut into aligned pieces of workspace_bytes(kvp, tokens of the slice, ..., 1).
  static std::size_t workspace_bytes(std::int64_t kvp, std::int64_t tokens, std::int64_t num_query_heads,
                                     std::int64_t value_dim, std::int64_t num_exchanges) {
    if (kvp == 1) return 0;
    constexpr std::int64_t kPiece = 256;
    constexpr std::int64_t kMost = static_cast<std::int64_t>(sizeof(ExchangeHeader)) + 2 * kAlignment;
    const std::int64_t fixed = (2 * num_query_heads * kMost + kPiece - 1) / kPiece * kPiece + kPiece;
    const std::int64_t payload = 2 * payload_bytes(tokens, num_query_heads, value_dim);
    return static_cast<std::size_t>(num_exchanges * fixed + payload / kPiece * kPiece);
  }

  /// Bytes of outputs and log-sum-exps in a rank's messages for `tokens` tokens, its own slice included,
  /// headers and padding not.
  std::int64_t payload_bytes(std::int64_t tokens) const {
    return payload_bytes(tokens, spec_.num_query_heads, spec_.value_dim);
  }

  /// Messages to be filled: where partials have their place in them. Views of the workspace.
  struct Outgoing {
    Partial<T> partial;   ///< [tokens, Hq/TPA, Dv] and [tokens, Hq/TPA]
    StampArgs headers{};  ///< for PartialAttentionArgs, or Backend::stamp
  };

  /// The messages of an exchange of `tokens` tokens, for an attention that writes its partials, and their
  /// headers, straight into them: nothing is packed then. `positions` as in exchange(). Local, queues
  /// nothing.
  /// @throws Error(invalid_argument) for KVP = 1, which sends none, for more tokens than the spec's, or a
  /// workspace that is not aligned to 16; Error(capacity) if it is too small.
  Outgoing outgoing(std::int64_t tokens, const std::int64_t* positions,
                    std::span<std::byte> workspace) const {
    HELIX_EXPECTS(kvp_ > 1 && tokens >= 0 && tokens <= spec_.max_tokens, ErrorCode::invalid_argument,
                  "outgoing: ", tokens, " tokens over KVP ", kvp_, "; built for up to ", spec_.max_tokens,
                  ", and KVP 1 sends nothing");
    Outgoing messages;
    messages.partial = {{nullptr, {0, spec_.num_query_heads, spec_.value_dim}},
                        {nullptr, {0, spec_.num_query_heads}}};
    if (tokens == 0) return messages;
    const MessageLayout at(tokens, spec_.num_query_heads / kvp_, spec_.value_dim);
    const auto needed = static_cast<std::size_t>(2 * kvp_ * at.message_bytes);
    HELIX_EXPECTS(workspace.size() >= needed, ErrorCode::capacity, "exchange: workspace is ",
                  workspace.size(), " bytes; ", needed, " are needed: size it with workspace_bytes()");
    HELIX_EXPECTS(reinterpret_cast<std::uintptr_t>(workspace.data()) % kAlignment == 0,
                  ErrorCode::invalid_argument, "exchange: the workspace begins ",
                  reinterpret_cast<std::uintptr_t>(workspace.data()) % kAlignment,
                  " bytes past a multiple of ", kAlignment, "; align it");
    std::byte* sent = workspace.data();
    messages.partial.out = {reinterpret_cast<T*>(sent + at.out_begin),
                            {tokens, spec_.num_query_heads, spec_.value_dim},
                            {spec_.value_dim, at.template head_stride<T>(), 1}};
    messages.partial.lse = {reinterpret_cast<float*>(sent + at.lse_begin),
                            {tokens, spec_.num_query_heads},
                            {1, at.template head_stride<float>()}};
    messages.headers = {sent, tokens,          backend_->comms().kvp->rank(), epoch(), positions,
                        kvp_, at.message_bytes};
    return messages;
  }

  /// The partials of this rank's Hq/N heads from every KVP rank, in rank order; views of the workspace (KVP =
  /// 1: of the input).
  struct Received {
    TensorView<const T, 4> out;      ///< [KVP, tokens, Hq/N, Dv]
    TensorView<const float, 3> lse;  ///< [KVP, tokens, Hq/N]
  };

  /// Sends head slice p of `partial` to KVP rank p and receives this rank's slice from all: rank (kvp, tpa)
  /// gets heads [kvp * Hq/N, +Hq/N) of its TPA group's Hq/TPA (invariant 1). KVP = 1 and zero tokens send
  /// nothing and need no workspace. Collective over the KVP group with equal token counts. Queued on `stream`
  /// (packing, all-to-all and check); allocates nothing, capturable; `workspace` is in use until what reads
  /// the result has run. The calls of one KvpAllToAll are ordered by one stream, or by events.
  /// @throws Error(invalid_argument) if shapes differ from the spec or the workspace is not aligned to 16,
  /// Error(capacity) if it is too small; before anything is queued. Failures on the stream are sticky:
  /// Error(out_of_step) if the ranks are not in the same step. That shows in `positions` (device, [tokens],
  /// equal on all ranks); with nullptr only counts, tokens and senders are compared, and a rank that left out
  /// a whole step goes unseen.
  Received exchange(const Partial<T>& partial, const std::int64_t* positions, std::span<std::byte> workspace,
                    Stream stream) {
    const std::int64_t tokens = partial.out.extent(0);
    HELIX_EXPECTS(tokens <= spec_.max_tokens && partial.out.extent(1) == spec_.num_query_heads &&
                      partial.out.extent(2) == spec_.value_dim && partial.lse.extent(0) == tokens &&
                      partial.lse.extent(1) == spec_.num_query_heads,
                  ErrorCode::invalid_argument, "exchange: out is [", tokens, ", ", partial.out.extent(1),
                  ", ", partial.out.extent(2), "], lse [", partial.lse.extent(0), ", ", partial.lse.extent(1),
                  "]; built for up to [", spec_.max_tokens, ", ", spec_.num_query_heads, ", ",
                  spec_.value_dim, "]");
    HELIX_EXPECTS(tokens == 0 || partial.out.stride(2) == 1, ErrorCode::invalid_argument,
                  "exchange: the last stride of out is ", partial.out.stride(2), "; it must be 1");
    if (kvp_ == 1) return without_exchange(partial);
    if (tokens == 0) return nothing();
    const Outgoing messages = outgoing(tokens, positions, workspace);
    backend_->pack_partial(PackPartialArgs<T>{partial.out, partial.lse, messages.partial.out,
                                              messages.partial.lse, messages.headers},
                           stream);
    const Received received = transfer(messages, stream);
    backend_->check_exchange(check_of(messages), stream);
    return received;
  }

  /// The same without positions.
  Received exchange(const Partial<T>& partial, std::span<std::byte> workspace, Stream stream) {
    return exchange(partial, nullptr, workspace, stream);
  }

  /// Exchanges what attention wrote to `messages`, headers included, and combines what comes: combined
  /// [tokens, Hq/N, Dv] of this rank's heads, with the logits `sinks` [Hq/N] (or null) in the denominator. As
  /// exchange() and lse_combine(), with nothing packed and the check beside the combine: it may have written
  /// `combined` when it finds a rank out of step, whose Error is as sticky.
  void exchange_and_combine(const Outgoing& messages, const float* sinks, TensorView<T, 3> combined,
                            Stream stream) {
    if (messages.headers.tokens == 0) return;
    const Received received = transfer(messages, stream);
    backend_->combine_exchange(check_of(messages),
                               LseCombineArgs<T>{received.out, received.lse, sinks, combined, {}}, stream);
  }

  /// Bytes of outputs and log-sum-exps sent to other ranks so far, queued ones included: tokens * Hq/TPA *
  /// (Dv * sizeof(T) + 4) * (KVP - 1) / KVP an exchange. This rank's own slice, and headers and padding (16
  /// to 46 bytes a head), are not counted.
  std::int64_t sent_payload_bytes() const { return sent_payload_bytes_; }

 private:
  static constexpr std::int64_t kAlignment = 16;

  static constexpr std::int64_t payload_bytes(std::int64_t tokens, std::int64_t heads,
                                              std::int64_t value_dim) {
    return tokens * heads *
           (value_dim * static_cast<std::int64_t>(sizeof(T)) + static_cast<std::int64_t>(sizeof(float)));
  }

  /// One packed message a KVP peer, a block a head: [header 16 B][lse f32: tokens][out: tokens * Dv], each
  /// padded to 16 B; the first block's header counts. The heads of all peers are a constant stride apart, so
  /// attention writes [tokens, Hq/TPA, Dv] straight into the messages.
  struct MessageLayout {
    std::int64_t lse_begin, out_begin, head_bytes, message_bytes;

    MessageLayout(std::int64_t tokens, std::int64_t heads, std::int64_t value_dim)
        : lse_begin(static_cast<std::int64_t>(sizeof(ExchangeHeader))),
          out_begin(lse_begin + padded(tokens * static_cast<std::int64_t>(sizeof(float)))),
          head_bytes(out_begin + padded(tokens * value_dim * static_cast<std::int64_t>(sizeof(T)))),
          message_bytes(heads * head_bytes) {}
    template <class X>
    std::int64_t head_stride() const {
      return head_bytes / static_cast<std::int64_t>(sizeof(X));
    }

   private:
    static std::int64_t padded(std::int64_t bytes) {
      return (bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
  };

  std::uint64_t* epoch() const { return reinterpret_cast<std::uint64_t*>(epoch_.data()); }

  /// Queues the all-to-all. The received messages lie behind the sent ones.
  Received transfer(const Outgoing& messages, Stream stream) {
    const std::int64_t tokens = messages.headers.tokens;
    const std::int64_t heads = spec_.num_query_heads / kvp_;
    const std::int64_t dim = spec_.value_dim;
    const MessageLayout at(tokens, heads, dim);
    std::byte* const sent = messages.headers.message;
    std::byte* const received = sent + kvp_ * at.message_bytes;
    backend_->comms().kvp->all_to_all(sent, received, at.message_bytes, stream);
    sent_payload_bytes_ += (kvp_ - 1) * payload_bytes(tokens, heads, dim);
    const std::int64_t out_stride = at.template head_stride<T>();
    const std::int64_t lse_stride = at.template head_stride<float>();
    return {{reinterpret_cast<const T*>(received + at.out_begin),
             {kvp_, tokens, heads, dim},
             {heads * out_stride, dim, out_stride, 1}},
            {reinterpret_cast<const float*>(received + at.lse_begin),
             {kvp_, tokens, heads},
             {heads * lse_stride, 1, lse_stride}}};
  }

  CheckExchangeArgs check_of(const Outgoing& messages) const {
    const StampArgs& sent = messages.headers;
    return {sent.message + kvp_ * sent.message_bytes, sent.message_bytes, kvp_, sent.tokens, sent.message};
  }

  Received nothing() const {
    const std::int64_t heads = spec_.num_query_heads / kvp_;
    return {{nullptr, {kvp_, 0, heads, spec_.value_dim}}, {nullptr, {kvp_, 0, heads}}};
  }

  static Received without_exchange(const Partial<T>& partial) {
    const auto& out = partial.out;
    const auto& lse = partial.lse;
    return {{out.data(),
             {1, out.extent(0), out.extent(1), out.extent(2)},
             {0, out.stride(0), out.stride(1), out.stride(2)}},
            {lse.data(), {1, lse.extent(0), lse.extent(1)}, {0, lse.stride(0), lse.stride(1)}}};
  }

  B* backend_;
  KvpAllToAllSpec spec_;
  std::int64_t kvp_;
  typename B::Buffer epoch_;
  std::int64_t sent_payload_bytes_ = 0;
};

}  // namespace helix
