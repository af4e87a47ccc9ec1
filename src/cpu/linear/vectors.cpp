// SPDX-License-Identifier: Apache-2.0
// Products on f32 vectors, compiled for each instruction set and selected at run time. Weights of any type
// are widened between memory and registers.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/linear/vectors.cpp"
#include "cpu/foreach_target.hpp"
// These must come after foreach_target.hpp.
#include <algorithm>
#include <cstdint>

#include <hwy/highway.h>

#include "cpu/dots-inl.hpp"
#include "cpu/linear/blocks.hpp"
#include "cpu/linear/task.hpp"
#include "cpu/widen-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::linear::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using namespace cpu::HWY_NAMESPACE;

static_assert(kColumnStep % kPair == 0);

/// Weights of type T against packed f32.
template <class T>
struct Vectors {
  using Weight = T;
  using Row = float;
  /// Columns after which sums are folded. Equal for every R, so that sums have one order.
  static constexpr std::int64_t kChunk = 768;
  static constexpr std::int64_t kStep = kPair;
  static constexpr std::int64_t kSumFloats = kLanes;
  static constexpr bool kReadsAhead = kHasReadings;
  /// The sums of a strip take 12 KB of L1 beside as many of activations: 8 rows, one thread of Zen 5, 45 ms a
  /// GiB of bf16 weights; with 48 rows and 12 KiB ahead 50.
  static constexpr std::int64_t kStripRows = 24;
  static constexpr std::int64_t kStripAheadBytes = 8 << 10;
  /// As many as fit in registers beside the operands.
  template <int R>
  static constexpr std::int64_t kGroup = kLanes == 16        ? (R == 4 ? 6 : 8)
                                         : R == 1            ? 8
                                         : R < 4             ? 4
                                         : kHasWideGroups<T> ? 3
                                                             : 2;

  template <int R, int kLines>
  static HWY_NOINLINE void multiply(const Tile<T>& tile) {
    constexpr int K = static_cast<int>(kGroup<R>);
    const T* weights[K];
    HELIX_UNROLL for (int k = 0; k < K; ++k) {
      weights[k] = tile.weight + std::min<std::int64_t>(k, tile.last) * tile.stride;
    }
    Vec acc[K * R];
    HELIX_UNROLL for (int k = 0; k < K; ++k) {
      HELIX_UNROLL for (int r = 0; r < R; ++r) acc[k * R + r] = hn::Zero(kF32);
    }
    const auto* x = static_cast<const float*>(tile.rows);
    [[maybe_unused]] const char* ahead = tile.ahead.next;
    const std::int64_t whole = tile.cols / kPair * kPair;
    for (std::int64_t d = 0; d < whole; d += kPair, x += R * kPair) {
      HELIX_UNROLL for (int line = 0; line < kLines; ++line) {
        __builtin_prefetch(ahead, 0, 2);
        ahead += tile.ahead.line_bytes;
      }
      add_products<R, K>(weights, d, x, acc);
    }
    if (whole < tile.cols) {
      Pair w[K];
      HELIX_UNROLL for (int k = 0; k < K; ++k) w[k] = load_pair_tail(weights[k] + whole, tile.cols - whole);
      add_products<R, K>(w, x, acc);
    }
    HELIX_UNROLL for (int i = 0; i < K * R; i += 4) {
      store_sums(acc[i], acc[i + 1], acc[i + 2], acc[i + 3], tile.dots + i);
    }
  }

  template <int R>
  static HWY_NOINLINE void multiply_row(const Tile<T>& tile, std::int64_t ahead) {
    Vec acc[R];
    HELIX_UNROLL for (int r = 0; r < R; ++r) acc[r] = hn::Zero(kF32);
    const auto* x = static_cast<const float*>(tile.rows);
    const std::int64_t whole = tile.cols / kPair * kPair;
    for (std::int64_t d = 0; d < whole; d += kPair, x += R * kPair) {
      const T* from = tile.weight + d;
      // Each pair, although with AVX2 two of 16 bits share a line: once per line took up to a quarter longer.
      ask<3>(from + ahead);
      const Pair w[1] = {load_pair(from)};
      add_products<R, 1>(w, x, acc);
    }
    if (whole < tile.cols) {
      const Pair w[1] = {load_pair_tail(tile.weight + whole, tile.cols - whole)};
      add_products<R, 1>(w, x, acc);
    }
    store_dots<R>(acc, tile.dots);
  }

  template <int R0, int R1>
  static HWY_NOINLINE void multiply_strip(const Strip<T>& strip) {
    constexpr int K = kStripGroup;
    constexpr int kSums = K * (R0 + R1);
    const std::int64_t whole = strip.cols / kPair * kPair;
    float* sums = strip.sums;
    float* dots = strip.dots;
    for (std::int64_t n = 0; n < strip.count; n += K, sums += kSums * kSumFloats, dots += kSums) {
      const T* weights[K] = {strip.weight + n * strip.stride,
                             strip.weight + n * strip.stride + strip.second(n)};
      const T* ahead[K] = {strip.ahead(n), strip.ahead(n) + strip.second_ahead(n)};
      Vec acc[kSums];  // [block][weight row][activation row]
      HELIX_UNROLL for (int i = 0; i < kSums; ++i) {
        acc[i] = strip.is_first ? hn::Zero(kF32) : hn::LoadU(kF32, sums + i * kSumFloats);
      }
      const auto* x0 = static_cast<const float*>(strip.rows[0]);
      const auto* x1 = static_cast<const float*>(strip.rows[1]);
      for (std::int64_t d = 0; d < whole; d += kPair, x0 += R0 * kPair, x1 += R1 * kPair) {
        Pair w[K];
        HELIX_UNROLL for (int k = 0; k < K; ++k) {
          ask<2>(ahead[k] + d);  // each pair, as in multiply_row()
          w[k] = load_pair(weights[k] + d);
        }
        add_products<R0, K>(w, x0, acc);
        add_products<R1, K>(w, x1, acc + K * R0);
      }
      // Weights that begin inside a cache line end in one more line.
      HELIX_UNROLL for (int k = 0; k < K; ++k) __builtin_prefetch(ahead[k] + strip.cols - 1, 0, 2);
      if (whole < strip.cols) {
        Pair w[K];
        HELIX_UNROLL for (int k = 0; k < K; ++k) w[k] =
            load_pair_tail(weights[k] + whole, strip.cols - whole);
        add_products<R0, K>(w, x0, acc);
        add_products<R1, K>(w, x1, acc + K * R0);
      }
      if (strip.is_last) {
        HELIX_UNROLL for (int k = 0; k < K; ++k) {
          store_dots<R0>(acc + k * R0, dots + k * (R0 + R1));
          if constexpr (R1 > 0) store_dots<R1>(acc + K * R0 + k * R1, dots + k * (R0 + R1) + R0);
        }
      } else {
        HELIX_UNROLL for (int i = 0; i < kSums; ++i) hn::StoreU(acc[i], kF32, sums + i * kSumFloats);
      }
    }
  }

 private:
  /// Stores the sums of R vectors, filled up to four by repeating some.
  template <int R>
  static HWY_INLINE void store_dots(const Vec* acc, float* dots) {
    store_sums(acc[0], acc[R > 1 ? 1 : 0], acc[R > 2 ? 2 : 0], acc[R > 3 ? 3 : 0], dots);
  }
};

/// The weight rows of Reading::near. The last one also stands for rows that a block reads past the end.
template <class T, int R>
struct NearRows {
  const T* first;
  std::int64_t stride;
  std::int64_t last;
  std::int64_t after_last;  ///< elements from the row after the last to what is read next
  HWY_INLINE const T* operator[](std::int64_t i) const { return first + std::min(i, last) * stride; }
  /// Prefetches a block or two ahead, because a chunk of a row is too short for the hardware prefetcher to
  /// get ahead: half again as fast on the machines that this is for.
  HWY_INLINE void prefetch(std::int64_t i, int block, std::int64_t d) const {
    i += R == 1 ? block : 2 * block;
    const auto offset = (i * stride + d + (i > last ? after_last : 0)) * static_cast<std::int64_t>(sizeof(T));
    ask<3>(reinterpret_cast<const T*>(reinterpret_cast<std::uintptr_t>(first) +
                                      static_cast<std::uintptr_t>(offset)));
  }
};

constexpr std::int64_t kNearRows = 64;

template <class T, int R>
HWY_NOINLINE void multiply_near(const Task& task, std::int64_t row) {
  alignas(64) float dots[kNearRows * R + kLanes];
  constexpr std::int64_t kChunk = Vectors<T>::kChunk;
  const auto* packed = static_cast<const float*>(task.in) + row * packed_cols(task.cols);
  for (std::int64_t first = 0; first < task.num_weight_rows; first += kNearRows) {
    const std::int64_t count = std::min(kNearRows, task.num_weight_rows - first);
    for (std::int64_t begin = 0; begin < task.cols; begin += kChunk) {
      const std::int64_t cols = std::min(kChunk, task.cols - begin);
      // After the last row of a chunk come the first rows of the next chunk, or of the next group of rows.
      const std::int64_t after_last = begin + kChunk < task.cols ? kChunk - count * task.cols : -begin;
      NearRows<T, R> weights{static_cast<const T*>(task.weight) + first * task.cols + begin, task.cols,
                             count - 1, after_last};
      dot_block<R, true>(weights, count, packed + begin * R, cols, dots);
      add_dots<R>(task, dots, row, first, count, begin == 0 && !task.accumulate);
    }
  }
}

template <class T>
void multiply_as(const Task& task) {
  if constexpr (kHasReadings) {
    if (task.reading == Reading::near) {
      for_each_row_block(task.num_rows, [&]<int R>(std::int64_t row) { multiply_near<T, R>(task, row); });
      return;
    }
  }
  BlockWalk<Vectors<T>>(task).run();
}

void multiply_target(const Task& task) {
  dispatch(task.dtype, [&]<class T>(T*) { multiply_as<T>(task); });
}

template <class T>
void pack_as(const float* in, std::int64_t in_stride, std::int64_t count, std::int64_t cols, float* to) {
  const std::int64_t rows = packed_rows(count);
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* from = in + std::min(r, count - 1) * in_stride;
    load_pair_order<T>(from, cols, kDecodeFactor<T>, to + r * kPair, rows * kPair);
  }
}

void pack_target(DType weight, const float* in, std::int64_t in_stride, std::int64_t count, std::int64_t cols,
                 float* to) {
  dispatch(weight, [&]<class T>(T*) { pack_as<T>(in, in_stride, count, cols, to); });
}

}  // namespace
}  // namespace helix::cpu::linear::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace helix::cpu::linear {

HWY_EXPORT(multiply_target);
HWY_EXPORT(pack_target);

void multiply_vectors(const Task& task) {
  HWY_DYNAMIC_DISPATCH(multiply_target)(task);
}

void pack_for_vectors(DType weight, const float* in, std::int64_t in_stride, std::int64_t count,
                      std::int64_t cols, float* to) {
  HWY_DYNAMIC_DISPATCH(pack_target)(weight, in, in_stride, count, cols, to);
}

}  // namespace helix::cpu::linear
#endif
