// SPDX-License-Identifier: Apache-2.0
// StepInputs: what a step reads besides its batch, on the device at stable addresses.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <helix/backend.hpp>
#include <helix/error.hpp>

namespace helix::decode {

/// Owns device memory for steps of up to `max_tokens` tokens and `max_rows` logit rows. Addresses never
/// change.
template <Backend B>
class StepInputs {
 public:
  StepInputs(B& backend, std::int64_t max_tokens, std::int64_t max_rows)
      : backend_(&backend),
        max_tokens_(max_tokens),
        max_rows_(max_rows),
        // Tokens come last: the copy ends with the last one, whatever the capacity.
        counters_begin_(bytes<std::int64_t>(max_rows)),
        rows_begin_(counters_begin_ + bytes<std::uint64_t>(max_rows)),
        tokens_begin_(rows_begin_ + bytes<std::int32_t>(max_rows)),
        staged_(tokens_begin_ + bytes<std::int32_t>(max_tokens)),
        device_(backend.allocate(staged_.size())) {}

  /// Copies the next step's `tokens`, the logit rows `rows` among them, their `positions` of all tokens and
  /// one draw counter a row to the device, at once. Queued on `stream`.
  /// @throws Error(capacity) if there are more than planned.
  void set(std::span<const std::int32_t> tokens, std::span<const std::int64_t> positions,
           std::span<const std::int32_t> rows, std::span<const std::uint64_t> counters,
           typename B::Stream stream) {
    HELIX_EXPECTS(std::ssize(tokens) <= max_tokens_ && std::ssize(rows) <= max_rows_, ErrorCode::capacity,
                  "a step of ", tokens.size(), " tokens and ", rows.size(), " logit rows exceeds the ",
                  max_tokens_, " and ", max_rows_, " that were planned");
    std::byte* row_position = staged_.data();
    for (const std::int32_t row : rows) {
      const auto position = std::as_bytes(positions.subspan(static_cast<std::size_t>(row), 1));
      row_position = std::ranges::copy(position, row_position).out;
    }
    std::ranges::copy(std::as_bytes(counters), staged_.data() + counters_begin_);
    std::ranges::copy(std::as_bytes(rows), staged_.data() + rows_begin_);
    std::ranges::copy(std::as_bytes(tokens), staged_.data() + tokens_begin_);
    backend_->upload(device_.data(), staged_.data(), tokens_begin_ + tokens.size_bytes(), stream);
  }

  const std::int32_t* tokens() const { return at<std::int32_t>(tokens_begin_); }        ///< [tokens]
  const std::int32_t* rows() const { return at<std::int32_t>(rows_begin_); }            ///< [rows]
  const std::int64_t* row_positions() const { return at<std::int64_t>(0); }             ///< [rows]
  const std::uint64_t* counters() const { return at<std::uint64_t>(counters_begin_); }  ///< [rows]

 private:
  template <class T>
  static std::size_t bytes(std::int64_t count) {
    return static_cast<std::size_t>(count) * sizeof(T);
  }
  template <class T>
  const T* at(std::size_t begin) const {
    return reinterpret_cast<const T*>(device_.data() + begin);
  }

  B* backend_;
  std::int64_t max_tokens_;
  std::int64_t max_rows_;
  std::size_t counters_begin_;  // bytes from the rows' positions
  std::size_t rows_begin_;
  std::size_t tokens_begin_;
  std::vector<std::byte> staged_;  // positions i64, counters u64 and indices i32 of the rows; tokens i32
  typename B::Buffer device_;      // the same
};

}  // namespace helix::decode
