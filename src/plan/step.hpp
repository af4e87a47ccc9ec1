// SPDX-License-Identifier: Apache-2.0
// Step: the operators of one configuration, handed one by one to a sink that sums or lists them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <helix/hop_b_model.hpp>
#include <helix/kv_layout.hpp>
#include <helix/plan/collectives.hpp>
#include <helix/plan/step_time.hpp>

#include "plan/rank_elements.hpp"

namespace helix::plan::detail {

inline constexpr double kLseBits = 32;

/// Product of `rows` rows with a matrix of `weights` elements.
struct Product {
  double rows = 0;
  double weights = 0;      ///< elements read
  double activations = 0;  ///< elements read and written
  double multiplies = 0;   ///< multiply-adds in all; 0: rows * weights
};

/// One configuration, from which the operators of each part of the model follow.
class Step {
 public:
  Step(const StepModel& step_model, FlopRate product_rate, FlopRate attention_rate, const Layout& layout,
       const Workload& workload)
      : model_(step_model.model()),
        precision_(step_model.precision()),
        hardware_(step_model.hardware()),
        product_rate_(product_rate),
        attention_rate_(attention_rate),
        layout_(layout),
        workload_(workload),
        rank_(rank_elements(model_, layout)),
        batch_(rank_batch(layout, workload)),
        hidden_(static_cast<double>(model_.shape.hidden)),
        own_tokens_(static_cast<double>(batch_.attention * workload.step_tokens)),
        stage_tokens_(static_cast<double>(batch_.stage * workload.step_tokens)) {}

  const RankBatch& batch() const { return batch_; }

  /// Slices of the layer that was walked last.
  int hop_b_slices() const { return hop_b_slices_; }

  template <class Sink>
  void first(Sink& sink) const {
    if (model_.shape.vocab == 0) return;
    local(sink, Operator::embedding, Cost::vocabulary, activation_bytes(stage_tokens_ * hidden_));
    collective(sink, Operator::embedding_all_reduce, Cost::vocabulary, Collective::all_reduce,
               {layout_.ffn_width(), 1}, activation_bytes(stage_tokens_ * hidden_));
  }

  template <class Sink>
  void last(Sink& sink) const {
    if (model_.shape.vocab == 0) return;
    local(sink, Operator::final_norm, Cost::overhead, activation_bytes(2 * own_tokens_ * hidden_));
    if (uses_attn_dp()) {
      collective(sink, Operator::ffn_dispatch, Cost::token_exchange, Collective::all_gather,
                 {layout_.stage_size(), 1}, activation_bytes(stage_tokens_ * hidden_));
    }
    product(sink, Operator::lm_head, Cost::vocabulary,
            {.rows = stage_tokens_,
             .weights = rank_.vocab * hidden_,
             .activations = stage_tokens_ * (hidden_ + rank_.vocab)});
    // A candidate a rank: token and value.
    constexpr double kCandidateBytes = 8;
    collective(sink, Operator::sample_gather, Cost::vocabulary, Collective::all_gather,
               {layout_.ffn_width(), 1}, bytes(kCandidateBytes * stage_tokens_ * layout_.ffn_width()));
  }

  template <class Sink>
  void layer(Sink& sink, bool is_moe, bool is_windowed) {
    if (hardware_.overheads.per_layer > Time{}) {
      sink(declared(Operator::layer_overhead, hardware_.overheads.per_layer));
    }
    attention_block(sink, is_windowed);
    local(sink, Operator::ffn_norm, Cost::overhead, activation_bytes(2 * own_tokens_ * hidden_));
    if (is_moe) {
      moe_block(sink);
    } else {
      dense_block(sink);
    }
    if (layout_.strategy == Strategy::medha) {
      collective(sink, Operator::hidden_broadcast, Cost::exchange, Collective::broadcast,
                 {layout_.kvp, layout_.tpa}, activation_bytes(stage_tokens_ * hidden_));
    }
  }

  /// Each of the pipeline's sends, the slow ones between domains apart.
  template <class Sink>
  void sends(Sink& sink) const {
    if (layout_.pp == 1) return;
    const int n = layout_.stage_size();
    int between_domains = 0;
    for (int stage = 1; stage < layout_.pp; ++stage) {
      const std::int64_t first_rank = std::int64_t{stage} * n;
      // Rank i sends to rank i + n: if a stage fits unevenly, some rank of it crosses.
      between_domains +=
          (first_rank - n) / hardware_.nvlink_domain != (first_rank + n - 1) / hardware_.nvlink_domain;
    }
    const Bytes message = activation_bytes(own_tokens_ * hidden_);
    const int inside = layout_.pp - 1 - between_domains;
    if (inside > 0) {
      collective(sink, Operator::pipeline_send, Cost::pipeline, Collective::send, {2, 1}, message, inside);
    }
    if (between_domains > 0) {
      collective(sink, Operator::pipeline_send, Cost::pipeline, Collective::send,
                 {2, hardware_.nvlink_domain}, message, between_domains);
    }
  }

  OperatorTime declared(Operator op, Time time) const {
    OperatorTime result;
    result.op = op;
    result.time = time;
    result.overhead = time;
    result.bound = Bound::overhead;
    return result;
  }

 private:
  bool uses_attn_dp() const { return layout_.attn_dp > 1; }
  Bytes activation_bytes(double elements) const { return packed_bytes(elements, precision_.activation_bits); }

  OperatorTime timed(Operator op, Cost cost, Bytes bytes, Flops flops, FlopRate rate) const {
    return timed(op, cost, hardware_.read, hardware_.overheads.per_operator, bytes, flops, rate);
  }
  OperatorTime timed(Operator op, Cost cost, const BandwidthCurve& read, Time overhead, Bytes bytes,
                     Flops flops, FlopRate rate) const {
    const Time memory = read.time(bytes);
    const Time compute = flops / rate;
    OperatorTime result;
    result.op = op;
    result.cost = cost;
    result.bytes = bytes;
    result.flops = flops;
    result.overhead = overhead;
    result.time = std::max(memory, compute) + overhead;
    result.bound = compute > memory ? Bound::compute : Bound::memory;
    if (overhead > std::max(memory, compute)) result.bound = Bound::overhead;
    return result;
  }

  template <class Sink>
  void local(Sink& sink, Operator op, Cost cost, Bytes bytes) const {
    sink(timed(op, cost, bytes, Flops{}, product_rate_));
  }

  template <class Sink>
  void product(Sink& sink, Operator op, Cost cost, const Product& shape) const {
    const double multiplies = shape.multiplies > 0 ? shape.multiplies : shape.rows * shape.weights;
    sink(timed(op, cost,
               packed_bytes(shape.weights, precision_.weight_bits) + activation_bytes(shape.activations),
               flops(2 * multiplies), product_rate_));
  }

  OperatorTime timed_collective(Operator op, Cost cost, Collective kind, CommGroup group, Bytes size) const {
    const CollectiveTime fastest = collective_time(hardware_, kind, group, size);
    OperatorTime result;
    result.op = op;
    result.cost = cost;
    result.bytes = size;
    result.algorithm = fastest.algorithm;
    result.ranks = group.ranks;
    result.overhead = hardware_.overheads.per_collective;
    result.time = fastest.time + result.overhead;
    result.bound = result.overhead > fastest.time ? Bound::overhead : Bound::network;
    return result;
  }

  template <class Sink>
  void collective(Sink& sink, Operator op, Cost cost, Collective kind, CommGroup group, Bytes size,
                  std::int64_t count = 1) const {
    if (group.ranks == 1) return;
    OperatorTime result = timed_collective(op, cost, kind, group, size);
    result.count = count;
    sink(result);
  }

  template <class Sink>
  void attention_block(Sink& sink, bool is_windowed) {
    local(sink, Operator::attention_norm, Cost::overhead, activation_bytes(2 * own_tokens_ * hidden_));
    product(sink, Operator::qkv_projection, Cost::attention_weights,
            {.rows = own_tokens_,
             .weights = rank_.qkv,
             .activations = own_tokens_ * (hidden_ + rank_.qkv_width)});
    local(sink, Operator::rope_append, Cost::overhead, activation_bytes(2 * own_tokens_ * rank_.qkv_width));
    attention_and_exchange(sink, is_windowed);
    if (layout_.kvp > 1) {
      const double heads = own_tokens_ * rank_.combined_heads;
      const auto value_dim = static_cast<double>(model_.shape.value_dim);
      local(sink, Operator::lse_combine, Cost::exchange,
            activation_bytes((layout_.kvp + 1) * heads * value_dim) +
                packed_bytes(layout_.kvp * heads, kLseBits));
    }
    if (rank_.value_up > 0) {
      product(
          sink, Operator::value_up_projection, Cost::attention_weights,
          {.rows = own_tokens_,
           .weights = rank_.value_up,
           .activations = own_tokens_ * (rank_.combined_heads * static_cast<double>(model_.shape.value_dim) +
                                         rank_.output_width)});
    }
    product(sink, Operator::output_projection, Cost::attention_weights,
            {.rows = own_tokens_,
             .weights = rank_.output,
             .activations = own_tokens_ * (rank_.output_width + hidden_)});
    const int width = layout_.strategy == Strategy::helix ? layout_.stage_size() : layout_.tpa;
    collective(sink, Operator::attention_all_reduce, Cost::all_reduce, Collective::all_reduce, {width, 1},
               activation_bytes(own_tokens_ * hidden_));
  }

  /// Attention of the fullest rank over `slices` slices, each timed as its own operator.
  OperatorTime attention(double local_tokens, int slices) const {
    const double rows = own_tokens_ * rank_.query_heads;
    const double dims = static_cast<double>(model_.shape.head_dim + model_.shape.value_dim);
    const Bytes kv =
        packed_bytes(static_cast<double>(batch_.attention) * rank_.kv_row * local_tokens, precision_.kv_bits);
    const bool is_measured = !hardware_.attention_read.points().empty();
    OperatorTime slice =
        timed(Operator::attention, Cost::kv_read, is_measured ? hardware_.attention_read : hardware_.read,
              is_measured ? Time{} : hardware_.overheads.per_operator,
              (kv + activation_bytes(rows * dims)) / slices, flops(2 * rows * local_tokens * dims) / slices,
              attention_rate_);
    if (slices > 1) {
      slice.time += hardware_.overheads.per_slice;
      slice.overhead += hardware_.overheads.per_slice;
    }
    return times(slice, slices);
  }

  /// What a rank's partial outputs come to: before the exchange, own slice included.
  Bytes partials() const {
    const double rows = own_tokens_ * rank_.query_heads;
    return activation_bytes(rows * static_cast<double>(model_.shape.value_dim)) +
           packed_bytes(rows, kLseBits);
  }

  OperatorTime exchange(int slices) const {
    return times(timed_collective(Operator::kvp_exchange, Cost::exchange, Collective::all_to_all,
                                  {layout_.kvp, layout_.tpa}, partials() / slices),
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
    const auto context = static_cast<std::int64_t>(std::ceil(in_tokens(workload_.context)));
    const std::int64_t seen =
        is_windowed ? std::min(context, model_.window + workload_.step_tokens - 1) : context;
    // Rank 0 owns the first chunk of each period: no rank reads more of a whole context. A window may begin
    // in another's chunk, which moves the same number of chunks elsewhere.
    const auto local_tokens = static_cast<double>(KvLayout(layout_.kvp, workload_.chunk).length(seen, 0));
    hop_b_slices_ = 1;
    if (layout_.strategy != Strategy::helix || layout_.kvp == 1) {
      sink(attention(local_tokens, 1));
      if (layout_.strategy == Strategy::medha) {
        collective(sink, Operator::kvp_exchange, Cost::exchange, Collective::all_gather,
                   {layout_.kvp, layout_.tpa}, partials() * layout_.kvp);
      }
      return;
    }
    const std::int64_t max_slices = std::min<std::int64_t>(
        batch_.attention, layout_.hop_b_slices == 0 ? kMaxSlices : layout_.hop_b_slices);
    int slices = layout_.hop_b_slices == 0 ? 1 : static_cast<int>(max_slices);
    Overlapped best = overlapped(local_tokens, slices);
    if (layout_.hop_b_slices == 0) {
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

  /// A gated FFN: two matrices up, one down.
  template <class Sink>
  void gated(Sink& sink, Operator up, Operator down, double rows, double width, double matrices,
             double multiply_rows) const {
    product(sink, up, Cost::ffn_weights,
            {.rows = rows,
             .weights = 2 * matrices * hidden_ * width,
             .activations = multiply_rows * (hidden_ + 2 * width),
             .multiplies = 2 * multiply_rows * hidden_ * width});
    product(sink, down, Cost::ffn_weights,
            {.rows = rows,
             .weights = matrices * hidden_ * width,
             .activations = multiply_rows * (hidden_ + width),
             .multiplies = multiply_rows * hidden_ * width});
  }

  template <class Sink>
  void dense_block(Sink& sink) const {
    const CommGroup group{layout_.ffn_width(), 1};
    const Bytes all = activation_bytes(stage_tokens_ * hidden_);
    if (uses_attn_dp()) {
      collective(sink, Operator::ffn_dispatch, Cost::token_exchange, Collective::all_gather, group, all);
    }
    gated(sink, Operator::ffn_gate_up, Operator::ffn_down, stage_tokens_, rank_.ffn_width, 1, stage_tokens_);
    if (uses_attn_dp()) {
      collective(sink, Operator::ffn_collect, Cost::token_exchange, Collective::reduce_scatter, group, all);
    } else {
      collective(sink, Operator::ffn_all_reduce, Cost::all_reduce, Collective::all_reduce, group, all);
    }
  }

  template <class Sink>
  void moe_block(Sink& sink) const {
    const MoeShape& moe = *model_.shape.moe;
    const auto num_experts = static_cast<double>(moe.num_experts);
    const auto top_k = static_cast<double>(moe.top_k);
    const CommGroup stage{layout_.ffn_width(), 1};
    const Bytes all = activation_bytes(stage_tokens_ * hidden_);

    product(
        sink, Operator::router, Cost::ffn_weights,
        {.rows = own_tokens_, .weights = rank_.router, .activations = own_tokens_ * (hidden_ + num_experts)});
    // Tokens to all ranks, or each to the ranks of the experts that it chose: as many EP groups as top_k
    // draws hit, TPF ranks in each.
    const double groups_hit = layout_.ep * (1 - std::pow(1 - 1.0 / layout_.ep, top_k));
    const Bytes chosen = activation_bytes(own_tokens_ / layout_.tpa * groups_hit * layout_.tpf * hidden_);
    if (uses_attn_dp()) {
      faster(sink, Operator::ffn_dispatch, Collective::all_gather, stage, all, chosen);
    }

    // Experts that the rank reads, and (token, expert) pairs that it computes.
    double hits = 0;
    double pairs = 0;
    if (workload_.expert_hits == ExpertHits::expectation) {
      hits = expected_expert_hits(moe, stage_tokens_) / layout_.ep;
      pairs = stage_tokens_ * top_k / layout_.ep;
    } else {
      hits = std::min(rank_.experts, stage_tokens_ * top_k);
      pairs = stage_tokens_ * std::min(rank_.experts, top_k);
    }
    gated(sink, Operator::experts_gate_up, Operator::experts_down, stage_tokens_, rank_.expert_width, hits,
          pairs);
    if (rank_.shared_width > 0) {
      gated(sink, Operator::shared_gate_up, Operator::shared_down, own_tokens_, rank_.shared_width, 1,
            own_tokens_);
    }
    if (!uses_attn_dp()) {
      collective(sink, Operator::ffn_all_reduce, Cost::all_reduce, Collective::all_reduce, stage, all);
      return;
    }
    faster(sink, Operator::ffn_collect, Collective::reduce_scatter, stage, all, chosen);
    if (rank_.shared_width > 0) {
      collective(sink, Operator::ffn_all_reduce, Cost::all_reduce, Collective::all_reduce, {layout_.tpa, 1},
                 activation_bytes(own_tokens_ * hidden_));
    }
  }

  /// `kind` with everything, or an all-to-all with what was chosen.
  template <class Sink>
  void faster(Sink& sink, Operator op, Collective kind, CommGroup group, Bytes all, Bytes chosen) const {
    const OperatorTime whole = timed_collective(op, Cost::token_exchange, kind, group, all);
    const OperatorTime part =
        timed_collective(op, Cost::token_exchange, Collective::all_to_all, group, chosen);
    sink(part.time < whole.time ? part : whole);
  }

  static constexpr std::int64_t kMaxSlices = 64;

  const Model& model_;
  const Precision& precision_;
  const Hardware& hardware_;
  FlopRate product_rate_;
  FlopRate attention_rate_;
  Layout layout_;
  Workload workload_;
  RankElements rank_;
  RankBatch batch_;
  double hidden_;
  double own_tokens_;    // that a rank of attention works on
  double stage_tokens_;  // of all ranks of the stage
  int hop_b_slices_ = 1;
};

}  // namespace helix::plan::detail
