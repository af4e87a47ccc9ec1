// SPDX-License-Identifier: Apache-2.0
// BatchOffsets: a fingerprint of a batch's host offsets, taken when an operation is queued, and compared with
// the device's offsets when it runs.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include <helix/backend/batch.hpp>
#include <helix/error.hpp>
#include <helix/splitmix64.hpp>

namespace helix::cpu {

class BatchOffsets {
 public:
  explicit BatchOffsets(const Batch& batch)
      : tokens_(batch.num_tokens()), mixed_(mix(batch.query_offsets_host)) {}

  /// @throws Error(invalid_argument) unless `offsets`, those on the device, are the host's.
  void check(std::string_view operation, std::span<const std::int32_t> offsets) const {
    const std::int64_t tokens = offsets.empty() ? 0 : std::int64_t{offsets.back()} - offsets.front();
    HELIX_EXPECTS(tokens == tokens_, ErrorCode::invalid_argument, operation, ": the batch has ", tokens_,
                  " tokens by its query_offsets_host and ", tokens,
                  " by its query_offsets; give the same in both");
    HELIX_EXPECTS(mix(offsets) == mixed_, ErrorCode::invalid_argument, operation, ": the batch's ", tokens_,
                  " tokens are divided among its sequences in one way by its query_offsets_host and in "
                  "another by its query_offsets; give the same in both");
  }

 private:
  static std::uint64_t mix(std::span<const std::int32_t> offsets) {
    std::uint64_t mixed = 0;
    for (const std::int32_t offset : offsets)
      mixed = detail::splitmix64_mix(mixed + detail::kSplitmix64Step + static_cast<std::uint32_t>(offset));
    return mixed;
  }

  std::int64_t tokens_;
  std::uint64_t mixed_;
};

}  // namespace helix::cpu
