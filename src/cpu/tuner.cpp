// SPDX-License-Identifier: Apache-2.0
// Tuners, and the list of them with which a process reports and fixes its choices.
#include "cpu/tuner.hpp"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <helix/error.hpp>

namespace helix::cpu {
namespace {

using Source = KernelTuning::Source;

/// All tuners of the process. A function-local static, because tuners of several files register before
/// main().
struct Registry {
  std::mutex mutex;
  std::vector<Tuner*> tuners;
};

Registry& registry() {
  static Registry registry;
  return registry;
}

bool is_named(std::string_view pattern, std::string_view kernel) {
  if (!pattern.ends_with('*')) return pattern == kernel;
  return kernel.starts_with(pattern.substr(0, pattern.size() - 1));
}

}  // namespace

Tuner::Tuner(std::string kernel, const std::vector<const char*>& variants, std::int64_t least_bytes)
    : kernel_(std::move(kernel)),
      num_variants_(static_cast<int>(variants.size())),
      least_bytes_(least_bytes) {
  HELIX_EXPECTS(num_variants_ >= 1 && num_variants_ <= kMaxVariants, ErrorCode::internal, "kernel ", kernel_,
                " has ", num_variants_, " variants; a tuner takes 1 to ", kMaxVariants);
  std::copy(variants.begin(), variants.end(), variants_.begin());
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.tuners.push_back(this);
}

Tuner::~Tuner() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase(all.tuners, this);
}

Tuner::Call::Call(Tuner& tuner, std::int64_t bytes)
    : tuner_(tuner), bytes_(bytes), variant_(tuner.chosen_.load(std::memory_order_relaxed)) {
  if (bytes < tuner.least_bytes_ || tuner.num_variants_ == 1) return;
  if (tuner.source_.load(std::memory_order_relaxed) != Source::preset) return;
  const int turn = tuner.next_turn_.fetch_add(1, std::memory_order_relaxed);
  if (turn >= kTurns * tuner.num_variants_) return;  // other calls still run the last turns
  variant_ = turn % tuner.num_variants_;
  is_timed_ = true;
  exceptions_ = std::uncaught_exceptions();
  begin_ = std::chrono::steady_clock::now();
}

void Tuner::Call::end() noexcept {
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin_;
  const bool has_failed = std::uncaught_exceptions() > exceptions_;
  tuner_.note(variant_, has_failed ? std::numeric_limits<double>::infinity()
                                   : seconds.count() / static_cast<double>(bytes_));
}

void Tuner::note(int variant, double seconds_a_byte) noexcept {
  const std::lock_guard lock(mutex_);
  double& best = best_[static_cast<std::size_t>(variant)];
  best = best == 0.0 ? seconds_a_byte : std::min(best, seconds_a_byte);
  if (++num_timed_ < kTurns * num_variants_) return;
  if (source_.load() == Source::fixed) return;
  const auto* fastest = std::min_element(best_.data(), best_.data() + num_variants_);
  chosen_ = static_cast<int>(fastest - best_.data());
  source_ = Source::measured;
}

void Tuner::fix(int variant) {
  const std::lock_guard lock(mutex_);
  if (variant != kMeasured) {
    chosen_ = variant;
    source_ = Source::fixed;
  } else if (source_.load() == Source::fixed) {
    chosen_ = 0;
    best_.fill(0.0);
    num_timed_ = 0;
    next_turn_ = 0;
    source_ = Source::preset;
  }
}

std::vector<KernelTuning> tuning() {
  std::vector<KernelTuning> result;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  for (const Tuner* tuner : all.tuners) {
    const auto chosen = static_cast<std::size_t>(tuner->chosen_.load());
    result.push_back({tuner->kernel_, tuner->variants_[chosen], tuner->source_.load()});
  }
  std::sort(result.begin(), result.end(),
            [](const KernelTuning& a, const KernelTuning& b) { return a.kernel < b.kernel; });
  return result;
}

void fix_tuning(std::string_view text) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::vector<std::pair<Tuner*, int>> changes;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::string_view item = text.substr(begin, text.find(',', begin) - begin);
    begin += item.size() + 1;
    const std::size_t equals = item.find('=');
    HELIX_EXPECTS(equals != std::string_view::npos, ErrorCode::invalid_argument, "tuning: \"", item,
                  "\" is not of the form kernel=variant");
    const std::string_view kernel = item.substr(0, equals);
    const std::string_view variant = item.substr(equals + 1);
    std::string kernels;
    const std::size_t before = changes.size();
    for (Tuner* tuner : all.tuners) {
      kernels.append(kernels.empty() ? "" : ", ").append(tuner->kernel_);
      if (!is_named(kernel, tuner->kernel_)) continue;
      const auto* first = tuner->variants_.data();
      const auto* last = first + tuner->num_variants_;
      const auto* found = std::find(first, last, variant);
      std::string variants;
      for (const auto* name = first; name != last; ++name)
        variants.append(name == first ? "" : ", ").append(*name);
      const bool is_auto = variant == "auto";
      HELIX_EXPECTS(is_auto || found != last, ErrorCode::invalid_argument, "tuning: kernel ", tuner->kernel_,
                    " has no variant \"", variant, "\"; it has ", variants, ", and auto measures");
      changes.emplace_back(tuner, is_auto ? Tuner::kMeasured : static_cast<int>(found - first));
    }
    HELIX_EXPECTS(changes.size() > before, ErrorCode::invalid_argument, "tuning: there is no kernel \"",
                  kernel, "\"; there are ", kernels);
  }
  for (const auto& [tuner, variant] : changes) tuner->fix(variant);
}

}  // namespace helix::cpu
