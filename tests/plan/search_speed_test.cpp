// SPDX-License-Identifier: Apache-2.0
// A search of 100,000 configurations takes less than a second on one core.
#include <chrono>

#include <helix/plan/search.hpp>

#include "support/catch.hpp"

namespace {

using namespace helix::plan;

TEST_CASE("100,000 configurations take less than a second") {
  const StepModel model(model_preset("deepseek-r1"), {4, 4, 4}, hardware_preset("gb200"));
  SearchSpace space{.max_gpus = 64, .hop_b_slices = {0, 1, 2, 4}};
  for (std::int64_t batch = 1; batch <= 300; ++batch) space.batches.push_back(batch);
  const auto begin = std::chrono::steady_clock::now();
  const SearchResult result = search(model, {.context = tokens(1e5)}, space);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  const auto timed = static_cast<double>(result.candidates.size());  // those that do not fit cost nothing
  INFO(timed << " timed configurations in " << elapsed.count() << " s");
  CHECK(timed >= 100000);
#ifdef NDEBUG
  CHECK(elapsed.count() < timed / 100000);
#endif
}

}  // namespace
