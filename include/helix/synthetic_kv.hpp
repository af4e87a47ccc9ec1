// SPDX-License-Identifier: Apache-2.0
// Synthetic KV: contexts from a counter-based generator, for measurements at lengths that nobody prefills. A
// value depends only on its place in the model, so that every topology stores the same values.
#pragma once

#include <cstdint>

#include <helix/host_device.hpp>
#include <helix/kv_format.hpp>
#include <helix/splitmix64.hpp>

namespace helix {

/// Key of the K (or V) row of `head` at global `position` in `layer`, as the model counts them. A function of
/// these alone.
HELIX_HOST_DEVICE constexpr std::uint32_t synthetic_row_key(std::int64_t layer, std::int64_t head,
                                                            std::int64_t position, bool is_value) {
  const std::uint64_t where =
      detail::splitmix64_mix(static_cast<std::uint64_t>(layer) << 1 | (is_value ? 1u : 0u)) ^
      static_cast<std::uint64_t>(head) * detail::kSplitmix64Step;
  return static_cast<std::uint32_t>(detail::splitmix64_mix(where + static_cast<std::uint64_t>(position)) >>
                                    32);
}

/// Pseudo-random value in [-1, 1) of one element of the row.
HELIX_HOST_DEVICE constexpr float synthetic_element(std::uint32_t row_key, std::uint32_t element) {
  std::uint32_t x = row_key ^ element * 0x9e3779b9u;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return static_cast<float>(static_cast<std::int32_t>(x)) * 0x1p-31f;
}

/// Arguments of fill_synthetic_kv(args, stream), which a backend may have. It writes the rows that
/// kv.kvp_rank owns of positions [0, tokens), stored as value / scale, rounded once.
struct SyntheticKvArgs {
  KvView kv;  ///< Pages of the model's layer `layer`.
  std::int64_t sequence_slot = 0;
  std::int64_t tokens = 0;      ///< The sequence must have been grown to this length.
  std::int64_t layer = 0;       ///< Layer of the model.
  std::int64_t first_head = 0;  ///< KV head of the model that is head 0 of the pages.
};

}  // namespace helix
