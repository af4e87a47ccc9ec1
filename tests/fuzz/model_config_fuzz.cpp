// SPDX-License-Identifier: Apache-2.0
// Any bytes as config.json give helix::Error, or a config whose constants are finite and usable.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>

#include <helix/error.hpp>

#include "fuzz.hpp"
#include "model/parse_config.hpp"

namespace {

using helix::fuzz::require;

bool is_usable(float value) {
  return std::isfinite(value) && value > 0.0f;
}

void parse_config(std::string_view text) {
  using helix::ErrorCode;
  try {
    const auto config = helix::decode::parse_model_config(text, "fuzz");
    const helix::ModelShape shape = config.shape;
    require(shape.num_query_heads % shape.num_kv_heads == 0);
    require(shape.head_dim > 0 && shape.value_dim > 0 && shape.hidden > 0 && shape.vocab > 0 &&
            shape.num_layers > 0);
    require(shape.ffn > 0 || shape.num_experts() > 0);
    require(is_usable(config.softmax_scale()) && is_usable(config.rope.magnitude()) &&
            is_usable(config.rms_norm_eps));
    const auto frequencies = config.rope.inverse_frequencies();
    require(static_cast<std::int64_t>(frequencies.size()) * 2 == config.rope.rotary_dim);
    require(std::all_of(frequencies.begin(), frequencies.end(), is_usable));
    bool has_dense = false;
    bool has_moe = false;
    for (std::int64_t layer = 0; layer < shape.num_layers; ++layer) {
      (config.shape.is_moe_layer(layer) ? has_moe : has_dense) = true;
      require(config.window(layer) >= 0);
    }
    require(has_dense == (shape.ffn > 0));
    require(has_moe == (shape.num_experts() > 0));
    if (config.shape.moe) {
      require(config.shape.moe->num_experts % config.router.num_groups == 0);
      require(config.shape.moe->top_k <=
              config.router.groups_kept * (config.shape.moe->num_experts / config.router.num_groups));
      require(is_usable(config.router.scale));
    }
  } catch (const helix::Error& error) {
    require(error.code() == ErrorCode::invalid_file || error.code() == ErrorCode::unsupported);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  parse_config(text);
  return 0;
}
