// SPDX-License-Identifier: Apache-2.0
// StepBuffer: what a step reads besides its batch, and what it draws, on the device at stable addresses.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

#include <helix/backend/vocabulary.hpp>
#include <helix/error.hpp>

#include "model/decoder_backend.hpp"

namespace helix::decode {

/// Owns device memory for steps of up to `max_tokens` tokens and `max_rows` logit rows. Addresses never
/// change. The tokens that a step draws take the places of the first ones that it read: where each sequence
/// has one, the next step embeds them there.
template <DecoderBackend B>
class StepBuffer {
 public:
  StepBuffer(B& backend, std::int64_t max_tokens, std::int64_t max_rows)
      : backend_(&backend),
        max_tokens_(max_tokens),
        max_rows_(max_rows),
        configs_begin_(bytes<std::uint64_t>(max_rows)),
        rows_begin_(configs_begin_ + bytes<SamplingConfig>(max_rows)),
        norms_begin_(rows_begin_ + bytes<std::int32_t>(max_rows)),
        tokens_begin_(norms_begin_ + bytes<float>(max_rows)),
        host_(tokens_begin_ + bytes<std::int32_t>(max_tokens)),
        device_(backend.allocate(host_.size())) {}

  /// Copies the next step's `tokens`, the logit rows `rows` among them, and a row's draw counter, below 2^63,
  /// and config to the device, at once. Queued on `stream`.
  /// @throws Error(capacity) if there are more than planned.
  void set(std::span<const std::int32_t> tokens, std::span<const std::int32_t> rows,
           std::span<const std::uint64_t> counters, std::span<const SamplingConfig> configs,
           typename B::Stream stream) {
    HELIX_EXPECTS(std::ssize(tokens) <= max_tokens_ && std::ssize(rows) <= max_rows_, ErrorCode::capacity,
                  "a step of ", tokens.size(), " tokens and ", rows.size(), " logit rows exceeds the ",
                  max_tokens_, " and ", max_rows_, " that were planned");
    std::ranges::copy(std::as_bytes(counters), host_.data());
    std::ranges::copy(std::as_bytes(configs), host_.data() + configs_begin_);
    std::ranges::copy(std::as_bytes(rows), host_.data() + rows_begin_);
    std::ranges::copy(std::as_bytes(tokens), host_.data() + tokens_begin_);
    backend_->upload(device_.data(), host_.data(), tokens_begin_ + tokens.size_bytes(), stream);
  }

  /// Adds one to the draw counters of `num_rows` rows. Queued on `stream`.
  void advance(std::int64_t num_rows, typename B::Stream stream) {
    backend_->advance(AdvanceArgs{at<std::int64_t>(0), num_rows}, stream);
  }

  /// Tokens of the step, [tokens]; after it the drawn ones, [rows].
  std::int32_t* tokens() { return at<std::int32_t>(tokens_begin_); }
  /// Logit rows, [rows].
  const std::int32_t* rows() { return at<std::int32_t>(rows_begin_); }
  /// Draw counters, [rows].
  const std::uint64_t* counters() { return at<std::uint64_t>(0); }
  /// How each row's token is drawn, [rows].
  const SamplingConfig* configs() { return at<SamplingConfig>(configs_begin_); }
  /// L2 norms of the logits, [rows].
  float* norms() { return at<float>(norms_begin_); }

  /// Waits for `stream` and brings the tokens drawn, [num_rows], and the norms to the host, at once. The two
  /// functions below have them until the next call or set().
  void download(std::int64_t num_rows, typename B::Stream stream) {
    backend_->download(host_.data() + norms_begin_, device_.data() + norms_begin_,
                       tokens_begin_ - norms_begin_ + bytes<std::int32_t>(num_rows), stream);
  }
  std::span<const std::int32_t> drawn(std::int64_t num_rows) const {
    return {reinterpret_cast<const std::int32_t*>(host_.data() + tokens_begin_),
            static_cast<std::size_t>(num_rows)};
  }
  std::span<const float> drawn_norms(std::int64_t num_rows) const {
    return {reinterpret_cast<const float*>(host_.data() + norms_begin_), static_cast<std::size_t>(num_rows)};
  }

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
  std::size_t configs_begin_;  // bytes from the rows' counters
  std::size_t rows_begin_;
  std::size_t norms_begin_;
  std::size_t tokens_begin_;     // last: a copy ends with the last one, whatever the capacity
  std::vector<std::byte> host_;  // of the rows: counters u64, configs, indices i32, norms f32; tokens i32
  typename B::Buffer device_;    // the same
};

}  // namespace helix::decode
