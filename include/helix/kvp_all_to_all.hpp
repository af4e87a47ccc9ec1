// SPDX-License-Identifier: Apache-2.0
// KvpAllToAll: exchanges head slices of partial attention across a KVP group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include <helix/backend/communicator.hpp>
#include <helix/backend/exchange.hpp>
#include <helix/backend/optional.hpp>
#include <helix/error.hpp>
#include <helix/exchange_layout.hpp>
#include <helix/window_exchange.hpp>

namespace helix {

/// One rank's end of the exchange. Owns the memory of its messages and a device-side count of exchanges. Each
/// message carries the count with a hash of its tokens' positions. A rank that skipped or repeated a step is
/// an Error(out_of_step) on the stream, not a wrong result (invariant 13), unless the next step has the same
/// positions (exchange_epoch()). The bytes that travel do not depend on the context. Not thread-safe. Source:
/// paper section 2.1.2.
///
/// With windows (WindowExchange) attention writes into the memory of the rank that combines each head:
/// outgoing() and exchange_and_combine() pack and send nothing, the transfer overlaps attention, and a step
/// is one slice. A step of few bytes may then travel as lines (LineRows), each of which carries the number of
/// its exchange and needs no header. exchange() packs and sends in either case.
///
/// After a move each use of the old object is Error(invalid_argument), but exchange() with KVP = 1 still
/// passes its input on.
///
/// Never calls abort(): after an error of one rank alone, thrown or sticky on its stream, its caller calls
/// abort() of the KVP group, else the others wait until the group's timeout.
template <ExchangeBackend B>
class KvpAllToAll {
 public:
  using T = typename B::Activation;
  using Stream = typename B::Stream;

  /// Allocates the messages; those that peers write lie in memory of the communicator. Keeps the backend's
  /// address. Collective over the KVP group; waits for the upload of the group's number.
  /// @throws Error(invalid_argument) if the KVP width does not divide the query heads, a size exceeds
  /// limits.hpp, or the backend has no KVP communicator.
  KvpAllToAll(B& backend, const KvpAllToAllSpec& spec)
      : backend_(&backend),
        spec_(detail::checked_exchange_spec(
            spec, detail::given_comm("KvpAllToAll", "kvp", backend.comms().kvp).size())),
        kvp_(backend.comms().kvp->size()),
        layout_(spec, kElementBytes),
        windows_(spec, kvp_),
        exchanges_(backend.allocate(kExchangeCountBytes)) {
    if (kvp_ == 1) return;
    set_first_count();
    has_windows_ = windows_.open(backend);
    if (!has_windows_) allocate_messages();
  }

  const KvpAllToAllSpec& spec() const { return spec_; }
  /// Ranks of the KVP group.
  std::int64_t kvp() const { return kvp_; }

  /// Whether messages go straight into the peers' memory. A step is then one slice, and no other is in
  /// flight.
  bool has_windows() const { return has_windows_; }

  /// Bytes of outputs and log-sum-exps in a rank's messages for `tokens` tokens. The slice that the rank
  /// keeps counts; headers and padding do not.
  std::int64_t payload_bytes(std::int64_t tokens) const {
    return ExchangeLayout::payload_bytes(tokens, spec_.num_query_heads, spec_.value_dim, kElementBytes);
  }

  /// Messages that attention fills.
  struct Outgoing {
    PartialTarget<T> target;  ///< Place of the partials in the messages, for PartialAttentionArgs.
    ExchangeSlice slice{};
  };

  /// Returns the messages of one slice of a step, for an attention that writes its partials and their headers
  /// straight into them, so that nothing is packed. Over windows the combine sends the headers, and attention
  /// must support the target's `lines` unless the spec wants none. `positions` (device) are those of the
  /// slice's tokens, as in exchange(). Local, queues nothing.
  /// @throws Error(invalid_argument) for KVP = 1, which sends no messages, or for a slice outside of the
  /// spec.
  [[nodiscard]] Outgoing outgoing(const ExchangeSlice& of_step, const std::int64_t* positions) const {
    const ExchangeSlice slice = detail::checked_exchange_slice(spec_, of_step, kvp_, has_windows_);
    expect_memory();
    Outgoing messages{.target = {.out = {nullptr, {0, spec_.num_query_heads, slice.value_dim}},
                                 .lse = {nullptr, {0, spec_.num_query_heads}},
                                 .first_token = slice.first_token},
                      .slice = slice};
    if (slice.tokens == 0) return messages;
    if (has_windows_) {
      windows_.point_to_peers(messages.target, slice.tokens, slice.value_dim, positions, exchanges());
      return messages;
    }
    return packed(slice, positions);
  }

  /// Partials of this rank's Hq/N heads from every KVP rank, in rank order. Views of the messages, or with
  /// KVP = 1 of the input.
  struct Received {
    TensorView<const T, 4> out;      ///< [KVP, tokens, Hq/N, Dv].
    TensorView<const float, 3> lse;  ///< [KVP, tokens, Hq/N], natural.
  };

  /// Sends to KVP rank p the heads of `partial` that it combines and receives those that this rank combines
  /// from all: of the Hq/TPA heads of its tpa_rank, KVP rank k gets [k * Hq/N, +Hq/N) (invariant 1). With KVP
  /// = 1 or zero tokens nothing is sent. Collective over the KVP group with equal token counts. Queued on
  /// `stream` (packing, all-to-all and check); capturable. Allocates nothing, except that with windows the
  /// first call allocates its messages. The result is valid until the next exchange is queued. Order the
  /// calls of one KvpAllToAll by one stream, or by events.
  /// @throws Error(invalid_argument), before anything is queued, if shapes differ from the spec or the
  /// convention is not a named one. KVP = 1 converts nothing, so the convention must be natural there.
  ///
  /// Failures on the stream are sticky: Error(out_of_step) if the ranks are not in the same step. `positions`
  /// (device, [tokens], equal on all ranks) reveal that. With nullptr only counts, tokens and senders are
  /// compared, and a rank that skipped a whole step goes undetected.
  Received exchange(const Partial<T>& partial, const std::int64_t* positions, Stream stream,
                    LseConvention convention = LseConvention::natural) {
    const std::int64_t tokens = partial.out.extent(0);
    HELIX_EXPECTS(
        tokens >= 0 && tokens <= spec_.max_tokens && partial.out.extent(1) == spec_.num_query_heads &&
            partial.out.extent(2) == spec_.value_dim && partial.lse.extent(0) == tokens &&
            partial.lse.extent(1) == spec_.num_query_heads,
        ErrorCode::invalid_argument, "exchange: out is [", tokens, ", ", partial.out.extent(1), ", ",
        partial.out.extent(2), "], lse [", partial.lse.extent(0), ", ", partial.lse.extent(1),
        "]; built for up to [", spec_.max_tokens, ", ", spec_.num_query_heads, ", ", spec_.value_dim, "]");
    HELIX_EXPECTS(tokens == 0 || partial.out.stride(2) == 1, ErrorCode::invalid_argument,
                  "exchange: the last stride of out is ", partial.out.stride(2), "; it must be 1");
    HELIX_EXPECTS(tokens == 0 || (partial.out.data() != nullptr && partial.lse.data() != nullptr),
                  ErrorCode::invalid_argument, "exchange: ", partial.out.data() == nullptr ? "out" : "lse",
                  " is null; it must point to the partials of ", tokens, " tokens");
    detail::check_convention("exchange", convention);
    HELIX_EXPECTS(kvp_ > 1 || convention == LseConvention::natural, ErrorCode::invalid_argument,
                  "exchange: KVP 1 packs nothing and converts no lse; give the convention to lse_combine");
    if (kvp_ == 1) return without_exchange(partial);
    expect_memory();
    if (tokens == 0)
      return {{nullptr, {kvp_, 0, heads_a_rank(), spec_.value_dim}}, {nullptr, {kvp_, 0, heads_a_rank()}}};
    if (sent_.data() == nullptr) allocate_messages();
    const Outgoing messages = packed({.tokens = tokens, .value_dim = spec_.value_dim}, positions);
    backend_->pack_partial(
        PackPartialArgs<T>{
            .out = partial.out, .lse = partial.lse, .target = messages.target, .convention = convention},
        stream);
    const Received received = transfer(messages, stream);
    backend_->check_exchange(check_of(messages), stream);
    return received;
  }

  /// Exchanges what attention wrote to `messages`, headers included, and combines what arrives into
  /// `combined` [tokens, Hq/N, Dv] of this rank's heads. The logits `sinks` [Hq/N] (or null) join the
  /// denominator. Does the work of exchange() and lse_combine() without packing, and checks while it
  /// combines: `combined` may have been written when a rank is found out of step. That Error is sticky too.
  /// Collective over the KVP group.
  /// @throws Error(invalid_argument), before anything is queued, unless `combined` has that shape, an
  /// address, rows that do not overlap, and a last stride of 1.
  void exchange_and_combine(const Outgoing& messages, const float* sinks, TensorView<T, 3> combined,
                            Stream stream) {
    if (messages.slice.tokens == 0) return;
    expect_memory();
    check_combined(messages.slice, combined);
    if (has_windows_) {
      count_sent(messages.slice);
      return windows_.combine(*backend_, messages.target, sinks, combined, stream);
    }
    const Received received = transfer(messages, stream);
    const CheckExchangeArgs check = check_of(messages);
    const LseCombineArgs<T> combine{
        .partial_out = received.out, .partial_lse = received.lse, .sinks = sinks, .out = combined};
    if constexpr (requires { backend_->combine_exchange(check, combine, stream); }) {
      backend_->combine_exchange(check, combine, stream);
    } else {
      HELIX_EXPECT_NO_MEMBER(B, combine_exchange,
                             (const CheckExchangeArgs&, const LseCombineArgs<Activation>&, Stream));
      backend_->check_exchange(check, stream);
      backend_->lse_combine(combine, stream);
    }
  }

  /// Bytes of outputs and log-sum-exps sent to other ranks so far, queued ones included: tokens * Hq/TPA *
  /// (Dv * sizeof(T) + 4) * (KVP - 1) / KVP for each exchange. The slice that the rank keeps, headers and
  /// padding do not count.
  std::int64_t sent_payload_bytes() const { return sent_payload_bytes_; }

 private:
  static constexpr auto kElementBytes = static_cast<std::int64_t>(sizeof(T));
  static constexpr auto kLseBytes = static_cast<std::int64_t>(sizeof(float));
  using Window =
      decltype(helix::allocate_window(std::declval<B&>(), std::declval<typename B::Comm&>(), std::size_t{}));

  /// outgoing() into this rank's own memory.
  Outgoing packed(const ExchangeSlice& slice, const std::int64_t* positions) const {
    Outgoing messages{.target = {.out = {}, .lse = {}, .first_token = slice.first_token}, .slice = slice};
    const ExchangeMessage at = message_of(slice);
    std::byte* const sent = sent_.data() + layout_.begin(slice);
    messages.target.out = {reinterpret_cast<T*>(sent + at.out_begin),
                           {slice.tokens, spec_.num_query_heads, slice.value_dim},
                           {slice.value_dim, at.head_bytes / kElementBytes, 1}};
    messages.target.lse = {reinterpret_cast<float*>(sent + at.lse_begin),
                           {slice.tokens, spec_.num_query_heads},
                           {1, at.head_bytes / kLseBytes}};
    messages.target.headers = {.message = sent,
                               .tokens = slice.tokens,
                               .sender = backend_->comms().kvp->rank(),
                               .exchanges = exchanges(),
                               .positions = positions,
                               .count = kvp_,
                               .message_bytes = at.message_bytes};
    return messages;
  }

  void allocate_messages() {
    const auto bytes = static_cast<std::size_t>(layout_.total_bytes());
    typename B::Buffer sent = backend_->allocate(bytes);
    received_ = helix::allocate_window(*backend_, *backend_->comms().kvp, bytes);
    sent_ = std::move(sent);  // both or none
  }

  void set_first_count() {
    const std::uint64_t count = first_exchange_count(spec_.group);
    if (count == 0) return;  // as allocated
    const Stream stream = backend_->create_stream();
    backend_->upload(exchanges_.data(), &count, sizeof(count), stream);
    backend_->synchronize(stream);
  }

  void expect_memory() const { detail::check_not_moved("KvpAllToAll", exchanges_.data()); }

  std::uint64_t* exchanges() const { return reinterpret_cast<std::uint64_t*>(exchanges_.data()); }

  ExchangeMessage message_of(const ExchangeSlice& slice) const {
    return {slice.tokens, heads_a_rank(), slice.value_dim, kElementBytes};
  }
  void count_sent(const ExchangeSlice& slice) {
    const std::int64_t heads = spec_.num_query_heads / kvp_ * (kvp_ - 1);
    sent_payload_bytes_ += ExchangeLayout::payload_bytes(slice.tokens, heads, slice.value_dim, kElementBytes);
  }
  void check_combined(const ExchangeSlice& slice, const TensorView<T, 3>& combined) const {
    HELIX_EXPECTS(combined.extent(0) == slice.tokens && combined.extent(1) == heads_a_rank() &&
                      combined.extent(2) == slice.value_dim && combined.stride(2) == 1,
                  ErrorCode::invalid_argument, "exchange_and_combine: combined is [", combined.extent(0),
                  ", ", combined.extent(1), ", ", combined.extent(2), "] with ", combined.stride(2),
                  " for its last stride; the messages combine to [", slice.tokens, ", ", heads_a_rank(), ", ",
                  slice.value_dim, "], whose last stride must be 1");
    detail::check_given("exchange_and_combine", "combined", combined.data(), combined.size());
    detail::check_elements_apart("exchange_and_combine", "combined", combined);
  }
  std::int64_t heads_a_rank() const { return spec_.num_query_heads / kvp_; }
  std::byte* received_at(const ExchangeSlice& slice) const { return received_.data() + layout_.begin(slice); }

  Received transfer(const Outgoing& messages, Stream stream) {
    const ExchangeSlice& slice = messages.slice;
    const std::int64_t heads = heads_a_rank();
    const ExchangeMessage at = message_of(slice);
    std::byte* const received = received_at(slice);
    backend_->comms().kvp->all_to_all(messages.target.headers.message, received, at.message_bytes, stream);
    count_sent(slice);
    const std::int64_t out_stride = at.head_bytes / kElementBytes;
    const std::int64_t lse_stride = at.head_bytes / kLseBytes;
    return {{reinterpret_cast<const T*>(received + at.out_begin),
             {kvp_, slice.tokens, heads, slice.value_dim},
             {heads * out_stride, slice.value_dim, out_stride, 1}},
            {reinterpret_cast<const float*>(received + at.lse_begin),
             {kvp_, slice.tokens, heads},
             {heads * lse_stride, 1, lse_stride}}};
  }

  CheckExchangeArgs check_of(const Outgoing& messages) const {
    const StampArgs& sent = messages.target.headers;
    return {.messages = received_at(messages.slice),
            .message_bytes = sent.message_bytes,
            .peers = kvp_,
            .sent = sent.message};
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
  ExchangeLayout layout_;
  WindowExchange<B> windows_;
  typename B::Buffer exchanges_;
  typename B::Buffer sent_{};
  Window received_{};
  bool has_windows_ = false;
  std::int64_t sent_payload_bytes_ = 0;
};

}  // namespace helix
