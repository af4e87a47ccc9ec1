// SPDX-License-Identifier: Apache-2.0
// Tuner: finds the fastest of a few equal ways to do some work by taking turns on the work itself.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <helix/cpu/tuning.hpp>

namespace helix::cpu {

/// A variant as the kernel knows it, and its name.
template <class Value>
struct Variant {
  const char* name;
  Value value;
};

/// The names that a Tuner takes.
template <class Value>
std::vector<const char*> names_of(std::span<const Variant<Value>> variants) {
  std::vector<const char*> names;
  for (const Variant<Value>& variant : variants) names.push_back(variant.name);
  return names;
}

/// One kernel's variants. The first calls that move enough bytes each take another variant and are timed;
/// then the one that moved a byte in the least time stays. Nothing is measured beside the work: what is
/// timed are its own sizes, threads, pages and neighbours. For static storage; many threads may use it.
class Tuner {
 public:
  static constexpr int kMaxVariants = 20;

  /// `variants`: their names, the preset one first. Names outlive the process.
  Tuner(std::string kernel, const std::vector<const char*>& variants, std::int64_t least_bytes);
  Tuner(const Tuner&) = delete;
  Tuner& operator=(const Tuner&) = delete;
  ~Tuner();

  /// One call of the kernel, timed from here to its end if variants are still taking turns.
  class Call {
   public:
    Call(Tuner& tuner, std::int64_t bytes);
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call() {
      if (is_timed_) end();
    }
    /// Index of the variant that the call has to take.
    int variant() const { return variant_; }

   private:
    void end() noexcept;

    Tuner& tuner_;
    std::int64_t bytes_;
    int variant_;
    bool is_timed_ = false;
    std::chrono::steady_clock::time_point begin_;
  };

 private:
  friend std::vector<KernelTuning> tuning();
  friend void fix_tuning(std::string_view text);

  /// Calls that each variant is timed in. The least time counts: the others met page faults or neighbours.
  static constexpr int kTurns = 6;

  static constexpr int kMeasured = -1;  ///< In place of a variant: by turns again, if one was fixed.

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
  std::array<double, kMaxVariants> best_{};  // seconds a byte; 0: not timed yet
  int num_timed_ = 0;
};

}  // namespace helix::cpu
