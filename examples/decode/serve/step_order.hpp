// SPDX-License-Identifier: Apache-2.0
// StepOrder: what the root tells every rank to do next, and how this reaches them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <helix/integers.hpp>
#include <helix/page_ledger.hpp>

#include "model/decoder_backend.hpp"
#include "model/sized_bytes.hpp"
#include "model/step.hpp"

namespace helix::decode {

/// One call of ShardedKVCache. Every rank makes the same calls in the same order, so all get the same ids.
struct CacheCall {
  enum class Kind : std::int32_t { add, fork, reserve, unreserve, release };
  Kind kind = Kind::add;
  SequenceId id;            ///< add, fork: the new sequence.
  SequenceId parent;        ///< fork
  std::int64_t tokens = 0;  ///< fork: tokens of the prefix; reserve: tokens in total.
};

/// What one replica must do.
struct ReplicaOrder {
  std::vector<CacheCall> cache_calls;
  Step step;  ///< Empty: no step.
};

/// What all ranks must do.
struct StepOrder {
  bool is_last = false;
  std::vector<ReplicaOrder> replicas;
};

/// What one replica's step drew.
struct ReplicaResult {
  std::vector<std::int32_t> tokens;  ///< One per logit row.
  std::vector<float> log_probs;      ///< As in LogProbs, or empty.
  std::vector<std::int32_t> best_ids;
  std::vector<float> best_log_probs;
};

/// Serializes the result, for ranks of this program.
std::vector<std::byte> serialize(const ReplicaResult& result);
/// Reads the result that serialize() wrote.
/// @throws Error(internal) if bytes are missing or left over.
ReplicaResult deserialize_result(std::span<const std::byte> bytes);

/// Serializes the order, for ranks of this program.
std::vector<std::byte> serialize(const StepOrder& order);
/// Reads the order that serialize() wrote.
/// @throws Error(internal) if bytes are missing or left over.
StepOrder deserialize_order(std::span<const std::byte> bytes);

/// Sends the root's bytes to every rank, with one broadcast, or two if they do not fit into the first.
template <DecoderBackend B>
class OrderChannel {
 public:
  OrderChannel(B& backend, typename B::Comm& world, typename B::Stream stream)
      : backend_(&backend), world_(&world), stream_(stream), device_(backend.allocate(kFirstBytes)) {}

  /// Collective. `mine` is used on rank 0 only; every rank returns rank 0's bytes.
  std::vector<std::byte> broadcast(std::vector<std::byte> mine) {
    if (world_->size() == 1) return mine;
    std::vector<std::byte> first = first_message(mine);
    send(first);
    const std::uint64_t size = size_in(first.data());
    if (fits_first_message(size)) {
      const auto begin = first.begin() + kSizeBytes;
      return {begin, begin + static_cast<std::ptrdiff_t>(size)};
    }
    mine.resize(size);
    if (device_.size_bytes() < size) device_ = backend_->allocate(round_up(size, std::uint64_t{1} << 16));
    send(mine);
    return mine;
  }

 private:
  void send(std::vector<std::byte>& bytes) {
    if (world_->rank() == 0) backend_->upload(device_.data(), bytes.data(), bytes.size(), stream_);
    world_->broadcast(device_.data(), static_cast<std::int64_t>(bytes.size()), 0, stream_);
    backend_->download(bytes.data(), device_.data(), bytes.size(), stream_);
  }

  B* backend_;
  typename B::Comm* world_;
  typename B::Stream stream_;
  typename B::Buffer device_;
};

}  // namespace helix::decode
