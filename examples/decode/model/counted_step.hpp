// SPDX-License-Identifier: Apache-2.0
// CountedStep: tells a communicator that counts steps when the queueing of a step begins and ends.
#pragma once

#include <cstdint>

namespace helix::decode {

/// Lives while step `step` is being queued. A step that fails is not counted.
template <class Comm>
class CountedStep {
 public:
  CountedStep(const Comm& comm, std::uint64_t step) : comm_(comm) {
    if constexpr (kCounts) comm.begin_step(step);
  }
  CountedStep(const CountedStep&) = delete;
  CountedStep& operator=(const CountedStep&) = delete;

  /// Reports that the step is completely queued.
  void end() const {
    if constexpr (kCounts) comm_.end_step();
  }

 private:
  static constexpr bool kCounts = requires(const Comm& comm, std::uint64_t step) {
    comm.begin_step(step);
    comm.end_step();
  };

  const Comm& comm_;
};

}  // namespace helix::decode
