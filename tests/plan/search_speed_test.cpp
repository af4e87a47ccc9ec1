// SPDX-License-Identifier: Apache-2.0
// A search of 100,000 configurations takes less than a second of one core, and so does one of a million
// layers. Other processes' work does not count.
#include <ctime>

#include <helix/plan/search.hpp>

#include "support/catch.hpp"

namespace {

using namespace helix::plan;

/// Seconds of CPU time that this process has taken.
double cpu_seconds() {
  std::timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

TEST_CASE("100,000 configurations take less than a second") {
  const StepModel model(model_preset("deepseek-r1"), {4, 4, 4}, hardware_preset("gb200"));
  SearchSpace space{.max_gpus = 64, .hop_b_slices = {0, 1, 2, 4}};
  for (std::int64_t batch = 1; batch <= 300; ++batch) space.batches.push_back(batch);
  const double begin = cpu_seconds();
  const SearchResult result = search(model, {.context = tokens(1e5)}, space);
  const double elapsed = cpu_seconds() - begin;
  // Candidates that do not fit cost nothing.
  const auto timed = static_cast<double>(result.candidates.size());
  INFO(timed << " timed configurations in " << elapsed << " s of CPU time");
  CHECK(timed >= 100000);
#ifdef NDEBUG
  CHECK(elapsed < timed / 100000);
#endif
}

TEST_CASE("a search does not take longer for a model's number of layers") {
  Model model = model_preset("llama-3.1-8b");
  model.shape.num_layers = std::int64_t{1} << 20;
  model.shape.hidden = 128;
  model.shape.ffn = 128;
  const double begin = cpu_seconds();
  Hardware hardware = hardware_preset("gb200");
  hardware.memory = gigabytes(1e9);
  const StepModel step(model, {4, 4, 4}, hardware);
  const SearchResult result = search(step, {.context = tokens(1000)}, {.max_gpus = 64});
  const double elapsed = cpu_seconds() - begin;
  INFO(result.candidates.size() << " configurations in " << elapsed << " s of CPU time");
  CHECK(result.candidates.size() > 1000);
#ifdef NDEBUG
  CHECK(elapsed < 1);
#endif
}

}  // namespace
