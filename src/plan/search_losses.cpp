// SPDX-License-Identifier: Apache-2.0
// Explains why the runners-up of a search lost.
#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include <helix/plan/search.hpp>

#include "plan/search_walk.hpp"

namespace helix::plan {
namespace {

/// The best configuration of one kind so far. One that meets all requirements ranks before one that is too
/// slow, and that before one that does not fit.
struct Runner {
  enum class State : std::uint8_t { meets_all, over_ttl, out_of_memory };
  State state = State::out_of_memory;
  Layout layout;
  std::int64_t batch = 0;
  RankMemoryPlan memory;
  StepTotals totals;
};

bool replaces(const Runner& next, const Runner& now, Objective objective) {
  if (next.state != now.state) return next.state < now.state;
  switch (next.state) {
    case Runner::State::meets_all:
      return detail::is_better(objective, next.totals, now.totals);
    case Runner::State::over_ttl:
      return next.totals.ttl < now.totals.ttl;
    case Runner::State::out_of_memory:
      return next.memory.total() < now.memory.total();
  }
  return false;
}

/// The cost of a time: TTL, or for throughput the GPU time per token.
Time charge(Objective objective, Time time, const StepTotals& totals) {
  if (objective == Objective::latency) return time;
  return time * totals.num_gpus / static_cast<double>(totals.batch);
}

/// The cost in which `loser` exceeds `winner` most.
std::pair<Cost, Time> largest_excess(Objective objective, const StepTotals& loser, const StepTotals& winner) {
  Cost worst = Cost::kv_read;
  Time excess = microseconds(-std::numeric_limits<double>::infinity());
  for (int i = 0; i < kNumCosts; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const Time difference =
        charge(objective, loser.by_cost[at], loser) - charge(objective, winner.by_cost[at], winner);
    if (difference > excess) {
      excess = difference;
      worst = static_cast<Cost>(i);
    }
  }
  return {worst, excess};
}

/// Formats with four significant digits, or all digits before the point; never with an exponent.
std::string decimal(double value) {
  const double size = std::abs(value);
  const int magnitude = size > 0 && std::isfinite(size) ? static_cast<int>(std::floor(std::log10(size))) : 0;
  std::ostringstream out;
  out << std::fixed << std::setprecision(std::max(0, 3 - magnitude)) << value;
  std::string text = out.str();
  if (text.find('.') != std::string::npos) {
    text.erase(text.find_last_not_of('0') + 1);
    if (text.ends_with('.')) text.pop_back();
  }
  return text;
}

/// Whether both print the same, so that the text must say how little they differ.
bool reads_alike(double a, double b) {
  return decimal(a) == decimal(b);
}

/// ", not 2.5"
std::string beside(double value, double other, std::string_view more) {
  return reads_alike(value, other) ? ", less than 0.1 % " + std::string(more) : ", not " + decimal(other);
}

std::string sentence(const Loss& loss, const StepModel& model, const SearchSpace& space,
                     const Candidate& winner) {
  std::ostringstream out;
  const double ttl_ms = in_milliseconds(loss.totals.ttl);
  const double rate = in_tokens_per_second(loss.totals.tokens_per_gpu());
  const double usable_gb = in_gigabytes(model.hardware().usable_memory());
  const std::string mostly = ", mostly by " + std::string(to_string(loss.cost)) + " (+" +
                             decimal(in_milliseconds(loss.excess)) + " ";
  out << loss.layout.to_string() << " at batch " << loss.batch;
  switch (loss.reason) {
    case LossReason::memory:
      out << " does not fit: " << decimal(in_gigabytes(loss.memory.total())) << " GB a GPU (weights "
          << decimal(in_gigabytes(loss.memory.weights)) << ", KV " << decimal(in_gigabytes(loss.memory.kv))
          << ") of " << decimal(usable_gb)
          << (reads_alike(in_gigabytes(loss.memory.total()), usable_gb) ? ", less than 0.1 % too much" : "");
      break;
    case LossReason::ttl:
      out << " takes " << decimal(ttl_ms) << " ms, "
          << (reads_alike(ttl_ms, in_milliseconds(*space.ttl_limit)) ? "less than 0.1 % " : "")
          << "over the limit of " << decimal(in_milliseconds(*space.ttl_limit)) << " ms" << mostly << "ms)";
      break;
    case LossReason::slower:
      out << " takes " << decimal(ttl_ms) << " ms"
          << beside(ttl_ms, in_milliseconds(winner.totals.ttl), "longer") << mostly << "ms)";
      break;
    case LossReason::fewer_per_gpu:
      out << " gives " << decimal(rate) << " tokens/s/GPU"
          << beside(rate, in_tokens_per_second(winner.totals.tokens_per_gpu()), "fewer") << mostly
          << "GPU-ms a token)";
      break;
    case LossReason::equal:
      out << " does as well";
      break;
  }
  return out.str();
}

}  // namespace

std::string_view to_string(LossReason reason) {
  switch (reason) {
    case LossReason::memory:
      return "memory";
    case LossReason::ttl:
      return "ttl";
    case LossReason::slower:
      return "slower";
    case LossReason::fewer_per_gpu:
      return "fewer_per_gpu";
    case LossReason::equal:
      return "equal";
  }
  return "unknown";
}

std::vector<Loss> explain_losses(const StepModel& model, const Workload& workload, const SearchSpace& space,
                                 const SearchResult& result) {
  if (!result.best) return {};
  const Candidate& winner = result.candidates[*result.best];
  using Kind = std::pair<Strategy, bool>;  // strategy, and whether HOP-B is off
  std::map<Kind, Runner> runners;
  detail::for_each_configuration(
      model.model(), workload, space, [&](const Layout& layout, const Workload& load) {
        if (layout == winner.layout && load.batch == winner.totals.batch) return;
        Runner next{.layout = layout,
                    .batch = load.batch,
                    .memory = model.memory(layout, load),
                    .totals = model.evaluate(layout, load)};
        if (next.memory.total() <= model.hardware().usable_memory()) {
          const bool is_over = space.ttl_limit && next.totals.ttl > *space.ttl_limit;
          next.state = is_over ? Runner::State::over_ttl : Runner::State::meets_all;
        }
        const auto [at, is_new] =
            runners.try_emplace({layout.strategy, layout.kvp > 1 && layout.hop_b_slices == 1}, next);
        if (!is_new && replaces(next, at->second, space.objective)) at->second = next;
      });

  std::vector<Loss> losses;
  for (const auto& [kind, runner] : runners) {
    Loss loss{
        .layout = runner.layout, .batch = runner.batch, .memory = runner.memory, .totals = runner.totals};
    Objective compared = space.objective;
    if (runner.state == Runner::State::out_of_memory) {
      loss.reason = LossReason::memory;
    } else if (runner.state == Runner::State::over_ttl) {
      loss.reason = LossReason::ttl;
      compared = Objective::latency;
    } else if (!detail::is_better(space.objective, winner.totals, runner.totals)) {
      loss.reason = LossReason::equal;
    } else if (space.objective == Objective::throughput &&
               winner.totals.tokens_per_gpu() > runner.totals.tokens_per_gpu()) {
      loss.reason = LossReason::fewer_per_gpu;
    } else if (runner.totals.ttl > winner.totals.ttl) {
      loss.reason = LossReason::slower;
      compared = Objective::latency;
    } else {
      loss.reason = LossReason::fewer_per_gpu;
      compared = Objective::throughput;
    }
    std::tie(loss.cost, loss.excess) = largest_excess(compared, runner.totals, winner.totals);
    loss.text = sentence(loss, model, space, winner);
    losses.push_back(std::move(loss));
  }
  return losses;
}

}  // namespace helix::plan
