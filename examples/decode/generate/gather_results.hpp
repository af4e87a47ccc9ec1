// SPDX-License-Identifier: Apache-2.0
// Gathers the results of all ranks on every rank: bytes of unequal length over all_gather, and sequences as
// bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include <helix/error.hpp>
#include <helix/integers.hpp>

#include "generate/generation.hpp"
#include "model/decoder_backend.hpp"
#include "model/sized_bytes.hpp"

namespace helix::decode {

/// Gathers every rank's bytes on every rank. It keeps its memory: a rank that allocates while another rank's
/// captured step runs on the same GPU may have to wait for that step.
template <DecoderBackend B>
class BytesGather {
 public:
  BytesGather(B& backend, typename B::Comm& comm, typename B::Stream stream)
      : backend_(&backend),
        comm_(&comm),
        stream_(stream),
        first_bytes_(first_bytes_of(num_ranks())),
        device_(backend.allocate(message_bytes(first_bytes_) * (1 + num_ranks()))) {}

  /// Returns the bytes of each rank, by rank. Collective.
  /// @throws Error(out_of_step) if a rank has skipped an exchange.
  std::vector<std::vector<std::byte>> gather(std::span<const std::byte> mine) {
    std::vector<std::byte> all = exchange(first_message(mine, first_bytes_));
    std::vector<std::uint64_t> sizes(num_ranks());
    for (std::size_t rank = 0; rank < sizes.size(); ++rank)
      sizes[rank] = size_in(all.data() + rank * message_bytes(first_bytes_));
    const std::uint64_t widest = std::ranges::max(sizes);
    std::size_t skipped = kSizeBytes;
    std::size_t stride = message_bytes(first_bytes_);
    if (!fits_first_message(widest, first_bytes_)) {
      std::vector<std::byte> padded(round_up(widest, first_bytes_));
      std::ranges::copy(mine, padded.begin());
      skipped = 0;
      stride = message_bytes(padded.size());
      if (device_.size_bytes() < stride * (1 + num_ranks()))
        device_ = backend_->allocate(stride * (1 + num_ranks()));
      all = exchange(std::move(padded));
    }
    std::vector<std::vector<std::byte>> parts;
    for (std::size_t rank = 0; rank < sizes.size(); ++rank) {
      const std::byte* const begin = all.data() + rank * stride + skipped;
      parts.emplace_back(begin, begin + sizes[rank]);
    }
    return parts;
  }

 private:
  std::size_t num_ranks() const { return static_cast<std::size_t>(comm_->size()); }

  /// Bytes of a first message among `num_ranks`: each rank holds those of all, so that many ranks of one
  /// process would otherwise take the square of their number times kFirstBytes.
  static std::size_t first_bytes_of(std::size_t num_ranks) {
    constexpr std::size_t kAllBytes = 16 * kFirstBytes;
    constexpr std::size_t kMinBytes = 128;
    return std::clamp(kAllBytes / num_ranks / kMinBytes * kMinBytes, kMinBytes, kFirstBytes);
  }

  /// Distance in bytes between the messages of two ranks. The number of the exchange follows the content of
  /// each message.
  static constexpr std::size_t message_bytes(std::size_t content_bytes) {
    constexpr std::size_t kNumberBytes = 16;
    return content_bytes + kNumberBytes;
  }

  /// Returns the messages of all ranks, one after the other. The contents of all ranks must have the same
  /// size.
  std::vector<std::byte> exchange(std::vector<std::byte> message) {
    const std::size_t content_bytes = message.size();
    const std::uint64_t number = ++num_exchanges_;
    message.resize(message_bytes(content_bytes));
    std::memcpy(message.data() + content_bytes, &number, sizeof(number));
    std::byte* const target = device_.data() + message.size();
    backend_->upload(device_.data(), message.data(), message.size(), stream_);
    comm_->all_gather(device_.data(), target, static_cast<std::int64_t>(message.size()), stream_);
    std::vector<std::byte> all(message.size() * num_ranks());
    backend_->download(all.data(), target, all.size(), stream_);
    for (std::size_t rank = 0; rank < num_ranks(); ++rank) {
      const std::uint64_t found = size_in(all.data() + rank * message.size() + content_bytes);
      HELIX_EXPECTS(found == number, ErrorCode::out_of_step, "exchange ", number, " of results on rank ",
                    comm_->rank(), ": that of rank ", rank, " has number ", found);
    }
    return all;
  }

  B* backend_;
  typename B::Comm* comm_;
  typename B::Stream stream_;
  std::uint64_t num_exchanges_ = 0;
  std::size_t first_bytes_;
  typename B::Buffer device_;  // own message, then the messages of all ranks
};

/// Serializes the sequences, for ranks of this program.
std::vector<std::byte> serialize(const std::vector<GeneratedSequence>& sequences);
/// Reads the sequences that serialize() wrote.
/// @throws Error(internal) if bytes are missing.
std::vector<GeneratedSequence> deserialize(std::span<const std::byte> bytes);

/// Every rank's memory, by rank. Collective.
template <DecoderBackend B>
std::vector<RankMemory> gather_memory(B& backend, typename B::Comm& comm, const RankMemory& mine,
                                      typename B::Stream stream) {
  std::vector<RankMemory> all;
  for (const auto& bytes : BytesGather(backend, comm, stream).gather(std::as_bytes(std::span(&mine, 1)))) {
    std::memcpy(&all.emplace_back(), bytes.data(), sizeof(RankMemory));
  }
  return all;
}

/// The sequences of all ranks, by rank. Collective.
template <DecoderBackend B>
std::vector<GeneratedSequence> gather_sequences(B& backend, typename B::Comm& comm,
                                                const std::vector<GeneratedSequence>& mine,
                                                typename B::Stream stream) {
  std::vector<GeneratedSequence> all;
  for (const auto& bytes : BytesGather(backend, comm, stream).gather(serialize(mine))) {
    for (GeneratedSequence& sequence : deserialize(bytes)) all.push_back(std::move(sequence));
  }
  return all;
}

}  // namespace helix::decode
