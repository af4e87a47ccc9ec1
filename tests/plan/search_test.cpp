// SPDX-License-Identifier: Apache-2.0
// Search: the frontier compared with brute force, limits, explanations, errors.
#include <limits>
#include <random>
#include <set>
#include <vector>

#include <helix/plan/search.hpp>

#include "support/catch.hpp"
#include "support/failure.hpp"

namespace {

using namespace helix::plan;
using helix::ErrorCode;
using helix::test::failure_of;

const Precision kFp4{4, 4, 4};

/// The definition: another point is at least as good in both values and better in one.
bool is_dominated(const std::vector<Candidate>& all, std::size_t i) {
  const auto user = [&](std::size_t x) { return all[x].totals.tokens_per_user(); };
  const auto gpu = [&](std::size_t x) { return all[x].totals.tokens_per_gpu(); };
  for (std::size_t j = 0; j < all.size(); ++j) {
    if (user(j) >= user(i) && gpu(j) >= gpu(i) && (user(j) > user(i) || gpu(j) > gpu(i))) return true;
  }
  return false;
}

void check_frontier(const std::vector<Candidate>& all, const std::vector<std::size_t>& frontier) {
  std::set<std::pair<double, double>> expected;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!is_dominated(all, i)) {
      expected.insert({all[i].totals.tokens_per_user().base(), all[i].totals.tokens_per_gpu().base()});
    }
  }
  std::set<std::pair<double, double>> found;
  for (const std::size_t i : frontier) {
    found.insert({all[i].totals.tokens_per_user().base(), all[i].totals.tokens_per_gpu().base()});
  }
  CHECK(found == expected);
  CHECK(found.size() == frontier.size());  // equal points appear once
  for (std::size_t k = 1; k < frontier.size(); ++k) {
    CHECK(all[frontier[k]].totals.tokens_per_user() > all[frontier[k - 1]].totals.tokens_per_user());
    CHECK(all[frontier[k]].totals.tokens_per_gpu() < all[frontier[k - 1]].totals.tokens_per_gpu());
  }
}

TEST_CASE("the frontier of random points is what brute force finds") {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    std::vector<Candidate> points(static_cast<std::size_t>(round * 3));
    for (Candidate& point : points) {
      // Few different values, so that ties and equal points are common.
      point.totals.ttl = microseconds(static_cast<double>(1 + random() % 9));
      point.totals.batch = 1 + static_cast<std::int64_t>(random() % 9);
      point.totals.num_gpus = 1;
    }
    check_frontier(points, pareto_frontier(points));
  }
}

TEST_CASE("the frontier of a search is what brute force finds") {
  const StepModel model(model_preset("deepseek-r1"), kFp4, hardware_preset("gb200"));
  const SearchResult result =
      search(model, {.context = tokens(1e6)}, {.max_gpus = 16, .max_batch = 64, .hop_b_slices = {0, 1}});
  REQUIRE(result.candidates.size() > 100);
  check_frontier(result.candidates, result.frontier);
}

TEST_CASE("every candidate is legal, fits, meets the limit and is timed as explain() times it") {
  const StepModel model(model_preset("llama-3.1-70b"), {}, hardware_preset("h200"));
  const Workload workload{.context = tokens(3e5)};
  SearchSpace space{.max_gpus = 16, .max_batch = 32, .ttl_limit = milliseconds(40)};
  const SearchResult result = search(model, workload, space);
  CHECK(result.counts.out_of_memory > 0);
  CHECK(result.counts.over_ttl > 0);
  CHECK(result.counts.evaluated == result.counts.out_of_memory + result.counts.over_ttl +
                                       static_cast<std::int64_t>(result.candidates.size()));
  for (const Candidate& candidate : result.candidates) {
    CHECK(is_legal(candidate.layout, model.model()));
    CHECK(candidate.memory.total() <= model.hardware().usable_memory());
    CHECK(candidate.totals.ttl <= milliseconds(40));
    Workload load = workload;
    load.batch = candidate.totals.batch;
    CHECK(model.explain(candidate.layout, load).totals.ttl == candidate.totals.ttl);
    CHECK(candidate.layout.num_gpus() <= 16);
  }
  REQUIRE(result.best);
  for (const Candidate& candidate : result.candidates) {
    CHECK(candidate.totals.tokens_per_gpu() <= result.candidates[*result.best].totals.tokens_per_gpu());
  }
  space.objective = Objective::latency;
  // What takes exactly as long as the limit meets it.
  space.ttl_limit = result.candidates[*result.best].totals.ttl;
  CHECK(search(model, workload, space).candidates.size() >= 1);
  space.ttl_limit = milliseconds(40);
  const SearchResult fastest = search(model, workload, space);
  for (const Candidate& candidate : fastest.candidates) {
    CHECK(candidate.totals.ttl >= fastest.candidates[*fastest.best].totals.ttl);
  }
}

TEST_CASE("no stage is without a layer, and what has nothing to slice is tried once whatever the slices") {
  Model short_model = model_preset("llama-3.1-8b");
  short_model.shape.num_layers = 2;
  const StepModel model(short_model, {}, hardware_preset("h200"));
  const Workload workload{.context = tokens(1e4)};
  const SearchResult result = search(model, workload, {.max_gpus = 8, .max_batch = 2});
  REQUIRE_FALSE(result.candidates.empty());
  for (const Candidate& candidate : result.candidates) CHECK(candidate.layout.pp <= 2);
  const auto evaluated = [&](Strategy strategy, const std::vector<int>& slices) {
    return search(model, workload,
                  {.max_gpus = 2,
                   .gpu_counts = {2},
                   .batches = {4},
                   .strategies = {strategy},
                   .pipeline_stages = {1},
                   .hop_b_slices = slices})
        .counts.evaluated;
  };
  CHECK(evaluated(Strategy::tensor_parallel, {1, 2, 4}) == evaluated(Strategy::tensor_parallel, {1}));
  // KVP 2 with each number of slices, and KVP 1, which has none.
  CHECK(evaluated(Strategy::helix, {1, 2, 4}) == 4);
}

TEST_CASE("each loser is the nearest of its kind to winning, and its excess is GPU time a token") {
  const StepModel model(model_preset("llama-3.1-405b"), kFp4, hardware_preset("gb200"));
  const Workload workload{.context = tokens(1e6)};
  const auto of = [](SearchSpace space, Strategy strategy) {
    space.strategies = {strategy};
    return space;
  };
  SECTION("the least memory") {
    const SearchSpace space{.max_gpus = 16, .batches = {32, 16}, .pipeline_stages = {1}};
    const SearchResult result = search_or_throw(model, workload, space);
    int by_memory = 0;
    for (const Loss& loss : explain_losses(model, workload, space, result)) {
      if (loss.reason != LossReason::memory) continue;
      ++by_memory;
      INFO(loss.text);
      CHECK(loss.memory.total() == search(model, workload, of(space, loss.layout.strategy)).least_memory);
    }
    CHECK(by_memory > 0);
  }
  SECTION("the least time") {
    SearchSpace space{.max_gpus = 64, .gpu_counts = {64}, .batches = {2, 1}, .objective = Objective::latency};
    const SearchResult fastest = search_or_throw(model, workload, space);
    space.ttl_limit = fastest.candidates[*fastest.best].totals.ttl;  // which the winner meets alone
    const SearchResult result = search_or_throw(model, workload, space);
    int by_ttl = 0;
    for (const Loss& loss : explain_losses(model, workload, space, result)) {
      if (loss.reason != LossReason::ttl || loss.layout.strategy == Strategy::helix) continue;
      ++by_ttl;
      INFO(loss.text);
      SearchSpace own = of(space, loss.layout.strategy);
      own.ttl_limit.reset();
      const SearchResult alone = search_or_throw(model, workload, own);
      CHECK(loss.totals.ttl == alone.candidates[*alone.best].totals.ttl);
    }
    CHECK(by_ttl > 0);
  }
  SECTION("the same layout with another batch") {
    const SearchSpace space{.max_gpus = 8,
                            .gpu_counts = {8},
                            .batches = {1, 2},
                            .strategies = {Strategy::tensor_parallel},
                            .pipeline_stages = {1}};
    const StepModel dense(model_preset("llama-3.1-405b"), kFp4, hardware_preset("roofline-8000"));
    const SearchResult result = search_or_throw(dense, {.context = tokens(1e4)}, space);
    const StepTotals& winner = result.candidates[*result.best].totals;
    REQUIRE(winner.batch == 2);
    const std::vector<Loss> losses = explain_losses(dense, {.context = tokens(1e4)}, space, result);
    REQUIRE(losses.size() == 1);
    CHECK(losses.front().batch == 1);
    CHECK(losses.front().layout == result.candidates[*result.best].layout);
    const auto cost = static_cast<std::size_t>(losses.front().cost);
    CHECK(in_microseconds(losses.front().excess) ==
          Approx(8 * in_microseconds(losses.front().totals.by_cost[cost] - winner.by_cost[cost] / 2)));
  }
}

TEST_CASE("replicas fill the GPUs") {
  const StepModel model(model_preset("llama-3.1-8b"), {}, hardware_preset("h200"));
  const SearchResult result =
      search(model, {.context = tokens(1e4)}, {.max_gpus = 8, .batches = {8}, .has_replicas = true});
  REQUIRE_FALSE(result.candidates.empty());
  for (const Candidate& candidate : result.candidates) CHECK(candidate.totals.num_gpus == 8);
}

TEST_CASE("the answer says why the others lost") {
  const StepModel model(model_preset("llama-3.1-405b"), kFp4, hardware_preset("roofline-8000"));
  const Workload workload{.context = tokens(1e6)};
  const SearchSpace space{
      .max_gpus = 64, .gpu_counts = {64}, .batches = {1}, .objective = Objective::latency};
  const SearchResult result = search_or_throw(model, workload, space);
  CHECK(result.candidates[*result.best].layout.strategy == Strategy::helix);
  const std::vector<Loss> losses = explain_losses(model, workload, space, result);
  REQUIRE(losses.size() == 4);  // the best of each strategy, except the winner
  for (const Loss& loss : losses) {
    CHECK_FALSE(loss.text.empty());
    if (loss.layout.strategy == Strategy::tensor_parallel) {
      CHECK(loss.reason == LossReason::slower);
      CHECK(loss.cost == Cost::kv_read);
      // 8 times 2 us, minus the 2 us of the winner, in each of 126 layers.
      CHECK(in_microseconds(loss.excess) == Approx(126 * 14).epsilon(0.01));
      CHECK(loss.text.find("kv_read") != std::string::npos);
    }
    if (loss.layout.strategy == Strategy::medha) CHECK(loss.cost == Cost::ffn_weights);
  }
}

TEST_CASE("a loss by less than its digits show says so, and no number has an exponent") {
  // The two fastest layouts differ by 6 ns of reading experts.
  const StepModel model(model_preset("deepseek-r1"), kFp4, hardware_preset("roofline-8000"));
  const SearchSpace space{.max_gpus = 64,
                          .gpu_counts = {64},
                          .batches = {1},
                          .strategies = {Strategy::helix},
                          .objective = Objective::latency};
  const auto text = [](const StepModel& step, const Workload& workload, const SearchSpace& searched) {
    const std::vector<Loss> losses =
        explain_losses(step, workload, searched, search_or_throw(step, workload, searched));
    REQUIRE(losses.size() == 1);
    return losses[0].text;
  };
  const std::string close = text(model, {.context = tokens(1e6)}, space);
  INFO(close);
  CHECK(close.find(" ms, less than 0.1 % longer, mostly by ffn_weights (+0.0000") != std::string::npos);
  CHECK(close.find("e-") == std::string::npos);
  // Numbers from 10,000 on are printed without decimals.
  SearchSpace many = space;
  many.batches = {std::int64_t{1} << 16};
  many.objective = Objective::throughput;
  Hardware large = hardware_preset("roofline-8000");
  large.memory = gigabytes(1e6);
  const std::string fast =
      text(StepModel(model_preset("llama-3.1-8b"), kFp4, large), {.context = tokens(1000)}, many);
  INFO(fast);
  CHECK(fast.find("e+") == std::string::npos);
  CHECK(fast.find(" tokens/s/GPU, not ") != std::string::npos);
}

TEST_CASE("what does not fit says so, with the memory") {
  const StepModel model(model_preset("llama-3.1-405b"), kFp4, hardware_preset("gb200"));
  const Workload workload{.context = tokens(1e6)};
  // 16 requests of 129 GB on 64 GPUs: duplicated eight times they do not fit.
  const SearchSpace space{.max_gpus = 64, .gpu_counts = {64}, .batches = {16}, .pipeline_stages = {1}};
  const SearchResult result = search_or_throw(model, workload, space);
  bool was_seen = false;
  for (const Loss& loss : explain_losses(model, workload, space, result)) {
    if (loss.layout.strategy != Strategy::tensor_parallel) continue;
    was_seen = true;
    CHECK(loss.reason == LossReason::memory);
    CHECK(loss.memory.kv > gigabytes(16 * 129.024 / 8 - 1));
    CHECK(loss.text.find("does not fit") != std::string::npos);
  }
  CHECK(was_seen);
}

TEST_CASE("no answer is an error that says what to change") {
  const StepModel model(model_preset("llama-3.1-405b"), {}, hardware_preset("h200"));
  const Workload workload{.context = tokens(1e6)};
  const auto small = failure_of([&] { search_or_throw(model, workload, {.max_gpus = 2}); });
  REQUIRE(small);
  CHECK(small->code == ErrorCode::capacity);
  CHECK(small->says("use more GPUs"));
  const auto slow = failure_of([&] {
    search_or_throw(model, workload, {.max_gpus = 64, .max_batch = 1, .ttl_limit = microseconds(1)});
  });
  REQUIRE(slow);
  CHECK(slow->says("the fastest"));
}

TEST_CASE("the error of a limit that nothing meets names the fastest, whatever was wanted") {
  const StepModel model(model_preset("llama-3.1-405b"), {}, hardware_preset("h200"));
  const Workload workload{.context = tokens(1e6)};
  const SearchSpace space{
      .max_gpus = 64, .max_batch = 4, .ttl_limit = microseconds(1), .objective = Objective::throughput};
  SearchSpace fast = space;
  fast.ttl_limit.reset();
  fast.objective = Objective::latency;
  const SearchResult all = search(model, workload, fast);
  const auto failure = failure_of([&] { search_or_throw(model, workload, space); });
  REQUIRE(failure);
  CHECK(failure->says("the fastest, " + all.candidates[*all.best].layout.to_string() + ", takes"));
}

TEST_CASE("a strategy of which something fits has not lost by memory") {
  const StepModel model(model_preset("llama-3.1-405b"), kFp4, hardware_preset("gb200"));
  const Workload workload{.context = tokens(1e6)};
  const SearchSpace space{.max_gpus = 64, .batches = {1, 16}, .pipeline_stages = {1}};
  const SearchResult result = search_or_throw(model, workload, space);
  REQUIRE(result.counts.out_of_memory > 0);
  std::set<Strategy> fitting;
  for (const Candidate& candidate : result.candidates) fitting.insert(candidate.layout.strategy);
  for (const Loss& loss : explain_losses(model, workload, space, result)) {
    INFO(loss.text);
    CHECK((loss.reason == LossReason::memory) == !fitting.contains(loss.layout.strategy));
  }
}

TEST_CASE("where no layout is legal the error names the GPUs asked for and the nearest number that has one") {
  const StepModel model(model_preset("llama-3.1-405b"), {}, hardware_preset("h200"));
  const auto says = [&](const SearchSpace& space, const std::string& words) {
    const auto failure = failure_of([&] { search_or_throw(model, {.context = tokens(1e4)}, space); });
    REQUIRE(failure);
    CHECK(failure->code == ErrorCode::invalid_topology);
    INFO(failure->what << "\n" << words);
    CHECK(failure->says(words));
  };
  const std::vector<Strategy> helix{Strategy::helix};
  // Powers of two are legal, because they divide the 128 query heads.
  says({.max_gpus = 7, .gpu_counts = {7}, .strategies = helix, .pipeline_stages = {1}},
       "is legal on 7 GPUs with the strategies and widths asked for: the nearest number that has one is 8");
  says({.max_gpus = 9, .gpu_counts = {9}, .strategies = helix, .pipeline_stages = {1}}, "has one is 8");
  says({.max_gpus = 7, .gpu_counts = {6, 7}, .strategies = helix, .pipeline_stages = {1}},
       "is legal on any number asked for up to 7 GPUs with the strategies and widths asked for: the nearest "
       "number that has one is 8");
  says({.max_gpus = 4, .gpu_counts = {4}, .pipeline_stages = {3}}, "is legal on 4 GPUs");
  says({.max_gpus = 4, .gpu_counts = {4}, .pipeline_stages = {3}}, "has one is 3");
  says({.max_gpus = 2, .strategies = helix, .pipeline_stages = {4}},
       "is legal on powers of two up to 2 GPUs with the strategies and widths asked for: the nearest number "
       "that has one is 4");
  says({.max_gpus = 1, .gpu_counts = {1}, .strategies = {Strategy::medha}, .pipeline_stages = {1}},
       "has one is 2");
  says({.max_gpus = 8, .pipeline_stages = {3}}, "no number near has one; ask for other strategies or stages");
}

TEST_CASE("absurd spaces are refused with the value") {
  const StepModel model(model_preset("llama-3.1-8b"), {}, hardware_preset("h200"));
  const auto refuses = [&](const SearchSpace& space, const char* says) {
    const auto failure = failure_of([&] { search(model, {.context = tokens(1000)}, space); });
    return failure && failure->code == ErrorCode::invalid_argument && failure->says(says);
  };
  CHECK(refuses({.max_gpus = 0}, "max_gpus is 0"));
  CHECK(refuses({.max_gpus = std::numeric_limits<int>::max()}, "max_gpus is 2147483647"));
  CHECK(refuses({.max_gpus = 4, .gpu_counts = {8}}, "gpu_counts has 8"));
  CHECK(refuses({.batches = {0}}, "batches has 0"));
  CHECK(refuses({.max_batch = -1}, "max_batch is -1"));
  CHECK(refuses({.strategies = {static_cast<Strategy>(77)}}, "strategies has 77"));
  CHECK(refuses({.pipeline_stages = {0}}, "pipeline_stages has 0"));
  CHECK(refuses({.hop_b_slices = {-1}}, "hop_b_slices has -1"));
  CHECK(refuses({.ttl_limit = milliseconds(std::numeric_limits<double>::quiet_NaN())}, "ttl_limit is nan"));
  CHECK(refuses({.ttl_limit = Time{}}, "ttl_limit is 0"));
  const auto wide = failure_of(
      [&] { legal_layouts(Strategy::helix, model_preset("llama-3.1-8b"), std::numeric_limits<int>::max()); });
  REQUIRE(wide);
  CHECK(wide->says("stage_size is 2147483647; it must be at most 65536"));
  CHECK(legal_layouts(Strategy::helix, model_preset("llama-3.1-8b"), 0).empty());
}

}  // namespace
