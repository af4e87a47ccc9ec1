// SPDX-License-Identifier: Apache-2.0
// WeightPiece and PieceReader: a plan's copied targets in pieces, each made by one read on any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <helix/range.hpp>

#include "model/weight_plan.hpp"

namespace helix::decode {

/// Some rows of one slice, or a run of its rectangles, that fill one run of bytes of a target.
struct WeightPiece {
  const WeightTarget* target = nullptr;
  const WeightSlice* slice = nullptr;  ///< Null: zeros.
  Range repeats;                       ///< Rectangles of the slice; more than one, or transposed, only whole.
  Range rows;                          ///< Source rows of the first of them.
  std::int64_t offset = 0;             ///< Bytes, from the beginning of the target.
  std::int64_t bytes = 0;
};

/// The pieces of all targets that are not in place, of about 1 MiB each. Borrows from `plan`.
std::vector<WeightPiece> cut_pieces(const WeightPlan& plan);

/// @throws Error(invalid_file) naming tensor and element if `values`, the elements of source rows `rows` of
/// `slice` in the target's type, are a router's weights or biases and one is not finite: it would decide
/// silently which experts a token visits.
void check_finite(const WeightTarget& target, const WeightSlice& slice, Range rows,
                  std::span<const std::byte> values);

/// Reads pieces of `plan`, one at a time, in scratch memory of its own.
class PieceReader {
 public:
  explicit PieceReader(const WeightPlan& plan) : plan_(&plan) {}

  /// Fills `out` (piece.bytes, aligned to the target's elements): straight from the file where the types are
  /// equal, else widened, scaled and transposed as the plan says.
  /// @throws Error(io) naming the file if it shrank or cannot be read, and what check_finite() throws.
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
  std::vector<std::byte> block_;    // rows as they lie in the file, with what lies between their parts
  std::vector<std::byte> stored_;   // elements in the file's type
  std::vector<std::byte> scales_;   // of the blocks that they lie in
  std::vector<std::byte> upright_;  // elements in the target's type, before they are transposed
};

}  // namespace helix::decode
