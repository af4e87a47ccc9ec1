// SPDX-License-Identifier: Apache-2.0
// BatchBuffer: the device copy of a step's Batch, at stable addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <helix/backend/batch.hpp>
#include <helix/backend/queue.hpp>
#include <helix/backend/vocabulary.hpp>
#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/limits.hpp>

namespace helix {

/// Owns device memory for batches of up to `max_sequences` sequences and `max_tokens` tokens. Addresses never
/// change, so a captured step can be replayed after the next set(), which is one copy to the device. A step
/// that ends with advance() can be replayed as it is. Keeps the backend's address. Not thread-safe. After a
/// move each use of the old object is Error(invalid_argument).
template <QueueBackend B>
class BatchBuffer {
 public:
  /// Allocates the memory. @throws Error(invalid_argument) if a capacity is negative or exceeds limits.hpp;
  /// Error(capacity) if the memory cannot be had.
  BatchBuffer(B& backend, std::int64_t max_sequences, std::int64_t max_tokens)
      : backend_(&backend),
        max_sequences_(checked("max_sequences", max_sequences, kMaxSequences)),
        max_tokens_(checked("max_tokens", max_tokens, kMaxStepTokens)),
        // Positions come last, so that the copy ends with the last one in use, whatever the capacity.
        slots_begin_(static_cast<std::size_t>(max_sequences + 1) * sizeof(std::int32_t)),
        positions_begin_(
            aligned(slots_begin_ + static_cast<std::size_t>(max_sequences) * sizeof(std::int32_t))),
        staged_(positions_begin_ + static_cast<std::size_t>(max_tokens) * sizeof(std::int64_t)),
        device_(backend.allocate(staged_.size())) {
    query_offsets_host_.reserve(static_cast<std::size_t>(max_sequences + 1));
    lengths_host_.reserve(static_cast<std::size_t>(max_sequences));
  }

  /// Describes the next step: sequence b has tokens [query_offsets[b], query_offsets[b+1]) at `positions`
  /// (global; -1: padding) and cache slot `slots[b]`. Copies the inputs; queued on `stream`. `tells_lengths`:
  /// whether batch() has Batch::lengths_host, which a step that is to be captured leaves out.
  /// @throws Error(invalid_argument) if the sizes contradict each other, a position is below -1 or not below
  /// kMaxTokens, or a slot is below 0; Error(capacity) if the sizes exceed the buffer.
  void set(std::span<const std::int32_t> query_offsets, std::span<const std::int64_t> positions,
           std::span<const std::int32_t> slots, typename B::Stream stream, bool tells_lengths = true) {
    detail::check_not_moved("BatchBuffer", device_.data());
    const auto sequences = static_cast<std::int64_t>(slots.size());
    const auto tokens = static_cast<std::int64_t>(positions.size());
    HELIX_EXPECTS(query_offsets.size() == slots.size() + 1 && query_offsets.front() == 0 &&
                      query_offsets.back() == tokens,
                  ErrorCode::invalid_argument, "BatchBuffer: ", query_offsets.size(), " query offsets for ",
                  sequences, " sequences and ", tokens,
                  " tokens; they must run from 0 to the number of tokens");
    for (std::size_t b = 0; b < slots.size(); ++b) {
      HELIX_EXPECTS(query_offsets[b] <= query_offsets[b + 1], ErrorCode::invalid_argument,
                    "BatchBuffer: query offset ", b + 1, " is ", query_offsets[b + 1],
                    ", below the one before it, ", query_offsets[b]);
    }
    HELIX_EXPECTS(sequences <= max_sequences_ && tokens <= max_tokens_, ErrorCode::capacity,
                  "BatchBuffer: a step of ", sequences, " sequences and ", tokens, " tokens exceeds the ",
                  max_sequences_, " and ", max_tokens_, " it was built for");
    for (std::size_t t = 0; t < positions.size(); ++t) {
      HELIX_EXPECTS(positions[t] >= -1 && positions[t] < kMaxTokens, ErrorCode::invalid_argument,
                    "BatchBuffer: positions[", t, "] is ", positions[t], "; it must be in [0, ", kMaxTokens,
                    "), or -1 for padding");
    }
    for (std::size_t b = 0; b < slots.size(); ++b) {
      HELIX_EXPECTS(slots[b] >= 0, ErrorCode::invalid_argument, "BatchBuffer: slots[", b, "] is ", slots[b],
                    "; slots count from 0: take ShardedKVCache::slot()");
    }
    query_offsets_host_.assign(query_offsets.begin(), query_offsets.end());
    lengths_host_.clear();
    for (std::size_t b = 0; tells_lengths && b < slots.size(); ++b) {
      std::int64_t length = 0;
      for (std::int32_t t = query_offsets[b]; t < query_offsets[b + 1]; ++t)
        length = larger(length, positions[static_cast<std::size_t>(t)] + 1);
      lengths_host_.push_back(length);
    }
    stage(query_offsets, 0);
    stage(slots, slots_begin_);
    stage(positions, positions_begin_);
    backend_->upload(device_.data(), staged_.data(), positions_begin_ + positions.size_bytes(), stream);
  }

  /// Moves each token on by one position, for a next step of one token a sequence; padding stays. Queued on
  /// `stream`; nothing is copied from the host, so a captured step may end with it. The host does not see
  /// replays, so batch() has no lengths until the next set().
  void advance(typename B::Stream stream) {
    detail::check_not_moved("BatchBuffer", device_.data());
    lengths_host_.clear();
    backend_->advance(
        AdvanceArgs{.values = reinterpret_cast<std::int64_t*>(device_.data() + positions_begin_),
                    .count = query_offsets_host_.empty() ? 0 : std::int64_t{query_offsets_host_.back()}},
        stream);
  }

  /// The step that was last set. Its host offsets and lengths are valid until the next set() or advance().
  Batch batch() const {
    detail::check_not_moved("BatchBuffer", device_.data());
    return {query_offsets_host_, reinterpret_cast<const std::int32_t*>(device_.data()),
            reinterpret_cast<const std::int64_t*>(device_.data() + positions_begin_),
            reinterpret_cast<const std::int32_t*>(device_.data() + slots_begin_), lengths_host_};
  }

 private:
  static std::int64_t checked(const char* name, std::int64_t capacity, std::int64_t most) {
    HELIX_EXPECTS(capacity >= 0 && capacity <= most, ErrorCode::invalid_argument, "BatchBuffer: ", name,
                  " is ", capacity, "; it must be in [0, ", most, "]");
    return capacity;
  }
  static constexpr std::size_t aligned(std::size_t bytes) { return round_up(bytes, sizeof(std::int64_t)); }

  template <class T>
  void stage(std::span<const T> values, std::size_t begin) {
    if (!values.empty()) std::memcpy(staged_.data() + begin, values.data(), values.size_bytes());
  }

  B* backend_;
  std::int64_t max_sequences_;
  std::int64_t max_tokens_;
  std::size_t slots_begin_;        // bytes from the query offsets to the slots
  std::size_t positions_begin_;    // and to the positions
  std::vector<std::byte> staged_;  // [max_sequences + 1] i32, [max_sequences] i32, [max_tokens] i64
  typename B::Buffer device_;      // the same
  std::vector<std::int32_t> query_offsets_host_;
  std::vector<std::int64_t> lengths_host_;  // [sequences], or empty after advance()
};

}  // namespace helix
