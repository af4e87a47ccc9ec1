// SPDX-License-Identifier: Apache-2.0
// Step: hands the operators of one configuration one by one to a sink that sums or lists them.
#pragma once

#include <algorithm>

#include <helix/plan/step_time.hpp>

#include "plan/attention_operators.hpp"
#include "plan/ffn_operators.hpp"
#include "plan/operator_timer.hpp"
#include "plan/step_configuration.hpp"

namespace helix::plan::detail {

/// One configuration, which determines the operators of each part of the model.
class Step {
 public:
  Step(const StepModel& step_model, FlopRate product_rate, FlopRate attention_rate, const Layout& layout,
       const Workload& workload)
      : timer_(step_model.precision(), step_model.hardware(), product_rate),
        at_(step_model.model(), layout, workload),
        attention_(timer_, at_, attention_rate),
        ffn_(timer_, at_) {}
  Step(const Step&) = delete;  // its parts refer to each other
  Step& operator=(const Step&) = delete;

  const RankBatch& batch() const { return at_.batch; }

  /// Slices of the last layer that was walked.
  int hop_b_slices() const { return attention_.hop_b_slices(); }

  /// An operator that takes a declared time and nothing else.
  OperatorTime declared(Operator op, Time time) const { return timer_.declared(op, time); }

  template <class Sink>
  void first(Sink& sink) const {
    if (at_.model.shape.vocab == 0) return;
    timer_.local(sink, Operator::embedding, Cost::vocabulary,
                 timer_.activation_bytes(at_.stage_tokens * at_.hidden));
    timer_.collective(sink, Operator::embedding_all_reduce, Cost::vocabulary, Collective::all_reduce,
                      {at_.layout.ffn_width(), 1}, timer_.activation_bytes(at_.stage_tokens * at_.hidden));
  }

  template <class Sink>
  void last(Sink& sink) const {
    if (at_.model.shape.vocab == 0) return;
    timer_.local(sink, Operator::final_norm, Cost::overhead,
                 timer_.activation_bytes(2 * at_.own_tokens * at_.hidden));
    if (at_.uses_attn_dp()) {
      timer_.collective(sink, Operator::ffn_dispatch, Cost::token_exchange, Collective::all_gather,
                        {at_.layout.stage_size(), 1}, timer_.activation_bytes(at_.stage_tokens * at_.hidden));
    }
    timer_.product(sink, Operator::lm_head, Cost::vocabulary,
                   {.rows = at_.stage_tokens,
                    .weights = at_.rank.vocab * at_.hidden,
                    .activations = at_.stage_tokens * (at_.hidden + at_.rank.vocab)});
    // Each rank sends one candidate: token and value.
    constexpr double kCandidateBytes = 8;
    timer_.collective(sink, Operator::sample_gather, Cost::vocabulary, Collective::all_gather,
                      {at_.layout.ffn_width(), 1},
                      bytes(kCandidateBytes * at_.stage_tokens * at_.layout.ffn_width()));
  }

  template <class Sink>
  void layer(Sink& sink, bool is_moe, bool is_windowed) {
    if (timer_.hardware().overheads.per_layer > Time{}) {
      sink(timer_.declared(Operator::layer_overhead, timer_.hardware().overheads.per_layer));
    }
    attention_.walk(sink, is_windowed);
    timer_.local(sink, Operator::ffn_norm, Cost::overhead,
                 timer_.activation_bytes(2 * at_.own_tokens * at_.hidden));
    if (is_moe) {
      ffn_.moe(sink);
    } else {
      ffn_.dense(sink);
    }
    if (at_.layout.strategy == Strategy::medha) {
      timer_.collective(sink, Operator::hidden_broadcast, Cost::exchange, Collective::broadcast,
                        {at_.layout.kvp, at_.layout.tpa},
                        timer_.activation_bytes(at_.stage_tokens * at_.hidden));
    }
  }

  /// The sends of the pipeline; those between domains, which are slower, are separate. A domain holds as many
  /// whole stages as fit, and a larger stage begins at the edge of a domain, as collective_time() assumes.
  template <class Sink>
  void sends(Sink& sink) const {
    if (at_.layout.pp == 1) return;
    const int stages_in_domain = std::max(1, timer_.hardware().nvlink_domain / at_.layout.stage_size());
    const int between_domains = (at_.layout.pp - 1) / stages_in_domain;
    const Bytes message = timer_.activation_bytes(at_.own_tokens * at_.hidden);
    const int inside = at_.layout.pp - 1 - between_domains;
    if (inside > 0) {
      timer_.collective(sink, Operator::pipeline_send, Cost::pipeline, Collective::send, {2, 1}, message,
                        inside);
    }
    if (between_domains > 0) {
      timer_.collective(sink, Operator::pipeline_send, Cost::pipeline, Collective::send,
                        {2, timer_.hardware().nvlink_domain}, message, between_domains);
    }
  }

 private:
  OperatorTimer timer_;
  StepConfiguration at_;
  AttentionOperators attention_;
  FfnOperators ffn_;
};

}  // namespace helix::plan::detail
