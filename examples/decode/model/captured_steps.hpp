// SPDX-License-Identifier: Apache-2.0
// CapturedSteps: captures each shape of decode step once and replays it, on backends that can.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

namespace helix::decode {

/// Backends that can capture the work queued on a stream and replay it with one launch, as cuda::Graph does.
template <class B>
concept CapturingBackend = requires {
  typename B::Graph;
};

/// Communicators with which each rank can capture and replay a graph of its own. Without this constant, a
/// rank can capture only if it is alone.
template <class Comm>
concept CapturesAlone = requires {
  requires Comm::kCapturesAlone;
};

/// The values that decide which work a step queues.
struct StepShape {
  std::span<const std::int32_t> query_offsets;  ///< Offsets of the batch.
  std::int64_t num_rows = 0;                    ///< Number of logit rows.
  bool is_random = false;                       ///< Whether draw counters advance.
};

/// Runs steps. A step is `queue()`, which queues device work that depends only on the step's shape and on
/// device memory, and returns a Result that depends only on the shape. This version is for backends that
/// cannot capture: it queues each step.
template <class B, class Result>
class CapturedSteps {
 public:
  explicit CapturedSteps(bool /*is_on*/) {}

  template <class Queue>
  Result run(const StepShape& /*shape*/, typename B::Stream /*stream*/, Queue queue) {
    return queue();
  }
  std::int64_t num_replayed() const { return 0; }
  void clear() noexcept {}
};

/// The first step of a shape is queued normally, which loads kernels, plans products and connects ranks. The
/// second is captured and then queued once more; each later one is replayed. The second is not replayed
/// itself, because a capture allocates device memory: a rank may have to wait until its GPU is idle, while
/// another rank on that GPU that already replays waits for this rank. Ranks that run equal steps make equal
/// decisions.
template <CapturingBackend B, class Result>
class CapturedSteps<B, Result> {
 public:
  /// If `is_on` is false, each step is queued.
  explicit CapturedSteps(bool is_on) : is_on_(is_on) {}

  /// @throws what queue() throws, and errors of the capture and the launch.
  template <class Queue>
  Result run(const StepShape& shape, typename B::Stream stream, Queue queue) {
    ++num_steps_;
    Entry* const entry = is_on_ ? find(shape) : nullptr;
    if (entry == nullptr) {
      const Result result = queue();
      if (Entry* const place = is_on_ ? place_for_new() : nullptr)
        *place = {{shape.query_offsets.begin(), shape.query_offsets.end()},
                  shape.num_rows,
                  shape.is_random,
                  num_steps_,
                  result,
                  {}};
      return result;
    }
    entry->last_step = num_steps_;
    if (entry->graph.empty()) {
      entry->graph = B::Graph::capture(stream, [entry, queue] { entry->result = queue(); });
      return queue();
    }
    entry->graph.replay(stream);
    ++num_replayed_;
    return entry->result;
  }

  /// Number of steps that were replayed so far.
  std::int64_t num_replayed() const { return num_replayed_; }

  /// Destroys all graphs, even those that still run: a communicator used by a graph waits for this before it
  /// is destroyed.
  void clear() noexcept { entries_.clear(); }

 private:
  // Drafts of varying length, and batches that requests join and leave, have many shapes. A new shape
  // replaces only one that has not occurred for a long time, so that captures, which take as long as several
  // steps, stay rare. Steps without a place are queued. A graph takes up to a few MB.
  static constexpr std::size_t kMaxShapes = 64;
  static constexpr std::int64_t kLongAgo = 1024;  // steps

  struct Entry {
    std::vector<std::int32_t> query_offsets;
    std::int64_t num_rows = 0;
    bool is_random = false;
    std::int64_t last_step = 0;  // value of num_steps_
    Result result;
    typename B::Graph graph;  // empty: seen once
  };

  Entry* place_for_new() {
    if (entries_.size() < kMaxShapes) return &entries_.emplace_back();
    const auto oldest = std::ranges::min_element(entries_, {}, &Entry::last_step);
    return num_steps_ - oldest->last_step >= kLongAgo ? &*oldest : nullptr;
  }

  Entry* find(const StepShape& shape) {
    const auto at = std::ranges::find_if(entries_, [&](const Entry& entry) {
      return entry.num_rows == shape.num_rows && entry.is_random == shape.is_random &&
             std::ranges::equal(entry.query_offsets, shape.query_offsets);
    });
    return at == entries_.end() ? nullptr : &*at;
  }

  bool is_on_;
  std::deque<Entry> entries_;   // a deque, so that addresses stay
  std::int64_t num_steps_ = 0;  // over all shapes
  std::int64_t num_replayed_ = 0;
};

}  // namespace helix::decode
