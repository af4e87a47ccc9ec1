// SPDX-License-Identifier: Apache-2.0
// LogitExtras: rarely needed work on a step's logits: penalties before tokens are drawn, log-probabilities
// afterwards.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include <helix/vocabulary_head.hpp>

#include "model/decoder_backend.hpp"
#include "model/step.hpp"

namespace helix::decode {

/// Device memory for penalties and log-probabilities. It grows when a step needs more, and growing changes
/// addresses, so such steps are not captured.
template <DecoderBackend B>
class LogitExtras {
 public:
  using Stream = typename B::Stream;

  explicit LogitExtras(B& backend) : backend_(&backend) {}

  static bool is_needed(const Step& step) { return !step.penalties.empty() || step.num_best; }

  /// Takes the requirements of the next step. The previous step must have ended.
  void set(const Step& step, Stream stream) {
    num_penalties_ = std::ssize(step.penalties);
    num_rows_ = step.num_best ? std::ssize(step.logit_rows) : 0;
    num_best_ = step.num_best.value_or(0);
    if (num_penalties_ > 0) {
      penalties_ = step.penalties;
      grow(penalties_device_, penalties_.size() * sizeof(LogitPenalty));
      backend_->upload(penalties_device_.data(), penalties_.data(), penalties_.size() * sizeof(LogitPenalty),
                       stream);
    }
    if (num_rows_ > 0) {
      found_.resize(static_cast<std::size_t>(num_rows_ * (1 + 2 * num_best_)) * kFieldBytes);
      grow(found_device_, found_.size());
    }
  }

  /// Whether the step passed to set() needs nothing.
  bool is_empty() const { return num_penalties_ == 0 && num_rows_ == 0; }

  /// Applies the step's penalties. Last stage only. Queued.
  template <class Logits>
  void penalize(VocabularyHead<B>& head, Logits logits, Stream stream) {
    const auto* penalties = reinterpret_cast<const LogitPenalty*>(penalties_device_.data());
    head.penalize(logits, penalties, num_penalties_, stream);
  }

  /// Computes the log-probabilities of the drawn `tokens` (device) and of the likeliest tokens. Last stage
  /// only. Queued.
  template <class Logits>
  void find_log_probs(VocabularyHead<B>& head, Logits logits, const std::int32_t* tokens, Stream stream) {
    if (num_rows_ == 0) return;
    std::byte* const device = found_device_.data();
    head.log_probs(logits, tokens, num_best_, reinterpret_cast<float*>(device),
                   reinterpret_cast<std::int32_t*>(device + ids_begin()),
                   reinterpret_cast<float*>(device + best_begin()), stream);
  }

  /// Sends the log-probabilities to all stages. Queued; collective over the pipeline.
  void broadcast(typename B::Comm& pipeline, int last_stage, Stream stream) {
    if (num_rows_ > 0)
      pipeline.broadcast(found_device_.data(), static_cast<std::int64_t>(found_.size()), last_stage, stream);
  }

  /// Waits for `stream` and returns the log-probabilities on the host, valid until the next set().
  LogProbs download(Stream stream) {
    if (num_rows_ == 0) return {};
    backend_->download(found_.data(), found_device_.data(), found_.size(), stream);
    const auto rows = static_cast<std::size_t>(num_rows_);
    const auto all = static_cast<std::size_t>(num_rows_ * num_best_);
    return {{reinterpret_cast<const float*>(found_.data()), rows},
            {reinterpret_cast<const std::int32_t*>(found_.data() + ids_begin()), all},
            {reinterpret_cast<const float*>(found_.data() + best_begin()), all}};
  }

 private:
  static constexpr std::size_t kFieldBytes = 4;  // size of an id or a logarithm
  static_assert(sizeof(float) == kFieldBytes && sizeof(std::int32_t) == kFieldBytes);

  std::size_t ids_begin() const { return static_cast<std::size_t>(num_rows_) * kFieldBytes; }
  std::size_t best_begin() const {
    return ids_begin() + static_cast<std::size_t>(num_rows_ * num_best_) * kFieldBytes;
  }

  void grow(typename B::Buffer& buffer, std::size_t bytes) {
    if (buffer.size_bytes() < bytes) buffer = backend_->allocate(std::max(bytes, 2 * buffer.size_bytes()));
  }

  B* backend_;
  std::int64_t num_penalties_ = 0;
  std::int64_t num_rows_ = 0;  // rows with log-probabilities
  std::int64_t num_best_ = 0;
  std::vector<LogitPenalty> penalties_;
  // Logarithms (f32) of the drawn tokens, then ids (i32) and logarithms (f32) of the likeliest.
  std::vector<std::byte> found_;
  typename B::Buffer penalties_device_;
  typename B::Buffer found_device_;
};

}  // namespace helix::decode
