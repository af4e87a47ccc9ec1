// SPDX-License-Identifier: Apache-2.0
// A random layer for the oracle, with its shape and its constants.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include <helix/dtype.hpp>
#include <helix/layer_config.hpp>
#include <helix/model_shape.hpp>

#include "support/oracle.hpp"

namespace helix::test {

/// Sizes and features of a random layer.
struct LayerSpec {
  std::int64_t hidden = 32;
  std::int64_t query_heads = 8;
  std::int64_t kv_heads = 4;
  std::int64_t head_dim = 16;
  std::int64_t ffn = 48;
  bool has_biases = false;
  bool has_head_norms = false;
  bool has_sinks = false;
  std::int64_t window = 0;
  double soft_cap = 0.0;
  bool is_interleaved = false;
  std::int64_t rotary_dim = 16;
  double magnitude = 1.0;

  bool is_mla = false;  // head_dim is then kv_lora + rope
  std::int64_t q_lora = 24;
  std::int64_t kv_lora = 16;
  std::int64_t nope = 8;
  std::int64_t rope = 8;
  std::int64_t value = 12;

  std::int64_t experts = 0;  // 0: a dense layer
  std::int64_t expert_ffn = 16;
  std::int64_t shared_ffn = 0;
  std::int64_t top_k = 2;
  std::int64_t groups = 1;
  std::int64_t groups_kept = 1;
  bool is_sigmoid = false;
  bool normalize = false;
  double routed_scale = 1.0;

  /// Adds small versions of the experts of DeepSeek-V3, or of V2.
  void add_deepseek_experts(bool is_v3) {
    experts = 8;
    shared_ffn = 24;
    groups = 4;
    groups_kept = 2;
    top_k = 3;
    is_sigmoid = is_v3;
    normalize = is_v3;
    routed_scale = is_v3 ? 2.5 : 1.0;
  }

  /// Latent attention with experts, as in these models.
  static LayerSpec deepseek(bool is_v3) {
    LayerSpec spec;
    spec.is_mla = true;
    spec.is_interleaved = true;
    spec.add_deepseek_experts(is_v3);
    return spec;
  }
};

/// Random weights that are exact in bf16, so that narrower copies hold the same values.
class RandomMatrices {
 public:
  explicit RandomMatrices(std::uint32_t seed) : generator_(seed) {}

  oracle::Matrix operator()(std::int64_t rows, std::int64_t cols, double spread, double centre = 0.0) {
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    oracle::Matrix m{rows, cols, std::vector<float>(static_cast<std::size_t>(rows * cols))};
    for (float& x : m.values)
      x = static_cast<float>(bf16(static_cast<float>(centre + spread * 1.7 * uniform(generator_))));
    return m;
  }

  /// A projection that keeps the magnitude of its input: spread 1 / sqrt(cols).
  oracle::Matrix projection(std::int64_t rows, std::int64_t cols) {
    return (*this)(rows, cols, 1.0 / std::sqrt(static_cast<double>(cols)));
  }
  oracle::Matrix norm(std::int64_t cols) { return (*this)(1, cols, 0.2, 1.0); }
  std::vector<float> vector(std::int64_t count, double spread) { return (*this)(1, count, spread).values; }

  oracle::FeedForward feed_forward(std::int64_t hidden, std::int64_t ffn, bool has_biases) {
    oracle::FeedForward f{
        projection(ffn, hidden), projection(ffn, hidden), projection(hidden, ffn), {}, {}, {}};
    if (has_biases) {
      f.gate_bias = (*this)(1, ffn, 0.5);
      f.up_bias = (*this)(1, ffn, 0.5);
      f.down_bias = (*this)(1, hidden, 0.5);
    }
    return f;
  }

 private:
  std::mt19937 generator_;
};

inline oracle::LatentAttention random_latent_attention(const LayerSpec& spec, RandomMatrices& random) {
  const std::int64_t m = spec.hidden;
  oracle::LatentAttention a;
  if (spec.q_lora > 0) {
    a.q_a = random.projection(spec.q_lora, m);
    a.q_a_norm = random.norm(spec.q_lora);
  }
  a.q_b = random.projection(spec.query_heads * (spec.nope + spec.rope), spec.q_lora > 0 ? spec.q_lora : m);
  a.kv_a = random.projection(spec.kv_lora + spec.rope, m);
  a.kv_a_norm = random.norm(spec.kv_lora);
  a.k_b = random.projection(spec.query_heads * spec.nope, spec.kv_lora);
  a.v_b = random.projection(spec.query_heads * spec.value, spec.kv_lora);
  a.o = random.projection(m, spec.query_heads * spec.value);
  if (spec.has_biases) {
    a.q_a_bias = random(1, spec.q_lora > 0 ? spec.q_lora : a.q_b.rows, 0.5);
    a.kv_a_bias = random(1, spec.kv_lora + spec.rope, 0.5);
    a.o_bias = random(1, m, 0.5);
  }
  return a;
}

inline oracle::Attention random_attention(const LayerSpec& spec, RandomMatrices& random) {
  const std::int64_t m = spec.hidden;
  const std::int64_t q_rows = spec.query_heads * spec.head_dim;
  const std::int64_t kv_rows = spec.kv_heads * spec.head_dim;
  oracle::Attention a;
  a.q = random.projection(q_rows, m);
  a.k = random.projection(kv_rows, m);
  a.v = random.projection(kv_rows, m);
  a.o = random.projection(m, q_rows);
  if (spec.has_biases) {
    a.q_bias = random(1, q_rows, 0.5);
    a.k_bias = random(1, kv_rows, 0.5);
    a.v_bias = random(1, kv_rows, 0.5);
    a.o_bias = random(1, m, 0.5);
  }
  if (spec.has_head_norms) {
    a.q_norm = random.norm(spec.head_dim);
    a.k_norm = random.norm(spec.head_dim);
  }
  if (spec.has_sinks) a.sinks = random.vector(spec.query_heads, 1.0);
  return a;
}

inline oracle::Experts random_experts(const LayerSpec& spec, RandomMatrices& random) {
  oracle::Experts e;
  e.router = random.projection(spec.experts, spec.hidden);
  if (spec.is_sigmoid) e.router_bias = random.vector(spec.experts, 0.3);
  for (std::int64_t i = 0; i < spec.experts; ++i)
    e.routed.push_back(random.feed_forward(spec.hidden, spec.expert_ffn, false));
  if (spec.shared_ffn > 0) e.shared = random.feed_forward(spec.hidden, spec.shared_ffn, false);
  e.is_sigmoid = spec.is_sigmoid;
  e.top_k = spec.top_k;
  e.num_groups = spec.groups;
  e.groups_kept = spec.groups_kept;
  e.normalize = spec.normalize;
  e.scale = spec.routed_scale;
  return e;
}

inline oracle::Layer random_layer(const LayerSpec& spec, std::uint32_t seed) {
  RandomMatrices random(seed);
  oracle::Layer layer;
  const std::int64_t m = spec.hidden;
  layer.hidden = m;
  layer.query_heads = spec.query_heads;
  layer.kv_heads = spec.is_mla ? 1 : spec.kv_heads;
  layer.head_dim = spec.is_mla ? spec.kv_lora + spec.rope : spec.head_dim;
  layer.window = spec.window;
  layer.soft_cap = spec.soft_cap;
  layer.is_interleaved = spec.is_interleaved;
  layer.magnitude = spec.magnitude;
  layer.softmax_scale =
      1.0 / std::sqrt(static_cast<double>(spec.is_mla ? spec.nope + spec.rope : spec.head_dim));
  const std::int64_t pairs = (spec.is_mla ? spec.rope : spec.rotary_dim) / 2;
  for (std::int64_t i = 0; i < pairs; ++i)
    layer.inverse_frequency.push_back(
        static_cast<float>(std::pow(10.0, -4.0 * static_cast<double>(i) / static_cast<double>(pairs))));
  layer.input_norm = random.norm(m);
  layer.post_attention_norm = random.norm(m);

  if (spec.is_mla) {
    layer.q_lora = spec.q_lora;
    layer.kv_lora = spec.kv_lora;
    layer.nope = spec.nope;
    layer.rope = spec.rope;
    layer.value = spec.value;
    layer.latent = random_latent_attention(spec, random);
  } else {
    layer.attention = random_attention(spec, random);
  }
  if (spec.experts == 0) {
    layer.dense = random.feed_forward(m, spec.ffn, spec.has_biases);
  } else {
    layer.experts = random_experts(spec, random);
  }
  return layer;
}

inline ModelShape shape_of(const oracle::Layer& layer) {
  ModelShape shape;
  shape.num_query_heads = layer.query_heads;
  shape.num_kv_heads = layer.kv_heads;
  shape.head_dim = layer.head_dim;
  shape.value_dim = layer.latent ? layer.kv_lora : layer.head_dim;
  shape.hidden = layer.hidden;
  shape.num_layers = 1;
  if (layer.latent) {
    shape.mla = MlaShape{.q_lora_rank = layer.q_lora,
                         .kv_lora_rank = layer.kv_lora,
                         .qk_nope_head_dim = layer.nope,
                         .qk_rope_head_dim = layer.rope,
                         .v_head_dim = layer.value};
  }
  if (layer.dense) shape.ffn = layer.dense->down.cols;
  if (layer.experts) {
    const oracle::Experts& e = *layer.experts;
    shape.moe = MoeShape{.num_experts = static_cast<std::int64_t>(e.routed.size()),
                         .top_k = e.top_k,
                         .expert_ffn = e.routed.front().down.cols,
                         .shared_ffn = e.shared ? e.shared->down.cols : 0};
  }
  return shape;
}

/// The constants that are not weights; `inverse_frequency` is the device's copy.
inline LayerConfig config_of(const oracle::Layer& layer, const float* inverse_frequency) {
  LayerConfig config;
  config.norm_epsilon = static_cast<float>(layer.norm_epsilon);
  config.softmax_scale = static_cast<float>(layer.softmax_scale);
  config.window = layer.window;
  config.soft_cap = static_cast<float>(layer.soft_cap);
  config.rope = {inverse_frequency, static_cast<std::int64_t>(layer.inverse_frequency.size()) * 2,
                 layer.is_interleaved, static_cast<float>(layer.magnitude)};
  config.latent_norm_epsilon = static_cast<float>(layer.mla_norm_epsilon);
  if (layer.experts) {
    const oracle::Experts& e = *layer.experts;
    config.router = {e.is_sigmoid ? RouterScoring::sigmoid : RouterScoring::softmax, e.num_groups,
                     e.groups_kept, e.normalize, static_cast<float>(e.scale)};
  }
  return config;
}

}  // namespace helix::test
