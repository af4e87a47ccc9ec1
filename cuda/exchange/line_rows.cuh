// SPDX-License-Identifier: Apache-2.0
// Rows of partials as lines (LineRows), on their way to the rank that combines them.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/backend/exchange.hpp>

#include "cuda/comm/peer_lines.cuh"

namespace helix::cuda {

/// What a kernel reads on the device of where it writes partials.
struct SinkPlace {
  std::int64_t slot;    ///< 0 or 1.
  std::uint32_t count;  ///< Of lines.

  SinkPlace() = default;
  /// `gave_up`: of lines; null: there are none.
  __device__ __forceinline__ SinkPlace(const std::uint64_t* epoch, const std::uint32_t* gave_up) {
    const std::uint64_t exchanges = *epoch;
    const std::uint32_t has_stopped = gave_up == nullptr ? 0 : volatile_word(gave_up);
    slot = static_cast<std::int64_t>(exchanges & 1);
    count = static_cast<std::uint32_t>(exchanges) + (has_stopped != 0 ? 0 : 1);  // 0: as if nothing had come
  }
};

/// One row of an exchange, for its writer.
struct OutgoingLines {
  std::byte* out = nullptr;
  std::byte* lse = nullptr;
  std::uint32_t count = 0;
  std::uint32_t tag = 0;

  OutgoingLines() = default;
  /// Row (token, head) of the exchange; slots are slot_bytes apart.
  __device__ __forceinline__ OutgoingLines(const SinkLines& lines, const SinkPlace& place,
                                           std::int64_t slot_bytes, std::int64_t token, std::int64_t head)
      : count(place.count),
        tag(exchange_row_tag(lines.positions == nullptr ? 0 : lines.positions[token], lines.tokens)) {
    const std::int64_t begin = place.slot * slot_bytes + head * lines.rows.head_bytes;
    out = lines.rows.out + begin + token * lines.rows.token_bytes;
    lse = lines.rows.lse + begin + token * kLineBytes;
  }

  __device__ __forceinline__ void store_lse(float value) const {
    store_line(lse, __float_as_uint(value), tag, count);
  }
  /// 8 bytes of the row, `at` bytes behind its begin.
  __device__ __forceinline__ void store(std::int64_t at, std::uint32_t first, std::uint32_t second) const {
    store_line(out + 2 * at, first, second, count);
  }
};

}  // namespace helix::cuda
