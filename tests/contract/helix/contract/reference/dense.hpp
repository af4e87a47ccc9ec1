// SPDX-License-Identifier: Apache-2.0
// Norms, products, rope and experts, by their definitions in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include <helix/backend/layer.hpp>
#include <helix/contract/reference/elements.hpp>
#include <helix/error.hpp>

namespace helix::contract::reference {

inline void rms_norm(const RmsNormArgs<float>& args) {
  const auto& x = args.residual;
  for (std::int64_t r = 0; r < x.extent(0); ++r) {
    double squares = 0.0;
    for (std::int64_t i = 0; i < x.extent(1); ++i) {
      if (args.delta.data() != nullptr) x(r, i) = static_cast<float>(double{x(r, i)} + args.delta(r, i));
      squares += double{x(r, i)} * x(r, i);
    }
    if (args.out.data() == nullptr) continue;
    const double rms = std::sqrt(squares / static_cast<double>(x.extent(1)) + double{args.epsilon});
    for (std::int64_t i = 0; i < x.extent(1); ++i)
      args.out(r, i) = static_cast<float>(x(r, i) / rms * load(args.weight, 0, i));
  }
}

inline void linear(const LinearArgs<float>& args) {
  for (std::int64_t r = 0; r < args.in.extent(0); ++r) {
    for (std::int64_t n = 0; n < args.weight.rows; ++n) {
      double sum = args.bias.empty() ? 0.0 : load(args.bias, 0, n);
      if (args.accumulate) sum += double{args.out(r, n)};
      for (std::int64_t k = 0; k < args.weight.cols; ++k) sum += args.in(r, k) * load(args.weight, n, k);
      args.out(r, n) = static_cast<float>(sum);
    }
  }
}

inline void head_linear(const HeadLinearArgs<float>& args) {
  const std::int64_t width = args.out.extent(2);
  for (std::int64_t t = 0; t < args.in.extent(0); ++t) {
    for (std::int64_t h = 0; h < args.in.extent(1); ++h) {
      for (std::int64_t n = 0; n < width; ++n) {
        double sum = 0.0;
        for (std::int64_t k = 0; k < args.in.extent(2); ++k)
          sum += args.in(t, h, k) * load(args.weight, h * width + n, k);
        args.out(t, h, n) = static_cast<float>(sum);
      }
    }
  }
}

inline void head_rms_norm(const HeadRmsNormArgs<float>& args) {
  const auto& x = args.x;
  for (std::int64_t t = 0; t < x.extent(0); ++t) {
    for (std::int64_t h = 0; h < x.extent(1); ++h) {
      double squares = 0.0;
      for (std::int64_t i = 0; i < x.extent(2); ++i) squares += double{x(t, h, i)} * x(t, h, i);
      const double rms = std::sqrt(squares / static_cast<double>(x.extent(2)) + double{args.epsilon});
      for (std::int64_t i = 0; i < x.extent(2); ++i)
        x(t, h, i) = static_cast<float>(x(t, h, i) / rms * load(args.weight, 0, i));
    }
  }
}

inline void rope(const RopeArgs<float>& args) {
  const std::int64_t pairs = args.rope.rotary_dim / 2;
  std::vector<double> head(static_cast<std::size_t>(args.in.extent(2)));
  for (std::int64_t t = 0; t < args.in.extent(0); ++t) {
    for (std::int64_t h = 0; h < args.in.extent(1); ++h) {
      for (std::int64_t i = 0; i < args.in.extent(2); ++i)
        head[static_cast<std::size_t>(i)] = args.in(t, h, i);
      const bool is_padding = pairs > 0 && args.positions[t] < 0;
      for (std::int64_t i = 0; i < pairs && !is_padding; ++i) {
        const auto a = static_cast<std::size_t>(args.rope.is_interleaved ? 2 * i : i);
        const auto b = static_cast<std::size_t>(args.rope.is_interleaved ? 2 * i + 1 : i + pairs);
        const float angle = static_cast<float>(args.positions[t]) * args.rope.inverse_frequency[i];
        const double cosine = std::cos(double{angle}) * args.rope.magnitude;
        const double sine = std::sin(double{angle}) * args.rope.magnitude;
        const double x = head[a];
        const double y = head[b];
        head[a] = x * cosine - y * sine;
        head[b] = y * cosine + x * sine;
      }
      for (std::int64_t i = 0; i < args.in.extent(2); ++i)
        args.out(t, h, i) = static_cast<float>(head[static_cast<std::size_t>(i)]);
    }
  }
}

inline void swiglu(const SwigluArgs<float>& args) {
  const std::int64_t width = args.out.extent(1);
  for (std::int64_t r = 0; r < args.out.extent(0); ++r)
    for (std::int64_t i = 0; i < width; ++i)
      args.out(r, i) = static_cast<float>(silu(args.gate_up(r, i)) * args.gate_up(r, width + i));
}

inline void router_logits(const RouterLogitsArgs<float>& args) {
  linear({.in = args.in, .weight = args.weight, .bias = {}, .out = args.out});
}

/// Indices of the `count` largest values, best first; ties go to the smaller index.
inline std::vector<std::int64_t> largest(const std::vector<double>& values, std::int64_t count) {
  std::vector<std::int64_t> order(values.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return values[static_cast<std::size_t>(a)] > values[static_cast<std::size_t>(b)];
  });
  order.resize(static_cast<std::size_t>(count));
  return order;
}

inline void route(const RouteArgs& args) {
  const std::int64_t experts = args.logits.extent(1);
  const std::int64_t group = experts / args.num_groups;
  for (std::int64_t t = 0; t < args.logits.extent(0); ++t) {
    std::vector<double> scores;
    double highest = kMinusInfinity;
    for (std::int64_t e = 0; e < experts; ++e) highest = std::max(highest, double{args.logits(t, e)});
    double total = 0.0;
    for (std::int64_t e = 0; e < experts; ++e) {
      const double logit = args.logits(t, e);
      const bool is_softmax = args.scoring == RouterScoring::softmax;
      scores.push_back(is_softmax ? std::exp(logit - highest) : 1.0 / (1.0 + std::exp(-logit)));
      total += scores.back();
    }
    if (args.scoring == RouterScoring::softmax)
      for (double& score : scores) score /= total;
    std::vector<double> choice = scores;
    if (args.bias != nullptr)
      for (std::size_t e = 0; e < choice.size(); ++e) choice[e] += args.bias[e];
    const auto selectable = [](double value) { return std::isnan(value) ? kMinusInfinity : value; };
    for (double& value : choice) value = selectable(value);

    std::vector<double> group_scores;
    for (std::int64_t g = 0; g < args.num_groups; ++g) {
      std::vector<double> members(choice.begin() + g * group, choice.begin() + (g + 1) * group);
      std::sort(members.rbegin(), members.rend());
      const bool takes_two = args.scoring == RouterScoring::sigmoid && group > 1;
      group_scores.push_back(selectable(takes_two ? members[0] + members[1] : members[0]));
    }
    const std::vector<std::int64_t> kept = largest(group_scores, args.groups_kept);
    for (std::int64_t e = 0; e < experts; ++e)
      if (std::find(kept.begin(), kept.end(), e / group) == kept.end())
        choice[static_cast<std::size_t>(e)] = kMinusInfinity;

    const std::vector<std::int64_t> chosen = largest(choice, args.experts.extent(1));
    double sum = 0.0;
    for (std::int64_t e : chosen) sum += scores[static_cast<std::size_t>(e)];
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      const auto k = static_cast<std::int64_t>(i);
      const double score = scores[static_cast<std::size_t>(chosen[i])];
      args.experts(t, k) = static_cast<std::int32_t>(chosen[i]);
      args.weights(t, k) = static_cast<float>(score / (args.normalize ? sum + 1e-20 : 1.0) * args.scale);
    }
  }
}

inline void expert_ffn(const ExpertFfnArgs<float>& args) {
  const auto num_local = static_cast<std::int64_t>(args.local_experts.size());
  for (std::int64_t t = 0; t < args.in.extent(0); ++t) {
    std::vector<double> sums(static_cast<std::size_t>(args.out.extent(1)), 0.0);
    for (std::int64_t k = 0; k < args.experts.extent(1); ++k) {
      const std::int64_t local = args.experts(t, k) - args.first_expert;
      if (local < 0 || local >= num_local) continue;
      const ExpertWeights& weights = args.local_experts[static_cast<std::size_t>(local)];
      const std::int64_t width = weights.down.cols;
      for (std::int64_t f = 0; f < width; ++f) {
        double gate = 0.0;
        double up = 0.0;
        for (std::int64_t i = 0; i < args.in.extent(1); ++i) {
          gate += args.in(t, i) * load(weights.gate_up, f, i);
          up += args.in(t, i) * load(weights.gate_up, width + f, i);
        }
        const double activated = args.weights(t, k) * silu(gate) * up;
        for (std::size_t m = 0; m < sums.size(); ++m)
          sums[m] += activated * load(weights.down, static_cast<std::int64_t>(m), f);
      }
    }
    for (std::size_t m = 0; m < sums.size(); ++m) {
      float& out = args.out(t, static_cast<std::int64_t>(m));
      out = static_cast<float>(out + sums[m]);
    }
  }
}

}  // namespace helix::contract::reference
