// SPDX-License-Identifier: Apache-2.0
// Splits f32 into bf16 terms, lays them out for tiles, and multiplies them in AVX-512 and AMX instructions;
// elsewhere, definitions that are never called.
#include "cpu/amx.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu/amx_vectors.hpp"
#include "cpu/x86_features.hpp"

namespace helix::cpu::amx {
namespace {

constexpr std::int64_t kTile = kRows * kStep;  // elements
constexpr std::int64_t kLineBytes = 64;

bool detect() noexcept {
  constexpr unsigned kBf16 = 1u << 22;
  constexpr unsigned kTiles = 1u << 24;
  if (is_switched_off("HELIX_AMX") || !has_avx512()) return false;
  const unsigned features = CpuId(7, 0).edx;
  if ((features & kBf16) == 0 || (features & kTiles) == 0) return false;
  // The tile state is large, so Linux saves it only for processes that ask.
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

/// An f32 as the exact sum of three bf16, each in the upper half of its lane.
struct Split {
  __m512i part[3];
};

HELIX_AVX512 Split split(__m512 x) noexcept {
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  Split result;
  result.part[0] = _mm512_and_si512(_mm512_castps_si512(x), mask);
  // inf - inf would be NaN, so an infinity is entirely in its first part.
  const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(__builtin_inff()), _CMP_LT_OQ);
  const __m512 rest = _mm512_maskz_sub_ps(finite, x, _mm512_castsi512_ps(result.part[0]));
  result.part[1] = _mm512_and_si512(_mm512_castps_si512(rest), mask);
  result.part[2] = _mm512_castps_si512(_mm512_sub_ps(rest, _mm512_castsi512_ps(result.part[1])));
  return result;
}

/// Transposes 8 vectors of 8 lanes of 64 bits.
HELIX_AVX512 void transpose_pairs(__m512i* x) noexcept {
  __m512i y[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm512_unpacklo_epi64(x[2 * i], x[2 * i + 1]);
    y[4 + i] = _mm512_unpackhi_epi64(x[2 * i], x[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd) {
    const __m512i* rows = y + 4 * odd;
    const __m512i a = _mm512_shuffle_i64x2(rows[0], rows[1], 0x88);
    const __m512i b = _mm512_shuffle_i64x2(rows[0], rows[1], 0xdd);
    const __m512i c = _mm512_shuffle_i64x2(rows[2], rows[3], 0x88);
    const __m512i d = _mm512_shuffle_i64x2(rows[2], rows[3], 0xdd);
    x[odd] = _mm512_shuffle_i64x2(a, c, 0x88);
    x[2 + odd] = _mm512_shuffle_i64x2(b, d, 0x88);
    x[4 + odd] = _mm512_shuffle_i64x2(a, c, 0xdd);
    x[6 + odd] = _mm512_shuffle_i64x2(b, d, 0xdd);
  }
}

/// The operand of TILELOADCONFIG: all eight tiles are 16 lines of 64 bytes.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_line = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfig kTileConfig;

HELIX_AMX void configure() noexcept {
  _tile_loadconfig(&kTileConfig);
}

HELIX_AMX void release() noexcept {
  _tile_release();
}

/// Loads 16 floats of a row, as selected by `mask`, times `factor`.
HELIX_AVX512 __m512 load_row(const float* from, std::uint32_t mask, __m512 factor) noexcept {
  return _mm512_mul_ps(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from), factor);
}

HELIX_AVX512 std::uint32_t step_mask(std::int64_t left) noexcept {
  return left < kStep ? (std::uint32_t{1} << left) - 1 : 0xffffffffu;
}

HELIX_AMX void split_full_rows(const float* rows, std::int64_t row_stride, std::int64_t num_rows,
                               std::int64_t count, float factor, bf16* parts) noexcept {
  const __m512 f = _mm512_set1_ps(factor);
  for (std::int64_t i = 0; i < count; i += kStep) {
    const std::uint32_t mask = step_mask(count - i);
    __m512i part[3][kRows];
    for (std::int64_t r = 0; r < kRows; ++r) {
      Split lower{};
      Split upper{};
      if (r < num_rows) {
        const float* from = rows + r * row_stride + i;
        lower = split(load_row(from, mask, f));
        upper = split(load_row(from + 16, mask >> 16, f));
      }
      for (int p = 0; p < 3; ++p) part[p][r] = join_upper(lower.part[p], upper.part[p]);
    }
    for (int p = 0; p < 3; ++p, parts += kTile) {
      transpose(part[p]);
      for (std::int64_t line = 0; line < kRows; ++line)
        _mm512_store_si512(parts + line * kStep, part[p][line]);
    }
  }
}

// Writes the columns of the tiles, as pairs of words. For every 4: the first parts of two rows, then their
// second parts, the third parts, then zeros.
HELIX_AMX void split_half_rows(const float* rows, std::int64_t row_stride, std::int64_t num_rows,
                               std::int64_t count, float factor, bf16* parts) noexcept {
  const __m512 f = _mm512_set1_ps(factor);
  for (std::int64_t i = 0; i < count; i += kStep, parts += 2 * kTile) {
    std::uint32_t mask = step_mask(count - i);
    for (std::int64_t half = 0; half < 2; ++half, mask >>= 16) {
      __m512i x[kHalfRows] = {};
      for (std::int64_t r = 0; r < num_rows; ++r)
        x[r] = _mm512_castps_si512(load_row(rows + r * row_stride + i + half * 16, mask, f));
      transpose_pairs(x);
      bf16* to = parts + half * kHalfRows * kStep;
      for (std::int64_t line = 0; line < kHalfRows; ++line, to += kStep) {
        const Split s = split(_mm512_castsi512_ps(x[line]));
        _mm512_store_si512(to, pack_upper(s.part[0], s.part[1]));
        _mm512_store_si512(to + kTile, pack_upper(s.part[2], _mm512_setzero_si512()));
      }
    }
  }
}

/// Adds the columns of split_half_rows() that belong to the same row.
HELIX_AVX512 __m256 fold(__m512 x) noexcept {
  const __m512 sum = _mm512_add_ps(x, _mm512_shuffle_ps(x, x, 0x4e));
  const __m512i rows =
      _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 0, 0, 0, 0), _mm512_castps_si512(sum));
  return _mm256_castsi256_ps(_mm512_castsi512_si256(rows));
}

template <bool kHalf>
HELIX_AMX void split_columns_of(const float* columns, std::int64_t count, bf16* parts) noexcept {
  for (std::int64_t i = 0; i < count; i += kStep) {
    __m512i x[2][kRows];  // [16 columns][row]
    if constexpr (kHalf) {
      __m512i both[kRows];
      for (std::int64_t k = 0; k < kRows; ++k) {
        const float* from = columns + (i + k) * kHalfRows;
        const __m512i lower = _mm512_castsi256_si512(_mm256_castps_si256(_mm256_loadu_ps(from)));
        both[k] =
            _mm512_inserti32x8(lower, _mm256_castps_si256(_mm256_loadu_ps(from + kRows * kHalfRows)), 1);
      }
      transpose(both);
      for (std::int64_t r = 0; r < kHalfRows; ++r) {
        x[0][r] = both[r];
        x[1][r] = both[kHalfRows + r];
      }
    } else {
      for (std::int64_t half = 0; half < 2; ++half) {
        for (std::int64_t k = 0; k < kRows; ++k)
          x[half][k] = _mm512_castps_si512(_mm512_loadu_ps(columns + (i + half * kRows + k) * kRows));
        transpose(x[half]);
      }
    }
    constexpr std::int64_t kSplitRows = kHalf ? kHalfRows : kRows;
    for (std::int64_t r = 0; r < kSplitRows; ++r) {
      const Split lower = split(_mm512_castsi512_ps(x[0][r]));
      const Split upper = split(_mm512_castsi512_ps(x[1][r]));
      bf16* to = parts + r * kStep;
      for (int p = 0; p < 3; ++p, to += kSplitRows * kStep)
        _mm512_store_si512(to, join_upper(lower.part[p], upper.part[p]));
      if constexpr (kHalf) _mm512_store_si512(to, _mm512_setzero_si512());
    }
    parts += kHalf ? 2 * kTile : 3 * kTile;
  }
}

// Each part of the f32 rows has its own sums, so that products need not wait for each other, and so that 8
// rows and 16 rows give a row the same bits: (first + third part) + second part.
template <int kTiles, bool kHalf>
HELIX_AMX void multiply_rows_of(const std::byte* rows, std::int64_t row_bytes, const bf16* parts,
                                std::int64_t steps, float* dots, bool add, RowsAhead ahead) noexcept {
  barrier();
  const std::byte* next_rows = rows + kRows * row_bytes;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if constexpr (!kHalf) {
    _tile_zero(4);
    _tile_zero(5);
  }
  for (std::int64_t step = 0; step < steps; ++step, rows += kLineBytes, next_rows += kLineBytes) {
    if constexpr (kHalf) {
      _tile_loadd(6, parts, kLineBytes);
      _tile_loadd(7, parts + kTile, kLineBytes);
      _tile_loadd(4, rows, row_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 4, 7);
      if constexpr (kTiles > 1) {
        _tile_loadd(5, next_rows, row_bytes);
        _tile_dpbf16ps(1, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      parts += 2 * kTile;
    } else {
      // Two tiles are left, one for rows and one for a part. The parts are reloaded for the next rows,
      // because they are contiguous; rows a power of two apart would evict each other from L1.
      _tile_loadd(6, rows, row_bytes);
      _tile_loadd(7, parts, kLineBytes);
      _tile_dpbf16ps(0, 6, 7);
      _tile_loadd(7, parts + kTile, kLineBytes);
      _tile_dpbf16ps(4, 6, 7);
      _tile_loadd(7, parts + 2 * kTile, kLineBytes);
      _tile_dpbf16ps(2, 6, 7);
      if constexpr (kTiles > 1) {
        _tile_loadd(6, next_rows, row_bytes);
        _tile_loadd(7, parts, kLineBytes);
        _tile_dpbf16ps(1, 6, 7);
        _tile_loadd(7, parts + kTile, kLineBytes);
        _tile_dpbf16ps(5, 6, 7);
        _tile_loadd(7, parts + 2 * kTile, kLineBytes);
        _tile_dpbf16ps(3, 6, 7);
      }
      parts += 3 * kTile;
    }
    ahead.ask();
  }
  constexpr std::int64_t kSums = kRows * kRows;
  alignas(64) float sums[6 * kSums];  // first parts, third parts, second parts
  _tile_stored(0, sums, kLineBytes);
  _tile_stored(2, sums + 2 * kSums, kLineBytes);
  if constexpr (kTiles > 1) {
    _tile_stored(1, sums + kSums, kLineBytes);
    _tile_stored(3, sums + 3 * kSums, kLineBytes);
  }
  if constexpr (!kHalf) {
    _tile_stored(4, sums + 4 * kSums, kLineBytes);
    if constexpr (kTiles > 1) _tile_stored(5, sums + 5 * kSums, kLineBytes);
  }
  barrier();
  for (std::int64_t i = 0; i < kTiles * kRows; ++i) {
    const float* from = sums + i * kRows;
    __m512 sum = _mm512_add_ps(_mm512_load_ps(from), _mm512_load_ps(from + 2 * kSums));
    if constexpr (kHalf) {
      __m256 half = fold(sum);
      if (add) half = _mm256_add_ps(_mm256_loadu_ps(dots), half);
      _mm256_storeu_ps(dots, half);
      dots += kHalfRows;
    } else {
      sum = _mm512_add_ps(sum, _mm512_load_ps(from + 4 * kSums));
      if (add) sum = _mm512_add_ps(_mm512_loadu_ps(dots), sum);
      _mm512_storeu_ps(dots, sum);
      dots += kRows;
    }
  }
}

// Even columns: the low halves of both rows' words; odd columns: the high halves. Crosses no 128-bit lane.
HELIX_AMX void interleave_rows_of(const bf16* const* rows, std::int64_t count, bf16* tiles) noexcept {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  constexpr int kSelect = 0xca;  // mask ? b : c
  for (std::int64_t line = 0; line < kRows; ++line) {
    const bf16* first = rows[2 * line];
    const bf16* second = rows[2 * line + 1];
    bf16* to = tiles + line * kStep;
    for (std::int64_t i = 0; i < count; i += kStep, to += 2 * kTile) {
      const std::int64_t valid = count - i < kStep ? count - i : kStep;
      const auto mask = static_cast<__mmask32>((std::uint64_t{1} << valid) - 1);
      const __m512i x = _mm512_maskz_loadu_epi16(mask, first + i);
      const __m512i y = _mm512_maskz_loadu_epi16(mask, second + i);
      _mm512_store_si512(to, _mm512_ternarylogic_epi32(high, _mm512_slli_epi32(y, 16), x, kSelect));
      _mm512_store_si512(to + kTile, _mm512_ternarylogic_epi32(high, y, _mm512_srli_epi32(x, 16), kSelect));
    }
  }
}

template <int kTiles, bool kHalf>
HELIX_AMX void multiply_columns_of(const bf16* parts, std::int64_t steps, const bf16* tiles,
                                   std::int64_t step_tiles, std::int64_t num_rows, const float* shrink,
                                   float* sums, std::int64_t sums_stride) noexcept {
  constexpr std::int64_t kWidth = kTiles * kRows;
  alignas(64) float added[kRows * kWidth];
  barrier();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (std::int64_t step = 0; step < steps; ++step, tiles += step_tiles * kTile) {
    _tile_loadd(4, parts, kLineBytes);
    _tile_loadd(5, parts + kTile, kLineBytes);
    if constexpr (!kHalf) _tile_loadd(6, parts + 2 * kTile, kLineBytes);
    parts += (kHalf ? 2 : 3) * kTile;
    _tile_loadd(7, tiles, kLineBytes);
    _tile_dpbf16ps(0, 4, 7);
    _tile_dpbf16ps(0, 5, 7);
    if constexpr (!kHalf) _tile_dpbf16ps(0, 6, 7);
    if constexpr (kTiles > 1) {
      _tile_loadd(7, tiles + kTile, kLineBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(1, 5, 7);
      if constexpr (!kHalf) _tile_dpbf16ps(1, 6, 7);
    }
    if constexpr (kTiles > 2) {
      _tile_loadd(7, tiles + 2 * kTile, kLineBytes);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(2, 5, 7);
      if constexpr (!kHalf) _tile_dpbf16ps(2, 6, 7);
    }
    if constexpr (kTiles > 3) {
      _tile_loadd(7, tiles + 3 * kTile, kLineBytes);
      _tile_dpbf16ps(3, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
      if constexpr (!kHalf) _tile_dpbf16ps(3, 6, 7);
    }
  }
  constexpr std::int64_t kAddedBytes = kWidth * static_cast<std::int64_t>(sizeof(float));
  _tile_stored(0, added, kAddedBytes);
  if constexpr (kTiles > 1) _tile_stored(1, added + kRows, kAddedBytes);
  if constexpr (kTiles > 2) _tile_stored(2, added + 2 * kRows, kAddedBytes);
  if constexpr (kTiles > 3) _tile_stored(3, added + 3 * kRows, kAddedBytes);
  barrier();
  for (std::int64_t r = 0; r < num_rows; ++r) {
    const __m512 factor = _mm512_set1_ps(shrink[r]);
    float* to = sums + r * sums_stride;
#pragma GCC unroll 4
    for (std::int64_t c = 0; c < kWidth; c += kRows) {
      __m512 x = _mm512_load_ps(added + r * kWidth + c);
      if constexpr (kHalf) x = _mm512_add_ps(x, _mm512_load_ps(added + (kHalfRows + r) * kWidth + c));
      _mm512_storeu_ps(to + c, _mm512_fmadd_ps(_mm512_loadu_ps(to + c), factor, x));
    }
  }
}

}  // namespace

bool available() noexcept {
  static const bool is_available = detect();
  return is_available;
}

Session::Session() noexcept {
  configure();
}
Session::~Session() {
  release();
}

void split_rows(const float* rows, std::int64_t row_stride, std::int64_t num_rows, std::int64_t count,
                float factor, bf16* parts) noexcept {
  const auto split_into = num_rows <= kHalfRows ? split_half_rows : split_full_rows;
  split_into(rows, row_stride, num_rows, count, factor, parts);
}

void split_columns(const float* columns, std::int64_t num_rows, std::int64_t count, bf16* parts) noexcept {
  const auto split_into = num_rows <= kHalfRows ? split_columns_of<true> : split_columns_of<false>;
  split_into(columns, count, parts);
}

void multiply_rows(const void* rows, std::int64_t row_bytes, std::int64_t num_tiles, const bf16* parts,
                   std::int64_t num_rows, std::int64_t steps, float* dots, bool add,
                   RowsAhead ahead) noexcept {
  const bool half = num_rows <= kHalfRows;
  const auto multiply = num_tiles == 1 ? (half ? multiply_rows_of<1, true> : multiply_rows_of<1, false>)
                                       : (half ? multiply_rows_of<2, true> : multiply_rows_of<2, false>);
  multiply(static_cast<const std::byte*>(rows), row_bytes, parts, steps, dots, add, ahead);
}

void interleave_rows(const bf16* const* rows, std::int64_t count, bf16* tiles) noexcept {
  interleave_rows_of(rows, count, tiles);
}

void multiply_columns(const bf16* parts, std::int64_t steps, const bf16* tiles, std::int64_t step_tiles,
                      std::int64_t num_tiles, std::int64_t num_rows, const float* shrink, float* sums,
                      std::int64_t sums_stride) noexcept {
  const bool half = num_rows <= kHalfRows;
  const auto multiply = num_tiles == 2
                            ? (half ? multiply_columns_of<2, true> : multiply_columns_of<2, false>)
                            : (half ? multiply_columns_of<4, true> : multiply_columns_of<4, false>);
  multiply(parts, steps, tiles, step_tiles, num_rows, shrink, sums, sums_stride);
}

}  // namespace helix::cpu::amx

#else

// Never called if available() returns false.
namespace helix::cpu::amx {
bool available() noexcept {
  return false;
}
Session::Session() noexcept = default;
Session::~Session() = default;
void split_rows(const float*, std::int64_t, std::int64_t, std::int64_t, float, bf16*) noexcept {}
void split_columns(const float*, std::int64_t, std::int64_t, bf16*) noexcept {}
void multiply_rows(const void*, std::int64_t, std::int64_t, const bf16*, std::int64_t, std::int64_t, float*,
                   bool, RowsAhead) noexcept {}
void interleave_rows(const bf16* const*, std::int64_t, bf16*) noexcept {}
void multiply_columns(const bf16*, std::int64_t, const bf16*, std::int64_t, std::int64_t, std::int64_t,
                      const float*, float*, std::int64_t) noexcept {}
}  // namespace helix::cpu::amx

#endif
