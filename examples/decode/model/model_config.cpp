// SPDX-License-Identifier: Apache-2.0
// Derives one layer's values from the model's config.
#include "model/model_config.hpp"

#include <cmath>

namespace helix::decode {

std::int64_t ModelConfig::window(std::int64_t layer) const {
  const bool applies = is_window_layer.empty() || is_window_layer.at(static_cast<std::size_t>(layer));
  return applies ? sliding_window : 0;
}

float ModelConfig::softmax_scale() const {
  if (!shape.mla) return static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape.head_dim)));
  const double scale = 1.0 / std::sqrt(static_cast<double>(shape.mla->qk_head_dim()));
  return static_cast<float>(scale * rope.latent_softmax_factor());
}

LayerConfig ModelConfig::layer(std::int64_t layer, const float* inverse_frequency) const {
  return {.norm_epsilon = rms_norm_eps,
          .latent_norm_epsilon = kLatentNormEps,
          .softmax_scale = softmax_scale(),
          .window = window(layer),
          .rope = {.inverse_frequency = inverse_frequency,
                   .rotary_dim = rope.rotary_dim,
                   .is_interleaved = rope.is_interleaved,
                   .magnitude = rope.magnitude()},
          .router = router};
}

}  // namespace helix::decode
