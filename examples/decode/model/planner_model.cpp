// SPDX-License-Identifier: Apache-2.0
// Converts a config for the planner; only windows need work.
#include "model/planner_model.hpp"

namespace helix::decode {

plan::Model planner_model(const ModelConfig& config) {
  plan::Model model{.name = config.model_type,
                    .source = "config.json",
                    .shape = config.shape,
                    .tie_word_embeddings = config.tie_word_embeddings,
                    .has_qk_norm = config.has_qk_norm,
                    .window = config.sliding_window,
                    .full_attention_stride = config.sliding_window > 0 ? 0 : 1,
                    .window_layers = config.is_window_layer};
  model.check();
  return model;
}

}  // namespace helix::decode
