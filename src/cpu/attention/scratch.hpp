// SPDX-License-Identifier: Apache-2.0
// ScratchLayout: the sizes of attention's tiles, and where one thread's arrays lie in its scratch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <helix/dtype.hpp>
#include <helix/integers.hpp>

#include "cpu/amx.hpp"
#include "cpu/attention/task.hpp"

namespace helix::cpu {

inline constexpr std::int64_t kDirectTile = 256;  ///< keys between two updates of the running maximum
inline constexpr std::int64_t kReadRun = 64;      ///< keys of a head that are read before the next head's
inline constexpr std::int64_t kPackedTile = 64;
inline constexpr std::int64_t kPackedRows = 128;  ///< rows that share a widened tile
inline constexpr std::int64_t kDepth = 128;       ///< part of the head dimension whose keys stay in L1
inline constexpr std::int64_t kValueTile = 64;    ///< keys whose V rows stay in L1 while blocks walk them
/// keys whose V rows stay in L1 while groups of columns walk them
inline constexpr std::int64_t kShortPass = 16;
inline constexpr std::int64_t kRowSlack = 8;     ///< rows that a block may compute past the last one
inline constexpr std::int64_t kAmxTile = 128;    ///< keys of a tile on AMX
inline constexpr std::int64_t kJoinedRows = 64;  ///< f32 rows of a split latent that are joined at once
static_assert(kJoinedRows >= kPackedTile &&
                  kJoinedRows * sizeof(float) >= static_cast<std::size_t>(kAmxTile) * sizeof(bf16),
              "a tile of a split latent must fit");
/// elements of the widest pair; rows are padded to a multiple
inline constexpr std::int64_t kPairSlack = 32;
/// floats of `keys` that hold the sums of a tile in direct()
inline constexpr std::int64_t kSumFloats = kDepth * kPairSlack;

/// Where each array of the AMX path lies in its scratch, in bytes.
struct AmxLayout {
  std::int64_t q, keys, values, weights, scores, total;

  AmxLayout(std::int64_t rows, std::int64_t head_dim, std::int64_t value_dim) {
    const std::int64_t padded_rows = round_up(std::min(rows, kPackedRows), amx::kRows);
    const std::int64_t d = round_up(head_dim, amx::kStep);
    const std::int64_t dv = round_up(value_dim, amx::kStep);
    constexpr auto kBytes = static_cast<std::int64_t>(sizeof(bf16));
    q = 0;
    keys = q + 3 * padded_rows * d * kBytes;
    values = keys + kAmxTile * d * kBytes;
    weights = values + kAmxTile * dv * kBytes;
    scores = weights + 3 * padded_rows * kAmxTile * kBytes;
    total = scores + padded_rows * kAmxTile * static_cast<std::int64_t>(sizeof(float));
  }
};

/// Where each array lies in the scratch, in floats. Every array starts on a cache line.
struct ScratchLayout {
  std::int64_t q, acc, max, sum, correction, scores, read_scores, keys, values, pointers, joined, amx, total;

  ScratchLayout(std::int64_t rows, std::int64_t head_dim, std::int64_t value_dim) {
    const std::int64_t padded_rows = round_up(rows + kRowSlack, 16);
    const std::int64_t d = round_up(head_dim, kPairSlack);
    const std::int64_t dv = round_up(value_dim, kPairSlack);
    q = 0;
    acc = q + std::max(padded_rows, kTaskRows + kRowSlack) * d;
    max = acc + padded_rows * dv;
    sum = max + padded_rows;
    correction = sum + padded_rows;
    scores = correction + padded_rows;
    read_scores =
        scores + std::max((kPackedRows + kRowSlack) * kPackedTile, (kDirectRows + kRowSlack) * kDirectTile);
    keys = read_scores + (kTaskRows + kRowSlack) * kDirectTile;
    values = keys + std::max(kDepth * kPairSlack, d);
    pointers = values + kPackedTile * kPairSlack;
    const std::int64_t pointer_floats = static_cast<std::int64_t>(sizeof(void*) / sizeof(float));
    joined = pointers + 4 * (kDirectTile + kPairSlack) * pointer_floats;
    amx = joined + round_up(head_dim > value_dim ? kJoinedRows * head_dim : 0, 16);
    total = amx;
    if (amx::available()) {
      total += AmxLayout(rows, head_dim, value_dim).total / static_cast<std::int64_t>(sizeof(float));
    }
  }
};

}  // namespace helix::cpu
