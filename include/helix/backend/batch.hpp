// SPDX-License-Identifier: Apache-2.0
// Batch: one step's tokens, as every operation with per-token arguments reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <helix/error.hpp>
#include <helix/limits.hpp>

namespace helix {

/// The tokens of one step. Ragged: sequence b has query tokens [query_offsets[b], query_offsets[b+1]), which
/// index the step's token tensors. A slice of the batch (slice()) covers fewer sequences, with the same
/// indices into the same tensors. Shapes and query_offsets are fixed when a step is captured; everything else
/// is read from device memory (invariant 10).
struct Batch {
  /// [B + 1], host memory; read only while an operation is being queued. HOP-B cuts slices by it.
  std::span<const std::int32_t> query_offsets_host;
  /// [B + 1], device memory, with the values of query_offsets_host.
  const std::int32_t* query_offsets = nullptr;
  /// [tokens of the step], device memory, global positions. Below 0 (-1): padding, which attends to nothing
  /// and is not stored.
  const std::int64_t* positions = nullptr;
  /// [B], device memory: the row of the cache's page table for each sequence. No two sequences of a step may
  /// share a row of the cache that the step writes.
  const std::int32_t* sequence_slots = nullptr;
  /// [B] or empty, host memory, read only while an operation is being queued: the length of each sequence
  /// after this step, that is its largest position plus one. Equal on all ranks. What is queued may depend on
  /// the lengths, so leave them out of a step that is captured. No operation compares them with the
  /// positions. A length that is too small gives wrong outputs where latents are expanded, and may let a GPU
  /// count too few tokens of a sequence longer than 2^31. A length that is too large makes the expansion of
  /// latents read pages past the sequence's last one.
  std::span<const std::int64_t> lengths_host{};

  std::int64_t num_sequences() const {
    return query_offsets_host.empty() ? 0 : static_cast<std::int64_t>(query_offsets_host.size()) - 1;
  }
  std::int64_t first_token() const { return query_offsets_host.empty() ? 0 : query_offsets_host.front(); }
  std::int64_t num_tokens() const {
    return query_offsets_host.empty() ? 0 : query_offsets_host.back() - query_offsets_host.front();
  }

  /// Sequences [begin, begin + count) of this batch. @throws Error(invalid_argument) if it has fewer.
  Batch slice(std::int64_t begin, std::int64_t count) const {
    HELIX_EXPECTS(begin >= 0 && count >= 0 && begin <= num_sequences() && count <= num_sequences() - begin,
                  ErrorCode::invalid_argument, "Batch::slice: sequences [", begin, ", ", begin, " + ", count,
                  ") of a batch of ", num_sequences());
    if (query_offsets_host.empty()) return *this;
    const auto first = static_cast<std::size_t>(begin);
    const auto number = static_cast<std::size_t>(count);
    const auto from_begin = [&](const std::int32_t* of_batch) {  // a batch without tokens may have none
      return of_batch == nullptr ? nullptr : of_batch + begin;
    };
    return {query_offsets_host.subspan(first, number + 1), from_begin(query_offsets), positions,
            from_begin(sequence_slots),
            lengths_host.empty() ? lengths_host : lengths_host.subspan(first, number)};
  }
};

namespace detail {

/// Throws Error(invalid_argument) that names the field unless the batch can be read. Host offsets must begin
/// at 0 or above and never fall. There must be a length for each sequence or none. Device pointers must be
/// given if there are tokens; device memory is not looked at.
inline void check_batch(std::string_view operation, const Batch& batch) {
  const std::span<const std::int32_t> offsets = batch.query_offsets_host;
  for (std::size_t b = 0; b < offsets.size(); ++b) {
    const std::int32_t least = b == 0 ? 0 : offsets[b - 1];
    HELIX_EXPECTS(offsets[b] >= least && offsets[b] <= kMaxStepTokens, ErrorCode::invalid_argument, operation,
                  ": the batch's query_offsets_host[", b, "] is ", offsets[b], "; it must be in [", least,
                  ", ", kMaxStepTokens, "], from 0 on and never below the one before it");
  }
  HELIX_EXPECTS(batch.lengths_host.empty() ||
                    static_cast<std::int64_t>(batch.lengths_host.size()) == batch.num_sequences(),
                ErrorCode::invalid_argument, operation, ": the batch has ", batch.num_sequences(),
                " sequences and ", batch.lengths_host.size(), " in lengths_host; give one each, or none");
  if (batch.num_tokens() == 0) return;
  const auto expect_given = [&](std::string_view name, const void* pointer) {
    HELIX_EXPECTS(pointer != nullptr, ErrorCode::invalid_argument, operation, ": the batch's ", name,
                  " is null; it must point to device memory, as the batch has ", batch.num_tokens(),
                  " tokens");
  };
  expect_given("query_offsets", batch.query_offsets);
  expect_given("positions", batch.positions);
  expect_given("sequence_slots", batch.sequence_slots);
}

}  // namespace detail
}  // namespace helix
