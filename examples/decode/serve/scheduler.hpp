// SPDX-License-Identifier: Apache-2.0
// Scheduler: which requests are in which step, on the root alone and without a model.
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

/// What a scheduler is built for. Equal to what every rank's cache and steps are built for.
struct SchedulerSpec {
  int num_replicas = 1;
  PageLedgerSpec ledger;           ///< Of each replica's caches.
  std::int64_t max_sequences = 8;  ///< Requests in a replica's steps; the ledger has as many for ended ones.
  std::int64_t max_tokens = 0;     ///< Prompt and output of a request.
  /// Of the prompts that wait, unless it is one alone: 256 MiB.
  std::int64_t max_queued_tokens = std::int64_t{64} << 20;
  /// Tokens of prompts that are compared with what caches hold between two steps, before who would join waits
  /// for the next one: of thousands of prompts that continue one another, each is compared with all before
  /// it.
  std::int64_t max_compared_tokens = std::int64_t{64} << 20;
  std::int64_t prefill_tokens = 256;
  std::int64_t vocab = 0;
  std::vector<std::int64_t> eos_ids;
  std::int64_t default_max_tokens = 16;
  std::uint64_t seed = 0;  ///< Requests without a seed draw by this and their number.
};

/// Takes requests, forms steps and tells what comes of them. Requests wait in the order in which they came;
/// one joins a replica's steps when the pages of its longest sequence are free, so that none is ever stopped
/// for want of memory. Prompts go in chunks, beside the requests that decode and one another. An ended
/// request's cache is kept until its memory is needed: one whose prompt begins alike forks it, as it forks a
/// running one's.
class Scheduler {
 public:
  using Emit = std::function<void(std::string)>;  ///< Takes an event, a whole line.

  Scheduler(SchedulerSpec spec, Emit emit);

  /// Takes a command; what is wrong with it is an error event.
  void take(ServeCommand command);
  void refuse(const BadLine& line);

  /// Whether no request waits or runs.
  bool is_idle() const;
  /// What the ranks do next; its steps are empty if nothing can run. The caller then runs it and calls
  /// complete(), before anything else.
  StepOrder next();
  /// `results`: what the last order's steps drew, by replica.
  void complete(std::span<const ReplicaResult> results);

  /// Ends all requests, those that wait too, with error events. Nothing may be called after.
  void fail(std::string_view reason);

  /// resident_bytes is the caller's.
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
    TokenIds tokens;              ///< Prompt and output.
    std::int64_t num_cached = 0;  ///< Of them in the cache.
    std::int64_t num_shared = 0;  ///< Of them from another request.
    std::int64_t max_tokens = 0;  ///< Of the output.
    TokenCounts counts;
    Clock::time_point queued_at;
    Clock::time_point started_at;
    Clock::time_point first_token_at;
    Clock::time_point last_token_at;

    std::int64_t prompt_size() const { return static_cast<std::int64_t>(request.prompt.size()); }
    std::int64_t output_size() const { return static_cast<std::int64_t>(tokens.size()) - prompt_size(); }
    bool is_prefilled() const { return num_cached >= prompt_size(); }
  };

  /// An ended request's cache.
  struct Retained {
    SequenceId sequence;
    TokenIds tokens;  ///< That are in it.
  };

  struct Replica {
    PageLedger ledger;
    std::list<Running> running;                         // in the order in which they joined
    std::deque<Retained> retained;                      // the one used last at the back
    std::vector<CacheCall> calls;                       // of the next order
    std::vector<std::list<Running>::iterator> drawing;  // one a logit row of the step that runs
    bool may_admit = true;  // something changed since the queue's head found no room
  };

  /// Where a prompt's beginning is in a cache already.
  struct Prefix {
    SequenceId sequence;
    std::int64_t tokens = 0;
    bool is_retained = false;
  };

  /// Tokens of a prompt in a step.
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
  std::int64_t queued_tokens_ = 0;       // of the prompts in it
  std::int64_t compared_tokens_ = 0;     // since the last step
  std::unordered_set<std::string> ids_;  // of requests that wait or run
  std::vector<Replica> replicas_;
  std::uint64_t num_requests_ = 0;
};

}  // namespace helix::decode
