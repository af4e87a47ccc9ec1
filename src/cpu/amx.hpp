// SPDX-License-Identifier: Apache-2.0
// Matrix products on the tile registers of x86 (AMX): stored bf16 times f32.
//
// An f32 is exactly the sum of three bf16, and tiles multiply bf16 exactly and add in f32. So three tile
// products make one product in f32 arithmetic, at five times the rate of f32 vectors. Subnormals count as
// zero. Infinities and quiet NaN among the f32 give what f32 arithmetic gives. An infinite bf16 may give NaN,
// because it is multiplied by parts that are zero, too.
//
// A product has 16 f32 rows on one side (zero rows if fewer are needed) and proceeds in steps of 32 along the
// summed dimension. A tile is 16 lines of 64 bytes. With up to 8 rows, the first and second bf16 of each row
// share a tile, so two tile products suffice.
#pragma once

#include <cstdint>

#include <helix/dtype.hpp>

namespace helix::cpu::amx {

inline constexpr std::int64_t kRows = 16;     ///< f32 rows of a product, and lines of a tile
inline constexpr std::int64_t kStep = 32;     ///< summed elements of a tile
inline constexpr std::int64_t kMaxTiles = 4;  ///< bf16 tiles of one step of multiply_columns()
inline constexpr std::int64_t kMaxRows = 32;  ///< bf16 rows of one multiply_rows()
inline constexpr std::int64_t kHalfRows = 8;  ///< f32 rows up to which two bf16 of a row share a tile

/// f32 rows from which tiles pay off in thin products. Below, memory bandwidth is the limit, and vectors keep
/// up with it. Attention uses tiles from kHalfRows + 1 on: reading K and V by alternating tiles costs what
/// the arithmetic gains.
inline constexpr std::int64_t kMinRows = 5;

/// f32 rows that a product of `num_rows` rows computes; the width of its results and of split_columns()'
/// input.
constexpr std::int64_t padded_rows(std::int64_t num_rows) {
  return num_rows <= kHalfRows ? kHalfRows : kRows;
}

/// Number of bf16 into which one step of `num_rows` f32 rows is split.
constexpr std::int64_t step_elements(std::int64_t num_rows) {
  return (num_rows <= kHalfRows ? 2 : 3) * kRows * kStep;
}

/// Cache lines that products prefetch while they multiply: `run` lines of each row.
struct RowsAhead {
  const char* next = nullptr;
  std::int64_t lines = 0;  ///< Lines per step.
  std::int64_t run = 1;
  std::int64_t to_next_run = 0;  ///< Bytes from the end of a run to the next one.
  std::int64_t left = run;       ///< Lines left in this run.

  void ask() noexcept {
    for (std::int64_t line = 0; line < lines; ++line) {
      __builtin_prefetch(next, 0, 2);
      next += 64;
      if (--left == 0) {
        next += to_next_run;
        left = run;
      }
    }
  }
};

/// Whether this machine has bf16 tiles and the system lets the process use them. HELIX_AMX=0 in the
/// environment disables them. Decided at the first call.
bool available() noexcept;

/// Configures the calling thread's tiles, and releases them when destroyed. The products below require one on
/// their thread.
class Session {
 public:
  Session() noexcept;
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

/// Splits `num_rows` rows of `count` floats, times `factor`, for multiply_rows(): [count / kStep, rounded up]
/// [step_elements(num_rows)].
void split_rows(const float* rows, std::int64_t row_stride, std::int64_t num_rows, std::int64_t count,
                float factor, bf16* parts) noexcept;

/// Splits [count][padded_rows(num_rows)] floats, rows innermost, for multiply_columns(): [count / kStep]
/// [step_elements(num_rows)]. `count` is a multiple of kStep.
void split_columns(const float* columns, std::int64_t num_rows, std::int64_t count, bf16* parts) noexcept;

/// dots[i][r] = rows[i] . f32 row r, or += if `add`, for num_tiles * 16 rows i of steps * kStep elements,
/// `row_bytes` apart, and padded_rows(num_rows) rows r. Prefetches `ahead`.
void multiply_rows(const void* rows, std::int64_t row_bytes, std::int64_t num_tiles, const bf16* parts,
                   std::int64_t num_rows, std::int64_t steps, float* dots, bool add,
                   RowsAhead ahead = {}) noexcept;

/// Rearranges kStep rows of `count` elements for multiply_columns(): [count / 16, rounded up to even] tiles.
/// Of each 32 columns the even ones come first, then the odd ones.
void interleave_rows(const bf16* const* rows, std::int64_t count, bf16* tiles) noexcept;

/// sums[r][c] = sums[r][c] * shrink[r] + sum over i of f32 row r at i times column c at i, for the first
/// `num_rows` rows and num_tiles * 16 columns, in the column order of interleave_rows(). The tiles of the
/// next step are `step_tiles` tiles further.
void multiply_columns(const bf16* parts, std::int64_t steps, const bf16* tiles, std::int64_t step_tiles,
                      std::int64_t num_tiles, std::int64_t num_rows, const float* shrink, float* sums,
                      std::int64_t sums_stride) noexcept;

}  // namespace helix::cpu::amx
