// SPDX-License-Identifier: Apache-2.0
// WindowExchange: exchanges partial attention by stores into the memory of the ranks that combine it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include <helix/backend/communicator.hpp>
#include <helix/backend/exchange.hpp>
#include <helix/exchange_layout.hpp>
#include <helix/integers.hpp>

namespace helix {

/// A backend that ends an exchange over windows and combines in one operation, and whose communicators may
/// have windows; has_windows() of the KVP group says whether they do. A backend that also takes partials as
/// lines (LineRows) states as kMaxLineBytes up to how many bytes of a step, and its windows have gave_up().
template <class B>
concept WindowBackend = ExchangeBackend<B> && WindowComm<typename B::Comm> &&
    requires(B& backend, LseCombineArgs<typename B::Activation> combine, typename B::Stream stream) {
  backend.combine_window(WindowExchangeArgs{}, combine, stream);
};

/// One rank's end of an exchange over the windows of its KVP group, which KvpAllToAll uses if there are any.
/// Empty for other backends.
template <ExchangeBackend B>
class WindowExchange {
 public:
  using T = typename B::Activation;
  using Stream = typename B::Stream;
  static_assert(
      !requires(const typename B::Comm& comm) { comm.has_windows(); } || WindowComm<typename B::Comm>,
      "a communicator with has_windows() needs allocate_window(bytes, parts): see WindowComm");

  /// Makes an exchange without a window; open() allocates it.
  WindowExchange(const KvpAllToAllSpec& spec, std::int64_t kvp)
      : spec_(spec), layout_(spec, kvp, kElementBytes, spec.has_lines ? kMaxLineBytes : 0) {}

  /// Allocates the window if the group has windows. Collective. Returns whether it did, equal on all ranks.
  bool open(B& backend) {
    if constexpr (WindowBackend<B>) {
      auto& kvp = *backend.comms().kvp;
      if (!kvp.has_windows()) return false;
      rank_ = kvp.rank();
      size_ = kvp.size();
      window_ = kvp.allocate_window(static_cast<std::size_t>(larger<std::int64_t>(1, layout_.total_bytes)),
                                    layout_.heads);
      return true;
    } else {
      return false;
    }
  }

  /// Points `target` at the peers' windows for a step of `tokens` tokens and values of `value_dim` columns,
  /// at most the spec's: head h goes into the memory of the rank that combines it. `exchanges` is the counter
  /// of WindowExchangeArgs::exchanges.
  void point_to_peers(PartialTarget<T>& target, std::int64_t tokens, std::int64_t value_dim,
                      const std::int64_t* positions, std::uint64_t* exchanges) const {
    if constexpr (WindowBackend<B>) {
      std::byte* const first = window_.part(0) + rank_ * layout_.sender_bytes;
      target.out = {reinterpret_cast<T*>(first + layout_.out_begin),
                    {tokens, spec_.num_query_heads, value_dim},
                    {value_dim, head_bytes() / kElementBytes, 1}};
      target.lse = {reinterpret_cast<float*>(first + layout_.lse_begin),
                    {tokens, spec_.num_query_heads},
                    {1, head_bytes() / kLseBytes}};
      target.slot = {.exchanges = exchanges, .bytes = layout_.slot_bytes};
      target.exchange = {.sent = first,
                         .received = window_.part(static_cast<int>(rank_)),
                         .peer_bytes = window_.stride_bytes(),
                         .sender_bytes = layout_.sender_bytes,
                         .slot_bytes = layout_.slot_bytes,
                         .peers = size_,
                         .sender = rank_,
                         .tokens = tokens,
                         .exchanges = exchanges,
                         .positions = positions};
      if (layout_.has_lines(tokens, value_dim * kElementBytes)) {
        target.lines = {
            .rows = lines_at(first), .gave_up = gave_up(), .positions = positions, .tokens = tokens};
        target.exchange.lines = lines_at(target.exchange.received);
      }
    }
  }

  /// Ends the exchange of what was written where point_to_peers() said, and combines what arrives into
  /// `combined` [tokens, Hq/N, value_dim]. The logits `sinks` [Hq/N] (or null) join the denominator.
  /// Collective.
  void combine(B& backend, const PartialTarget<T>& sent, const float* sinks, TensorView<T, 3> combined,
               Stream stream) const {
    if constexpr (WindowBackend<B>) {
      const std::byte* const own = sent.exchange.received;
      const std::int64_t tokens = sent.exchange.tokens;
      const std::int64_t head = head_bytes();
      const std::int64_t value_dim = sent.out.extent(2);
      backend.combine_window(
          sent.exchange,
          LseCombineArgs<T>{
              .partial_out = {reinterpret_cast<const T*>(own + layout_.out_begin),
                              {size_, tokens, layout_.heads, value_dim},
                              {layout_.sender_bytes / kElementBytes, value_dim, head / kElementBytes, 1}},
              .partial_lse = {reinterpret_cast<const float*>(own + layout_.lse_begin),
                              {size_, tokens, layout_.heads},
                              {layout_.sender_bytes / kLseBytes, 1, head / kLseBytes}},
              .sinks = sinks,
              .out = combined},
          stream);
    }
  }

 private:
  static constexpr auto kElementBytes = static_cast<std::int64_t>(sizeof(T));
  static constexpr auto kLseBytes = static_cast<std::int64_t>(sizeof(float));

  /// Most payload bytes of a rank's step that travel as lines; 0 for backends without lines.
  static constexpr std::int64_t kMaxLineBytes = [] {
    if constexpr (requires { B::kMaxLineBytes; }) {
      return std::int64_t{B::kMaxLineBytes};
    } else {
      return std::int64_t{0};
    }
  }();

  struct NoWindow {};
  static auto no_window() {
    if constexpr (WindowBackend<B>) {
      return decltype(std::declval<typename B::Comm&>().allocate_window(std::size_t{}, std::int64_t{})){};
    } else {
      return NoWindow{};
    }
  }

  std::int64_t head_bytes() const { return layout_.head_bytes(window_.stride_bytes()); }

  const std::uint32_t* gave_up() const {
    if constexpr (kMaxLineBytes > 0) {
      return window_.gave_up();
    } else {
      return nullptr;
    }
  }

  /// Lines of the message whose header is at `header`.
  template <class Byte>
  LineRows<Byte> lines_at(Byte* header) const {
    return {.out = header + layout_.line_out_begin,
            .lse = header + layout_.line_lse_begin,
            .token_bytes = layout_.line_token_bytes,
            .head_bytes = head_bytes()};
  }

  KvpAllToAllSpec spec_;
  WindowLayout layout_;
  decltype(no_window()) window_{};
  std::int64_t rank_ = 0;
  std::int64_t size_ = 1;
};

}  // namespace helix
