// SPDX-License-Identifier: Apache-2.0
// The tuners of products: which readings each kernel has for how many rows, and which of them a call takes.
#include "cpu/linear/readings.hpp"

#include <cstddef>
#include <span>
#include <string>

namespace helix::cpu::linear {
namespace {

/// Up to this many rows memory bandwidth is the limit, and the fastest way of reading is measured.
constexpr std::int64_t kFewRows = 2 * kBlockRows;
/// Least bytes of weights for timing: read often enough, and too large to stay in a cache.
constexpr std::int64_t kTunedBytes = std::int64_t{2} << 20;

/// With more than kBlockRows rows `rows` is the same as `strips`, so the last entries are for up to
/// kBlockRows only.
constexpr Variant<Reading> kVectorReadings[] = {{"ahead", Reading::ahead},
                                                {"plain", Reading::plain},
                                                {"near", Reading::near},
                                                {"strips", Reading::strips},
                                                {"strips_ahead", Reading::strips_ahead},
                                                {"rows", Reading::rows}};
constexpr Variant<Reading> kDotReadings[] = {
    {"ahead", Reading::ahead},   {"ahead_pairs", Reading::ahead_pairs},   {"plain", Reading::plain},
    {"strips", Reading::strips}, {"strips_ahead", Reading::strips_ahead}, {"rows", Reading::rows}};
constexpr Variant<Reading> kManyReadings[] = {{"ahead", Reading::ahead},
                                              {"plain", Reading::plain},
                                              {"strips", Reading::strips},
                                              {"strips_ahead", Reading::strips_ahead}};
/// For one row.
constexpr Variant<Reading> kVectorRowReadings[] = {
    {"ahead", Reading::ahead}, {"plain", Reading::plain}, {"near", Reading::near}, {"rows", Reading::rows}};
constexpr Variant<Reading> kDotRowReadings[] = {{"rows2", Reading::rows2},
                                                {"rows4", Reading::rows4},
                                                {"rows", Reading::rows},
                                                {"ahead", Reading::ahead},
                                                {"plain", Reading::plain}};
/// For tile registers.
constexpr Variant<Reading> kTileReadings[] = {{"ahead", Reading::ahead}, {"plain", Reading::plain}};

/// A kernel's tuners for 1, 2, up to 4, up to 8 and more rows, and the readings that they choose from.
class ReadingTuners {
 public:
  using Readings = std::span<const Variant<Reading>>;

  /// `one_row`: readings for one row. `few`: for up to kBlockRows; without its last entry, for up to
  /// kFewRows.
  ReadingTuners(const std::string& kernel, Readings one_row, Readings few)
      : one_row_(one_row),
        few_(few),
        rows1_(kernel + ".rows1", names_of(one_row), kTunedBytes),
        rows2_(kernel + ".rows2", names_of(few), kTunedBytes),
        rows4_(kernel + ".rows4", names_of(few), kTunedBytes),
        rows8_(kernel + ".rows8", names_of(few.first(few.size() - 1)), kTunedBytes),
        many_(kernel + ".many", names_of<Reading>(kManyReadings), kTunedBytes) {}

  /// Begins `call` and returns its reading.
  Reading begin(std::int64_t num_rows, std::int64_t weight_bytes, std::optional<Tuner::Call>& call) {
    if (num_rows > kFewRows) {
      // Arithmetic is the limit, so the time per byte grows with the rows.
      call.emplace(many_, weight_bytes * num_rows / kFewRows);
      return kManyReadings[call->variant()].value;
    }
    call.emplace(tuner_of(num_rows), weight_bytes);
    return (num_rows == 1 ? one_row_ : few_)[static_cast<std::size_t>(call->variant())].value;
  }

 private:
  Tuner& tuner_of(std::int64_t num_rows) {
    return num_rows == 1 ? rows1_ : num_rows == 2 ? rows2_ : num_rows <= kBlockRows ? rows4_ : rows8_;
  }

  Readings one_row_;
  Readings few_;
  Tuner rows1_;
  Tuner rows2_;
  Tuner rows4_;
  Tuner rows8_;
  Tuner many_;
};

/// A kernel's tuners on tile registers: for up to 8 rows, and for more rows as long as weights are read in
/// place.
class TileTuners {
 public:
  TileTuners(const std::string& kernel, std::int64_t most_rows)
      : most_rows_(most_rows),
        rows8_(kernel + ".rows8", names_of<Reading>(kTileReadings), kTunedBytes),
        more_(kernel + ".rows" + std::to_string(most_rows), names_of<Reading>(kTileReadings), kTunedBytes) {}

  /// Begins `call`, if there is anything to choose, and returns its reading.
  Reading begin(std::int64_t num_rows, std::int64_t weight_bytes, std::optional<Tuner::Call>& call) {
    if (num_rows > most_rows_) return Reading::plain;
    call.emplace(num_rows <= kFewRows ? rows8_ : more_, weight_bytes);
    return kTileReadings[call->variant()].value;
  }

 private:
  std::int64_t most_rows_;
  Tuner rows8_;
  Tuner more_;
};

ReadingTuners g_f32("linear.f32", kVectorRowReadings, kVectorReadings);
ReadingTuners g_f16("linear.f16", kVectorRowReadings, kVectorReadings);
ReadingTuners g_bf16("linear.bf16", kVectorRowReadings, kVectorReadings);
ReadingTuners g_bf16_dots("linear.bf16_dots", kDotRowReadings, kDotReadings);
TileTuners g_tiles("linear.bf16.tiles", kTileRows);
TileTuners g_bf16_tiles("linear.bf16_tiles", 2 * kTileRows);

/// Begins `call`, if there is anything to choose, and returns its reading.
Reading begin_call(Kernel kernel, DType weight, std::int64_t num_rows, std::int64_t weight_bytes,
                   std::optional<Tuner::Call>& call) {
  if (kernel == Kernel::tiles) return g_tiles.begin(num_rows, weight_bytes, call);
  if (kernel == Kernel::bf16_tiles) return g_bf16_tiles.begin(num_rows, weight_bytes, call);
  if (kernel == Kernel::bf16_dots) return g_bf16_dots.begin(num_rows, weight_bytes, call);
  // check_weight_data() allows no other type.
  ReadingTuners& vectors = weight == DType::f32 ? g_f32 : weight == DType::f16 ? g_f16 : g_bf16;
  return vectors.begin(num_rows, weight_bytes, call);
}

}  // namespace

ChosenReading::ChosenReading(Kernel kernel, DType weight, std::int64_t num_rows, std::int64_t weight_bytes)
    : value_(begin_call(kernel, weight, num_rows, weight_bytes, call_)) {}

}  // namespace helix::cpu::linear
