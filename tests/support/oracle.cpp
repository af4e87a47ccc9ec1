// SPDX-License-Identifier: Apache-2.0
// The double-precision layer: naive loops over whole sequences, no code shared with the library.
#include "support/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>

namespace helix::oracle {
namespace {

using Vector = std::vector<double>;

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

Vector multiply(const Matrix& weight, const Vector& in, const Matrix& bias = {}) {
  Vector out(at(weight.rows));
  for (std::int64_t r = 0; r < weight.rows; ++r) {
    double sum = bias.empty() ? 0.0 : bias.values[at(r)];
    for (std::int64_t c = 0; c < weight.cols; ++c) sum += double{weight.row(r)[c]} * in[at(c)];
    out[at(r)] = sum;
  }
  return out;
}

Vector part(const Vector& v, std::int64_t begin, std::int64_t count) {
  return Vector(v.begin() + begin, v.begin() + begin + count);
}

void put(Vector& into, std::int64_t begin, const Vector& v) {
  std::copy(v.begin(), v.end(), into.begin() + begin);
}

Vector sum(const Vector& a, const Vector& b) {
  Vector out(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) out[i] = a[i] + b[i];
  return out;
}

double dot(const Vector& a, const Vector& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

Vector rms_norm(const Vector& x, const Matrix& weight, double epsilon) {
  const double mean_square = dot(x, x) / static_cast<double>(x.size());
  Vector out(x.size());
  for (std::size_t i = 0; i < x.size(); ++i)
    out[i] = x[i] / std::sqrt(mean_square + epsilon) * weight.values[i];
  return out;
}

Vector rotate(const Layer& layer, const Vector& x, std::int64_t position) {
  Vector out = x;
  const std::size_t pairs = layer.inverse_frequency.size();
  for (std::size_t i = 0; i < pairs; ++i) {
    const double angle = static_cast<double>(position) * layer.inverse_frequency[i];
    const double c = std::cos(angle) * layer.magnitude;
    const double s = std::sin(angle) * layer.magnitude;
    const std::size_t a = layer.is_interleaved ? 2 * i : i;
    const std::size_t b = layer.is_interleaved ? 2 * i + 1 : i + pairs;
    out[a] = x[a] * c - x[b] * s;
    out[b] = x[b] * c + x[a] * s;
  }
  return out;
}

/// The sum of `values` weighted by softmax(scores); `sink` joins the denominator.
Vector attend(const Layer& layer, Vector scores, const std::vector<Vector>& values, const float* sink) {
  double highest = sink != nullptr ? *sink : -std::numeric_limits<double>::infinity();
  for (double& score : scores) {
    score *= layer.softmax_scale;
    if (layer.soft_cap > 0.0) score = layer.soft_cap * std::tanh(score / layer.soft_cap);
    highest = std::max(highest, score);
  }
  double total = sink != nullptr ? std::exp(*sink - highest) : 0.0;
  Vector out(values.front().size(), 0.0);
  for (std::size_t j = 0; j < scores.size(); ++j) {
    const double weight = std::exp(scores[j] - highest);
    total += weight;
    for (std::size_t d = 0; d < out.size(); ++d) out[d] += weight * values[j][d];
  }
  for (double& x : out) x /= total;
  return out;
}

std::int64_t first_visible(const Layer& layer, std::int64_t position) {
  return layer.window > 0 ? std::max<std::int64_t>(0, position + 1 - layer.window) : 0;
}

Vector grouped_attention(const Layer& layer, const Attention& weights, History& history,
                         const Vector& normed) {
  const auto position = static_cast<std::int64_t>(history.rows.size());
  const std::int64_t d = layer.head_dim;
  const auto heads = [&](Vector x, std::int64_t count, const Matrix& norm) {
    for (std::int64_t h = 0; h < count; ++h) {
      Vector head = part(x, h * d, d);
      if (!norm.empty()) head = rms_norm(head, norm, layer.norm_epsilon);
      put(x, h * d, rotate(layer, head, position));
    }
    return x;
  };
  const Vector q = heads(multiply(weights.q, normed, weights.q_bias), layer.query_heads, weights.q_norm);
  Vector row = heads(multiply(weights.k, normed, weights.k_bias), layer.kv_heads, weights.k_norm);
  const Vector v = multiply(weights.v, normed, weights.v_bias);
  row.insert(row.end(), v.begin(), v.end());
  history.rows.push_back(row);

  Vector attended(at(layer.query_heads * d));
  for (std::int64_t h = 0; h < layer.query_heads; ++h) {
    const std::int64_t kv_head = h / (layer.query_heads / layer.kv_heads);
    const Vector query = part(q, h * d, d);
    Vector scores;
    std::vector<Vector> values;
    for (std::int64_t p = first_visible(layer, position); p <= position; ++p) {
      const Vector& cached = history.rows[at(p)];
      scores.push_back(dot(query, part(cached, kv_head * d, d)));
      values.push_back(part(cached, (layer.kv_heads + kv_head) * d, d));
    }
    const float* sink = weights.sinks.empty() ? nullptr : &weights.sinks[at(h)];
    put(attended, h * d, attend(layer, scores, values, sink));
  }
  return multiply(weights.o, attended, weights.o_bias);
}

Vector latent_attention(const Layer& layer, const LatentAttention& weights, History& history,
                        const Vector& normed) {
  const auto position = static_cast<std::int64_t>(history.rows.size());
  const std::int64_t width = layer.nope + layer.rope;
  Vector q = normed;
  if (!weights.q_a.empty())
    q = rms_norm(multiply(weights.q_a, normed, weights.q_a_bias), weights.q_a_norm, layer.mla_norm_epsilon);
  q = multiply(weights.q_b, q, weights.q_a.empty() ? weights.q_a_bias : Matrix{});

  const Vector compressed = multiply(weights.kv_a, normed, weights.kv_a_bias);
  Vector row = rms_norm(part(compressed, 0, layer.kv_lora), weights.kv_a_norm, layer.mla_norm_epsilon);
  const Vector k_rope = rotate(layer, part(compressed, layer.kv_lora, layer.rope), position);
  row.insert(row.end(), k_rope.begin(), k_rope.end());
  history.rows.push_back(row);

  // Keys and values of every token for every head: k_nope = W_UK c, v = W_UV c.
  const std::int64_t first = first_visible(layer, position);
  std::vector<Vector> k_nope, expanded_v;
  for (std::int64_t p = first; p <= position; ++p) {
    const Vector c = part(history.rows[at(p)], 0, layer.kv_lora);
    k_nope.push_back(multiply(weights.k_b, c));
    expanded_v.push_back(multiply(weights.v_b, c));
  }
  Vector attended(at(layer.query_heads * layer.value));
  for (std::int64_t h = 0; h < layer.query_heads; ++h) {
    const Vector q_nope = part(q, h * width, layer.nope);
    const Vector q_rope = rotate(layer, part(q, h * width + layer.nope, layer.rope), position);
    Vector scores;
    std::vector<Vector> values;
    for (std::int64_t p = first; p <= position; ++p) {
      scores.push_back(dot(q_nope, part(k_nope[at(p - first)], h * layer.nope, layer.nope)) +
                       dot(q_rope, part(history.rows[at(p)], layer.kv_lora, layer.rope)));
      values.push_back(part(expanded_v[at(p - first)], h * layer.value, layer.value));
    }
    put(attended, h * layer.value, attend(layer, scores, values, nullptr));
  }
  return multiply(weights.o, attended, weights.o_bias);
}

Vector feed_forward(const FeedForward& weights, const Vector& in) {
  Vector gate = multiply(weights.gate, in, weights.gate_bias);
  const Vector up = multiply(weights.up, in, weights.up_bias);
  for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1.0 + std::exp(-gate[i])) * up[i];
  return multiply(weights.down, gate, weights.down_bias);
}

/// Indices of the `count` largest scores, best first. Lowers `margin` to the gap to the next score.
std::vector<std::size_t> largest(const Vector& scores, std::int64_t count, double* margin) {
  std::vector<std::size_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
  const std::size_t kept = at(count);
  if (margin != nullptr && kept < order.size())
    *margin = std::min(*margin, scores[order[kept - 1]] - scores[order[kept]]);
  order.resize(kept);
  return order;
}

Vector mixture(const Experts& experts, const Vector& in, double* margin) {
  const Vector logits = multiply(experts.router, in);
  const std::size_t num_experts = logits.size();
  Vector scores(num_experts);
  if (experts.is_sigmoid) {
    for (std::size_t e = 0; e < num_experts; ++e) scores[e] = 1.0 / (1.0 + std::exp(-logits[e]));
  } else {
    double total = 0.0;
    for (double logit : logits) total += std::exp(logit);
    for (std::size_t e = 0; e < num_experts; ++e) scores[e] = std::exp(logits[e]) / total;
  }
  Vector choice = scores;
  if (!experts.router_bias.empty())
    for (std::size_t e = 0; e < num_experts; ++e) choice[e] += experts.router_bias[e];

  const std::size_t group_size = num_experts / at(experts.num_groups);
  Vector group_scores;
  for (std::int64_t g = 0; g < experts.num_groups; ++g) {
    const Vector group =
        part(choice, g * static_cast<std::int64_t>(group_size), static_cast<std::int64_t>(group_size));
    const auto best =
        largest(group, std::min<std::int64_t>(2, static_cast<std::int64_t>(group_size)), nullptr);
    group_scores.push_back(experts.is_sigmoid && best.size() > 1 ? group[best[0]] + group[best[1]]
                                                                 : group[best[0]]);
  }
  std::vector<bool> is_kept(at(experts.num_groups), false);
  for (std::size_t g : largest(group_scores, experts.groups_kept, margin)) is_kept[g] = true;
  for (std::size_t e = 0; e < num_experts; ++e)
    if (!is_kept[e / group_size]) choice[e] = -1e30;

  const std::vector<std::size_t> chosen = largest(choice, experts.top_k, margin);
  double total = 0.0;
  for (std::size_t e : chosen) total += scores[e];
  Vector out = experts.shared ? feed_forward(*experts.shared, in) : Vector(in.size(), 0.0);
  for (std::size_t e : chosen) {
    const double weight = scores[e] / (experts.normalize ? total + 1e-20 : 1.0) * experts.scale;
    const Vector result = feed_forward(experts.routed[e], in);
    for (std::size_t i = 0; i < out.size(); ++i) out[i] += weight * result[i];
  }
  return out;
}

}  // namespace

std::vector<double> run_layer(const Layer& layer, History& history, std::span<const float> tokens,
                              double* routing_margin) {
  std::vector<double> out;
  for (std::size_t begin = 0; begin < tokens.size(); begin += at(layer.hidden)) {
    Vector hidden(tokens.begin() + static_cast<std::ptrdiff_t>(begin),
                  tokens.begin() + static_cast<std::ptrdiff_t>(begin) + layer.hidden);
    const Vector normed = rms_norm(hidden, layer.input_norm, layer.norm_epsilon);
    hidden = sum(hidden, layer.latent ? latent_attention(layer, *layer.latent, history, normed)
                                      : grouped_attention(layer, *layer.attention, history, normed));
    const Vector second = rms_norm(hidden, layer.post_attention_norm, layer.norm_epsilon);
    hidden = sum(hidden, layer.experts ? mixture(*layer.experts, second, routing_margin)
                                       : feed_forward(*layer.dense, second));
    out.insert(out.end(), hidden.begin(), hidden.end());
  }
  return out;
}

}  // namespace helix::oracle
