// SPDX-License-Identifier: Apache-2.0
// The period of the windowed layers, and all else as the config has it.
#include "model/planner_model.hpp"

#include <algorithm>

#include <helix/error.hpp>

namespace helix::decode {
namespace {

/// plan::Model::full_attention_stride of the config's windowed layers.
std::int64_t full_attention_stride(const ModelConfig& config) {
  const std::vector<bool>& windowed = config.is_window_layer;
  const auto first_full = std::find(windowed.begin(), windowed.end(), false);
  if (first_full == windowed.end()) return 0;
  const std::int64_t stride = first_full - windowed.begin() + 1;
  for (std::int64_t layer = 0; layer < config.shape.num_layers; ++layer) {
    HELIX_EXPECTS(windowed[static_cast<std::size_t>(layer)] == ((layer + 1) % stride != 0),
                  ErrorCode::unsupported, "layer ", layer,
                  " breaks the period of the full-attention layers, every ", stride,
                  " by the first ones; the planner knows periods only");
  }
  return stride;
}

}  // namespace

plan::Model planner_model(const ModelConfig& config) {
  plan::Model model{.name = config.model_type,
                    .source = "config.json",
                    .shape = config.shape,
                    .tie_word_embeddings = config.tie_word_embeddings,
                    .has_qk_norm = config.has_qk_norm};
  const std::vector<bool>& windowed = config.is_window_layer;
  const bool has_window =
      config.sliding_window > 0 &&
      (windowed.empty() || std::find(windowed.begin(), windowed.end(), true) != windowed.end());
  if (has_window) {
    model.window = config.sliding_window;
    model.full_attention_stride = full_attention_stride(config);
  }
  model.check();
  return model;
}

}  // namespace helix::decode
