// SPDX-License-Identifier: Apache-2.0
// HopB: the batch-wise overlap pipeline, in which the exchange of slice i overlaps the attention of slice i +
// 1.
#pragma once

#include <cstdint>
#include <vector>

#include <helix/backend/queue.hpp>
#include <helix/error.hpp>
#include <helix/hop_b_model.hpp>
#include <helix/integers.hpp>
#include <helix/limits.hpp>

namespace helix {

/// The overlap pipeline of one rank. Owns the exchange stream and the events of up to `max_slices` slices,
/// created once. Keeps the backend's address. Not thread-safe. Source: paper section 2.1.3.
template <QueueBackend B>
class HopB {
 public:
  using Stream = typename B::Stream;

  /// Creates the stream and the events. @throws Error(invalid_argument) unless max_slices is in [1,
  /// kMaxCount].
  HopB(B& backend, int max_slices)
      : backend_(&backend), exchange_stream_(backend.create_stream()), exchanged_(backend.create_event()) {
    HELIX_EXPECTS(max_slices >= 1 && max_slices <= kMaxCount, ErrorCode::invalid_argument,
                  "HopB: max_slices is ", max_slices, "; it must be in [1, ", kMaxCount, "]");
    for (int i = 0; i < max_slices; ++i) attended_.push_back(backend.create_event());
  }

  int max_slices() const { return static_cast<int>(attended_.size()); }

  /// Returns the number of slices for a step, equal on all ranks: `requested`, or a choice if that is 0. The
  /// choice depends only on values that all ranks share and that are fixed when a step is captured; lengths
  /// are not, and a graph must not depend on them. With KVP = 1 there is nothing to overlap. A slice holds at
  /// least one sequence, so more slices than sequences are cut to these; there is at least one.
  /// `payload_bytes` are those of a rank's messages in the exchange of the whole step
  /// (KvpAllToAll::payload_bytes()).
  ///
  /// If the backend states its costs, these choose, for attention that takes longer than the exchange: n
  /// slices leave the n-th part of the transfer exposed. Otherwise there are up to four slices; more leave
  /// little to hide. On two cores that all ranks share, where nothing is idle that an overlap could fill, 8
  /// sequences of 256 tokens took 5 to 10 % longer in four slices and 12 to 30 % in eight; at 2048 tokens no
  /// loss could be measured. An engine that knows its times can call best_hop_b_slices().
  /// @throws Error(invalid_argument) if `requested` is not in [0, max_slices()] or num_sequences is below 0.
  int resolve_slices(int requested, std::int64_t num_sequences, int kvp, std::int64_t payload_bytes) const {
    HELIX_EXPECTS(requested >= 0 && requested <= max_slices() && num_sequences >= 0,
                  ErrorCode::invalid_argument, "HopB: ", requested, " slices of ", num_sequences,
                  " sequences are asked for; slices must be in [0, ", max_slices(),
                  "] (0: a choice), sequences 0 or more");
    if (requested == 0) requested = kvp == 1 ? 1 : choose_slices(num_sequences, payload_bytes);
    return static_cast<int>(larger<std::int64_t>(
        1, smaller(smaller<std::int64_t>(requested, num_sequences), std::int64_t{max_slices()})));
  }

  /// Calls attend(i, stream) and exchange(i, exchange stream) for each slice in order. exchange(i) starts
  /// when attend(i) is done and overlaps attend(i + 1); `stream` continues when the last exchange is done.
  /// One slice runs both on `stream`. Queues only. If a callback throws, `stream` still waits for the
  /// exchanges queued so far.
  /// @throws Error(invalid_argument) unless 1 <= num_slices <= max_slices(), and what the callbacks throw.
  template <class Attend, class Exchange>
  void run(int num_slices, Attend&& attend, Exchange&& exchange, Stream stream) {
    HELIX_EXPECTS(num_slices >= 1 && num_slices <= max_slices(), ErrorCode::invalid_argument,
                  "HopB: ", num_slices, " slices; built for 1 to ", max_slices());
    if (num_slices == 1) {
      attend(0, stream);
      exchange(0, stream);
      return;
    }
    try {
      for (int slice = 0; slice < num_slices; ++slice) {
        auto& attended = attended_[static_cast<std::size_t>(slice)];
        attend(slice, stream);
        backend_->record(attended, stream);
        backend_->wait(exchange_stream_, attended);
        exchange(slice, exchange_stream_);
      }
    } catch (...) {
      try {
        join(stream);
      } catch (...) {  // as in a capture without the exchange stream: report the cause
      }
      throw;
    }
    join(stream);
  }

 private:
  int choose_slices(std::int64_t num_sequences, [[maybe_unused]] std::int64_t payload_bytes) const {
    if constexpr (requires { B::kHopBCosts; }) {
      const double transfer = B::kHopBCosts.us_per_mb * 1e-6 * static_cast<double>(payload_bytes);
      return best_hop_b_slices(max_slices(), num_sequences, transfer, transfer, B::kHopBCosts.hand_over_us);
    } else {
      return static_cast<int>(smaller<std::int64_t>(num_sequences, 4));
    }
  }

  /// The exchange stream is in order: its last event covers all slices.
  void join(Stream stream) {
    backend_->record(exchanged_, exchange_stream_);
    backend_->wait(stream, exchanged_);
  }

  B* backend_;
  Stream exchange_stream_;
  std::vector<typename B::Event> attended_;
  typename B::Event exchanged_;
};

}  // namespace helix
