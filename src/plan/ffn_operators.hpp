// SPDX-License-Identifier: Apache-2.0
// FfnOperators: the feed-forward half of a layer after its norm, dense or routed.
#pragma once

#include <algorithm>
#include <cmath>

#include <helix/plan/step_time.hpp>

#include "plan/operator_timer.hpp"
#include "plan/step_configuration.hpp"

namespace helix::plan::detail {

/// Borrows its arguments.
class FfnOperators {
 public:
  FfnOperators(const OperatorTimer& timer, const StepConfiguration& at) : timer_(timer), at_(at) {}

  template <class Sink>
  void dense(Sink& sink) const {
    const CommGroup group{at_.layout.ffn_width(), 1};
    const Bytes all = timer_.activation_bytes(at_.stage_tokens * at_.hidden);
    if (at_.uses_attn_dp()) {
      timer_.collective(sink, Operator::ffn_dispatch, Cost::token_exchange, Collective::all_gather, group,
                        all);
    }
    gated(sink, Operator::ffn_gate_up, Operator::ffn_down, at_.stage_tokens, at_.rank.ffn_width, 1,
          at_.stage_tokens);
    if (at_.uses_attn_dp()) {
      timer_.collective(sink, Operator::ffn_collect, Cost::token_exchange, Collective::reduce_scatter, group,
                        all);
    } else {
      timer_.collective(sink, Operator::ffn_all_reduce, Cost::all_reduce, Collective::all_reduce, group, all);
    }
  }

  template <class Sink>
  void moe(Sink& sink) const {
    const MoeShape& shape = *at_.model.shape.moe;
    const auto num_experts = static_cast<double>(shape.num_experts);
    const auto top_k = static_cast<double>(shape.top_k);
    const CommGroup stage{at_.layout.ffn_width(), 1};
    const Bytes all = timer_.activation_bytes(at_.stage_tokens * at_.hidden);

    timer_.product(sink, Operator::router, Cost::ffn_weights,
                   {.rows = at_.own_tokens,
                    .weights = at_.rank.router,
                    .activations = at_.own_tokens * (at_.hidden + num_experts)});
    // Sends tokens to all ranks, or each only to the ranks of its chosen experts: as many EP groups as top_k
    // draws hit, with TPF ranks each.
    const double groups_hit = at_.layout.ep * (1 - std::pow(1 - 1.0 / at_.layout.ep, top_k));
    const Bytes chosen =
        timer_.activation_bytes(at_.own_tokens / at_.layout.tpa * groups_hit * at_.layout.tpf * at_.hidden);
    if (at_.uses_attn_dp()) {
      timer_.faster(sink, Operator::ffn_dispatch, Collective::all_gather, stage, all, chosen);
    }

    // Experts that the rank reads, and (token, expert) pairs that it computes.
    double hits = 0;
    double pairs = 0;
    if (at_.workload.expert_hits == ExpertHits::expectation) {
      hits = expected_expert_hits(shape, at_.stage_tokens) / at_.layout.ep;
      pairs = at_.stage_tokens * top_k / at_.layout.ep;
    } else {
      hits = std::min(at_.rank.experts, at_.stage_tokens * top_k);
      pairs = at_.stage_tokens * std::min(at_.rank.experts, top_k);
    }
    gated(sink, Operator::experts_gate_up, Operator::experts_down, at_.stage_tokens, at_.rank.expert_width,
          hits, pairs);
    if (at_.rank.shared_width > 0) {
      gated(sink, Operator::shared_gate_up, Operator::shared_down, at_.own_tokens, at_.rank.shared_width, 1,
            at_.own_tokens);
    }
    if (!at_.uses_attn_dp()) {
      timer_.collective(sink, Operator::ffn_all_reduce, Cost::all_reduce, Collective::all_reduce, stage, all);
      return;
    }
    timer_.faster(sink, Operator::ffn_collect, Collective::reduce_scatter, stage, all, chosen);
    if (at_.rank.shared_width > 0) {
      timer_.collective(sink, Operator::ffn_all_reduce, Cost::all_reduce, Collective::all_reduce,
                        {at_.layout.tpa, 1}, timer_.activation_bytes(at_.own_tokens * at_.hidden));
    }
  }

 private:
  /// A gated FFN: two matrices up, one down.
  template <class Sink>
  void gated(Sink& sink, Operator up, Operator down, double rows, double width, double matrices,
             double multiply_rows) const {
    timer_.product(sink, up, Cost::ffn_weights,
                   {.rows = rows,
                    .weights = 2 * matrices * at_.hidden * width,
                    .activations = multiply_rows * (at_.hidden + 2 * width),
                    .multiplies = 2 * multiply_rows * at_.hidden * width});
    timer_.product(sink, down, Cost::ffn_weights,
                   {.rows = rows,
                    .weights = matrices * at_.hidden * width,
                    .activations = multiply_rows * (at_.hidden + width),
                    .multiplies = multiply_rows * at_.hidden * width});
  }

  const OperatorTimer& timer_;
  const StepConfiguration& at_;
};

}  // namespace helix::plan::detail
