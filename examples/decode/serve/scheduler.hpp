// SPDX-License-Identifier: Apache-2.0
// Scheduler: decides which requests are in which step. It runs on the root only and needs no model.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include <helix/page_ledger.hpp>

#include "generate/generation.hpp"
#include "generate/token_counts.hpp"
#include "serve/events.hpp"
#include "serve/serve_request.hpp"
#include "serve/step_order.hpp"

namespace helix::decode {

/// What a scheduler is built for. Must match the cache and the steps of every rank.
struct SchedulerSpec {
  int num_replicas = 1;
  PageLedgerSpec ledger;  ///< Specification of each replica's caches.
  /// Requests in a replica's steps. The ledger has as many sequences again, for ended requests.
  std::int64_t max_sequences = 8;
  std::int64_t max_tokens = 0;  ///< Tokens of a request's prompt and output together.
  /// Limit on the prompt tokens of waiting requests: 256 MiB. A single request may exceed it.
  std::int64_t max_queued_tokens = std::int64_t{64} << 20;
  /// Limit on the prompt tokens that are compared with caches between two steps; once it is reached,
  /// admission continues after the next step. With thousands of prompts that continue one another, each is
  /// compared with all earlier ones.
  std::int64_t max_compared_tokens = std::int64_t{64} << 20;
  std::int64_t prefill_tokens = 256;
  std::int64_t vocab = 0;
  std::vector<std::int64_t> eos_ids;
  std::int64_t default_max_tokens = 16;
  std::uint64_t seed = 0;  ///< Requests without a seed use this and their number.
};

/// Takes requests, forms steps and reports their results. Requests wait in order of arrival. One joins a
/// replica's steps when the pages of its longest possible sequence are free, so that none is ever stopped for
/// lack of memory. Prompts run in chunks, together with decoding requests and with each other. The cache of
/// an ended request is kept until its memory is needed. A request whose prompt begins with the same tokens
/// forks that cache, or the cache of a running request.
class Scheduler {
 public:
  using Emit = std::function<void(std::string)>;  ///< Takes an event, as a whole line.

  Scheduler(SchedulerSpec spec, Emit emit);

  /// Takes a command. An error in the command becomes an error event.
  void take(ServeCommand command);
  void refuse(const BadLine& line);

  /// Whether no request waits or runs.
  bool is_idle() const;
  /// What the ranks must do next; its steps are empty if nothing can run. The caller must run it and call
  /// complete() before anything else.
  StepOrder next();
  /// `results` are what the steps of the last order drew, by replica.
  void complete(std::span<const ReplicaResult> results);

  /// Ends all requests, including those that wait, with error events. Nothing may be called afterwards.
  void fail(std::string_view reason);

  /// The caller sets resident_bytes.
  ServeStats stats() const;

 private:
  using Clock = std::chrono::steady_clock;

  struct Queued {
    ServeRequest request;
    Clock::time_point since;
  };

  struct Running {
    ServeRequest request;
    SequenceId sequence;
    TokenIds tokens;              ///< Prompt and output tokens.
    std::int64_t num_cached = 0;  ///< Number of these tokens in the cache.
    std::int64_t num_shared = 0;  ///< Number of these taken from another request's cache.
    std::int64_t max_tokens = 0;  ///< Limit on output tokens.
    TokenCounts counts;
    Clock::time_point queued_at;
    Clock::time_point started_at;
    Clock::time_point first_token_at;
    Clock::time_point last_token_at;

    std::int64_t prompt_size() const { return static_cast<std::int64_t>(request.prompt.size()); }
    std::int64_t output_size() const { return static_cast<std::int64_t>(tokens.size()) - prompt_size(); }
    bool is_prefilled() const { return num_cached >= prompt_size(); }
  };

  /// The cache of an ended request.
  struct Retained {
    SequenceId sequence;
    TokenIds tokens;  ///< The tokens in the cache.
  };

  struct Replica {
    PageLedger ledger;
    std::list<Running> running;                         // in the order in which they joined
    std::deque<Retained> retained;                      // most recently used at the back
    std::vector<CacheCall> calls;                       // of the next order
    std::vector<std::list<Running>::iterator> drawing;  // one per logit row of the running step
    // Whether something changed since the first request of the queue found no room.
    bool may_admit = true;
  };

  /// A prefix of a prompt that a cache already holds.
  struct Prefix {
    SequenceId sequence;
    std::int64_t tokens = 0;
    bool is_retained = false;
  };

  /// The number of tokens of a prompt in a step.
  struct PrefillShare {
    std::list<Running>::iterator at;
    std::int64_t count = 0;
  };

  void submit(ServeRequest request);
  void cancel(const std::string& id);
  void forget();

  void admit();
  bool admit_to(Replica& replica, Queued& queued);
  static std::optional<SequenceId> take_pages(PageLedger& ledger, std::vector<CacheCall>& calls,
                                              const std::optional<Prefix>& prefix, std::int64_t total);
  std::optional<SequenceId> evict_for(Replica& replica, std::vector<std::size_t> left, const TokenIds& prompt,
                                      std::int64_t total, std::optional<Prefix>& prefix);
  std::optional<Prefix> find_prefix(const Replica& replica, std::span<const std::size_t> retained,
                                    const TokenIds& prompt);
  void use(Replica& replica, SequenceId retained);
  void evict_oldest(Replica& replica);
  void release(Replica& replica, SequenceId sequence);

  void fill_step(Replica& replica, Step& step);
  std::vector<PrefillShare> share_prefill(Replica& replica) const;
  void add_entry(Replica& replica, std::list<Running>::iterator at, std::int64_t count, Step& step);
  std::optional<FinishReason> finish_reason(const Running& running, std::int32_t token) const;
  void end(Replica& replica, std::list<Running>::iterator running, FinishReason reason);

  SchedulerSpec spec_;
  Emit emit_;
  std::deque<Queued> queue_;
  std::int64_t queued_tokens_ = 0;       // prompt tokens of the queue
  std::int64_t compared_tokens_ = 0;     // since the last step
  std::unordered_set<std::string> ids_;  // ids of waiting and running requests
  std::vector<Replica> replicas_;
  std::uint64_t num_requests_ = 0;
};

}  // namespace helix::decode
