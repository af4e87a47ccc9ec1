// SPDX-License-Identifier: Apache-2.0
// How a product reads its weights: the fastest way that was measured for its kernel, type and rows.
#pragma once

#include <cstdint>
#include <optional>

#include <helix/dtype.hpp>

#include "cpu/linear/task.hpp"
#include "cpu/tuner.hpp"

namespace helix::cpu::linear {

/// The reading that one call of products must use. Timed until destruction if its tuner still tries readings.
class ChosenReading {
 public:
  /// `weight`: type of the weights. `num_rows`: most activation rows of a product. `weight_bytes`: bytes of
  /// weights that the call reads.
  ChosenReading(Kernel kernel, DType weight, std::int64_t num_rows, std::int64_t weight_bytes);

  Reading value() const { return value_; }

 private:
  std::optional<Tuner::Call> call_;
  Reading value_;
};

}  // namespace helix::cpu::linear
