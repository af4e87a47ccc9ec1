// SPDX-License-Identifier: Apache-2.0
// Names of operators, bounds and costs.
#include <helix/plan/step_time.hpp>

namespace helix::plan {

std::string_view to_string(Operator op) {
  switch (op) {
    case Operator::embedding:
      return "embedding";
    case Operator::embedding_all_reduce:
      return "embedding_all_reduce";
    case Operator::attention_norm:
      return "attention_norm";
    case Operator::qkv_projection:
      return "qkv_projection";
    case Operator::rope_append:
      return "rope_append";
    case Operator::attention:
      return "attention";
    case Operator::kvp_exchange:
      return "kvp_exchange";
    case Operator::lse_combine:
      return "lse_combine";
    case Operator::value_up_projection:
      return "value_up_projection";
    case Operator::output_projection:
      return "output_projection";
    case Operator::attention_all_reduce:
      return "attention_all_reduce";
    case Operator::ffn_norm:
      return "ffn_norm";
    case Operator::ffn_dispatch:
      return "ffn_dispatch";
    case Operator::router:
      return "router";
    case Operator::ffn_gate_up:
      return "ffn_gate_up";
    case Operator::ffn_down:
      return "ffn_down";
    case Operator::experts_gate_up:
      return "experts_gate_up";
    case Operator::experts_down:
      return "experts_down";
    case Operator::shared_gate_up:
      return "shared_gate_up";
    case Operator::shared_down:
      return "shared_down";
    case Operator::ffn_all_reduce:
      return "ffn_all_reduce";
    case Operator::ffn_collect:
      return "ffn_collect";
    case Operator::hidden_broadcast:
      return "hidden_broadcast";
    case Operator::pipeline_send:
      return "pipeline_send";
    case Operator::final_norm:
      return "final_norm";
    case Operator::lm_head:
      return "lm_head";
    case Operator::sample_gather:
      return "sample_gather";
    case Operator::layer_overhead:
      return "layer_overhead";
    case Operator::step_overhead:
      return "step_overhead";
    case Operator::pipeline_wait:
      return "pipeline_wait";
  }
  return "unknown";
}

std::string_view to_string(Bound bound) {
  switch (bound) {
    case Bound::memory:
      return "memory";
    case Bound::compute:
      return "compute";
    case Bound::network:
      return "network";
    case Bound::overhead:
      return "overhead";
  }
  return "unknown";
}

std::string_view to_string(Cost cost) {
  switch (cost) {
    case Cost::kv_read:
      return "kv_read";
    case Cost::attention_weights:
      return "attention_weights";
    case Cost::ffn_weights:
      return "ffn_weights";
    case Cost::exchange:
      return "exchange";
    case Cost::all_reduce:
      return "all_reduce";
    case Cost::token_exchange:
      return "token_exchange";
    case Cost::vocabulary:
      return "vocabulary";
    case Cost::pipeline:
      return "pipeline";
    case Cost::overhead:
      return "overhead";
  }
  return "unknown";
}

}  // namespace helix::plan
