// SPDX-License-Identifier: Apache-2.0
// Matrix products on the tile registers of x86 (AMX): bf16 as it is stored against f32.
//
// An f32 is the sum of three bf16, exactly, and the tiles multiply bf16 exactly and add in f32. So three tile
// products are one product of f32 arithmetic, at five times the rate of f32 vectors. Subnormals count as
// zero.
//
// A product has 16 rows of f32 on one side, zero rows where fewer are needed, and runs in steps of 32 along
// the summed dimension. A tile is 16 lines of 64 bytes. Up to 8 rows, the first and the second bf16 of each
// row share a tile, so that two tile products do.
#pragma once

#include <cstdint>

#include <helix/dtype.hpp>

namespace helix::cpu::amx {

inline constexpr std::int64_t kRows = 16;     ///< f32 rows of a product, and lines of a tile
inline constexpr std::int64_t kStep = 32;     ///< summed elements of a tile
inline constexpr std::int64_t kMaxTiles = 4;  ///< bf16 tiles of one step of multiply_columns()
inline constexpr std::int64_t kMaxRows = 32;  ///< bf16 rows of one multiply_rows()
inline constexpr std::int64_t kHalfRows = 8;  ///< f32 rows up to which two bf16 of a row share a tile

/// f32 rows from which tiles pay in thin products. Below, memory sets the pace, and vectors keep up with it.
/// Attention starts later, at kHalfRows + 1: reading K and V by tiles in turn costs what the arithmetic
/// gains.
inline constexpr std::int64_t kMinRows = 5;

/// f32 rows that a product of `num_rows` computes: the width of its results and of split_columns()' input.
constexpr std::int64_t padded_rows(std::int64_t num_rows) {
  return num_rows <= kHalfRows ? kHalfRows : kRows;
}

/// bf16 that `num_rows` f32 rows split into a step.
constexpr std::int64_t step_elements(std::int64_t num_rows) {
  return (num_rows <= kHalfRows ? 2 : 3) * kRows * kStep;
}

/// Cache lines that products ask for while they multiply others: `run` lines of each row.
struct Ahead {
  const char* next = nullptr;
  std::int64_t lines = 0;  ///< A step.
  std::int64_t run = 1;
  std::int64_t to_next_run = 0;  ///< Bytes from the end of a run to the next one.
  std::int64_t left = run;       ///< Lines of this run.

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

/// Whether this machine has tiles for bf16 and the system lets the process use them. HELIX_AMX=0 in the
/// environment says no. Decided at the first call.
bool available() noexcept;

/// Sets the calling thread's tiles up, and frees them at its end. The products below need one on their
/// thread.
class Session {
 public:
  Session() noexcept;
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

/// Splits `num_rows` rows of `count` floats, times `factor`, into what multiply_rows() takes: [count / kStep,
/// rounded up][step_elements(num_rows)].
void split_rows(const float* rows, std::int64_t row_stride, std::int64_t num_rows, std::int64_t count,
                float factor, bf16* parts) noexcept;

/// Splits [count][padded_rows(num_rows)] floats, rows innermost, into what multiply_columns() takes: [count /
/// kStep][step_elements(num_rows)]. `count` is a multiple of kStep.
void split_columns(const float* columns, std::int64_t num_rows, std::int64_t count, bf16* parts) noexcept;

/// dots[i][r] = rows[i] . f32 row r, added to what is there if `add`, for num_tiles * 16 rows of steps *
/// kStep elements each, `row_bytes` apart, and padded_rows(num_rows) rows r. Asks for `ahead`.
void multiply_rows(const void* rows, std::int64_t row_bytes, std::int64_t num_tiles, const bf16* parts,
                   std::int64_t num_rows, std::int64_t steps, float* dots, bool add,
                   Ahead ahead = {}) noexcept;

/// Brings kStep rows of `count` elements into what multiply_columns() takes, [count / 16, rounded up to even]
/// tiles: of each 32 columns the even ones, then the odd ones.
void interleave_rows(const bf16* const* rows, std::int64_t count, bf16* tiles) noexcept;

/// sums[r][c] = sums[r][c] * shrink[r] + sum over i of f32 row r at i times column c at i, for the first
/// `num_rows` rows and num_tiles * 16 columns, in the column order of interleave_rows. `tiles` of the
/// next step are `step_tiles` tiles further.
void multiply_columns(const bf16* parts, std::int64_t steps, const bf16* tiles, std::int64_t step_tiles,
                      std::int64_t num_tiles, std::int64_t num_rows, const float* shrink, float* sums,
                      std::int64_t sums_stride) noexcept;

}  // namespace helix::cpu::amx
