// SPDX-License-Identifier: Apache-2.0
// WeightPiece and PieceReader: a plan's copied targets cut into pieces, each of which any thread can make
// with one read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <helix/range.hpp>

#include "model/weight_plan.hpp"

namespace helix::decode {

/// Some rows of one slice, or a run of its rectangles, that fill one contiguous run of bytes of a target.
struct WeightPiece {
  const WeightTarget* target = nullptr;
  const WeightSlice* slice = nullptr;  ///< Null: the piece is zeros.
  /// Rectangles of the slice. A transposed rectangle, or one of several, is never divided.
  Range repeats;
  Range rows;               ///< Source rows of the first of these rectangles.
  std::int64_t offset = 0;  ///< In bytes from the beginning of the target.
  std::int64_t bytes = 0;
};

/// The pieces of all targets that are not in place, about 1 MiB each. Borrows from `plan`.
std::vector<WeightPiece> cut_pieces(const WeightPlan& plan);

/// Checks that router weights and biases are finite: a non-finite value would silently decide which experts a
/// token visits. `values` are the elements of source rows `rows` of `slice`, in the target's type.
/// @throws Error(invalid_file) naming tensor and element.
void check_finite(const WeightTarget& target, const WeightSlice& slice, Range rows,
                  std::span<const std::byte> values);

/// Reads pieces of `plan`, one at a time, with scratch memory of its own.
class PieceReader {
 public:
  explicit PieceReader(const WeightPlan& plan) : plan_(&plan) {}

  /// Fills `out` (piece.bytes, aligned to the target's elements): directly from the file if the types are
  /// equal, otherwise widened, scaled and transposed as the plan says.
  /// @throws Error(io) naming the file if it shrank or cannot be read, and the errors of check_finite().
  void read(const WeightPiece& piece, std::span<std::byte> out);

 private:
  struct Rectangle {
    const Checkpoint::Entry& source;
    Range rows;
    Range cols;
  };

  void read_rectangle(const Rectangle& part, std::span<std::byte> out);
  void read_through(const Rectangle& part, std::int64_t begin, std::span<std::byte> out);
  void read_rows(const WeightPiece& piece, Range rows, std::span<std::byte> out);
  void widen(const WeightSlice& slice, Range rows, float* out);
  void widen_fp8(const WeightSlice& slice, Range rows, const std::byte* from, float* out);

  const WeightPlan* plan_;
  std::vector<std::byte> block_;    // rows as in the file, with the bytes between their parts
  std::vector<std::byte> stored_;   // elements in the file's type
  std::vector<std::byte> scales_;   // scales of their blocks
  std::vector<std::byte> upright_;  // elements in the target's type before transposing
};

}  // namespace helix::decode
