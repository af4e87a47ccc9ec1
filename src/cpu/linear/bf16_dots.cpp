// SPDX-License-Identifier: Apache-2.0
// Products of bf16 weights with bf16 activations by AVX-512's dot products of pairs: twice the rate of f32
// vectors, and no widening.
#include <cstring>

#include "cpu/linear/task.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <algorithm>

#include <immintrin.h>

#include <helix/range.hpp>

#include "cpu/linear/blocks.hpp"
#include "cpu/x86_features.hpp"

// g++ 12 warns about its own header, where intrinsics start from vectors that are undefined on purpose.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

// Applied to these functions only, because the rest of the program must run on older machines.
#define HELIX_BF16_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"
#define HELIX_BF16 __attribute__((target(HELIX_BF16_TARGET), noinline))
#define HELIX_BF16_INLINE __attribute__((target(HELIX_BF16_TARGET), always_inline)) inline
#if defined(__clang__)
#define HELIX_BF16_UNROLL _Pragma("clang loop unroll(full)")
#pragma clang diagnostic ignored "-Wpass-failed"
#else
#define HELIX_BF16_UNROLL _Pragma("GCC unroll 24")
#endif

namespace helix::cpu::linear {
namespace {

HELIX_BF16_INLINE __m512 fold_lanes(__m512 x, __m512 y) {
  return _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
}

/// The sums of four vectors.
HELIX_BF16_INLINE __m128 sum_four(__m512 x0, __m512 x1, __m512 x2, __m512 x3) {
  const __m512d lower = _mm512_castps_pd(fold_lanes(x0, x1));
  const __m512d upper = _mm512_castps_pd(fold_lanes(x2, x3));
  const __m512 blocks = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(lower, upper)),
                                      _mm512_castpd_ps(_mm512_unpackhi_pd(lower, upper)));
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(blocks), _mm512_extractf32x8_ps(blocks, 1));
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

HELIX_BF16_INLINE __m512bh pairs(__m512i x) {
  __m512bh result;
  std::memcpy(&result, &x, sizeof(result));
  return result;
}

constexpr __mmask32 mask_of(std::int64_t count) {
  return static_cast<__mmask32>((std::uint64_t{1} << count) - 1);
}

constexpr std::int64_t kLineElements = 32;  // elements of a cache line, which is also a step

/// A row of weights that may begin inside a cache line, as rows of a mapped file do. Loads whole lines in
/// order and joins them in registers. Loads across lines take one row of activations 7 % longer, and eight
/// rows 40 % (Zen 5).
class LineJoiner {
 public:
  HELIX_BF16_INLINE LineJoiner(const bf16* row, std::int64_t cols) {
    const auto shift = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(row) % 64 / sizeof(bf16));
    lines_ = row - shift;
    end_ = cols + shift;
    alignas(64) std::uint16_t order[kLineElements];
    for (std::int64_t i = 0; i < kLineElements; ++i) order[i] = static_cast<std::uint16_t>(i + shift);
    order_ = _mm512_load_si512(order);
    const __mmask32 first = mask_of(std::min(end_, kLineElements)) & static_cast<__mmask32>(~mask_of(shift));
    before_ = _mm512_maskz_loadu_epi16(first, lines_);
  }

  /// Columns up to which load() provides everything that a step needs.
  HELIX_BF16_INLINE std::int64_t whole() const {
    return std::max((end_ - kLineElements) / kLineElements, std::int64_t{0}) * kLineElements;
  }
  /// The line in which elements [d, d + 32) end.
  HELIX_BF16_INLINE __m512i load(std::int64_t d) const {
    return _mm512_loadu_si512(lines_ + d + kLineElements);
  }
  /// As load() at the end of the row, zeros after it. Does not touch a line without elements: it would be
  /// fetched.
  HELIX_BF16_INLINE __m512i load_end(std::int64_t d) const {
    const std::int64_t count = std::min(end_ - d - kLineElements, kLineElements);
    if (count <= 0) return _mm512_setzero_si512();
    return _mm512_maskz_loadu_epi16(mask_of(count), lines_ + d + kLineElements);
  }
  /// Elements [d, d + 32), from the line loaded for d and the line of the previous call, for d - 32.
  HELIX_BF16_INLINE __m512i join(__m512i line) {
    const __m512i joined = _mm512_permutex2var_epi16(before_, order_, line);
    before_ = line;
    return joined;
  }

 private:
  const bf16* lines_;
  std::int64_t end_;  // elements from the start of the row's first line to the row's end
  __m512i order_;
  __m512i before_;
};

/// bf16 weights times packed bf16.
struct Dots {
  using Weight = bf16;
  using Row = bf16;
  /// Columns after which sums are folded. kBlockRows rows of activations, 16 KB, stay in L1, and folding
  /// takes 5 % of a product in caches (10 with 1024). Equal for every R, so that sums have one order.
  static constexpr std::int64_t kChunk = 2048;
  static constexpr std::int64_t kStep = 32;
  static constexpr std::int64_t kSumFloats = 16;
  static constexpr bool kReadsAhead = true;
  static constexpr std::int64_t kStripRows = 48;
  static constexpr std::int64_t kStripAheadBytes = 12 << 10;
  template <int R>
  static constexpr std::int64_t kGroup = R == 4 ? 6 : 8;

  template <int R, int kLines>
  HELIX_BF16 static void multiply(const Tile<bf16>& tile) {
    constexpr int K = static_cast<int>(kGroup<R>);
    const bf16* weights[K];
    HELIX_BF16_UNROLL for (int k = 0; k < K; ++k) {
      weights[k] = tile.weight + std::min<std::int64_t>(k, tile.last) * tile.stride;
    }
    __m512 acc[K * R];
    HELIX_BF16_UNROLL for (int i = 0; i < K * R; ++i) acc[i] = _mm512_setzero_ps();
    const auto* x = static_cast<const bf16*>(tile.rows);
    [[maybe_unused]] const char* ahead = tile.ahead.next;
    const std::int64_t whole = tile.cols / kStep * kStep;
    for (std::int64_t d = 0; d < whole; d += kStep, x += R * kStep) {
      __m512bh w[K];
      HELIX_BF16_UNROLL for (int k = 0; k < K; ++k) w[k] = pairs(_mm512_loadu_si512(weights[k] + d));
      HELIX_BF16_UNROLL for (int line = 0; line < kLines; ++line) {
        __builtin_prefetch(ahead, 0, 2);
        ahead += tile.ahead.line_bytes;
      }
      add_products<R, K>(w, x, acc);
    }
    if (whole < tile.cols) {
      const __mmask32 mask = mask_of(tile.cols - whole);
      __m512bh w[K];
      HELIX_BF16_UNROLL for (int k = 0; k < K; ++k) {
        w[k] = pairs(_mm512_maskz_loadu_epi16(mask, weights[k] + whole));
      }
      add_products<R, K>(w, x, acc);
    }
    HELIX_BF16_UNROLL for (int i = 0; i < K * R; i += 4) {
      _mm_storeu_ps(tile.dots + i, sum_four(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]));
    }
  }

  template <int R>
  HELIX_BF16 static void multiply_row(const Tile<bf16>& tile, std::int64_t ahead) {
    __m512 acc[R];
    HELIX_BF16_UNROLL for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
    const auto* x = static_cast<const bf16*>(tile.rows);
    const std::int64_t whole = tile.cols / kStep * kStep;
    for (std::int64_t d = 0; d < whole; d += kStep, x += R * kStep) {
      const bf16* from = tile.weight + d;
      __builtin_prefetch(from + ahead, 0, 3);
      const __m512bh w[1] = {pairs(_mm512_loadu_si512(from))};
      add_products<R, 1>(w, x, acc);
    }
    if (whole < tile.cols) {
      const __m512bh w[1] = {
          pairs(_mm512_maskz_loadu_epi16(mask_of(tile.cols - whole), tile.weight + whole))};
      add_products<R, 1>(w, x, acc);
    }
    store_dots<R>(acc, tile.dots);
  }

  template <int R0, int R1>
  HELIX_BF16 static void multiply_strip(const Strip<bf16>& strip) {
    constexpr int K = kStripGroup;
    constexpr int kSums = K * (R0 + R1);
    float* sums = strip.sums;
    float* dots = strip.dots;
    for (std::int64_t n = 0; n < strip.count; n += K, sums += kSums * kSumFloats, dots += kSums) {
      const bf16* first = strip.weight + n * strip.stride;
      LineJoiner weights[K] = {LineJoiner(first, strip.cols),
                               LineJoiner(first + strip.second(n), strip.cols)};
      const bf16* ahead[K] = {strip.ahead(n), strip.ahead(n) + strip.second_ahead(n)};
      // Weights that begin inside a cache line end in one more line.
      HELIX_BF16_UNROLL for (int k = 0; k < K; ++k) __builtin_prefetch(ahead[k] + strip.cols - 1, 0, 2);
      __m512 acc[kSums];  // [block][weight row][activation row]
      HELIX_BF16_UNROLL for (int i = 0; i < kSums; ++i) {
        acc[i] = strip.is_first ? _mm512_setzero_ps() : _mm512_load_ps(sums + i * kSumFloats);
      }
      const std::int64_t whole = std::min(weights[0].whole(), weights[1].whole());
      add_columns<R0, R1, false>(strip, weights, ahead, {0, whole}, acc);
      add_columns<R0, R1, true>(strip, weights, ahead, {whole, strip.cols}, acc);
      if (strip.is_last) {
        HELIX_BF16_UNROLL for (int k = 0; k < K; ++k) {
          store_dots<R0>(acc + k * R0, dots + k * (R0 + R1));
          if constexpr (R1 > 0) store_dots<R1>(acc + K * R0 + k * R1, dots + k * (R0 + R1) + R0);
        }
      } else {
        HELIX_BF16_UNROLL for (int i = 0; i < kSums; ++i) _mm512_store_ps(sums + i * kSumFloats, acc[i]);
      }
    }
  }

 private:
  /// Columns `columns` of a pair of weight rows, with or without their end.
  template <int R0, int R1, bool kIsEnd>
  HELIX_BF16_INLINE static void add_columns(const Strip<bf16>& strip, LineJoiner (&weights)[kStripGroup],
                                            const bf16* const (&ahead)[kStripGroup], Range columns,
                                            __m512* acc) {
    constexpr int K = kStripGroup;
    const auto* x0 = static_cast<const bf16*>(strip.rows[0]);
    const auto* x1 = static_cast<const bf16*>(strip.rows[1]);
    for (std::int64_t d = columns.begin; d < columns.end; d += kStep) {
      __m512bh w[K];
      HELIX_BF16_UNROLL for (int k = 0; k < K; ++k) {
        __builtin_prefetch(ahead[k] + d, 0, 2);
        w[k] = pairs(weights[k].join(kIsEnd ? weights[k].load_end(d) : weights[k].load(d)));
      }
      add_products<R0, K>(w, x0 + d * R0, acc);
      add_products<R1, K>(w, x1 + d * R1, acc + K * R0);
    }
  }

  /// Stores the sums of R vectors, filled up to four by repeating some.
  template <int R>
  HELIX_BF16_INLINE static void store_dots(const __m512* acc, float* dots) {
    _mm_storeu_ps(dots, sum_four(acc[0], acc[R > 1 ? 1 : 0], acc[R > 2 ? 2 : 0], acc[R > 3 ? 3 : 0]));
  }

  template <int R, int K>
  HELIX_BF16_INLINE static void add_products(const __m512bh (&w)[K], const bf16* x, __m512* acc) {
    HELIX_BF16_UNROLL for (int r = 0; r < R; ++r) {
      __m512i line = _mm512_loadu_si512(x + r * kStep);
      __asm__("" : "+v"(line));
      const __m512bh a = pairs(line);
      HELIX_BF16_UNROLL for (int k = 0; k < K; ++k) {
        acc[k * R + r] = _mm512_dpbf16_ps(acc[k * R + r], w[k], a);
      }
    }
  }
};

HELIX_BF16_INLINE __m512 add_dot(__m512 acc, __m512i w, const bf16* x) {
  return _mm512_dpbf16_ps(acc, pairs(w), pairs(_mm512_loadu_si512(x)));
}

/// The dot product of a chunk of a weight row with one activation row. Hardware follows best a loop that
/// loads kLines lines of a weight row before it multiplies them: 28 GB/s with two lines, where line after
/// line reads 22, and 23 with four if rows are long.
template <int kLines>
HELIX_BF16 float dot_aligned_row(const bf16* weight, const bf16* x, std::int64_t cols) {
  __m512 acc = _mm512_setzero_ps();
  std::int64_t d = 0;
  for (; d + kLines * kLineElements <= cols; d += kLines * kLineElements) {
    __m512i w[kLines];
    HELIX_BF16_UNROLL for (int line = 0; line < kLines; ++line) {
      w[line] = _mm512_loadu_si512(weight + d + line * kLineElements);
      __asm__("" : "+v"(w[line]));  // load here, not where it is multiplied
    }
    HELIX_BF16_UNROLL for (int line = 0; line < kLines; ++line) {
      acc = add_dot(acc, w[line], x + d + line * kLineElements);
    }
  }
  for (; d < cols; d += kLineElements) {
    acc =
        add_dot(acc, _mm512_maskz_loadu_epi16(mask_of(std::min(kLineElements, cols - d)), weight + d), x + d);
  }
  return _mm_cvtss_f32(sum_four(acc, acc, acc, acc));
}

/// As above, for a row that does not begin at a line.
template <int kLines>
HELIX_BF16 float dot_shifted_row(const bf16* weight, const bf16* x, std::int64_t cols) {
  LineJoiner weights(weight, cols);
  __m512 acc = _mm512_setzero_ps();
  std::int64_t d = 0;
  for (; d + kLines * kLineElements <= weights.whole(); d += kLines * kLineElements) {
    __m512i w[kLines];
    HELIX_BF16_UNROLL for (int line = 0; line < kLines; ++line) {
      w[line] = weights.load(d + line * kLineElements);
      __asm__("" : "+v"(w[line]));
    }
    HELIX_BF16_UNROLL for (int line = 0; line < kLines; ++line) {
      acc = add_dot(acc, weights.join(w[line]), x + d + line * kLineElements);
    }
  }
  for (; d < cols; d += kLineElements) acc = add_dot(acc, weights.join(weights.load_end(d)), x + d);
  return _mm_cvtss_f32(sum_four(acc, acc, acc, acc));
}

template <int kLines>
float dot_row(const bf16* weight, const bf16* x, std::int64_t cols) {
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(weight) % 64 == 0;
  return is_aligned ? dot_aligned_row<kLines>(weight, x, cols) : dot_shifted_row<kLines>(weight, x, cols);
}

template <int kLines>
void multiply_row(const Task& task) {
  const auto* x = static_cast<const bf16*>(task.in);
  const auto* weight = static_cast<const bf16*>(task.weight);
  for (std::int64_t n = 0; n < task.num_weight_rows; ++n, weight += task.cols) {
    float sum = task.accumulate ? task.out[n] : 0.0f;
    for (std::int64_t begin = 0; begin < task.cols; begin += Dots::kChunk)
      sum += dot_row<kLines>(weight + begin, x + begin, std::min(Dots::kChunk, task.cols - begin));
    task.out[n] = sum;
  }
}

HELIX_BF16 void pack(const float* in, std::int64_t in_stride, std::int64_t count, std::int64_t cols,
                     bf16* to) {
  const std::int64_t rows = packed_rows(count);
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* from = in + std::min(r, count - 1) * in_stride;
    bf16* target = to + r * Dots::kStep;
    for (std::int64_t d = 0; d < cols; d += Dots::kStep, target += rows * Dots::kStep) {
      const __mmask32 mask = mask_of(std::min(Dots::kStep, cols - d));
      const __m512 lower = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from + d);
      const __m512 upper = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), from + d + 16);
      const __m512bh rounded = _mm512_cvtne2ps_pbh(upper, lower);
      std::memcpy(static_cast<void*>(target), &rounded, sizeof(rounded));
    }
  }
}

}  // namespace

bool has_bf16_dots() noexcept {
  constexpr unsigned kBf16 = 1u << 5;
  static const bool has =
      !is_switched_off("HELIX_BF16_DOTS") && has_avx512() && (CpuId(7, 1).eax & kBf16) != 0;
  return has;
}

void multiply_bf16_dots(const Task& task) {
  if (task.num_rows == 1 && task.reading == Reading::rows2) {
    multiply_row<2>(task);
  } else if (task.num_rows == 1 && task.reading == Reading::rows4) {
    multiply_row<4>(task);
  } else {
    BlockWalk<Dots>(task).run();
  }
}

void pack_for_bf16_dots(const float* in, std::int64_t in_stride, std::int64_t count, std::int64_t cols,
                        bf16* to) {
  pack(in, in_stride, count, cols, to);
}

}  // namespace helix::cpu::linear

#else

#include <helix/error.hpp>

namespace helix::cpu::linear {

bool has_bf16_dots() noexcept {
  return false;
}

void multiply_bf16_dots(const Task&) {
  throw Error(ErrorCode::internal, "this machine has no dot products of bf16");
}

void pack_for_bf16_dots(const float*, std::int64_t, std::int64_t, std::int64_t, bf16*) {
  throw Error(ErrorCode::internal, "this machine has no dot products of bf16");
}

}  // namespace helix::cpu::linear

#endif
