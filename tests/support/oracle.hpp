// SPDX-License-Identifier: Apache-2.0
// A transformer layer in double precision, unsharded and by definition: the expected result of decode_layer.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace helix::oracle {

/// Row-major f32 values as in a checkpoint, one row per output feature.
struct Matrix {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::vector<float> values;

  bool empty() const { return values.empty(); }
  const float* row(std::int64_t r) const { return values.data() + r * cols; }
};

/// Attention whose keys and values are shared by groups of query heads.
struct Attention {
  Matrix q, k, v;                 // [heads * D, M]
  Matrix q_bias, k_bias, v_bias;  // [1, heads * D] or empty
  Matrix q_norm, k_norm;          // [1, D] or empty
  Matrix o;                       // [M, Hq * D]
  Matrix o_bias;                  // [1, M] or empty
  std::vector<float> sinks;       // [Hq] or empty
};

/// DeepSeek's attention, with keys and values expanded from the latent.
struct LatentAttention {
  Matrix q_a, q_a_norm;                // [q_lora, M], [1, q_lora], or empty
  Matrix q_b;                          // [Hq * (nope + rope), q_lora or M]
  Matrix kv_a;                         // [kv_lora + rope, M]
  Matrix kv_a_norm;                    // [1, kv_lora]
  Matrix k_b;                          // W_UK [Hq * nope, kv_lora]
  Matrix v_b;                          // W_UV [Hq * v, kv_lora]
  Matrix o;                            // [M, Hq * v]
  Matrix q_a_bias, kv_a_bias, o_bias;  // [1, ...] or empty; without q_a, q_a_bias is q_b's bias
};

struct FeedForward {
  Matrix gate, up, down;                 // [F, M], [F, M], [M, F]
  Matrix gate_bias, up_bias, down_bias;  // [1, ...] or empty
};

struct Experts {
  Matrix router;                   // [E, M]
  std::vector<float> router_bias;  // [E] or empty; only affects the selection
  std::vector<FeedForward> routed;
  std::optional<FeedForward> shared;
  bool is_sigmoid = false;  // DeepSeek-V3's sigmoid; otherwise V2's softmax
  std::int64_t top_k = 1;
  std::int64_t num_groups = 1;
  std::int64_t groups_kept = 1;
  bool normalize = false;
  double scale = 1.0;
};

/// All of one layer. Exactly one of `attention` and `latent` is set, and one of `dense` and `experts`.
struct Layer {
  std::int64_t hidden = 0;
  std::int64_t query_heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t q_lora = 0, kv_lora = 0, nope = 0, rope = 0, value = 0;  // of `latent`
  // Larger than those of models, and different, so that a norm with the other one, or with none, shows.
  double norm_epsilon = 1e-2;
  double mla_norm_epsilon = 1e-1;
  double softmax_scale = 1.0;
  std::int64_t window = 0;
  double soft_cap = 0.0;
  std::vector<float> inverse_frequency;  // [rotary dims / 2]
  bool is_interleaved = false;
  double magnitude = 1.0;

  Matrix input_norm, post_attention_norm;  // [1, M]
  std::optional<Attention> attention;
  std::optional<LatentAttention> latent;
  std::optional<FeedForward> dense;
  std::optional<Experts> experts;
};

/// The cache of one sequence, one row per token: rotated keys of all heads, then values; for latent attention
/// the normed latent, then the rotated shared key.
struct History {
  std::vector<std::vector<double>> rows;
};

/// The layer's output for `tokens` [n, M], which follow the tokens of `history` and are appended to it.
/// Lowers `routing_margin`, if given, to the smallest gap between a chosen and a rejected expert or group. If
/// this gap is below the precision of the code under test, another choice is correct too.
std::vector<double> run_layer(const Layer& layer, History& history, std::span<const float> tokens,
                              double* routing_margin = nullptr);

}  // namespace helix::oracle
