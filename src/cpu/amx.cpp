// SPDX-License-Identifier: Apache-2.0
#include "cpu/amx.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <cstdlib>
#include <cstring>

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// g++ 12 warns of its own header: intrinsics start from vectors left undefined on purpose.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

// For these functions only: the rest of the program runs on older machines too.
#define HELIX_AMX __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,amx-tile,amx-bf16"), noinline))
#define HELIX_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"), always_inline)) inline

namespace helix::cpu::amx {
namespace {

constexpr std::int64_t kTile = kRows * kStep;  // elements
constexpr std::int64_t kLineBytes = 64;

bool detect() noexcept {
  const char* setting = std::getenv("HELIX_AMX");
  if (setting != nullptr && std::strcmp(setting, "0") == 0) return false;
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  constexpr unsigned kBf16 = 1u << 22;
  constexpr unsigned kTiles = 1u << 24;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & kBf16) == 0 || (edx & kTiles) == 0) return false;
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq")) {
    return false;
  }
  // The tiles' state is large: Linux saves it for processes that ask.
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

/// The compiler does not know that tile loads read memory.
HELIX_AVX512 void barrier() noexcept {
  __asm__ volatile("" ::: "memory");
}

/// The upper 16 bits of each lane, and what they leave: exact, and an f32 is used up after three.
HELIX_AVX512 __m512i take_part(__m512& x) noexcept {
  const __m512i part =
      _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  // inf - inf would be NaN: an infinity is all in its first part.
  const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(__builtin_inff()), _CMP_LT_OQ);
  x = _mm512_maskz_sub_ps(finite, x, _mm512_castsi512_ps(part));
  return part;
}

/// Two vectors of upper halves as 32 words in order.
HELIX_AVX512 __m512i join(__m512i first, __m512i second) noexcept {
  const __m256i lower = _mm512_cvtepi32_epi16(_mm512_srli_epi32(first, 16));
  const __m256i upper = _mm512_cvtepi32_epi16(_mm512_srli_epi32(second, 16));
  return _mm512_inserti64x4(_mm512_castsi256_si512(lower), upper, 1);
}

/// Transposes 16 vectors of 16 lanes.
HELIX_AVX512 void transpose(__m512i* x) noexcept {
  __m512i y[16];
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) {
    y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    x[4 * i] = _mm512_unpacklo_epi64(y[4 * i], y[4 * i + 2]);
    x[4 * i + 1] = _mm512_unpackhi_epi64(y[4 * i], y[4 * i + 2]);
    x[4 * i + 2] = _mm512_unpacklo_epi64(y[4 * i + 1], y[4 * i + 3]);
    x[4 * i + 3] = _mm512_unpackhi_epi64(y[4 * i + 1], y[4 * i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
    y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
  }
}

/// What TILELOADCONFIG reads: all eight tiles are 16 lines of 64 bytes.
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

HELIX_AMX void split_rows_of(const float* rows, std::int64_t row_stride, std::int64_t num_rows,
                             std::int64_t count, float factor, bf16* parts) noexcept {
  const __m512 f = _mm512_set1_ps(factor);
  for (std::int64_t i = 0; i < count; i += kStep, parts += kStepElements) {
    const std::int64_t valid = count - i < kStep ? count - i : kStep;
    const auto mask = static_cast<std::uint32_t>((std::uint64_t{1} << valid) - 1);
    __m512i part[3][kRows];
    for (std::int64_t r = 0; r < kRows; ++r) {
      __m512 lower = _mm512_setzero_ps();
      __m512 upper = lower;
      if (r < num_rows) {
        const float* from = rows + r * row_stride + i;
        lower = _mm512_mul_ps(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from), f);
        upper = _mm512_mul_ps(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), from + 16), f);
      }
      for (auto& p : part) {
        const __m512i first = take_part(lower);
        p[r] = join(first, take_part(upper));
      }
    }
    for (int p = 0; p < 3; ++p) {
      transpose(part[p]);
      for (std::int64_t line = 0; line < kRows; ++line)
        _mm512_store_si512(parts + p * kTile + line * kStep, part[p][line]);
    }
  }
}

HELIX_AMX void split_columns_of(const float* columns, std::int64_t count, bf16* parts) noexcept {
  for (std::int64_t i = 0; i < count; i += kStep, parts += kStepElements) {
    __m512i x[2][kRows];
    for (std::int64_t half = 0; half < 2; ++half) {
      for (std::int64_t k = 0; k < kRows; ++k)
        x[half][k] = _mm512_castps_si512(_mm512_loadu_ps(columns + (i + half * kRows + k) * kRows));
      transpose(x[half]);
    }
    for (std::int64_t r = 0; r < kRows; ++r) {
      __m512 lower = _mm512_castsi512_ps(x[0][r]);
      __m512 upper = _mm512_castsi512_ps(x[1][r]);
      for (int p = 0; p < 3; ++p) {
        const __m512i first = take_part(lower);
        _mm512_store_si512(parts + p * kTile + r * kStep, join(first, take_part(upper)));
      }
    }
  }
}

// Tiles 0 to 3 sum, 4 to 6 hold the f32 rows' parts, 7 the bf16 tile.
template <int kTiles>
HELIX_AMX void multiply_rows_of(const std::byte* rows, std::int64_t row_bytes, const bf16* parts,
                                std::int64_t steps, float* dots, bool add) noexcept {
  barrier();
  const std::byte* row[4];
  for (int i = 0; i < 4; ++i) row[i] = rows + i * kRows * row_bytes;
  if (add) {
    _tile_loadd(0, dots, kLineBytes);
    if constexpr (kTiles > 1) _tile_loadd(1, dots + kRows * kRows, kLineBytes);
    if constexpr (kTiles > 2) _tile_loadd(2, dots + 2 * kRows * kRows, kLineBytes);
    if constexpr (kTiles > 3) _tile_loadd(3, dots + 3 * kRows * kRows, kLineBytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::int64_t step = 0; step < steps; ++step, parts += kStepElements) {
    _tile_loadd(4, parts, kLineBytes);
    _tile_loadd(5, parts + kTile, kLineBytes);
    _tile_loadd(6, parts + 2 * kTile, kLineBytes);
    _tile_loadd(7, row[0] + step * kLineBytes, row_bytes);
    _tile_dpbf16ps(0, 7, 4);
    _tile_dpbf16ps(0, 7, 5);
    _tile_dpbf16ps(0, 7, 6);
    if constexpr (kTiles > 1) {
      _tile_loadd(7, row[1] + step * kLineBytes, row_bytes);
      _tile_dpbf16ps(1, 7, 4);
      _tile_dpbf16ps(1, 7, 5);
      _tile_dpbf16ps(1, 7, 6);
    }
    if constexpr (kTiles > 2) {
      _tile_loadd(7, row[2] + step * kLineBytes, row_bytes);
      _tile_dpbf16ps(2, 7, 4);
      _tile_dpbf16ps(2, 7, 5);
      _tile_dpbf16ps(2, 7, 6);
    }
    if constexpr (kTiles > 3) {
      _tile_loadd(7, row[3] + step * kLineBytes, row_bytes);
      _tile_dpbf16ps(3, 7, 4);
      _tile_dpbf16ps(3, 7, 5);
      _tile_dpbf16ps(3, 7, 6);
    }
  }
  _tile_stored(0, dots, kLineBytes);
  if constexpr (kTiles > 1) _tile_stored(1, dots + kRows * kRows, kLineBytes);
  if constexpr (kTiles > 2) _tile_stored(2, dots + 2 * kRows * kRows, kLineBytes);
  if constexpr (kTiles > 3) _tile_stored(3, dots + 3 * kRows * kRows, kLineBytes);
  barrier();
}

// Even columns: the low halves of both rows' words; odd columns: the high halves. No lane is crossed.
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

template <int kTiles>
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
  for (std::int64_t step = 0; step < steps; ++step, parts += kStepElements, tiles += step_tiles * kTile) {
    _tile_loadd(4, parts, kLineBytes);
    _tile_loadd(5, parts + kTile, kLineBytes);
    _tile_loadd(6, parts + 2 * kTile, kLineBytes);
    _tile_loadd(7, tiles, kLineBytes);
    _tile_dpbf16ps(0, 4, 7);
    _tile_dpbf16ps(0, 5, 7);
    _tile_dpbf16ps(0, 6, 7);
    if constexpr (kTiles > 1) {
      _tile_loadd(7, tiles + kTile, kLineBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(1, 5, 7);
      _tile_dpbf16ps(1, 6, 7);
    }
    if constexpr (kTiles > 2) {
      _tile_loadd(7, tiles + 2 * kTile, kLineBytes);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(2, 5, 7);
      _tile_dpbf16ps(2, 6, 7);
    }
    if constexpr (kTiles > 3) {
      _tile_loadd(7, tiles + 3 * kTile, kLineBytes);
      _tile_dpbf16ps(3, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
      _tile_dpbf16ps(3, 6, 7);
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
      const __m512 x = _mm512_load_ps(added + r * kWidth + c);
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
  split_rows_of(rows, row_stride, num_rows, count, factor, parts);
}

void split_columns(const float* columns, std::int64_t count, bf16* parts) noexcept {
  split_columns_of(columns, count, parts);
}

void multiply_rows(const void* rows, std::int64_t row_bytes, std::int64_t num_tiles, const bf16* parts,
                   std::int64_t steps, float* dots, bool add) noexcept {
  const auto* first = static_cast<const std::byte*>(rows);
  switch (num_tiles) {
    case 1:
      return multiply_rows_of<1>(first, row_bytes, parts, steps, dots, add);
    case 2:
      return multiply_rows_of<2>(first, row_bytes, parts, steps, dots, add);
    case 3:
      return multiply_rows_of<3>(first, row_bytes, parts, steps, dots, add);
    default:
      return multiply_rows_of<4>(first, row_bytes, parts, steps, dots, add);
  }
}

void interleave_rows(const bf16* const* rows, std::int64_t count, bf16* tiles) noexcept {
  interleave_rows_of(rows, count, tiles);
}

void multiply_columns(const bf16* parts, std::int64_t steps, const bf16* tiles, std::int64_t step_tiles,
                      std::int64_t num_tiles, std::int64_t num_rows, const float* shrink, float* sums,
                      std::int64_t sums_stride) noexcept {
  if (num_tiles == 2)
    return multiply_columns_of<2>(parts, steps, tiles, step_tiles, num_rows, shrink, sums, sums_stride);
  multiply_columns_of<4>(parts, steps, tiles, step_tiles, num_rows, shrink, sums, sums_stride);
}

}  // namespace helix::cpu::amx

#else

// Never called where available() says no.
namespace helix::cpu::amx {
bool available() noexcept {
  return false;
}
Session::Session() noexcept = default;
Session::~Session() = default;
void split_rows(const float*, std::int64_t, std::int64_t, std::int64_t, float, bf16*) noexcept {}
void split_columns(const float*, std::int64_t, bf16*) noexcept {}
void multiply_rows(const void*, std::int64_t, std::int64_t, const bf16*, std::int64_t, float*,
                   bool) noexcept {}
void interleave_rows(const bf16* const*, std::int64_t, bf16*) noexcept {}
void multiply_columns(const bf16*, std::int64_t, const bf16*, std::int64_t, std::int64_t, std::int64_t,
                      const float*, float*, std::int64_t) noexcept {}
}  // namespace helix::cpu::amx

#endif
