// SPDX-License-Identifier: Apache-2.0
// Products of bf16 weights with bf16 activations on tile registers.
//
// A product takes 32 weight rows and up to 32 activation rows: four tiles of sums, two of weights, two of
// activations. With up to 32 activation rows, tiles are loaded from the weights in place, each row for 4 KB.
// With more rows the weights are copied tile by tile, because 32 rows a power of two apart share too few
// lines of L1. A panel of the copy stays in L1 while activations come from L2, where they stay for the next
// weights.
#include "cpu/linear/task.hpp"

#if defined(__x86_64__) && defined(__linux__)

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <immintrin.h>

#include <helix/integers.hpp>

#include "cpu/amx.hpp"
#include "cpu/amx_vectors.hpp"

namespace helix::cpu::linear {
namespace {

constexpr std::int64_t kLineBytes = 64;
constexpr std::int64_t kTile = amx::kRows * amx::kStep;  // elements
constexpr std::int64_t kTileSums = amx::kRows * amx::kRows;
constexpr std::int64_t kBlock = 2 * amx::kRows;  ///< Weight rows, and activation rows, of a product.
constexpr std::int64_t kBlockSums = 4 * kTileSums;
/// Columns of a panel: a copy of weights that stays in L1, 32 KB.
constexpr std::int64_t kPanel = 512;
/// Activation rows whose sums are kept while panels change; 32 KB.
constexpr std::int64_t kGroupRows = 256;

/// The weight tiles of one product, two per step.
struct WeightTiles {
  const std::byte* first;
  const std::byte* second;
  std::int64_t line_bytes;
  std::int64_t step_bytes;
};

/// sums[activation tile][weight tile][weight row][activation row] = or += the products over `steps`.
template <int kRowTiles>
HELIX_AMX void multiply_block(const WeightTiles& weights, const bf16* rows, std::int64_t to_next_rows,
                              std::int64_t steps, float* sums, bool continues, amx::RowsAhead ahead) {
  amx::barrier();
  if (continues) {
    _tile_loadd(0, sums, kLineBytes);
    _tile_loadd(1, sums + kTileSums, kLineBytes);
    if constexpr (kRowTiles > 1) {
      _tile_loadd(2, sums + 2 * kTileSums, kLineBytes);
      _tile_loadd(3, sums + 3 * kTileSums, kLineBytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const std::byte* first = weights.first;
  const std::byte* second = weights.second;
  for (std::int64_t step = 0; step < steps; ++step, rows += kTile) {
    _tile_loadd(6, rows, kLineBytes);
    _tile_loadd(4, first, weights.line_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, second, weights.line_bytes);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (kRowTiles > 1) {
      _tile_loadd(7, rows + to_next_rows, kLineBytes);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    first += weights.step_bytes;
    second += weights.step_bytes;
    ahead.ask();
  }
  _tile_stored(0, sums, kLineBytes);
  _tile_stored(1, sums + kTileSums, kLineBytes);
  if constexpr (kRowTiles > 1) {
    _tile_stored(2, sums + 2 * kTileSums, kLineBytes);
    _tile_stored(3, sums + 3 * kTileSums, kLineBytes);
  }
  amx::barrier();
}

/// Copies `count` weight rows of `cols` columns as [step][two tiles]; zeros after both.
HELIX_AMX void copy_weights(const bf16* from, std::int64_t stride, std::int64_t count, std::int64_t cols,
                            bf16* to) {
  for (std::int64_t row = 0; row < kBlock; ++row, from += stride, to += amx::kStep) {
    bf16* line = to;
    for (std::int64_t d = 0; d < cols; d += amx::kStep, line += 2 * kTile) {
      const std::int64_t valid = row < count ? std::min(amx::kStep, cols - d) : 0;
      const auto mask = static_cast<__mmask32>((std::uint64_t{1} << valid) - 1);
      _mm512_store_si512(line, _mm512_maskz_loadu_epi16(mask, from + d));
    }
  }
}

/// Adds a tile of sums, [weight row][activation row], to `out`, or stores it.
HELIX_AMX void add_tile(const float* sums, float* out, std::int64_t out_stride, std::int64_t num_weights,
                        std::int64_t num_rows, bool adds) {
  __m512i x[amx::kRows];
  for (std::int64_t n = 0; n < amx::kRows; ++n) x[n] = _mm512_load_si512(sums + n * amx::kRows);
  amx::transpose(x);
  const auto mask = static_cast<__mmask16>((std::uint32_t{1} << num_weights) - 1);
  for (std::int64_t r = 0; r < num_rows; ++r, out += out_stride) {
    __m512 sum = _mm512_castsi512_ps(x[r]);
    if (adds) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), sum);
    _mm512_mask_storeu_ps(out, mask, sum);
  }
}

/// A block of weights over a chunk of columns, and some of the packed rows.
struct Chunk {
  std::int64_t first;  ///< weight row
  std::int64_t count;
  std::int64_t begin;  ///< column
  std::int64_t cols;
  std::int64_t row;  ///< activation row
  std::int64_t rows;
  std::int64_t steps() const { return ceil_div(cols, amx::kStep); }
};

class Walk {
 public:
  explicit Walk(const Task& task)
      : task_(task),
        weight_(static_cast<const bf16*>(task.weight)),
        rows_(static_cast<const bf16*>(task.in)) {}

  void run() {
    const amx::Session session;
    if (task_.num_rows <= kBlock) {
      for (std::int64_t first = 0; first < task_.num_weight_rows; first += kBlock) {
        const std::int64_t count = std::min(kBlock, task_.num_weight_rows - first);
        for (std::int64_t begin = 0; begin < task_.cols; begin += kTileChunk) {
          ahead_ = next_weights(task_, first, kBlock, begin);
          multiply({first, count, begin, std::min(kTileChunk, task_.cols - begin), 0, task_.num_rows});
        }
      }
      return;
    }
    for (std::int64_t begin = 0; begin < task_.cols; begin += kTileChunk) {
      const std::int64_t cols = std::min(kTileChunk, task_.cols - begin);
      for (std::int64_t row = 0; row < task_.num_rows; row += kGroupRows) {
        const std::int64_t rows = std::min(kGroupRows, task_.num_rows - row);
        for (std::int64_t first = 0; first < task_.num_weight_rows; first += kBlock) {
          const std::int64_t count = std::min(kBlock, task_.num_weight_rows - first);
          multiply({first, count, begin, cols, row, rows});
        }
      }
    }
  }

 private:
  void multiply(const Chunk& chunk) {
    const std::int64_t blocks = ceil_div(chunk.rows, kBlock);
    const bf16* from = weight_ + chunk.first * task_.cols + chunk.begin;
    const std::int64_t row_bytes = task_.cols * static_cast<std::int64_t>(sizeof(bf16));
    const bool is_copied = blocks > 1 || chunk.count < kBlock || chunk.cols % amx::kStep != 0;
    WeightTiles tiles;
    if (is_copied) {
      copy_weights(from, task_.cols, chunk.count, chunk.cols, copy_);
      const auto* copy = reinterpret_cast<const std::byte*>(copy_);
      tiles = {copy, copy + kTile * sizeof(bf16), kLineBytes, 2 * kTile * sizeof(bf16)};
    } else {
      const auto* lie = reinterpret_cast<const std::byte*>(from);
      tiles = {lie, lie + amx::kRows * row_bytes, row_bytes, kLineBytes};
    }
    const std::int64_t panel = is_copied && blocks > 1 ? kPanel / amx::kStep : chunk.steps();
    for (std::int64_t step = 0; step < chunk.steps(); step += panel) {
      const std::int64_t steps = std::min(panel, chunk.steps() - step);
      const WeightTiles part = {tiles.first + step * tiles.step_bytes, tiles.second + step * tiles.step_bytes,
                                tiles.line_bytes, tiles.step_bytes};
      for (std::int64_t block = 0; block < blocks; ++block) multiply(chunk, part, block, step, steps);
    }
    for (std::int64_t block = 0; block < blocks; ++block) add(chunk, block);
  }

  void multiply(const Chunk& chunk, const WeightTiles& tiles, std::int64_t block, std::int64_t step,
                std::int64_t steps) {
    const std::int64_t row = chunk.row + block * kBlock;
    const std::int64_t tile_rows = packed_cols(task_.cols) * amx::kRows;  // elements of 16 rows
    const bf16* rows = rows_ + row / amx::kRows * tile_rows + (chunk.begin / amx::kStep + step) * kTile;
    const bool is_wide = chunk.rows - block * kBlock > amx::kRows;
    const auto multiply = is_wide ? multiply_block<2> : multiply_block<1>;
    multiply(tiles, rows, tile_rows, steps, sums_ + block * kBlockSums, step > 0, ahead_);
  }

  void add(const Chunk& chunk, std::int64_t block) {
    const bool adds = chunk.begin > 0 || task_.accumulate;
    const float* sums = sums_ + block * kBlockSums;
    for (std::int64_t r = 0; r < kBlock; r += amx::kRows) {
      const std::int64_t rows = std::min(amx::kRows, chunk.rows - block * kBlock - r);
      if (rows <= 0) break;
      float* out = task_.out + (chunk.row + block * kBlock + r) * task_.out_stride + chunk.first;
      for (std::int64_t n = 0; n < chunk.count; n += amx::kRows, sums += kTileSums)
        add_tile(sums, out + n, task_.out_stride, std::min(amx::kRows, chunk.count - n), rows, adds);
      if (chunk.count <= amx::kRows) sums += kTileSums;
    }
  }

  const Task& task_;
  const bf16* weight_;
  const bf16* rows_;
  amx::RowsAhead ahead_;
  alignas(64) bf16 copy_[kBlock * kTileChunk];
  alignas(64) float sums_[kGroupRows / kBlock * kBlockSums];
};

/// 16 floats, rounded to nearest bf16 as bf16() does, in the upper halves of their lanes.
HELIX_AVX512 __m512i round_upper(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
}

HELIX_AMX void pack(const float* in, std::int64_t in_stride, std::int64_t count, std::int64_t cols,
                    bf16* to) {
  for (std::int64_t d = 0; d < cols; d += amx::kStep, to += kTile) {
    const auto mask = static_cast<__mmask32>((std::uint64_t{1} << std::min(amx::kStep, cols - d)) - 1);
    __m512i x[amx::kRows] = {};
    for (std::int64_t r = 0; r < count; ++r) {
      const float* from = in + r * in_stride + d;
      const __m512i lower = round_upper(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from));
      const __m512i upper = round_upper(_mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), from + 16));
      x[r] = amx::join_upper(lower, upper);
    }
    amx::transpose(x);
    for (std::int64_t line = 0; line < amx::kRows; ++line)
      _mm512_store_si512(to + line * amx::kStep, x[line]);
  }
}

}  // namespace

void multiply_bf16_tiles(const Task& task) {
  Walk(task).run();
}

void pack_for_bf16_tiles(const float* in, std::int64_t in_stride, std::int64_t count, std::int64_t cols,
                         bf16* to) {
  pack(in, in_stride, count, cols, to);
}

}  // namespace helix::cpu::linear

#else

#include <helix/error.hpp>

namespace helix::cpu::linear {

void multiply_bf16_tiles(const Task&) {
  throw Error(ErrorCode::internal, "this machine has no tile registers");
}

void pack_for_bf16_tiles(const float*, std::int64_t, std::int64_t, std::int64_t, bf16*) {
  throw Error(ErrorCode::internal, "this machine has no tile registers");
}

}  // namespace helix::cpu::linear

#endif
