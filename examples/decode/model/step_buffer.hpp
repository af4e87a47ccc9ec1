// SPDX-License-Identifier: Apache-2.0
// StepBuffer: the inputs of a step besides its batch, and the tokens that it draws, at stable device
// addresses.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include <helix/backend/vocabulary.hpp>
#include <helix/error.hpp>

#include "model/decoder_backend.hpp"
#include "model/step.hpp"

namespace helix::decode {

/// Backends whose downloads can be queued after a step and taken once that step has ended, whatever was
/// queued later. queue_download() returns whether there was room; take_download() waits.
template <class B>
concept QueuesDownloads = requires(B& backend, void* target, const void* source, std::size_t bytes,
                                   typename B::Stream stream) {
  { backend.queue_download(source, bytes, stream) } -> std::same_as<bool>;
  backend.take_download(target, bytes);
};

/// Owns device memory for steps of up to `max_tokens` tokens and `max_rows` logit rows. Addresses never
/// change. The drawn tokens overwrite the first tokens that the step read. If each sequence draws one token,
/// the next step therefore finds its input tokens in place.
template <DecoderBackend B>
class StepBuffer {
 public:
  using T = typename B::Activation;

  StepBuffer(B& backend, std::int64_t max_tokens, std::int64_t max_rows)
      : backend_(&backend),
        max_tokens_(max_tokens),
        max_rows_(max_rows),
        configs_begin_(bytes<std::uint64_t>(max_rows)),
        rows_begin_(configs_begin_ + bytes<SamplingConfig>(max_rows)),
        norms_begin_(rows_begin_ + bytes<std::int32_t>(max_rows)),
        first_logits_begin_(norms_begin_ + bytes<float>(max_rows)),
        tokens_begin_(first_logits_begin_ + bytes<T>(max_rows) * kFirstLogits),
        host_(tokens_begin_ + bytes<std::int32_t>(max_tokens)),
        device_(backend.allocate(host_.size())) {}

  /// Copies the next step's `tokens`, its logit rows `rows`, and each row's draw counter (below 2^63) and
  /// config to the device in one transfer. Queued on `stream`.
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
    backend_->advance(AdvanceArgs{.values = at<std::int64_t>(0), .count = num_rows}, stream);
  }

  /// Tokens of the step, [tokens]; after the step the drawn tokens, [rows].
  std::int32_t* tokens() { return at<std::int32_t>(tokens_begin_); }
  /// Logit rows, [rows].
  const std::int32_t* rows() { return at<std::int32_t>(rows_begin_); }
  /// Draw counters, [rows].
  const std::uint64_t* counters() { return at<std::uint64_t>(0); }
  /// How each row's token is drawn, [rows].
  const SamplingConfig* configs() { return at<SamplingConfig>(configs_begin_); }
  /// L2 norms of the logits, [rows].
  float* norms() { return at<float>(norms_begin_); }
  /// Logits of the first ids of each row, [rows, kFirstLogits].
  T* first_logits() { return at<T>(first_logits_begin_); }

  /// Queues the download of what the queued step draws: take() then waits for this step, and not for anything
  /// queued later. @returns whether it was queued.
  bool queue_download([[maybe_unused]] std::int64_t num_rows, [[maybe_unused]] typename B::Stream stream) {
    if constexpr (QueuesDownloads<B>)
      is_queued_ = backend_->queue_download(device_.data() + norms_begin_, drawn_bytes(num_rows), stream);
    return is_queued_;
  }

  /// Waits for the step whose download is queued, or else for `stream`. Copies the drawn tokens [num_rows],
  /// the norms and the first logits to the host in one transfer. The functions below return them until the
  /// next take() or set().
  void take(std::int64_t num_rows, typename B::Stream stream) {
    if constexpr (QueuesDownloads<B>) {
      if (std::exchange(is_queued_, false))
        return backend_->take_download(host_.data() + norms_begin_, drawn_bytes(num_rows));
    }
    backend_->download(host_.data() + norms_begin_, device_.data() + norms_begin_, drawn_bytes(num_rows),
                       stream);
  }
  std::span<const std::int32_t> drawn(std::int64_t num_rows) const {
    return on_host<std::int32_t>(tokens_begin_, num_rows);
  }
  std::span<const float> drawn_norms(std::int64_t num_rows) const {
    return on_host<float>(norms_begin_, num_rows);
  }
  std::span<const float> drawn_first_logits(std::int64_t num_rows) {
    const auto logits = on_host<T>(first_logits_begin_, num_rows * std::int64_t{kFirstLogits});
    drawn_first_logits_ = std::vector<float>(logits.begin(), logits.end());
    return drawn_first_logits_;
  }

 private:
  template <class V>
  static std::size_t bytes(std::int64_t count) {
    return static_cast<std::size_t>(count) * sizeof(V);
  }
  template <class V>
  V* at(std::size_t begin) {
    return reinterpret_cast<V*>(device_.data() + begin);
  }
  template <class V>
  std::span<const V> on_host(std::size_t begin, std::int64_t count) const {
    return {reinterpret_cast<const V*>(host_.data() + begin), static_cast<std::size_t>(count)};
  }
  std::size_t drawn_bytes(std::int64_t num_rows) const {
    return tokens_begin_ - norms_begin_ + bytes<std::int32_t>(num_rows);
  }

  B* backend_;
  std::int64_t max_tokens_;
  std::int64_t max_rows_;
  std::size_t configs_begin_;  // byte offset from the counters
  std::size_t rows_begin_;
  std::size_t norms_begin_;
  std::size_t first_logits_begin_;
  std::size_t tokens_begin_;  // last, so that an upload can end with the last token in use
  /// Per row: counters u64, configs, indices i32, norms f32, first logits T. Then per token: ids i32.
  std::vector<std::byte> host_;
  std::vector<float> drawn_first_logits_;
  typename B::Buffer device_;  // layout of host_
  bool is_queued_ = false;     // whether the last step's download is queued
};

}  // namespace helix::decode
