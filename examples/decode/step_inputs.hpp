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
        rows_begin_(bytes<std::uint64_t>(max_rows)),
        tokens_begin_(rows_begin_ + bytes<std::int32_t>(max_rows)),
        staged_(tokens_begin_ + bytes<std::int32_t>(max_tokens)),
        device_(backend.allocate(staged_.size())) {}

  /// Copies the next step's `tokens`, the logit rows `rows` among them, and one draw counter a row, below
  /// 2^63, to the device, at once. Queued on `stream`.
  /// @throws Error(capacity) if there are more than planned.
  void set(std::span<const std::int32_t> tokens, std::span<const std::int32_t> rows,
           std::span<const std::uint64_t> counters, typename B::Stream stream) {
    HELIX_EXPECTS(std::ssize(tokens) <= max_tokens_ && std::ssize(rows) <= max_rows_, ErrorCode::capacity,
                  "a step of ", tokens.size(), " tokens and ", rows.size(), " logit rows exceeds the ",
                  max_tokens_, " and ", max_rows_, " that were planned");
    std::ranges::copy(std::as_bytes(counters), staged_.data());
    std::ranges::copy(std::as_bytes(rows), staged_.data() + rows_begin_);
    std::ranges::copy(std::as_bytes(tokens), staged_.data() + tokens_begin_);
    backend_->upload(device_.data(), staged_.data(), tokens_begin_ + tokens.size_bytes(), stream);
  }

  /// Adds one to the draw counters of `num_rows` rows. Queued on `stream`.
  void advance(std::int64_t num_rows, typename B::Stream stream) {
    backend_->advance(AdvanceArgs{reinterpret_cast<std::int64_t*>(device_.data()), num_rows}, stream);
  }

  std::int32_t* tokens() { return at<std::int32_t>(tokens_begin_); }    ///< [tokens]
  const std::int32_t* rows() { return at<std::int32_t>(rows_begin_); }  ///< [rows]
  const std::uint64_t* counters() { return at<std::uint64_t>(0); }      ///< [rows]

 private:
  template <class T>
  static std::size_t bytes(std::int64_t count) {
    return static_cast<std::size_t>(count) * sizeof(T);
  }
  template <class T>
  T* at(std::size_t begin) {
    return reinterpret_cast<T*>(device_.data() + begin);
  }

  B* backend_;
  std::int64_t max_tokens_;
  std::int64_t max_rows_;
  std::size_t rows_begin_;  // bytes from the rows' counters
  std::size_t tokens_begin_;
  std::vector<std::byte> staged_;  // counters u64 and indices i32 of the rows; tokens i32
  typename B::Buffer device_;      // the same
};

}  // namespace helix::decode
