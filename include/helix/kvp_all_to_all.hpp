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
    const std::int64_t headers =
        2 * kvp * (static_cast<std::int64_t>(sizeof(ExchangeHeader)) + kMessageAlignment);
    const std::int64_t fixed = (headers + kPiece - 1) / kPiece * kPiece + kPiece;
    const std::int64_t payload = 2 * tokens * num_query_heads * token_head_bytes(value_dim);
    return static_cast<std::size_t>(num_exchanges * fixed + payload / kPiece * kPiece);
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
    const std::int64_t heads = spec_.num_query_heads / kvp_;
    const std::int64_t dim = spec_.value_dim;
    if (tokens == 0) return {{nullptr, {kvp_, 0, heads, dim}}, {nullptr, {kvp_, 0, heads}}};
    const std::int64_t message = message_bytes(tokens, heads);
    const auto needed = static_cast<std::size_t>(2 * kvp_ * message);
    HELIX_EXPECTS(workspace.size() >= needed, ErrorCode::capacity, "exchange: workspace is ",
                  workspace.size(), " bytes; ", needed, " are needed: size it with workspace_bytes()");
    HELIX_EXPECTS(reinterpret_cast<std::uintptr_t>(workspace.data()) % kMessageAlignment == 0,
                  ErrorCode::invalid_argument, "exchange: the workspace begins ",
                  reinterpret_cast<std::uintptr_t>(workspace.data()) % kMessageAlignment,
                  " bytes past a multiple of ", kMessageAlignment, "; align it");
    std::byte* sent = workspace.data();
    std::byte* received = sent + kvp_ * message;
    auto* kvp = backend_->comms().kvp;
    auto* epoch = reinterpret_cast<std::uint64_t*>(epoch_.data());
    backend_->pack_partial(
        PackPartialArgs<T>{partial.out, partial.lse, sent, message, kvp_, kvp->rank(), epoch, positions},
        stream);
    kvp->all_to_all(sent, received, message, stream);
    backend_->check_exchange(CheckExchangeArgs{received, message, kvp_, tokens, epoch, positions}, stream);
    sent_payload_bytes_ += (kvp_ - 1) * tokens * heads * token_head_bytes(dim);
    const auto* lse = reinterpret_cast<const float*>(received + sizeof(ExchangeHeader));
    const auto* out = reinterpret_cast<const T*>(lse + tokens * heads);
    const auto lse_stride = message / static_cast<std::int64_t>(sizeof(float));
    const auto out_stride = message / static_cast<std::int64_t>(sizeof(T));
    return {{out, {kvp_, tokens, heads, dim}, {out_stride, heads * dim, dim, 1}},
            {lse, {kvp_, tokens, heads}, {lse_stride, heads, 1}}};
  }

  /// The same without positions.
  Received exchange(const Partial<T>& partial, std::span<std::byte> workspace, Stream stream) {
    return exchange(partial, nullptr, workspace, stream);
  }

  /// Bytes of outputs and log-sum-exps sent to other ranks so far, queued ones included: tokens * Hq/TPA *
  /// (Dv * sizeof(T) + 4) * (KVP - 1) / KVP an exchange. This rank's own slice, and the 16 to 31 bytes of
  /// header and padding a message, are not counted.
  std::int64_t sent_payload_bytes() const { return sent_payload_bytes_; }

 private:
  static constexpr std::int64_t kMessageAlignment = 16;

  static constexpr std::int64_t token_head_bytes(std::int64_t value_dim) {
    return value_dim * static_cast<std::int64_t>(sizeof(T)) + static_cast<std::int64_t>(sizeof(float));
  }

  std::int64_t message_bytes(std::int64_t tokens, std::int64_t heads) const {
    const std::int64_t bytes = static_cast<std::int64_t>(sizeof(ExchangeHeader)) +
                               tokens * heads * token_head_bytes(spec_.value_dim);
    return (bytes + kMessageAlignment - 1) / kMessageAlignment * kMessageAlignment;
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
