// SPDX-License-Identifier: Apache-2.0
// Admission, steps and ends of requests.
#include "serve/scheduler.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <type_traits>
#include <utility>
#include <variant>

#include <helix/error.hpp>
#include <helix/integers.hpp>

#include "files/strict_json.hpp"

namespace helix::decode {
namespace {

/// A shorter common prefix, such as the first token that all prompts share, is not worth copying a page.
constexpr std::int64_t kMinShared = 16;

/// A client with more waiting requests has lost count.
constexpr std::int64_t kMaxQueued = 100'000;

double milliseconds_between(std::chrono::steady_clock::time_point begin,
                            std::chrono::steady_clock::time_point end) {
  return std::chrono::duration<double, std::milli>(end - begin).count();
}

std::int64_t common_prefix(const TokenIds& prompt, const TokenIds& tokens, std::int64_t num_tokens) {
  const auto most = std::min(std::ssize(prompt), num_tokens);
  return std::mismatch(prompt.begin(), prompt.begin() + most, tokens.begin()).first - prompt.begin();
}

}  // namespace

Scheduler::Scheduler(SchedulerSpec spec, Emit emit) : spec_(std::move(spec)), emit_(std::move(emit)) {
  for (int i = 0; i < spec_.num_replicas; ++i)
    replicas_.push_back(Replica{PageLedger(spec_.ledger, /*kvp_rank=*/0), {}, {}, {}, {}});
}

void Scheduler::take(ServeCommand command) {
  std::visit(
      [this]<class Command>(Command& given) {
        if constexpr (std::is_same_v<Command, ServeRequest>) submit(std::move(given));
        if constexpr (std::is_same_v<Command, CancelCommand>) cancel(given.id);
        if constexpr (std::is_same_v<Command, ForgetCommand>) forget();
      },
      command);
}

void Scheduler::refuse(const BadLine& line) {
  emit_(error_event(line.id, line.message));
}

void Scheduler::submit(ServeRequest request) {
  const auto size = std::ssize(request.prompt);
  const auto refuse = [&]<class... Parts>(const Parts&... parts) {
    emit_(error_event(request.id, Error(ErrorCode::invalid_argument, parts...).what()));
  };
  if (ids_.contains(request.id))
    return refuse("id ", printable(request.id), " is of a request that runs; give another");
  if (std::ssize(queue_) >= kMaxQueued)
    return refuse(kMaxQueued, " requests wait already; send more when some have ended");
  if (queued_tokens_ > 0 && size > spec_.max_queued_tokens - queued_tokens_)
    return refuse("the prompt has ", size, " tokens, and ", queued_tokens_, " wait already of ",
                  spec_.max_queued_tokens, " at most; send more when some have ended");
  for (const TokenIds* const ids : {&request.prompt, &request.stop}) {
    const auto bad = std::ranges::find_if(*ids, [&](std::int32_t id) { return id >= spec_.vocab; });
    if (bad != ids->end())
      return refuse(ids == &request.prompt ? "prompt" : "stop", " holds token id ", *bad,
                    ", which is outside the vocabulary [0, ", spec_.vocab, ")");
  }
  if (size >= spec_.max_tokens)
    return refuse("the prompt has ", size, " tokens and leaves no room in the context of ", spec_.max_tokens,
                  "; shorten it, or start with a longer --context");
  if (request.max_tokens && *request.max_tokens > spec_.max_tokens - size)
    return refuse("the prompt has ", size, " tokens and max_tokens is ", *request.max_tokens, ": ",
                  saturating_sum(size, *request.max_tokens), " exceed the context of ", spec_.max_tokens,
                  "; lower max_tokens, or start with a longer --context");
  ids_.insert(request.id);
  queued_tokens_ += size;
  request.sampling.seed = request.seed.value_or(spec_.seed + num_requests_);
  ++num_requests_;
  queue_.push_back(Queued{std::move(request), Clock::now()});
}

void Scheduler::cancel(const std::string& id) {
  const auto has_id = [&](const auto& entry) { return entry.request.id == id; };
  const auto queued = std::ranges::find_if(queue_, has_id);
  if (queued != queue_.end()) {
    emit_(end_event(id, FinishReason::cancelled, {.prompt_tokens = std::ssize(queued->request.prompt)},
                    {.queued_ms = milliseconds_between(queued->since, Clock::now())}));
    queued_tokens_ -= std::ssize(queued->request.prompt);
    queue_.erase(queued);
    ids_.erase(id);
    for (Replica& replica : replicas_) replica.may_admit = true;
    return;
  }
  for (Replica& replica : replicas_) {
    const auto running = std::ranges::find_if(replica.running, has_id);
    if (running == replica.running.end()) continue;
    end(replica, running, FinishReason::cancelled);
    return;
  }
  emit_(error_event(id, "nothing to cancel: no request of this id waits or runs"));
}

void Scheduler::forget() {
  for (Replica& replica : replicas_) {
    while (!replica.retained.empty()) evict_oldest(replica);
  }
}

bool Scheduler::is_idle() const {
  return queue_.empty() &&
         std::ranges::all_of(replicas_, [](const Replica& replica) { return replica.running.empty(); });
}

StepOrder Scheduler::next() {
  admit();
  StepOrder order;
  for (Replica& replica : replicas_) {
    ReplicaOrder& mine = order.replicas.emplace_back();
    fill_step(replica, mine.step);
    mine.cache_calls = std::exchange(replica.calls, {});
  }
  return order;
}

/// Admits requests in queue order. The first request of the queue joins the replica with the fewest requests
/// that has room; no request overtakes it.
void Scheduler::admit() {
  compared_tokens_ = 0;
  while (!queue_.empty() && compared_tokens_ < spec_.max_compared_tokens) {
    std::vector<Replica*> choices;
    for (Replica& replica : replicas_) {
      if (replica.may_admit && std::ssize(replica.running) < spec_.max_sequences) choices.push_back(&replica);
    }
    std::ranges::stable_sort(choices, {}, [](const Replica* replica) { return replica->running.size(); });
    const std::int64_t num_tokens = std::ssize(queue_.front().request.prompt);
    const auto taken =
        std::ranges::find_if(choices, [&](Replica* replica) { return admit_to(*replica, queue_.front()); });
    if (taken == choices.end()) return;
    queue_.pop_front();
    queued_tokens_ -= num_tokens;
    // The next request may find room where this one did not.
    for (Replica& replica : replicas_) replica.may_admit = true;
  }
}

/// Reserves the pages of the longest sequence that the request can become, evicting ended requests if needed.
bool Scheduler::admit_to(Replica& replica, Queued& queued) {
  const TokenIds& prompt = queued.request.prompt;
  const std::int64_t left = spec_.max_tokens - std::ssize(prompt);
  const std::int64_t max_tokens =
      queued.request.max_tokens.value_or(std::min(left, spec_.default_max_tokens));
  const std::int64_t total = std::ssize(prompt) + max_tokens;
  std::vector<std::size_t> retained(replica.retained.size());
  std::iota(retained.begin(), retained.end(), std::size_t{0});
  std::optional<Prefix> prefix = find_prefix(replica, retained, prompt);
  std::optional<SequenceId> sequence = take_pages(replica.ledger, replica.calls, prefix, total);
  if (!sequence) sequence = evict_for(replica, std::move(retained), prompt, total, prefix);
  if (!sequence) {
    replica.may_admit = false;
    return false;
  }
  if (prefix && prefix->is_retained) use(replica, prefix->sequence);
  Running& running = replica.running.emplace_back();
  running.counts = TokenCounts(queued.request.penalties, prompt);
  running.request = std::move(queued.request);
  running.sequence = *sequence;
  running.tokens = running.request.prompt;
  running.num_cached = running.num_shared = prefix ? prefix->tokens : 0;
  running.max_tokens = max_tokens;
  running.queued_at = queued.since;
  running.started_at = Clock::now();
  return true;
}

/// Returns a sequence that begins with `prefix` and has the pages of `total` tokens reserved; nullopt if a
/// rank has too few pages.
std::optional<SequenceId> Scheduler::take_pages(PageLedger& ledger, std::vector<CacheCall>& calls,
                                                const std::optional<Prefix>& prefix, std::int64_t total) {
  std::optional<SequenceId> sequence;
  try {
    sequence = prefix ? ledger.fork(prefix->sequence, prefix->tokens) : ledger.add();
    calls.push_back({prefix ? CacheCall::Kind::fork : CacheCall::Kind::add, *sequence,
                     prefix ? prefix->sequence : SequenceId{}, prefix ? prefix->tokens : 0});
    ledger.reserve(*sequence, total);
    calls.push_back({CacheCall::Kind::reserve, *sequence, {}, total});
    return sequence;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::capacity) throw;
    if (sequence) {
      ledger.release(*sequence);
      calls.push_back({CacheCall::Kind::release, *sequence, {}, 0});
    }
    return std::nullopt;
  }
}

/// Like take_pages(), but evicts ended requests, whose indices are in `left`: those used longest ago first,
/// and last the one that holds `prefix`. If that one is evicted, the best prefix among the remaining ones
/// replaces it. Works on a copy, so that a request which finds no room even then evicts nothing.
std::optional<SequenceId> Scheduler::evict_for(Replica& replica, std::vector<std::size_t> left,
                                               const TokenIds& prompt, std::int64_t total,
                                               std::optional<Prefix>& prefix) {
  PageLedger ledger = replica.ledger;
  std::vector<CacheCall> calls = replica.calls;
  std::optional<Prefix> shared = prefix;
  while (!left.empty()) {
    const auto is_shared = [&](std::size_t index) {
      return shared && shared->sequence == replica.retained[index].sequence;
    };
    const auto other = std::ranges::find_if_not(left, is_shared);
    const auto oldest = other == left.end() ? left.begin() : other;
    const SequenceId evicted = replica.retained[*oldest].sequence;
    const bool was_shared = is_shared(*oldest);
    left.erase(oldest);
    ledger.release(evicted);
    calls.push_back({CacheCall::Kind::release, evicted, {}, 0});
    if (was_shared) shared = find_prefix(replica, left, prompt);
    const std::optional<SequenceId> sequence = take_pages(ledger, calls, shared, total);
    if (!sequence) continue;
    std::deque<Retained> kept;
    for (const std::size_t index : left) kept.push_back(std::move(replica.retained[index]));
    replica.retained = std::move(kept);
    replica.ledger = std::move(ledger);
    replica.calls = std::move(calls);
    prefix = shared;
    return sequence;
  }
  return std::nullopt;
}

/// The longest prefix of `prompt` in the cache of a running request or of one of the ended requests with
/// indices `retained`. It never includes the prompt's last token, because its logits are needed.
std::optional<Scheduler::Prefix> Scheduler::find_prefix(const Replica& replica,
                                                        std::span<const std::size_t> retained,
                                                        const TokenIds& prompt) {
  Prefix best;
  const auto offer = [&](SequenceId sequence, const TokenIds& tokens, std::int64_t num_cached,
                         bool is_retained) {
    // A cache can beat the best one only if it also has the best one's next token. Without this check
    // thousands of prompts with a common prefix would each be compared with all others, token by token.
    if (best.tokens >= std::min(num_cached, std::ssize(prompt) - 1)) return;
    const auto next = static_cast<std::size_t>(best.tokens);
    if (tokens[next] != prompt[next]) return;
    const std::int64_t shared = std::min(common_prefix(prompt, tokens, num_cached), std::ssize(prompt) - 1);
    compared_tokens_ += shared;
    if (shared > best.tokens) best = {sequence, shared, is_retained};
  };
  for (const std::size_t index : retained) {
    const Retained& old = replica.retained[index];
    offer(old.sequence, old.tokens, std::ssize(old.tokens), true);
  }
  for (const Running& other : replica.running) offer(other.sequence, other.tokens, other.num_cached, false);
  return best.tokens >= kMinShared ? std::optional(best) : std::nullopt;
}

void Scheduler::use(Replica& replica, SequenceId retained) {
  const auto used = std::ranges::find(replica.retained, retained, &Retained::sequence);
  std::rotate(used, used + 1, replica.retained.end());
}

/// Evicts the ended request that was used longest ago.
void Scheduler::evict_oldest(Replica& replica) {
  release(replica, replica.retained.front().sequence);
  replica.retained.pop_front();
}

void Scheduler::release(Replica& replica, SequenceId sequence) {
  replica.ledger.release(sequence);
  replica.calls.push_back({CacheCall::Kind::release, sequence, {}, 0});
  replica.may_admit = true;
}

void Scheduler::fill_step(Replica& replica, Step& step) {
  step.is_decode = true;
  std::optional<std::int64_t> num_best;
  // Decoding requests come first; prompts get what is left of the step.
  for (auto at = replica.running.begin(); at != replica.running.end(); ++at) {
    if (at->is_prefilled()) add_entry(replica, at, 1, step);
  }
  for (const auto& [at, count] : share_prefill(replica)) {
    add_entry(replica, at, count, step);
    step.is_decode = false;
  }
  for (const auto& drawing : replica.drawing) {
    if (drawing->request.num_best) num_best = std::max(num_best.value_or(0), *drawing->request.num_best);
  }
  step.num_best = num_best;
  std::vector<std::int64_t> counts;
  for (std::size_t i = 1; i < step.query_offsets.size(); ++i)
    counts.push_back(step.query_offsets[i] - step.query_offsets[i - 1]);
  // The same call as on every rank; admission has reserved the pages.
  replica.ledger.append(step.sequences, counts);
}

/// Decides how many tokens of which prompts come next. The prompt that joined first gets half of the step.
/// The rest goes to the others, those with the fewest remaining tokens first: short prompts do not wait for
/// long ones, and long ones do not wait for ever.
std::vector<Scheduler::PrefillShare> Scheduler::share_prefill(Replica& replica) const {
  std::vector<PrefillShare> shares;
  for (auto at = replica.running.begin(); at != replica.running.end(); ++at) {
    if (!at->is_prefilled()) shares.push_back({at, 0});
  }
  std::int64_t room = spec_.prefill_tokens;
  const auto give = [&](PrefillShare& share, std::int64_t most) {
    const std::int64_t left = share.at->prompt_size() - share.at->num_cached - share.count;
    const std::int64_t count = std::min(most, left);
    share.count += count;
    room -= count;
  };
  if (!shares.empty()) give(shares.front(), ceil_div(room, std::int64_t{2}));
  std::ranges::stable_sort(shares, {}, [](const PrefillShare& share) {
    return share.at->prompt_size() - share.at->num_cached - share.count;
  });
  for (PrefillShare& share : shares) give(share, room);
  std::erase_if(shares, [](const PrefillShare& share) { return share.count == 0; });
  return shares;
}

/// Adds the next `count` tokens of the sequence; draws a token if they are its last ones.
void Scheduler::add_entry(Replica& replica, std::list<Running>::iterator at, std::int64_t count, Step& step) {
  Running& running = *at;
  for (std::int64_t i = 0; i < count; ++i) {
    step.tokens.push_back(running.tokens[static_cast<std::size_t>(running.num_cached + i)]);
    step.positions.push_back(running.num_cached + i);
  }
  step.query_offsets.push_back(static_cast<std::int32_t>(step.tokens.size()));
  step.sequences.push_back(running.sequence);
  running.num_cached += count;
  if (running.num_cached < std::ssize(running.tokens)) return;
  replica.drawing.push_back(at);
  running.counts.append_penalties(static_cast<std::int32_t>(step.logit_rows.size()), step.penalties);
  step.logit_rows.push_back(static_cast<std::int32_t>(step.tokens.size() - 1));
  step.draw_counters.push_back(static_cast<std::uint64_t>(running.num_cached - 1));
  step.sampling.push_back(running.request.sampling);
}

void Scheduler::complete(std::span<const ReplicaResult> results) {
  const auto now = Clock::now();
  for (std::size_t i = 0; i < replicas_.size(); ++i) {
    Replica& replica = replicas_[i];
    const ReplicaResult& result = results[i];
    const auto rows = std::exchange(replica.drawing, {});
    for (std::size_t row = 0; row < rows.size(); ++row) {
      Running& running = *rows[row];
      const std::int32_t token = result.tokens[row];
      if (token < 0) {
        emit_(error_event(running.request.id,
                          "the model gave no finite logits: its weights or activations have overflowed"));
        release(replica, running.sequence);
        ids_.erase(running.request.id);
        replica.running.erase(rows[row]);
        continue;
      }
      if (running.output_size() == 0) running.first_token_at = now;
      running.last_token_at = now;
      running.tokens.push_back(token);
      running.counts.add(token);
      LogProbs log_probs;
      if (running.request.num_best) {
        const auto wanted = static_cast<std::size_t>(*running.request.num_best);
        const std::size_t found = result.best_ids.size() / result.log_probs.size();
        log_probs = {std::span(result.log_probs).subspan(row, 1),
                     std::span(result.best_ids).subspan(row * found, wanted),
                     std::span(result.best_log_probs).subspan(row * found, wanted)};
      }
      emit_(token_event(running.request.id, running.output_size() - 1, token, log_probs));
      if (const auto reason = finish_reason(running, token)) end(replica, rows[row], *reason);
    }
  }
}

std::optional<FinishReason> Scheduler::finish_reason(const Running& running, std::int32_t token) const {
  const bool is_eos = !running.request.ignore_eos && std::ranges::count(spec_.eos_ids, token) > 0;
  if (is_eos || std::ranges::count(running.request.stop, token) > 0) return FinishReason::stop;
  if (running.output_size() >= running.max_tokens) return FinishReason::length;
  return std::nullopt;
}

/// Reports the end of the request and keeps its cache, without the unused reserved pages.
void Scheduler::end(Replica& replica, std::list<Running>::iterator running, FinishReason reason) {
  const Clock::time_point now = Clock::now();
  const bool has_output = running->output_size() > 0;
  RequestTiming timing;
  timing.queued_ms = milliseconds_between(running->queued_at, running->started_at);
  timing.prefill_ms = milliseconds_between(running->started_at, has_output ? running->first_token_at : now);
  if (has_output) timing.decode_ms = milliseconds_between(running->first_token_at, running->last_token_at);
  emit_(end_event(running->request.id, reason,
                  {running->prompt_size(), running->num_shared, running->output_size()}, timing));
  if (running->num_cached >= kMinShared) {
    replica.ledger.unreserve(running->sequence);
    replica.calls.push_back({CacheCall::Kind::unreserve, running->sequence, {}, 0});
    replica.may_admit = true;
    running->tokens.resize(static_cast<std::size_t>(running->num_cached));
    replica.retained.push_back({running->sequence, std::move(running->tokens)});
  } else {
    release(replica, running->sequence);
  }
  ids_.erase(running->request.id);
  replica.running.erase(running);
  if (std::ssize(replica.retained) > spec_.max_sequences) evict_oldest(replica);
}

void Scheduler::fail(std::string_view reason) {
  for (const std::string& id : ids_) emit_(error_event(id, reason));
}

ServeStats Scheduler::stats() const {
  ServeStats stats;
  stats.queued = std::ssize(queue_);
  for (const Replica& replica : replicas_) {
    stats.running += std::ssize(replica.running);
    stats.retained += std::ssize(replica.retained);
    stats.pages += replica.ledger.spec().num_pages;
    stats.pages_used += replica.ledger.pages_used(0);
  }
  return stats;
}

}  // namespace helix::decode
