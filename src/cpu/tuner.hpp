// SPDX-License-Identifier: Apache-2.0
// Tuner: finds the fastest of several equivalent ways to do some work, by timing them on the work itself.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <helix/cpu/tuning.hpp>

namespace helix::cpu {

/// A variant in the form that a kernel uses, and its name.
template <class Value>
struct Variant {
  const char* name;
  Value value;
};

/// The names of `variants`, for a Tuner.
template <class Value>
std::vector<const char*> names_of(std::span<const Variant<Value>> variants) {
  std::vector<const char*> names;
  for (const Variant<Value>& variant : variants) names.push_back(variant.name);
  return names;
}

/// The variants of one kernel. The first calls that move enough bytes take turns among the variants and are
/// timed; then the variant with the least time per byte is kept. There are no separate measurements: timings
/// use the work's own sizes, threads, pages and neighbours. Must have static storage; many threads may use
/// it.
class Tuner {
 public:
  static constexpr int kMaxVariants = 21;

  /// `variants`: the names, default first. They must outlive the process.
  Tuner(std::string kernel, const std::vector<const char*>& variants, std::int64_t least_bytes);
  Tuner(const Tuner&) = delete;
  Tuner& operator=(const Tuner&) = delete;
  ~Tuner();

  /// One call of the kernel. Timed until destruction if variants are still taking turns; a call that an
  /// exception ends says nothing of its variant.
  class Call {
   public:
    Call(Tuner& tuner, std::int64_t bytes);
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call() {
      if (is_timed_) end();
    }
    /// Index of the variant that the call must use.
    int variant() const { return variant_; }

   private:
    void end() noexcept;

    Tuner& tuner_;
    std::int64_t bytes_;
    int variant_;
    bool is_timed_ = false;
    int exceptions_ = 0;  // that were in flight when the call began
    std::chrono::steady_clock::time_point begin_;
  };

 private:
  friend std::vector<KernelTuning> tuning();
  friend void fix_tuning(std::string_view text);

  /// Timed calls per variant. The least time counts, because slower ones met page faults or busy neighbours.
  static constexpr int kTurns = 6;

  static constexpr int kMeasured = -1;  ///< For fix(): measure again if a variant was fixed.

  void fix(int variant);
  void note(int variant, double seconds_a_byte) noexcept;

  std::string kernel_;
  std::array<const char*, kMaxVariants> variants_{};
  int num_variants_;
  std::int64_t least_bytes_;
  std::atomic<int> chosen_{0};
  std::atomic<KernelTuning::Source> source_{KernelTuning::Source::preset};
  std::atomic<int> next_turn_{0};
  std::mutex mutex_;
  std::array<double, kMaxVariants> best_{};  // seconds per byte; 0: not timed yet
  int num_timed_ = 0;
};

}  // namespace helix::cpu
