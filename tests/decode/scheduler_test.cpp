// SPDX-License-Identifier: Apache-2.0
// The scheduler of a serving decoder with a stand-in for the ranks: a cache that holds token ids, and a model
// whose next token is a hash of all previous tokens. Whatever requests join, leave, wait or share, each gets
// the answer that it would get alone.
#include "serve/scheduler.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>

#include "support/catch.hpp"
#include "support/ranks.hpp"

namespace helix::test {
namespace {

using namespace decode;

constexpr std::int64_t kVocab = 97;

std::int32_t next_token(const TokenIds& tokens) {
  std::uint64_t hash = 14695981039346656037ull;
  for (const std::int32_t token : tokens)
    hash = (hash ^ static_cast<std::uint64_t>(token)) * 1099511628211ull;
  return static_cast<std::int32_t>((hash >> 20) % kVocab);
}

/// Executes orders like the ranks of one replica: the cache of KVP rank `kvp_rank`, including its contents.
class StandIn {
 public:
  StandIn(const PageLedgerSpec& spec, std::int64_t kvp_rank) : ledger_(spec, kvp_rank) {}

  ReplicaResult run(const ReplicaOrder& order) {
    for (const CacheCall& call : order.cache_calls) apply(call);
    const Step& step = order.step;
    std::vector<std::int64_t> counts;
    for (std::size_t i = 0; i < step.sequences.size(); ++i)
      counts.push_back(step.query_offsets[i + 1] - step.query_offsets[i]);
    ledger_.append(step.sequences, counts);
    ReplicaResult result;
    std::size_t row = 0;
    for (std::size_t i = 0; i < step.sequences.size(); ++i) {
      TokenIds& stored = contents_.at(step.sequences[i].slot);
      for (std::int32_t at = step.query_offsets[i]; at < step.query_offsets[i + 1]; ++at) {
        const auto index = static_cast<std::size_t>(at);
        REQUIRE(step.positions[index] == std::ssize(stored));
        stored.push_back(step.tokens[index]);
        if (row < step.logit_rows.size() && step.logit_rows[row] == at) {
          REQUIRE(step.draw_counters[row] == stored.size() - 1);
          result.tokens.push_back(next_token(stored));
          ++row;
        }
      }
    }
    REQUIRE(row == step.logit_rows.size());
    REQUIRE(step.sampling.size() == row);
    if (step.num_best) {
      result.log_probs.assign(row, -1.0f);
      result.best_ids.assign(row * static_cast<std::size_t>(*step.num_best), 3);
      result.best_log_probs.assign(result.best_ids.size(), -1.0f);
    }
    return result;
  }

  const PageLedger& ledger() const { return ledger_; }

 private:
  void apply(const CacheCall& call) {
    switch (call.kind) {
      case CacheCall::Kind::add:
        REQUIRE(ledger_.add() == call.id);
        contents_[call.id.slot].clear();
        break;
      case CacheCall::Kind::fork: {
        REQUIRE(ledger_.fork(call.parent, call.tokens) == call.id);
        const TokenIds& parent = contents_.at(call.parent.slot);
        REQUIRE(call.tokens <= std::ssize(parent));
        contents_[call.id.slot] = TokenIds(parent.begin(), parent.begin() + call.tokens);
        break;
      }
      case CacheCall::Kind::reserve:
        ledger_.reserve(call.id, call.tokens);
        break;
      case CacheCall::Kind::unreserve:
        ledger_.unreserve(call.id);
        break;
      case CacheCall::Kind::release:
        ledger_.release(call.id);
        break;
    }
  }

  PageLedger ledger_;
  std::map<std::int32_t, TokenIds> contents_;  // tokens by slot
};

/// A scheduler, its stand-in ranks, and the events that it has sent.
class Decoder {
 public:
  explicit Decoder(const SchedulerSpec& spec)
      : scheduler_(spec, [this](const std::string& line) { take(line); }) {
    for (int i = 0; i < spec.num_replicas; ++i)
      replicas_.emplace_back(spec.ledger, spec.ledger.layout.kvp() - 1);
  }

  Scheduler& scheduler() { return scheduler_; }

  /// Runs one step. Returns the order that the ranks received.
  StepOrder step() {
    StepOrder order = scheduler_.next();
    std::vector<ReplicaResult> results;
    for (std::size_t i = 0; i < replicas_.size(); ++i) {
      most_tokens = std::max(most_tokens, std::ssize(order.replicas[i].step.tokens));
      most_sequences = std::max(most_sequences, std::ssize(order.replicas[i].step.sequences));
      results.push_back(replicas_[i].run(order.replicas[i]));
    }
    scheduler_.complete(results);
    return order;
  }
  void run_to_end() {
    for (int i = 0; !scheduler_.is_idle(); ++i) {
      REQUIRE(i < 100'000);
      step();
    }
    step();  // runs the cache calls left by the last end
  }

  std::int64_t pages_used() const {
    std::int64_t pages = 0;
    for (const StandIn& replica : replicas_)
      for (std::int64_t rank = 0; rank < replica.ledger().spec().layout.kvp(); ++rank)
        pages += replica.ledger().pages_used(rank);
    return pages;
  }

  std::map<std::string, TokenIds> tokens;
  std::map<std::string, nlohmann::json> ends;
  std::vector<nlohmann::json> errors;
  std::int64_t most_tokens = 0;
  std::int64_t most_sequences = 0;

 private:
  void take(const std::string& line) {
    const auto event = nlohmann::json::parse(line);
    if (event["event"] == "token") {
      TokenIds& list = tokens[event["id"]];
      REQUIRE(event["index"] == list.size());
      list.push_back(event["token"]);
    } else if (event["event"] == "end") {
      REQUIRE(ends.emplace(event["id"], event).second);
    } else {
      errors.push_back(event);
    }
  }

  Scheduler scheduler_;
  std::vector<StandIn> replicas_;
};

SchedulerSpec small_spec() {
  SchedulerSpec spec;
  spec.ledger = {
      .layout = KvLayout(3, 4), .page_tokens = 8, .num_pages = 12, .max_sequences = 8, .max_tokens = 120};
  spec.max_sequences = 4;
  spec.max_tokens = 120;
  spec.prefill_tokens = 11;
  spec.vocab = kVocab;
  spec.eos_ids = {5};
  return spec;
}

/// Has room for five pages of 24 tokens, 8 on each rank.
SchedulerSpec five_pages_spec() {
  SchedulerSpec spec = small_spec();
  spec.ledger.num_pages = 5;
  return spec;
}

/// Has room for `requests` requests of `tokens` tokens each in the steps, and for as many ended ones.
SchedulerSpec spacious_spec(std::int64_t requests, std::int64_t tokens) {
  SchedulerSpec spec = small_spec();
  spec.max_sequences = requests;
  spec.max_tokens = tokens;
  spec.ledger.num_pages = 1 << 20;
  spec.ledger.max_sequences = 2 * requests;
  spec.ledger.max_tokens = tokens;
  return spec;
}

/// The answer to the request when it runs alone.
TokenIds alone(const ServeRequest& request, const SchedulerSpec& spec) {
  TokenIds tokens = request.prompt;
  const std::int64_t most = request.max_tokens.value_or(
      std::min(spec.max_tokens - std::ssize(request.prompt), spec.default_max_tokens));
  TokenIds output;
  while (std::ssize(output) < most) {
    output.push_back(next_token(tokens));
    tokens.push_back(output.back());
    const bool is_eos = !request.ignore_eos && std::ranges::count(spec.eos_ids, output.back()) > 0;
    if (is_eos || std::ranges::count(request.stop, output.back()) > 0) break;
  }
  return output;
}

/// Random requests; many begin like earlier ones, or continue them.
class Requests {
 public:
  explicit Requests(unsigned seed) : random_(seed) {}

  ServeRequest next() {
    ServeRequest request;
    request.id = "r" + std::to_string(count_++);
    if (!earlier_.empty() && pick(3) > 0) {
      request.prompt = earlier_[pick(earlier_.size())];
      request.prompt.resize(1 + pick(request.prompt.size()));
    }
    const std::size_t more = 1 + pick(30);
    for (std::size_t i = 0; i < more && request.prompt.size() < 100; ++i)
      request.prompt.push_back(static_cast<std::int32_t>(pick(kVocab)));
    if (pick(4) > 0) request.max_tokens = 1 + static_cast<std::int64_t>(pick(120 - request.prompt.size()));
    request.ignore_eos = pick(2) == 0;
    if (pick(3) == 0) request.stop = {static_cast<std::int32_t>(pick(kVocab))};
    if (pick(4) == 0) request.num_best = static_cast<std::int64_t>(pick(5));
    if (pick(4) == 0) request.penalties.frequency = 0.5f;
    return request;
  }
  /// Makes the output part of a conversation that later requests may continue.
  void remember(const ServeRequest& request, const TokenIds& output) {
    TokenIds tokens = request.prompt;
    tokens.insert(tokens.end(), output.begin(), output.end());
    if (tokens.size() > 90) tokens.resize(90);
    if (earlier_.size() < 20) {
      earlier_.push_back(std::move(tokens));
    } else {
      earlier_[pick(earlier_.size())] = std::move(tokens);
    }
  }
  std::size_t pick(std::size_t below) { return random_() % below; }

 private:
  std::mt19937 random_;
  std::vector<TokenIds> earlier_;
  int count_ = 0;
};

void run_random(unsigned seed, int num_requests, int num_replicas) {
  SchedulerSpec spec = small_spec();
  spec.num_replicas = num_replicas;
  if (seed % 2 == 1) spec.max_compared_tokens = 20;
  Decoder decoder(spec);
  Requests requests(seed);
  std::map<std::string, ServeRequest> sent;
  std::set<std::string> cancelled;
  for (int sent_count = 0; sent_count < num_requests;) {
    if (requests.pick(4) == 0) {
      ServeRequest request = requests.next();
      decoder.scheduler().take(request);
      requests.remember(request, alone(request, spec));
      sent.emplace(request.id, std::move(request));
      ++sent_count;
    }
    if (requests.pick(40) == 0 && !sent.empty()) {
      const std::string id = "r" + std::to_string(requests.pick(sent.size()));
      const bool is_over = decoder.ends.contains(id);
      const std::size_t errors = decoder.errors.size();
      decoder.scheduler().take(CancelCommand{id});
      if (is_over) {
        REQUIRE(decoder.errors.size() == errors + 1);
      } else {
        REQUIRE(decoder.ends.at(id)["reason"] == "cancelled");
        cancelled.insert(id);
      }
    }
    if (requests.pick(400) == 0) decoder.scheduler().take(ForgetCommand{});
    decoder.step();
  }
  decoder.run_to_end();

  std::int64_t shared = 0;
  for (const auto& [id, request] : sent) {
    CAPTURE(seed, id);
    const nlohmann::json& end = decoder.ends.at(id);
    const TokenIds expected = alone(request, spec);
    const TokenIds& got = decoder.tokens[id];
    REQUIRE(end["usage"]["completion_tokens"] == got.size());
    shared += end["usage"]["cached_tokens"].get<std::int64_t>();
    if (cancelled.contains(id)) {
      REQUIRE(got.size() <= expected.size());
      REQUIRE(std::equal(got.begin(), got.end(), expected.begin()));
    } else {
      REQUIRE(got == expected);
      const bool is_length = std::ssize(got) == request.max_tokens.value_or(spec.default_max_tokens);
      REQUIRE((end["reason"] == "stop" || (end["reason"] == "length" && is_length) ||
               std::ssize(request.prompt) + std::ssize(got) == spec.max_tokens));
    }
  }
  CHECK(shared > num_requests);  // tokens
  CHECK(decoder.most_tokens <= spec.prefill_tokens + spec.max_sequences);
  CHECK(decoder.most_sequences == spec.max_sequences);
  decoder.scheduler().take(ForgetCommand{});
  decoder.step();
  CHECK(decoder.pages_used() == 0);
  CHECK(decoder.scheduler().stats().pages_used == 0);
}

}  // namespace

TEST_CASE("requests that join, leave, wait for memory and share prefixes are answered as if alone",
          "[quick]") {
  for (const unsigned seed : {1u, 2u, 3u}) run_random(seed, 400, 1);
  run_random(4, 400, 3);
}

TEST_CASE("100000 requests are answered as if alone", "[full]") {
  for (unsigned seed = 10; seed < 20; ++seed) run_random(seed, 10'000, 1 + static_cast<int>(seed % 3));
}

TEST_CASE("a request that cannot be taken is an error event that says what to do, and the rest goes on",
          "[quick]") {
  Decoder decoder(small_spec());
  const auto message = [&](ServeRequest request) {
    const std::size_t before = decoder.errors.size();
    decoder.scheduler().take(std::move(request));
    REQUIRE(decoder.errors.size() == before + 1);
    return decoder.errors.back()["message"].get<std::string>();
  };
  ServeRequest good;
  good.id = "good";
  good.prompt = {1, 2, 3};
  decoder.scheduler().take(good);
  CHECK(decoder.errors.empty());
  using Catch::Matchers::ContainsSubstring;
  CHECK_THAT(message(good), ContainsSubstring("'good' is of a request that runs"));
  ServeRequest bad = good;
  bad.id = "bad";
  bad.prompt = {1, 97};
  CHECK_THAT(message(bad), ContainsSubstring("token id 97") && ContainsSubstring("[0, 97)"));
  bad.prompt = {1};
  bad.stop = {200};
  CHECK_THAT(message(bad), ContainsSubstring("stop holds token id 200"));
  bad.stop.clear();
  bad.prompt.assign(120, 1);
  CHECK_THAT(message(bad), ContainsSubstring("120 tokens") && ContainsSubstring("--context"));
  bad.prompt.assign(100, 1);
  bad.max_tokens = 21;
  CHECK_THAT(message(bad), ContainsSubstring("121 exceed the context of 120"));
  bad.max_tokens = std::numeric_limits<std::int64_t>::max();
  CHECK_THAT(message(bad), ContainsSubstring(": 9223372036854775807 exceed the context of 120"));
  bad.max_tokens = 20;
  decoder.scheduler().take(bad);
  decoder.run_to_end();
  CHECK(decoder.tokens["good"] == alone(good, small_spec()));
  CHECK(decoder.tokens["bad"] == alone(bad, small_spec()));
}

TEST_CASE("a conversation that goes on takes its beginning from the cache", "[quick]") {
  Decoder decoder(small_spec());
  ServeRequest first;
  first.id = "a";
  first.ignore_eos = true;
  first.prompt.assign(30, 7);
  first.max_tokens = 10;
  decoder.scheduler().take(first);
  decoder.run_to_end();
  ServeRequest second = first;
  second.id = "b";
  const TokenIds& answer = decoder.tokens["a"];
  second.prompt.insert(second.prompt.end(), answer.begin(), answer.end());
  second.prompt.push_back(3);
  decoder.scheduler().take(second);
  decoder.run_to_end();
  CHECK(decoder.ends["b"]["usage"]["cached_tokens"] == 39);  // the last drawn token was never stored
  CHECK(decoder.tokens["b"] == alone(second, small_spec()));
}

namespace {

/// A prompt that repeats one token `size` times. The token's id is also the request's name.
ServeRequest uniform(std::int32_t token, std::size_t size) {
  ServeRequest request;
  request.id = std::to_string(token);
  request.prompt.assign(size, token);
  request.ignore_eos = true;
  request.max_tokens = 2;
  return request;
}

/// Runs the request to its end. Returns how many tokens of its prompt came from caches.
std::int64_t cached_tokens(Decoder& decoder, ServeRequest request) {
  static int count = 0;
  request.id += "." + std::to_string(++count);  // makes repeated requests distinct
  decoder.scheduler().take(request);
  decoder.run_to_end();
  return decoder.ends.at(request.id)["usage"]["cached_tokens"];
}

}  // namespace

TEST_CASE("of ended requests, the one that was used longest ago is given up first", "[quick]") {
  Decoder decoder(small_spec());
  for (const std::int32_t token : {1, 2, 3, 4}) CHECK(cached_tokens(decoder, uniform(token, 20)) == 0);
  CHECK(decoder.scheduler().stats().retained == 4);
  // One request too many: 2 is evicted, because 1 has just been used.
  CHECK(cached_tokens(decoder, uniform(1, 20)) == 19);
  CHECK(decoder.scheduler().stats().retained == 4);
  CHECK(cached_tokens(decoder, uniform(2, 20)) == 0);  // evicts 3
  CHECK(cached_tokens(decoder, uniform(4, 20)) == 19);
  CHECK(cached_tokens(decoder, uniform(3, 20)) == 0);
}

TEST_CASE("a request that needs memory takes it from the oldest, but not from the one that it continues",
          "[quick]") {
  Decoder decoder(five_pages_spec());
  for (const std::int32_t token : {1, 2, 3}) cached_tokens(decoder, uniform(token, 22));
  ServeRequest long_one = uniform(1, 50);
  long_one.max_tokens = 22;
  CHECK(cached_tokens(decoder, long_one) == 22);
  CHECK(cached_tokens(decoder, uniform(3, 22)) == 21);
  CHECK(cached_tokens(decoder, uniform(2, 22)) == 0);
}

TEST_CASE("a request that would find no room even so leaves the caches of ended ones", "[quick]") {
  Decoder decoder(five_pages_spec());
  cached_tokens(decoder, uniform(1, 22));
  ServeRequest other = uniform(2, 80);
  other.max_tokens = 16;
  decoder.scheduler().take(other);
  decoder.step();
  ServeRequest longer = uniform(1, 40);
  longer.max_tokens = 10;
  decoder.scheduler().take(longer);
  decoder.step();
  CHECK(decoder.scheduler().stats().queued == 1);
  CHECK(decoder.scheduler().stats().retained == 1);
  decoder.run_to_end();
  CHECK(decoder.ends.at(longer.id)["usage"]["cached_tokens"] == 22);
}

TEST_CASE("short prompts do not wait for long ones, nor these for short ones", "[quick]") {
  const SchedulerSpec spec = small_spec();  // 11 prompt tokens per step
  Decoder decoder(spec);
  decoder.scheduler().take(uniform(1, 100));
  for (const std::int32_t token : {2, 3, 4}) decoder.scheduler().take(uniform(token, 5));
  const auto counts = [](const StepOrder& order) {
    std::vector<std::int32_t> of_entries;
    const auto& offsets = order.replicas[0].step.query_offsets;
    for (std::size_t i = 1; i < offsets.size(); ++i) of_entries.push_back(offsets[i] - offsets[i - 1]);
    return of_entries;
  };
  // The short prompt, and half of the long one.
  StepOrder order = decoder.step();
  CHECK(counts(order) == std::vector<std::int32_t>{5, 6});
  CHECK_FALSE(order.replicas[0].step.is_decode);
  // The first request draws its second token.
  order = decoder.step();
  CHECK(counts(order) == std::vector<std::int32_t>{1, 5, 6});
  CHECK_FALSE(order.replicas[0].step.is_decode);

  Decoder equals(spec);
  for (const std::int32_t token : {1, 2}) equals.scheduler().take(uniform(token, 20));
  CHECK(counts(equals.step()) == std::vector<std::int32_t>{11});
  CHECK(counts(equals.step()) == std::vector<std::int32_t>{9, 2});

  // With its half of the step the first prompt has the fewest tokens left.
  Decoder halved(spec);
  halved.scheduler().take(uniform(1, 20));
  halved.scheduler().take(uniform(2, 18));
  CHECK(counts(halved.step()) == std::vector<std::int32_t>{11});
}

TEST_CASE("a step without prompts is a decode step", "[quick]") {
  Decoder decoder(small_spec());
  decoder.scheduler().take(uniform(1, 5));
  CHECK_FALSE(decoder.step().replicas[0].step.is_decode);
  CHECK(decoder.step().replicas[0].step.is_decode);
}

TEST_CASE("beginnings of 16 tokens and more are shared", "[quick]") {
  Decoder decoder(small_spec());
  const auto beginning = [](std::int32_t token, std::size_t size) {
    ServeRequest request = uniform(token, size);
    request.prompt.resize(30, 90);
    return request;
  };
  cached_tokens(decoder, uniform(1, 30));
  CHECK(cached_tokens(decoder, beginning(1, 15)) == 0);
  CHECK(cached_tokens(decoder, beginning(1, 16)) == 16);
  const std::int64_t retained = decoder.scheduler().stats().retained;
  cached_tokens(decoder, uniform(2, 14));  // its cache holds 15 tokens when it ends
  CHECK(decoder.scheduler().stats().retained == retained);
}

TEST_CASE("many requests with one long beginning join in no time", "[quick]") {
  constexpr std::int32_t kRequests = 4096;
  SchedulerSpec spec = spacious_spec(kRequests, 8192);
  spec.prefill_tokens = 4096;
  Decoder decoder(spec);
  cached_tokens(decoder, uniform(1, 8000));
  Scheduler& scheduler = decoder.scheduler();
  for (std::int32_t i = 0; i < kRequests; ++i) {
    ServeRequest request = uniform(1, 8000);
    request.id = "one of many, " + std::to_string(i);
    request.prompt.back() = i % 90;
    scheduler.take(ServeCommand(std::move(request)));
  }
  const std::clock_t begin = std::clock();  // of this process, which other ones cannot lengthen
  scheduler.next();
  CHECK(std::clock() - begin < 5 * CLOCKS_PER_SEC);
  CHECK(scheduler.stats().running == kRequests);
}

TEST_CASE("a prompt is compared only with caches that may share more of it", "[quick]") {
  constexpr std::int32_t kRequests = 64;
  constexpr std::size_t kShared = 100;
  SchedulerSpec spec = spacious_spec(kRequests, 512);
  spec.prefill_tokens = 1 << 20;
  spec.max_compared_tokens = 2 * kRequests * kShared;  // many fewer than each with all
  Decoder decoder(spec);
  const auto take = [&](std::int32_t own_token) {
    ServeRequest request = uniform(1, kShared + 10);
    request.id = std::to_string(own_token);
    std::fill_n(request.prompt.end() - 10, 10, own_token);
    decoder.scheduler().take(std::move(request));
  };
  for (std::int32_t i = 0; i < kRequests; ++i) take(2 + i);
  decoder.run_to_end();
  REQUIRE(decoder.scheduler().stats().retained == kRequests);
  for (std::int32_t i = 0; i < 30; ++i) take(2 + kRequests + i);
  decoder.step();
  CHECK(decoder.scheduler().stats().running == 30);
}

TEST_CASE("prompts that continue one another join over several steps", "[quick]") {
  constexpr std::int64_t kRequests = 64;
  SchedulerSpec spec = spacious_spec(kRequests, 512);
  spec.prefill_tokens = 1 << 20;
  spec.max_compared_tokens = 2000;
  Decoder decoder(spec);
  // Each ended request is one token longer than the previous one.
  for (std::size_t i = 0; i < kRequests; ++i) cached_tokens(decoder, uniform(1, 100 + i));
  for (std::int64_t i = 0; i < kRequests; ++i) {
    ServeRequest request = uniform(1, 200);
    request.id = "one of many, " + std::to_string(i);
    request.ignore_eos = true;
    request.max_tokens = 100;
    decoder.scheduler().take(ServeCommand(std::move(request)));
  }
  std::int64_t running = 0;
  int steps = 0;
  for (; running < kRequests; ++steps) {
    REQUIRE(steps < 100);
    decoder.step();
    const std::int64_t now = decoder.scheduler().stats().running;
    CHECK(now > running);  // at least one joins
    if (steps == 0) CHECK(now < kRequests);
    running = now;
  }
  CHECK(steps > 1);
  decoder.run_to_end();
}

TEST_CASE("prompts wait up to a number of tokens, and what has joined or was cancelled leaves room",
          "[quick]") {
  SchedulerSpec spec = small_spec();
  spec.max_sequences = 1;
  spec.max_queued_tokens = 100;
  std::string events;
  Scheduler scheduler(spec, [&](std::string event) { events += event; });
  const auto is_refused = [&](std::int32_t token, std::size_t size) {
    events.clear();
    scheduler.take(uniform(token, size));
    return events.find("100 at most") != std::string::npos;
  };
  CHECK_FALSE(is_refused(1, 60));
  CHECK_FALSE(is_refused(2, 40));
  CHECK(is_refused(3, 1));
  scheduler.take(CancelCommand{uniform(2, 40).id});
  CHECK_FALSE(is_refused(4, 40));
  (void)scheduler.next();  // the first one joins
  CHECK_FALSE(is_refused(5, 60));
  CHECK(is_refused(6, 1));

  Scheduler alone(spec, [&](const std::string& event) { FAIL(event); });
  alone.take(uniform(7, 110));
}

TEST_CASE("100000 requests may wait, and no more", "[quick]") {
  std::string events;
  Scheduler scheduler(small_spec(), [&](std::string event) { events += event; });
  ServeRequest request;
  request.prompt = {1};
  for (int i = 0; i < 100'000; ++i) {
    request.id = std::to_string(i);
    scheduler.take(request);
  }
  CHECK(events.empty());
  request.id = "late";
  scheduler.take(request);
  CHECK(events.find("100000 requests wait already") != std::string::npos);
}

TEST_CASE("a request joins the replica with the fewest", "[quick]") {
  SchedulerSpec spec = small_spec();
  spec.num_replicas = 3;
  Decoder decoder(spec);
  for (const std::int32_t token : {1, 2, 3, 4}) decoder.scheduler().take(uniform(token, 2));
  const StepOrder order = decoder.step();
  CHECK(order.replicas[0].step.sequences.size() == 2);
  CHECK(order.replicas[1].step.sequences.size() == 1);
  CHECK(order.replicas[2].step.sequences.size() == 1);
}

TEST_CASE("a replica that has no room for one request may have it for the next", "[quick]") {
  SchedulerSpec spec = five_pages_spec();
  spec.num_replicas = 2;
  Decoder decoder(spec);
  std::int32_t token = 0;
  for (const std::int64_t pages : {3, 2, 3, 2}) {  // the third one finds room only in the second replica
    ServeRequest request = uniform(++token, 10);
    request.max_tokens = pages * 24 - 10;
    decoder.scheduler().take(request);
  }
  decoder.step();
  CHECK(decoder.scheduler().stats().running == 4);
}

TEST_CASE("a request that says no max_tokens has at most what the context leaves it", "[quick]") {
  SchedulerSpec spec = small_spec();
  spec.default_max_tokens = 16;
  Decoder decoder(spec);
  for (const std::int32_t left : {1, 5, 16}) {
    ServeRequest request = uniform(left, static_cast<std::size_t>(spec.max_tokens - left));
    request.max_tokens.reset();
    decoder.scheduler().take(request);
    decoder.run_to_end();
    CHECK(decoder.errors.empty());
    CHECK(decoder.ends[request.id]["usage"]["completion_tokens"] == left);
  }
}

TEST_CASE("a waiting request that is cancelled leaves its turn to the next", "[quick]") {
  Decoder decoder(five_pages_spec());
  ServeRequest first = uniform(1, 80);
  first.max_tokens = 16;
  const ServeRequest second = uniform(2, 40);
  for (const ServeRequest& request : {first, second, uniform(3, 10)}) decoder.scheduler().take(request);
  decoder.step();
  CHECK(decoder.scheduler().stats().running == 1);
  decoder.scheduler().take(CancelCommand{second.id});
  decoder.step();
  CHECK(decoder.scheduler().stats().running == 2);
}

TEST_CASE("the id of a request that ended or was cancelled may come again", "[quick]") {
  Decoder decoder(small_spec());
  const auto takes = [&] {
    decoder.ends.clear();
    decoder.tokens.clear();
    decoder.scheduler().take(uniform(1, 5));
    CHECK(decoder.errors.empty());
  };
  takes();
  decoder.run_to_end();  // to its end
  takes();
  decoder.scheduler().take(CancelCommand{"1"});  // while it waits
  takes();
  decoder.step();
  decoder.scheduler().take(CancelCommand{"1"});  // while it runs
  takes();
}

TEST_CASE("a short request that ends early leaves its pages to the next", "[quick]") {
  Decoder decoder(five_pages_spec());
  ServeRequest first = uniform(1, 2);
  first.max_tokens = 118;
  first.stop = {next_token(first.prompt)};
  decoder.scheduler().take(first);
  decoder.scheduler().take(uniform(2, 40));
  decoder.step();
  CHECK(decoder.ends.contains(first.id));
  decoder.step();
  CHECK(decoder.scheduler().stats().running == 1);
}

TEST_CASE("what an ended request reserved and did not use takes the cache of no other", "[quick]") {
  Decoder decoder(five_pages_spec());
  ServeRequest first = uniform(1, 20);  // reserves four pages of 24 tokens, and uses one
  first.max_tokens = 60;
  first.stop = {next_token(first.prompt)};
  decoder.scheduler().take(first);
  decoder.step();
  decoder.step();
  REQUIRE(decoder.ends.contains(first.id));
  ServeRequest second = uniform(2, 20);
  second.max_tokens = 60;
  decoder.scheduler().take(second);
  decoder.step();
  const ServeStats stats = decoder.scheduler().stats();
  CHECK(stats.running == 1);
  CHECK(stats.retained == 1);
  CHECK(stats.pages == 5);
  CHECK(stats.pages_used == 2);  // not those that are only reserved
}

TEST_CASE("the cache of a request is kept from 16 tokens on", "[quick]") {
  Decoder decoder(small_spec());
  for (const std::size_t size : {15u, 16u}) {
    ServeRequest request = uniform(1, size);
    request.id += "." + std::to_string(size);
    request.max_tokens = 1;  // which is drawn, and not cached
    decoder.scheduler().take(request);
    decoder.run_to_end();
    CHECK(decoder.scheduler().stats().retained == (size == 16 ? 1 : 0));
  }
}

TEST_CASE("a request whose logits are not finite leaves its id and its pages", "[quick]") {
  std::string events;
  Scheduler scheduler(small_spec(), [&](const std::string& event) { events += event; });
  for (int times = 0; times < 2; ++times) {
    events.clear();
    scheduler.take(uniform(1, 5));
    CHECK(events.empty());
    (void)scheduler.next();
    scheduler.complete(
        std::vector<ReplicaResult>{{.tokens = {-1}, .log_probs = {}, .best_ids = {}, .best_log_probs = {}}});
    CHECK(events.find("no finite logits") != std::string::npos);
    CHECK(scheduler.is_idle());
    CHECK(scheduler.stats().pages_used == 0);
  }
}

TEST_CASE("each request of a step gets as many of its own row's likeliest tokens as it asks for", "[quick]") {
  std::map<std::string, nlohmann::json> best, log_probs;
  Scheduler scheduler(small_spec(), [&](const std::string& event) {
    const auto parsed = nlohmann::json::parse(event);
    if (parsed["event"] != "token") return;
    best[parsed["id"]] = parsed["best"];
    log_probs[parsed["id"]] = parsed["log_prob"];
  });
  for (const std::int32_t id : {1, 2, 3}) {
    ServeRequest request = uniform(id, 2);
    request.num_best = id == 2 ? 3 : 1;
    scheduler.take(request);
  }
  const StepOrder order = scheduler.next();
  CHECK(order.replicas[0].step.num_best == 3);
  scheduler.complete(std::vector<ReplicaResult>{{.tokens = {7, 7, 7},
                                                 .log_probs = {-1, -4, -7},
                                                 .best_ids = {10, 11, 12, 20, 21, 22, 30, 31, 32},
                                                 .best_log_probs = {-1, -2, -3, -4, -5, -6, -7, -8, -9}}});
  CHECK(best.at("1") == nlohmann::json::parse("[[10, -1.0]]"));
  CHECK(best.at("2") == nlohmann::json::parse("[[20, -4.0], [21, -5.0], [22, -6.0]]"));
  CHECK(best.at("3") == nlohmann::json::parse("[[30, -7.0]]"));
  CHECK(log_probs == std::map<std::string, nlohmann::json>{{"1", -1.0}, {"2", -4.0}, {"3", -7.0}});
}

TEST_CASE("requests without a seed draw by seeds of their own, those with one by it", "[quick]") {
  SchedulerSpec spec = small_spec();
  spec.seed = 40;
  Decoder decoder(spec);
  for (const std::int32_t token : {1, 2, 3}) {
    ServeRequest request = uniform(token, 2);
    request.sampling = {.temperature = 2.0f, .top_k = 9};
    if (token == 2) request.seed = 7;
    decoder.scheduler().take(request);
  }
  const std::vector<SamplingConfig> sampling = decoder.step().replicas[0].step.sampling;
  REQUIRE(sampling.size() == 3);
  CHECK(sampling[0] == SamplingConfig{.temperature = 2.0f, .top_k = 9, .seed = 40});
  CHECK(sampling[1] == SamplingConfig{.temperature = 2.0f, .top_k = 9, .seed = 7});
  CHECK(sampling[2] == SamplingConfig{.temperature = 2.0f, .top_k = 9, .seed = 42});
}

TEST_CASE("a step has the penalties of each request's prompt and output, at its row", "[quick]") {
  Decoder decoder(small_spec());
  ServeRequest first = uniform(1, 2);
  first.penalties.frequency = 0.25f;
  ServeRequest second = uniform(2, 3);
  second.penalties.repetition = 1.5f;
  decoder.scheduler().take(first);
  decoder.scheduler().take(second);
  CHECK(decoder.step().replicas[0].step.penalties == std::vector<LogitPenalty>{{1, 2, 1.5f, 0.0f}});
  const std::int32_t a = next_token(first.prompt);
  const std::int32_t b = next_token(second.prompt);
  REQUIRE(b > 2);
  CHECK(decoder.step().replicas[0].step.penalties ==
        std::vector<LogitPenalty>{{0, a, 1.0f, 0.25f}, {1, 2, 1.5f, 0.0f}, {1, b, 1.5f, 0.0f}});
}

TEST_CASE("the times of a request are no more than it took, one after the other", "[quick]") {
  Decoder decoder(small_spec());
  const auto start = std::chrono::steady_clock::now();
  decoder.scheduler().take(uniform(1, 2));
  const StepOrder order = decoder.scheduler().next();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  ReplicaResult drawn;
  drawn.tokens = {3};
  decoder.scheduler().complete(std::span(&drawn, 1));
  decoder.scheduler().next();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  decoder.scheduler().complete(std::span(&drawn, 1));
  const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
  const nlohmann::json& timing = decoder.ends.at("1")["timing"];
  CHECK(timing["prefill_ms"].get<double>() >= 20.0);
  CHECK(timing["decode_ms"].get<double>() >= 20.0);
  CHECK(timing["queued_ms"].get<double>() + timing["prefill_ms"].get<double>() +
            timing["decode_ms"].get<double>() <=
        taken.count());
}

TEST_CASE("a request that is cancelled says how long it waited, ran and drew", "[quick]") {
  const auto sleep = [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); };
  SchedulerSpec spec = small_spec();
  spec.max_sequences = 1;
  Decoder decoder(spec);
  const auto start = std::chrono::steady_clock::now();
  decoder.scheduler().take(uniform(1, 20));
  decoder.scheduler().take(uniform(2, 6));
  decoder.step();  // the first half of the first prompt
  sleep();
  for (const char* const id : {"1", "2"}) decoder.scheduler().take(CancelCommand{id});
  const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
  const auto is_slept = [&](const nlohmann::json& ms) {
    return ms.get<double>() >= 20.0 && ms.get<double>() <= taken.count();
  };
  const nlohmann::json& in_prefill = decoder.ends.at("1")["timing"];
  CHECK(is_slept(in_prefill["prefill_ms"]));
  CHECK(in_prefill["decode_ms"] == 0.0);
  const nlohmann::json& waiting = decoder.ends.at("2");
  CHECK(is_slept(waiting["timing"]["queued_ms"]));
  CHECK(waiting["usage"] ==
        nlohmann::json{{"prompt_tokens", 6}, {"cached_tokens", 0}, {"completion_tokens", 0}});

  decoder.scheduler().take(uniform(3, 2));
  decoder.step();
  sleep();
  decoder.scheduler().take(CancelCommand{"3"});
  CHECK(decoder.ends.at("3")["timing"]["decode_ms"] == 0.0);  // up to the last token, not to the end
}

TEST_CASE("every rank gets the root's bytes, whether or not they fit in the first message", "[quick]") {
  for (const int size : {1, 3}) {
    CHECK_NOTHROW(run_ranks_or_throw(size, [](cpu::LocalComm& comm) {
      cpu::Backend<cpu::LocalComm> backend(comm, comm.split(comm.rank(), 0));
      OrderChannel channel(backend, comm, backend.create_stream());
      for (const std::size_t bytes : {0, 10, 8184, 8185, 70'000, 300'000, 20}) {
        std::vector<std::byte> order(bytes);
        for (std::size_t i = 0; i < bytes; ++i) order[i] = static_cast<std::byte>(i * 7 + bytes);
        if (channel.broadcast(comm.rank() == 0 ? order : std::vector<std::byte>(3)) != order)
          throw Error(ErrorCode::internal, "other bytes than the root's ", bytes);
      }
    }));
  }
}

TEST_CASE("orders and results are the same behind serialize()", "[quick]") {
  StepOrder order;
  order.is_last = true;
  ReplicaOrder& replica = order.replicas.emplace_back();
  replica.cache_calls.push_back({CacheCall::Kind::fork, {1, 2, 3}, {4, 5, 6}, 7});
  replica.step.tokens = {1, 2};
  replica.step.positions = {3, 4};
  replica.step.query_offsets = {0, 2};
  replica.step.sequences = {{1, 2, 3}};
  replica.step.logit_rows = {1};
  replica.step.draw_counters = {4};
  replica.step.sampling = {{.temperature = 0.5f, .top_k = 3, .seed = 9}};
  replica.step.penalties = {{0, 5, 1.5f, 0.25f}};
  replica.step.num_best = 2;
  order.replicas.emplace_back().step.is_decode = true;
  const std::vector<std::byte> bytes = serialize(order);
  const StepOrder back = deserialize_order(bytes);
  CHECK(back.is_last);
  REQUIRE(back.replicas.size() == 2);
  REQUIRE(back.replicas[0].cache_calls.size() == 1);
  const CacheCall& call = back.replicas[0].cache_calls[0];
  CHECK(call.kind == CacheCall::Kind::fork);
  CHECK(call.id == SequenceId{1, 2, 3});
  CHECK(call.parent == SequenceId{4, 5, 6});
  CHECK(call.tokens == 7);
  CHECK(back.replicas[0].step == order.replicas[0].step);
  CHECK(back.replicas[1].step == order.replicas[1].step);
  CHECK(serialize(back) == bytes);
  for (std::size_t size = 0; size < bytes.size(); ++size)
    CHECK_THROWS_AS(deserialize_order(std::span(bytes).first(size)), Error);
  std::vector<std::byte> longer = bytes;
  longer.emplace_back();
  CHECK_THROWS_AS(deserialize_order(longer), Error);

  const ReplicaResult result{
      .tokens = {1, 2}, .log_probs = {-1, -2}, .best_ids = {3, 4, 5, 6}, .best_log_probs = {-3, -4, -5, -6}};
  std::vector<std::byte> drawn = serialize(result);
  const ReplicaResult same = deserialize_result(drawn);
  CHECK(same.tokens == result.tokens);
  CHECK(same.log_probs == result.log_probs);
  CHECK(same.best_ids == result.best_ids);
  CHECK(same.best_log_probs == result.best_log_probs);
  for (std::size_t size = 0; size < drawn.size(); ++size)
    CHECK_THROWS_AS(deserialize_result(std::span(drawn).first(size)), Error);
  drawn.emplace_back();
  CHECK_THROWS_AS(deserialize_result(drawn), Error);
}

}  // namespace helix::test
