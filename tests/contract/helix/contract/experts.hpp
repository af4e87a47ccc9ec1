// SPDX-License-Identifier: Apache-2.0
// Routing and experts, compared with their definitions in double.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <helix/contract/workbench.hpp>

namespace helix::contract {

/// Non-finite values give the same choice everywhere: NaN counts as -inf, ties go to the smaller id, and no
/// expert is chosen twice.
template <TestableBackend B>
void route_not_finite() {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<std::vector<float>> biases = {{kNan, 0, 0, 0, 0, 0, 0, 0},
                                                  {0, 0, 0, kNan, 0, 0, kNan, 0},
                                                  {kNan, kNan, kNan, kNan, kNan, kNan, kNan, kNan},
                                                  {kNan, kNan, kNan, kNan, kNan, 0, kNan, kNan},
                                                  {-kInf, kNan, -kInf, 0, kNan, kInf, kInf, -kInf},
                                                  {kInf, -kInf, -kInf, kInf, kNan, kNan, 0, 0},
                                                  {-kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf, -kInf}};
  for (const std::vector<float>& values : biases) {
    for (const auto scoring : {RouterScoring::softmax, RouterScoring::sigmoid}) {
      for (const auto& [groups, kept] : {std::pair{1, 1}, std::pair{4, 2}, std::pair{2, 1}}) {
        CAPTURE(values, int(scoring), groups, kept);
        Workbench<B> bench;
        const auto logits = bench.random(3 * 8, 3.0);
        const auto bias = bench.array(values);
        const auto experts = bench.array(std::vector<std::int32_t>(3 * 4, -9));
        const auto weights = bench.poison(3 * 4);
        HELIX_CHECK_OPERATION(bench, route, ([&, num_groups = groups, groups_kept = kept](const auto& side) {
                                return RouteArgs{.logits = side.view(logits, 3, 8),
                                                 .bias = side(bias),
                                                 .scoring = scoring,
                                                 .num_groups = num_groups,
                                                 .groups_kept = groups_kept,
                                                 .experts = side.view(experts, 3, 4),
                                                 .weights = side.view(weights, 3, 4)};
                              }));
      }
    }
  }
}

template <TestableBackend B>
void route() {
  route_not_finite<B>();
  struct Case {
    std::int64_t experts, groups, kept, top_k;
  };
  for (const Case c : {Case{1, 1, 1, 1}, Case{8, 1, 1, 2}, Case{8, 4, 2, 3}, Case{64, 8, 3, 6}}) {
    for (const auto scoring : {RouterScoring::softmax, RouterScoring::sigmoid}) {
      for (const bool has_bias : {false, true}) {
        for (const bool normalize : {false, true}) {
          for (const std::int64_t tokens : {0, 1, 7}) {
            CAPTURE(c.experts, c.groups, c.kept, c.top_k, int(scoring), has_bias, normalize, tokens);
            Workbench<B> bench;
            const auto logits = bench.random(tokens * c.experts, 3.0);
            const auto bias = bench.random(c.experts, 0.4);
            const auto experts =
                bench.array(std::vector<std::int32_t>(static_cast<std::size_t>(tokens * c.top_k), -9));
            const auto weights = bench.poison(tokens * c.top_k);
            HELIX_CHECK_OPERATION(bench, route, ([&](const auto& side) {
                                    return RouteArgs{side.view(logits, tokens, c.experts),
                                                     has_bias ? side(bias) : nullptr,
                                                     scoring,
                                                     c.groups,
                                                     c.kept,
                                                     normalize,
                                                     2.5f,
                                                     side.view(experts, tokens, c.top_k),
                                                     side.view(weights, tokens, c.top_k)};
                                  }));
          }
        }
      }
    }
  }
}

template <TestableBackend B>
void router_logits() {
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t tokens : {0, 1, 5, 33}) {
      for (const std::int64_t experts : {1, 8, 64}) {
        CAPTURE(to_string(dtype), tokens, experts);
        Workbench<B> bench;
        const auto in = bench.random(tokens * 48);
        const auto weight = bench.weight(experts, 48, dtype);
        const auto out = bench.poison(tokens * experts);
        HELIX_CHECK_OPERATION(bench, router_logits, ([&](const auto& side) {
                                return RouterLogitsArgs<float>{side.view(in, tokens, 48), weight.on(side),
                                                               side.view(out, tokens, experts)};
                              }));
      }
    }
  }
}

/// Scores that are too close for 16 bits are still distinguished: the larger logit wins, not the smaller id.
template <TestableBackend B>
void route_near_ties() {
  Workbench<B> bench;
  const float nudge = 1.0f + 1.0f / 65536.0f;
  const auto logits = bench.array(std::vector<float>{1.0f, nudge, 1.0f, 0.5f, nudge, 1.0f, 1.0f, nudge});
  const auto experts = bench.array(std::vector<std::int32_t>(2, -9));
  const auto weights = bench.poison(2);
  HELIX_CHECK_OPERATION(bench, route, ([&](const auto& side) {
                          return RouteArgs{.logits = side.view(logits, 2, 4),
                                           .experts = side.view(experts, 2, 1),
                                           .weights = side.view(weights, 2, 1)};
                        }));
}

template <TestableBackend B>
void expert_ffn() {
  for (const DType dtype : kWeightTypes) {
    for (const std::int64_t tokens : {0, 1, 6, 19}) {
      for (const std::int64_t width : {1, 8, 17}) {
        for (const std::int64_t first : {0, 4, 6}) {
          CAPTURE(to_string(dtype), tokens, width, first);
          constexpr std::int64_t kHidden = 24;
          constexpr std::int64_t kTopK = 3;
          Workbench<B> bench;
          const std::int64_t num_local = first == 6 ? 1 : 2;
          std::vector<std::int32_t> chosen;  // of 8 experts; some tokens choose none of this rank's experts
          for (std::int64_t t = 0; t < tokens; ++t)
            for (std::int64_t k = 0; k < kTopK; ++k)
              chosen.push_back(static_cast<std::int32_t>((t * 5 + k * 3) % 8));
          const auto experts = bench.array(chosen);
          const auto weights = bench.random(tokens * kTopK);
          const auto in = bench.random(tokens * kHidden);
          const auto out = bench.random(tokens * kHidden);
          std::vector<typename Workbench<B>::Weight> gate_up, down;
          for (std::int64_t e = 0; e < num_local; ++e) {
            gate_up.push_back(bench.weight(2 * width, kHidden, dtype));
            down.push_back(bench.weight(kHidden, width, dtype));
          }
          std::deque<std::vector<ExpertWeights>> kept;  // host arrays that the queued call still reads
          const std::size_t bytes = bench.backend().expert_ffn_workspace_bytes(tokens, kTopK, kHidden, width);
          typename B::Buffer workspace = bench.backend().allocate(std::max<std::size_t>(1, bytes));
          HELIX_CHECK_OPERATION(bench, expert_ffn, ([&](const auto& side) {
                                  std::vector<ExpertWeights>& local = kept.emplace_back();
                                  for (std::size_t e = 0; e < gate_up.size(); ++e)
                                    local.push_back({gate_up[e].on(side), down[e].on(side)});
                                  return ExpertFfnArgs<float>{side.view(in, tokens, kHidden),
                                                              side.view(experts, tokens, kTopK),
                                                              side.view(weights, tokens, kTopK),
                                                              local,
                                                              first,
                                                              side.view(out, tokens, kHidden),
                                                              {workspace.data(), bytes}};
                                }));
        }
      }
    }
  }
}

}  // namespace helix::contract
