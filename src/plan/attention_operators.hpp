// SPDX-License-Identifier: Apache-2.0
// AttentionOperators: the attention half of a layer, from its norm to its all-reduce, with HOP-B.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <helix/hop_b_model.hpp>
#include <helix/kv_layout.hpp>
#include <helix/plan/step_time.hpp>

#include "plan/operator_timer.hpp"
#include "plan/step_configuration.hpp"

namespace helix::plan::detail {

/// Bits of a log-sum-exp.
inline constexpr double kLseBits = 32;

/// Borrows its arguments.
class AttentionOperators {
 public:
  AttentionOperators(const OperatorTimer& timer, const StepConfiguration& at, FlopRate attention_rate)
      : timer_(timer), at_(at), attention_rate_(attention_rate) {}

  /// Slices of the last layer that was walked.
  int hop_b_slices() const { return hop_b_slices_; }

  /// Hands over the operators of one layer.
  template <class Sink>
  void walk(Sink& sink, bool is_windowed) {
    timer_.local(sink, Operator::attention_norm, Cost::overhead,
                 timer_.activation_bytes(2 * at_.own_tokens * at_.hidden));
    timer_.product(sink, Operator::qkv_projection, Cost::attention_weights,
                   {.rows = at_.own_tokens,
                    .weights = at_.rank.qkv,
                    .activations = at_.own_tokens * (at_.hidden + at_.rank.qkv_width)});
    timer_.local(sink, Operator::rope_append, Cost::overhead,
                 timer_.activation_bytes(2 * at_.own_tokens * at_.rank.qkv_width));
    attention_and_exchange(sink, is_windowed);
    if (at_.layout.kvp > 1) {
      const double heads = at_.own_tokens * at_.rank.combined_heads;
      const auto value_dim = static_cast<double>(at_.model.shape.value_dim);
      timer_.local(sink, Operator::lse_combine, Cost::exchange,
                   timer_.activation_bytes((at_.layout.kvp + 1) * heads * value_dim) +
                       packed_bytes(at_.layout.kvp * heads, kLseBits));
    }
    if (at_.rank.value_up > 0) {
      timer_.product(sink, Operator::value_up_projection, Cost::attention_weights,
                     {.rows = at_.own_tokens,
                      .weights = at_.rank.value_up,
                      .activations = at_.own_tokens * (at_.rank.combined_heads *
                                                           static_cast<double>(at_.model.shape.value_dim) +
                                                       at_.rank.output_width)});
    }
    timer_.product(sink, Operator::output_projection, Cost::attention_weights,
                   {.rows = at_.own_tokens,
                    .weights = at_.rank.output,
                    .activations = at_.own_tokens * (at_.rank.output_width + at_.hidden)});
    const int width = at_.layout.strategy == Strategy::helix ? at_.layout.stage_size() : at_.layout.tpa;
    timer_.collective(sink, Operator::attention_all_reduce, Cost::all_reduce, Collective::all_reduce,
                      {width, 1}, timer_.activation_bytes(at_.own_tokens * at_.hidden));
  }

 private:
  /// Attention of the fullest rank over `slices` slices, each timed as its own operator.
  OperatorTime attention(double local_tokens, int slices) const {
    const double rows = at_.own_tokens * at_.rank.query_heads;
    const double dims = static_cast<double>(at_.model.shape.head_dim + at_.model.shape.value_dim);
    const Bytes kv = packed_bytes(static_cast<double>(at_.batch.attention) * at_.rank.kv_row * local_tokens,
                                  timer_.precision().kv_bits);
    const bool is_measured = !timer_.hardware().attention_read.points().empty();
    OperatorTime slice = timer_.timed(Operator::attention, Cost::kv_read,
                                      is_measured ? timer_.hardware().attention_read : timer_.hardware().read,
                                      is_measured ? Time{} : timer_.hardware().overheads.per_operator,
                                      (kv + timer_.activation_bytes(rows * dims)) / slices,
                                      flops(2 * rows * local_tokens * dims) / slices, attention_rate_);
    if (slices > 1) {
      slice.time += timer_.hardware().overheads.per_slice;
      slice.overhead += timer_.hardware().overheads.per_slice;
    }
    return times(slice, slices);
  }

  /// Bytes of a rank's partial outputs before the exchange, own slice included.
  Bytes partials() const {
    const double rows = at_.own_tokens * at_.rank.query_heads;
    return timer_.activation_bytes(rows * static_cast<double>(at_.model.shape.value_dim)) +
           packed_bytes(rows, kLseBits);
  }

  OperatorTime exchange(int slices) const {
    return times(timer_.timed_collective(Operator::kvp_exchange, Cost::exchange, Collective::all_to_all,
                                         {at_.layout.kvp, at_.layout.tpa}, partials() / slices),
                 slices);
  }

  static OperatorTime times(OperatorTime slice, int slices) {
    slice.bytes = slice.bytes * slices;
    slice.flops = slice.flops * slices;
    slice.time = slice.time * slices;
    slice.overhead = slice.overhead * slices;
    return slice;
  }

  template <class Sink>
  void attention_and_exchange(Sink& sink, bool is_windowed) {
    const auto context = static_cast<std::int64_t>(std::ceil(in_tokens(at_.workload.context)));
    const std::int64_t seen =
        is_windowed ? std::min(context, at_.model.window + at_.workload.step_tokens - 1) : context;
    // Rank 0 owns the first chunk of each period, so no rank reads more of a whole context. A window may
    // begin in another rank's chunk, but that only moves the same number of chunks elsewhere.
    const auto local_tokens =
        static_cast<double>(KvLayout(at_.layout.kvp, at_.workload.chunk).length(seen, 0));
    hop_b_slices_ = 1;
    if (at_.layout.strategy != Strategy::helix || at_.layout.kvp == 1) {
      sink(attention(local_tokens, 1));
      if (at_.layout.strategy == Strategy::medha) {
        timer_.collective(sink, Operator::kvp_exchange, Cost::exchange, Collective::all_gather,
                          {at_.layout.kvp, at_.layout.tpa}, partials() * at_.layout.kvp);
      }
      return;
    }
    const std::int64_t max_slices = std::min<std::int64_t>(
        at_.batch.attention, at_.layout.hop_b_slices == 0 ? kMaxSlices : at_.layout.hop_b_slices);
    int slices = at_.layout.hop_b_slices == 0 ? 1 : static_cast<int>(max_slices);
    Overlapped best = overlapped(local_tokens, slices);
    if (at_.layout.hop_b_slices == 0) {
      for (slices *= 2; slices <= max_slices; slices *= 2) {
        const Overlapped next = overlapped(local_tokens, slices);
        if (next.time < best.time) best = next;
      }
    }
    hop_b_slices_ = best.slices;
    best.exchange.hidden = best.attention.time + best.exchange.time - best.time;
    sink(best.attention);
    sink(best.exchange);
  }

  struct Overlapped {
    int slices = 1;
    OperatorTime attention;
    OperatorTime exchange;
    Time time;
  };
  Overlapped overlapped(double local_tokens, int slices) const {
    Overlapped result{slices, attention(local_tokens, slices), exchange(slices), Time{}};
    result.time = microseconds(
        hop_b_time(slices, in_microseconds(result.attention.time), in_microseconds(result.exchange.time)));
    return result;
  }

  static constexpr std::int64_t kMaxSlices = 64;

  const OperatorTimer& timer_;
  const StepConfiguration& at_;
  FlopRate attention_rate_;
  int hop_b_slices_ = 1;
};

}  // namespace helix::plan::detail
