// SPDX-License-Identifier: Apache-2.0
// Routing as in DeepSeek-V2 and V3, checked by hand and against a naive double reference, and running the
// experts.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>

#include "support/catch.hpp"
#include "support/worse.hpp"

namespace helix::test {
namespace {

using cpu::Operators;

struct Router {
  RouterScoring scoring = RouterScoring::sigmoid;
  std::int64_t num_groups = 1;
  std::int64_t groups_kept = 1;
  std::int64_t top_k = 1;
  bool normalize = false;
  float scale = 1.0f;
  std::vector<float> bias = {};
};

struct Choice {
  std::vector<std::int32_t> experts;
  std::vector<float> weights;
};

Choice route(const Router& router, const std::vector<float>& logits, std::int64_t tokens = 1,
             int threads = 1) {
  const Operators ops(threads);
  const Operators::Stream stream = ops.create_stream();
  const auto experts = static_cast<std::int64_t>(logits.size()) / tokens;
  const auto count = static_cast<std::size_t>(tokens * router.top_k);
  Choice choice{std::vector<std::int32_t>(count, -1), std::vector<float>(count, std::nanf(""))};
  ops.route({{logits.data(), {tokens, experts}},
             router.bias.empty() ? nullptr : router.bias.data(),
             router.scoring,
             router.num_groups,
             router.groups_kept,
             router.normalize,
             router.scale,
             {choice.experts.data(), {tokens, router.top_k}},
             {choice.weights.data(), {tokens, router.top_k}}},
            stream);
  stream.synchronize();
  return choice;
}

float logit(double probability) {
  return static_cast<float>(std::log(probability / (1.0 - probability)));
}

TEST_CASE("V3: the correction bias selects, the weights are the unbiased sigmoids, best biased score first") {
  // Sigmoids .9 .6 .5 .1; biased: .9 .6 .5 1.1.
  const std::vector<float> logits{logit(.9), logit(.6), logit(.5), logit(.1)};
  const Choice choice = route({.top_k = 2, .normalize = true, .scale = 2.5f, .bias = {0, 0, 0, 1}}, logits);
  CHECK(choice.experts == std::vector<std::int32_t>{3, 0});
  CHECK(choice.weights[0] == Approx(2.5 * .1 / 1.0));
  CHECK(choice.weights[1] == Approx(2.5 * .9 / 1.0));
}

TEST_CASE("V3: without norm_topk_prob the weights are the scaled sigmoids themselves") {
  const Choice choice = route({.top_k = 2, .scale = 2.0f}, {logit(.25), logit(.75), logit(.5)});
  CHECK(choice.experts == std::vector<std::int32_t>{1, 2});
  CHECK(choice.weights[0] == Approx(1.5));
  CHECK(choice.weights[1] == Approx(1.0));
}

TEST_CASE("V3: a group counts by the sum of its two best, V2 by its maximum") {
  // Group 0: .9 .1 -> sum 1.0, max .9; group 1: .6 .6 -> sum 1.2, max .6.
  const std::vector<float> logits{logit(.9), logit(.1), logit(.6), logit(.6)};
  Router router{.num_groups = 2, .groups_kept = 1, .top_k = 2};
  CHECK(route(router, logits).experts == std::vector<std::int32_t>{2, 3});
  router.scoring = RouterScoring::softmax;
  CHECK(route(router, logits).experts == std::vector<std::int32_t>{0, 1});
}

TEST_CASE("experts of dropped groups are masked with -inf: negative biased scores still win over them") {
  // All biased scores are negative; a mask of 0 would choose an expert of the dropped group.
  const std::vector<float> logits{logit(.5), logit(.4), logit(.3), logit(.2)};
  const Choice choice =
      route({.num_groups = 2, .groups_kept = 1, .top_k = 2, .bias = {-3, -3, -1, -2}}, logits);
  CHECK(choice.experts == std::vector<std::int32_t>{2, 3});
  CHECK(choice.weights[0] == Approx(.3));
}

TEST_CASE("V2: softmax over all experts, no renormalisation, scaled") {
  const std::vector<float> logits{std::log(1.0f), std::log(2.0f), std::log(4.0f), std::log(3.0f)};
  Router router{.scoring = RouterScoring::softmax, .top_k = 2, .scale = 16.0f};
  Choice choice = route(router, logits);
  CHECK(choice.experts == std::vector<std::int32_t>{2, 3});
  CHECK(choice.weights[0] == Approx(16 * .4));
  CHECK(choice.weights[1] == Approx(16 * .3));
  router.num_groups = 2;  // group_limited_greedy; weights stay shares of all experts
  choice = route(router, logits);
  CHECK(choice.experts == std::vector<std::int32_t>{2, 3});
  CHECK(choice.weights[0] == Approx(16 * .4));
}

TEST_CASE("V2: logits beyond the exponent's range give their softmax") {
  const Choice choice = route({.scoring = RouterScoring::softmax, .top_k = 2}, {200, 199, -200, 0});
  CHECK(choice.experts == std::vector<std::int32_t>{0, 1});
  CHECK(choice.weights[0] == Approx(1 / (1 + std::exp(-1.0))));
  CHECK(choice.weights[1] == Approx(1 / (1 + std::exp(1.0))));
}

TEST_CASE("ties go to the smaller expert and to the smaller group") {
  CHECK(route({.top_k = 3}, {1, 2, 2, 2, 1}).experts == std::vector<std::int32_t>{1, 2, 3});
  CHECK(route({.num_groups = 3, .groups_kept = 2, .top_k = 4}, {1, 1, 1, 1, 1, 1}).experts ==
        std::vector<std::int32_t>{0, 1, 2, 3});
}

/// The best expert of `in` under the router `weight` [experts, hidden].
std::int32_t best_expert(const std::vector<float>& in, const std::vector<float>& weight) {
  const Operators ops;
  const Operators::Stream stream = ops.create_stream();
  const auto hidden = static_cast<std::int64_t>(in.size());
  const auto experts = static_cast<std::int64_t>(weight.size()) / hidden;
  std::vector<float> logits(static_cast<std::size_t>(experts), std::nanf(""));
  ops.router_logits({.in = {in.data(), {1, hidden}},
                     .weight = {weight.data(), DType::f32, experts, hidden},
                     .out = {logits.data(), {1, experts}}},
                    stream);
  stream.synchronize();
  return route({.scoring = RouterScoring::softmax, .top_k = 1}, logits).experts.front();
}

TEST_CASE("logits closer than the rounding of bf16 choose experts by their f32 values") {
  // Around 10, bf16 has steps of 1/16, so all three logits of a router round to the same value.
  for (const float gap : {1e-2f, 1e-3f, 1e-5f}) {
    for (std::int32_t best = 0; best < 3; ++best) {
      CAPTURE(gap, best);
      std::vector<float> in(64, 0.0f);
      in[0] = 10.0f;
      in[63] = 1.0f;
      std::vector<float> weight(3 * 64, 0.5f);
      for (std::int32_t expert = 0; expert < 3; ++expert) {
        weight[static_cast<std::size_t>(expert * 64)] = 1.0f;
        weight[static_cast<std::size_t>(expert * 64 + 63)] = expert == best ? gap : 0.0f;
      }
      REQUIRE(static_cast<float>(bf16(10.0f + gap)) == static_cast<float>(bf16(10.0f)));
      CHECK(best_expert(in, weight) == best);
    }
  }
}

TEST_CASE("sigmoids that underflow are normalised without dividing by zero") {
  const Choice choice = route({.top_k = 2, .normalize = true}, {-200, -300, -400});
  CHECK(choice.experts.front() == 0);
  for (const float weight : choice.weights) CHECK(std::isfinite(weight));
}

/// The choice by definition, in double, with sorted lists instead of repeated maxima.
std::vector<std::int32_t> naive_choice(const Router& router, const float* logits, std::size_t experts,
                                       std::vector<double>& scores, double& margin) {
  scores.assign(experts, 0.0);
  double sum = 0.0;
  for (std::size_t e = 0; e < experts; ++e) {
    scores[e] = router.scoring == RouterScoring::sigmoid ? 1.0 / (1.0 + std::exp(-double{logits[e]}))
                                                         : std::exp(double{logits[e]});
    sum += scores[e];
  }
  if (router.scoring == RouterScoring::softmax)
    for (double& score : scores) score /= sum;
  std::vector<double> biased = scores;
  for (std::size_t e = 0; e < router.bias.size(); ++e) biased[e] += router.bias[e];
  const auto sorted = [](std::vector<std::pair<double, std::int32_t>> list) {
    std::sort(list.begin(), list.end(),
              [](auto a, auto b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
    return list;
  };
  const std::size_t width = experts / static_cast<std::size_t>(router.num_groups);
  std::vector<std::pair<double, std::int32_t>> groups;
  for (std::size_t g = 0; g * width < experts; ++g) {
    std::vector<double> members(biased.begin() + static_cast<std::ptrdiff_t>(g * width),
                                biased.begin() + static_cast<std::ptrdiff_t>((g + 1) * width));
    std::sort(members.rbegin(), members.rend());
    const bool adds_two = router.scoring == RouterScoring::sigmoid && width > 1;
    groups.push_back({adds_two ? members[0] + members[1] : members[0], static_cast<std::int32_t>(g)});
  }
  groups = sorted(groups);
  const auto kept = static_cast<std::size_t>(router.groups_kept);
  if (kept < groups.size()) margin = std::min(margin, groups[kept - 1].first - groups[kept].first);
  std::vector<std::pair<double, std::int32_t>> candidates;
  for (std::size_t i = 0; i < kept; ++i)
    for (std::size_t e = 0; e < width; ++e) {
      const std::size_t expert = static_cast<std::size_t>(groups[i].second) * width + e;
      candidates.push_back({biased[expert], static_cast<std::int32_t>(expert)});
    }
  candidates = sorted(candidates);
  std::vector<std::int32_t> chosen;
  for (std::size_t i = 0; i < static_cast<std::size_t>(router.top_k); ++i) {
    chosen.push_back(candidates[i].second);
    if (i + 1 < candidates.size()) margin = std::min(margin, candidates[i].first - candidates[i + 1].first);
  }
  return chosen;
}

TEST_CASE("random routers agree with the definition, for any number of threads") {
  std::mt19937 generator(99);
  std::normal_distribution<float> normal;
  int compared = 0;
  for (int round = 0; round < 120; ++round) {
    Router router;
    router.scoring = round % 2 == 0 ? RouterScoring::sigmoid : RouterScoring::softmax;
    router.num_groups = std::vector<std::int64_t>{1, 2, 4, 8}[static_cast<std::size_t>(round / 2 % 4)];
    router.groups_kept = 1 + round % router.num_groups;
    constexpr std::size_t kExperts = 64;
    router.top_k = std::min<std::int64_t>(
        8, router.groups_kept * static_cast<std::int64_t>(kExperts) / router.num_groups);
    router.normalize = round % 3 == 0;
    router.scale = 2.5f;
    if (round % 5 != 0) {
      for (std::size_t e = 0; e < kExperts; ++e) router.bias.push_back(0.1f * normal(generator));
    }
    constexpr std::int64_t kTokens = 33;
    std::vector<float> logits(kTokens * kExperts);
    for (float& value : logits) value = normal(generator);
    const Choice choice = route(router, logits, kTokens, 1 + round % 3);
    for (std::size_t t = 0; t < kTokens; ++t) {
      std::vector<double> scores;
      double margin = 1.0;
      const auto expected = naive_choice(router, logits.data() + t * kExperts, kExperts, scores, margin);
      if (margin < 1e-5) continue;  // in f32 the other order is also correct
      ++compared;
      const auto k = static_cast<std::size_t>(router.top_k);
      double sum = 1e-20;
      for (const std::int32_t e : expected) sum += scores[static_cast<std::size_t>(e)];
      for (std::size_t i = 0; i < k; ++i) {
        REQUIRE(choice.experts[t * k + i] == expected[i]);
        const double share = scores[static_cast<std::size_t>(expected[i])] / (router.normalize ? sum : 1.0);
        REQUIRE(choice.weights[t * k + i] == Approx(2.5 * share).epsilon(1e-5));
      }
    }
  }
  CHECK(compared > 3000);
}

TEST_CASE("a router that cannot choose as many experts is refused with the numbers") {
  CHECK_THROWS_AS(route({.num_groups = 2, .groups_kept = 1, .top_k = 3}, {1, 2, 3, 4}), Error);
  CHECK_THROWS_AS(route({.num_groups = 3, .top_k = 1}, {1, 2, 3, 4}), Error);
  CHECK_THROWS_AS(route({.num_groups = 2, .groups_kept = 3, .top_k = 1}, {1, 2, 3, 4}), Error);
  CHECK_THROWS_AS(route({.top_k = 1}, std::vector<float>(4097)), Error);
}

/// The experts of one model in f32, cut into EP x TPF slices as Topology does.
struct Model {
  static constexpr std::int64_t kExperts = 6, kHidden = 40, kFfn = 24, kTopK = 3;
  std::vector<std::vector<float>> gate, up, down;

  explicit Model(std::uint32_t seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<std::vector<float>>& weights) {
      weights.assign(kExperts, std::vector<float>(kHidden * kFfn));
      for (auto& weight : weights)
        for (float& value : weight) value = 0.3f * normal(generator);
    };
    fill(gate);
    fill(up);
    fill(down);
  }
};

struct Step {
  std::vector<float> in;
  std::vector<std::int32_t> experts;
  std::vector<float> weights;
  std::int64_t tokens = 0;
};

Step random_step(std::int64_t tokens, std::uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Step step;
  step.tokens = tokens;
  for (std::int64_t i = 0; i < tokens * Model::kHidden; ++i) step.in.push_back(normal(generator));
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::vector<std::int32_t> all(Model::kExperts);
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), generator);
    for (std::size_t k = 0; k < Model::kTopK; ++k) {
      step.experts.push_back(all[k]);
      step.weights.push_back(0.2f + std::abs(normal(generator)));
    }
  }
  return step;
}

/// Adds the result of EP rank `ep_rank` of `ep` and TPF rank `tpf_rank` of `tpf` to `out`.
void run_rank(const Model& model, const Step& step, std::int64_t ep, std::int64_t ep_rank, std::int64_t tpf,
              std::int64_t tpf_rank, int threads, std::vector<float>& out) {
  const std::int64_t local = Model::kExperts / ep;
  const std::int64_t width = Model::kFfn / tpf;
  std::vector<std::vector<float>> gate_up, down;
  std::vector<ExpertWeights> weights;
  for (std::int64_t e = ep_rank * local; e < (ep_rank + 1) * local; ++e) {
    const auto expert = static_cast<std::size_t>(e);
    const auto rows = [&](const std::vector<float>& w) {
      const auto begin = w.begin() + tpf_rank * width * Model::kHidden;
      return std::vector<float>(begin, begin + width * Model::kHidden);
    };
    gate_up.push_back(rows(model.gate[expert]));
    const std::vector<float> up = rows(model.up[expert]);
    gate_up.back().insert(gate_up.back().end(), up.begin(), up.end());
    down.emplace_back();
    for (std::int64_t m = 0; m < Model::kHidden; ++m)
      for (std::int64_t f = 0; f < width; ++f)
        down.back().push_back(
            model.down[expert][static_cast<std::size_t>(m * Model::kFfn + tpf_rank * width + f)]);
  }
  for (std::size_t e = 0; e < gate_up.size(); ++e)
    weights.push_back({{gate_up[e].data(), DType::f32, 2 * width, Model::kHidden},
                       {down[e].data(), DType::f32, Model::kHidden, width}});
  const Operators ops(threads);
  const Operators::Stream stream = ops.create_stream();
  auto workspace =
      ops.allocate(ops.expert_ffn_workspace_bytes(step.tokens, Model::kTopK, Model::kHidden, width));
  std::fill_n(reinterpret_cast<float*>(workspace.data()), workspace.size_bytes() / sizeof(float),
              std::nanf(""));
  ops.expert_ffn({{step.in.data(), {step.tokens, Model::kHidden}},
                  {step.experts.data(), {step.tokens, Model::kTopK}},
                  {step.weights.data(), {step.tokens, Model::kTopK}},
                  weights,
                  ep_rank * local,
                  {out.data(), {step.tokens, Model::kHidden}},
                  {workspace.data(), workspace.size_bytes()}},
                 stream);
  stream.synchronize();
}

std::vector<double> expected_ffn(const Model& model, const Step& step) {
  std::vector<double> out;
  for (std::int64_t t = 0; t < step.tokens; ++t) {
    std::vector<double> row(Model::kHidden, 0.0);
    for (std::int64_t k = 0; k < Model::kTopK; ++k) {
      const auto pair = static_cast<std::size_t>(t * Model::kTopK + k);
      const auto expert = static_cast<std::size_t>(step.experts[pair]);
      std::vector<double> active(Model::kFfn);
      for (std::size_t f = 0; f < Model::kFfn; ++f) {
        double gate = 0.0, up = 0.0;
        for (std::size_t m = 0; m < Model::kHidden; ++m) {
          const double x = step.in[static_cast<std::size_t>(t) * Model::kHidden + m];
          gate += x * model.gate[expert][f * Model::kHidden + m];
          up += x * model.up[expert][f * Model::kHidden + m];
        }
        active[f] = gate / (1.0 + std::exp(-gate)) * up;
      }
      for (std::size_t m = 0; m < Model::kHidden; ++m)
        for (std::size_t f = 0; f < Model::kFfn; ++f)
          row[m] += step.weights[pair] * active[f] * model.down[expert][m * Model::kFfn + f];
    }
    out.insert(out.end(), row.begin(), row.end());
  }
  return out;
}

TEST_CASE("the ranks of any EP x TPF grid add up to all experts of every token") {
  const Model model(5);
  for (const std::int64_t tokens : {0, 1, 2, 17}) {
    const Step step = random_step(tokens, 6);
    const std::vector<double> expected = expected_ffn(model, step);
    double scale = 1.0;
    for (const double value : expected) scale = std::max(scale, std::abs(value));
    for (const std::int64_t ep : {1, 2, 3, 6}) {
      for (const std::int64_t tpf : {1, 2, 4}) {
        std::vector<float> sum(expected.size(), 0.0f);
        for (std::int64_t e = 0; e < ep; ++e)
          for (std::int64_t f = 0; f < tpf; ++f) run_rank(model, step, ep, e, tpf, f, 1, sum);
        double worst = 0.0;
        for (std::size_t i = 0; i < sum.size(); ++i) worst = worse(worst, std::abs(sum[i] - expected[i]));
        CAPTURE(tokens, ep, tpf);
        CHECK(worst <= 1e-5 * scale);
      }
    }
  }
}

TEST_CASE(
    "an expert's output for a token has the same bits in any batch, choice order and number of threads") {
  const Model model(7);
  const Step step = random_step(19, 8);
  std::vector<float> whole(static_cast<std::size_t>(19 * Model::kHidden), 0.5f);
  run_rank(model, step, 1, 0, 1, 0, 1, whole);
  for (const int threads : {2, 5}) {
    std::vector<float> again(whole.size(), 0.5f);
    run_rank(model, step, 1, 0, 1, 0, threads, again);
    CHECK(whole == again);
  }
  for (std::int64_t t = 0; t < 19; ++t) {
    Step one;
    one.tokens = 1;
    one.in.assign(step.in.begin() + t * Model::kHidden, step.in.begin() + (t + 1) * Model::kHidden);
    one.experts.assign(step.experts.begin() + t * 3, step.experts.begin() + (t + 1) * 3);
    one.weights.assign(step.weights.begin() + t * 3, step.weights.begin() + (t + 1) * 3);
    std::reverse(one.experts.begin(), one.experts.end());
    std::reverse(one.weights.begin(), one.weights.end());
    std::vector<float> alone(static_cast<std::size_t>(Model::kHidden), 0.5f);
    run_rank(model, one, 1, 0, 1, 0, 1, alone);
    CHECK(std::equal(alone.begin(), alone.end(), whole.begin() + t * Model::kHidden));
  }
}

}  // namespace
}  // namespace helix::test
