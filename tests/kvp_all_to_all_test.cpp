// SPDX-License-Identifier: Apache-2.0
// KvpAllToAll over threads: exact for every size, TPA-major heads, correct byte counts, and ranks that are
// out of step are detected.
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>
#include <helix/kvp_all_to_all.hpp>
#include <helix/lse_combine.hpp>
#include <helix/topology.hpp>

#include "support/catch.hpp"
#include "support/failure.hpp"
#include "support/ranks.hpp"

namespace helix::test {
namespace {

using CpuBackend = cpu::Backend<cpu::LocalComm>;
using Exchange = KvpAllToAll<CpuBackend>;

/// A number that is unique for (round, kvp_rank, token, head, element). It is exact in f32: 16 bits before
/// the binary point for 3 rounds, 8 ranks, 128 tokens and 16 heads, and 8 bits after it for 256 elements.
float stamp(int round, std::int64_t kvp_rank, std::int64_t token, std::int64_t head, std::int64_t element) {
  const std::int64_t place = ((round * 8 + kvp_rank) * 128 + token) * 16 + head;
  return static_cast<float>(place) + static_cast<float>(element) * 0x1p-8f;
}

/// The output of one rank's attention: [tokens, heads, dim] and [tokens, heads].
struct Attended {
  std::vector<float> out;
  std::vector<float> lse;
  Partial<float> view;

  Attended(int round, std::int64_t rank, std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
    for (std::int64_t t = 0; t < tokens; ++t)
      for (std::int64_t h = 0; h < heads; ++h) {
        lse.push_back(-stamp(round, rank, t, h, 0));
        for (std::int64_t d = 0; d < dim; ++d) out.push_back(stamp(round, rank, t, h, d));
      }
    view = {{out.data(), {tokens, heads, dim}}, {lse.data(), {tokens, heads}}};
  }
};

void expect(bool condition, const std::string& what) {  // Catch's assertions are not thread-safe
  if (!condition) throw Error(ErrorCode::internal, what);
}

/// Exchanges `tokens` tokens in several rounds over the same messages and compares everything that arrives
/// bit for bit.
void check_rounds(CpuBackend& backend, Exchange& exchange, std::int64_t tokens) {
  const auto stream = backend.create_stream();
  const std::int64_t heads = exchange.spec().num_query_heads;
  const std::int64_t dim = exchange.spec().value_dim;
  const std::int64_t kvp = backend.comms().kvp->size();
  const std::int64_t kvp_rank = backend.comms().kvp->rank();
  for (int round = 0; round < 3; ++round) {
    const Attended attended(round, kvp_rank, tokens, heads, dim);
    std::vector<std::int64_t> positions;  // another step each round, equal on all ranks
    for (std::int64_t t = 0; t < tokens; ++t) positions.push_back(1000 * t + round);
    const auto received = exchange.exchange(attended.view, round == 1 ? nullptr : positions.data(), stream);
    backend.synchronize(stream);
    const std::int64_t h = heads / kvp;
    expect(received.out.extents() == std::array<std::int64_t, 4>{kvp, tokens, h, dim}, "out's shape");
    expect(received.lse.extents() == std::array<std::int64_t, 3>{kvp, tokens, h}, "lse's shape");
    for (std::int64_t r = 0; r < kvp; ++r)
      for (std::int64_t t = 0; t < tokens; ++t)
        for (std::int64_t i = 0; i < h; ++i) {
          const std::int64_t head = kvp_rank * h + i;
          bool is_equal = received.lse(r, t, i) == -stamp(round, r, t, head, 0);
          for (std::int64_t d = 0; d < dim; ++d)
            is_equal &= received.out(r, t, i, d) == stamp(round, r, t, head, d);
          if (!is_equal)
            throw Error(ErrorCode::internal, "dim ", dim, ", ", tokens, " tokens, round ", round, ": token ",
                        t, ", head ", head, " of rank ", r, " is not what it sent");
        }
  }
}

TEST_CASE("every head slice of every rank arrives, bit for bit, in three rounds over the same buffers") {
  for (const int kvp : {2, 4, 8}) {
    CAPTURE(kvp);
    CHECK_NOTHROW(run_ranks_or_throw(kvp, [&](cpu::LocalComm& comm) {
      CpuBackend backend(comm, comm.split(0, comm.rank()));
      for (const std::int64_t dim : {128, 256}) {
        Exchange one_head(backend, {.max_tokens = 128, .num_query_heads = kvp, .value_dim = dim});
        Exchange two_heads(backend, {.max_tokens = 128, .num_query_heads = 2 * kvp, .value_dim = dim});
        for (const std::int64_t tokens : {1, 2, 3, 7, 16, 33, 64, 128})
          check_rounds(backend, tokens < 64 ? two_heads : one_head, tokens);
      }
    }));
  }
}

TEST_CASE("the payload sent is B * T * Hq/TPA * (Dv * 4 + 4) * (KVP - 1) / KVP a rank and an exchange") {
  for (const int kvp : {1, 2, 4, 8}) {
    CHECK_NOTHROW(run_ranks_or_throw(kvp, [&](cpu::LocalComm& comm) {
      CpuBackend backend(comm, comm.split(0, comm.rank()));
      const auto stream = backend.create_stream();
      Exchange exchange(backend, {.max_tokens = 6, .num_query_heads = 8, .value_dim = 5});
      std::int64_t expected = 0;
      for (const std::int64_t tokens : {6, 0, 3}) {
        const Attended attended(0, comm.rank(), tokens, 8, 5);
        exchange.exchange(attended.view, nullptr, stream);
        expected += tokens * 8 * (5 * 4 + 4) * (kvp - 1) / kvp;
        expect(exchange.sent_payload_bytes() == expected, "bytes sent");
        backend.synchronize(stream);  // the exchange borrows `attended`
      }
    }));
  }
}

TEST_CASE("KVP of one is the identity: views of the input, no copy, no task") {
  CpuBackend backend;
  const auto stream = backend.create_stream();
  Exchange exchange(backend, {.max_tokens = 8, .num_query_heads = 3, .value_dim = 4});
  std::vector<float> out(400), lse(80);
  const Partial<float> partial{{out.data(), {5, 3, 4}, {40, 8, 1}}, {lse.data(), {5, 3}, {10, 2}}};
  const auto received = exchange.exchange(partial, nullptr, stream);
  CHECK(received.out.data() == out.data());
  CHECK(received.lse.data() == lse.data());
  CHECK(received.out.extents() == std::array<std::int64_t, 4>{1, 5, 3, 4});
  CHECK(&received.out(0, 4, 2, 3) == &partial.out(4, 2, 3));
  CHECK(&received.lse(0, 4, 2) == &partial.lse(4, 2));
  CHECK(exchange.sent_payload_bytes() == 0);
}

TEST_CASE("zero tokens do nothing: a rank that calls alone comes back, and all stay in step") {
  CHECK_NOTHROW(run_ranks_or_throw(2, [](cpu::LocalComm& comm) {
    CpuBackend backend(comm, comm.split(0, comm.rank()));
    const auto stream = backend.create_stream();
    Exchange exchange(backend, {.max_tokens = 1, .num_query_heads = 2, .value_dim = 4});
    const Attended none(0, comm.rank(), 0, 2, 4);
    if (comm.rank() == 0) {  // no collective follows, so rank 1 need not call it
      const auto received = exchange.exchange(none.view, nullptr, stream);
      backend.synchronize(stream);
      expect(received.out.extents() == std::array<std::int64_t, 4>{2, 0, 1, 4}, "shape");
    }
    const Attended one(0, comm.rank(), 1, 2, 4);
    exchange.exchange(one.view, nullptr, stream);
    backend.synchronize(stream);
  }));
}

TEST_CASE("heads after the exchange are TPA-major on every KVP x TPA grid") {
  for (const auto& [kvp, tpa] : std::vector<std::tuple<int, int>>{{2, 2}, {2, 4}, {4, 2}, {1, 4}, {4, 1}}) {
    CAPTURE(kvp, tpa);
    constexpr std::int64_t kHeads = 16, kTokens = 3, kDim = 4;
    ModelShape shape;
    shape.hidden = 64;
    shape.num_query_heads = kHeads;
    shape.num_kv_heads = 4;
    shape.head_dim = shape.value_dim = kDim;
    shape.ffn = 64;
    shape.vocab = 64;
    const Topology topo({.kvp = kvp, .tpa = tpa, .tpf = kvp * tpa, .ep = 1}, shape);
    CHECK_NOTHROW(run_ranks_or_throw(kvp * tpa, [&, kvp = kvp, tpa = tpa](cpu::LocalComm& stage) {
      const int kvp_rank = stage.rank() / tpa;
      const int tpa_rank = stage.rank() % tpa;
      CpuBackend backend(stage, stage.split(tpa_rank, kvp_rank));
      const auto stream = backend.create_stream();
      const std::int64_t local = kHeads / tpa;
      Exchange exchange(backend, {.max_tokens = kTokens, .num_query_heads = local, .value_dim = kDim});
      std::vector<float> out, lse;
      for (std::int64_t t = 0; t < kTokens; ++t)
        for (std::int64_t h = 0; h < local; ++h) {
          lse.push_back(stamp(0, kvp_rank, t, tpa_rank * local + h, 0));  // by the head's number in the model
          for (std::int64_t d = 0; d < kDim; ++d)
            out.push_back(stamp(0, kvp_rank, t, tpa_rank * local + h, d));
        }
      const auto received = exchange.exchange(
          {{out.data(), {kTokens, local, kDim}}, {lse.data(), {kTokens, local}}}, nullptr, stream);
      backend.synchronize(stream);
      const Range heads = topo.combined_heads(stage.rank());
      expect(heads.size() == received.lse.extent(2), "number of heads");
      expect(heads.begin == tpa_rank * kHeads / tpa + kvp_rank * kHeads / (kvp * tpa), "first head");
      for (std::int64_t r = 0; r < kvp; ++r)
        for (std::int64_t t = 0; t < kTokens; ++t)
          for (std::int64_t h = 0; h < heads.size(); ++h) {
            expect(received.lse(r, t, h) == stamp(0, r, t, heads.begin + h, 0), "lse");
            for (std::int64_t d = 0; d < kDim; ++d)
              expect(received.out(r, t, h, d) == stamp(0, r, t, heads.begin + h, d), "out");
          }
    }));
  }
}

TEST_CASE("exchange and combine give each rank the exact attention of its heads, an empty shard included") {
  constexpr std::int64_t kTokens = 5, kHeads = 8, kDim = 16, kKeys = 11;
  for (const int kvp : {2, 4}) {
    // Scores and values of the whole attention. Key k belongs to rank k % (kvp - 1), so the last rank has
    // none.
    const auto score = [](std::int64_t t, std::int64_t h, std::int64_t k) {
      return std::sin(static_cast<double>(t * 31 + h * 17 + k * 7)) * 3.0;
    };
    const auto value = [](std::int64_t h, std::int64_t k, std::int64_t d) {
      return std::cos(static_cast<double>(h * 13 + k * 5 + d));
    };
    CHECK_NOTHROW(run_ranks_or_throw(kvp, [&](cpu::LocalComm& comm) {
      CpuBackend backend(comm, comm.split(0, comm.rank()));
      const auto stream = backend.create_stream();
      std::vector<float> out, lse;
      const bool is_empty = comm.rank() == kvp - 1;
      for (std::int64_t t = 0; t < kTokens; ++t)
        for (std::int64_t h = 0; h < kHeads; ++h) {
          double total = 0.0;
          std::vector<double> sum(kDim, is_empty ? std::nan("") : 0.0);
          for (std::int64_t k = comm.rank(); k < kKeys && !is_empty; k += kvp - 1) {
            total += std::exp(score(t, h, k));
            for (std::size_t d = 0; d < sum.size(); ++d)
              sum[d] += std::exp(score(t, h, k)) * value(h, k, static_cast<std::int64_t>(d));
          }
          lse.push_back(static_cast<float>(std::log(total)));
          for (const double x : sum) out.push_back(static_cast<float>(x / (is_empty ? 1.0 : total)));
        }
      Exchange exchange(backend, {.max_tokens = kTokens, .num_query_heads = kHeads, .value_dim = kDim});
      const auto received = exchange.exchange(
          {{out.data(), {kTokens, kHeads, kDim}}, {lse.data(), {kTokens, kHeads}}}, nullptr, stream);
      const std::int64_t h = kHeads / kvp;
      std::vector<float> combined(static_cast<std::size_t>(kTokens * h * kDim));
      lse_combine(backend,
                  LseCombineArgs<float>{
                      received.out, received.lse, nullptr, {combined.data(), {kTokens, h, kDim}}, {}},
                  stream);
      backend.synchronize(stream);
      for (std::int64_t t = 0; t < kTokens; ++t)
        for (std::int64_t i = 0; i < h; ++i)
          for (std::int64_t d = 0; d < kDim; ++d) {
            const std::int64_t head = comm.rank() * h + i;
            double total = 0.0, sum = 0.0;
            for (std::int64_t k = 0; k < kKeys; ++k) {
              total += std::exp(score(t, head, k));
              sum += std::exp(score(t, head, k)) * value(head, k, d);
            }
            const float got = combined[static_cast<std::size_t>((t * h + i) * kDim + d)];
            expect(std::abs(got - sum / total) < 1e-5, "attention");
          }
    }));
  }
}

/// Four decode steps of two sequences. Rank `offender` takes part in step 1 `times` times. `wrong` receives
/// the wrong results of each rank.
RankOutcomes run_out_of_step(int kvp, int offender, int times, bool tells_positions,
                             std::vector<int>& wrong) {
  wrong.assign(static_cast<std::size_t>(kvp), 0);
  // Without positions, ranks notice only by a timeout.
  const std::chrono::milliseconds timeout(tells_positions ? 20'000 : 300);
  return run_ranks(cpu::LocalComm::create_group(kvp, timeout), [&](cpu::LocalComm& comm) {
    CpuBackend backend(comm, comm.split(0, comm.rank()));
    auto stream = backend.create_stream();
    Exchange exchange(backend, {.max_tokens = 2, .num_query_heads = kvp, .value_dim = 4});
    int& errors = wrong[static_cast<std::size_t>(comm.rank())];
    for (int step = 0; step < 4; ++step) {
      const Attended attended(step, comm.rank(), 2, kvp, 4);
      const std::vector<std::int64_t> positions{100 + step, 7 + step};
      for (int i = 0; i < (comm.rank() == offender && step == 1 ? times : 1); ++i) {
        const auto received =
            exchange.exchange(attended.view, tells_positions ? positions.data() : nullptr, stream);
        stream.enqueue([&errors, received, step, rank = comm.rank(), kvp] {
          for (int r = 0; r < kvp; ++r)
            if (received.out(r, 1, 0, 3) != stamp(step, r, 1, rank, 3)) ++errors;
        });
        backend.synchronize(stream);
      }
    }
  });
}

TEST_CASE("a rank that skips or repeats a step is an error on every rank, never wrong data") {
  for (const int kvp : {2, 4}) {
    for (const int offender : {0, kvp - 1}) {
      for (const int times : {0, 2}) {
        std::vector<int> wrong;
        const RankOutcomes outcomes = run_out_of_step(kvp, offender, times, true, wrong);
        bool is_named = false;
        for (int rank = 0; rank < kvp; ++rank) {
          CAPTURE(kvp, offender, times, rank, outcomes.message(rank));
          const auto code = outcomes.code(rank);
          CHECK((code == ErrorCode::out_of_step || code == ErrorCode::peer_failed));
          is_named |= code == ErrorCode::out_of_step;
          CHECK(wrong[static_cast<std::size_t>(rank)] == 0);
        }
        CHECK(is_named);
      }
    }
  }
}

TEST_CASE("without positions the same skip gives wrong data: what the count alone cannot see") {
  std::vector<int> wrong;
  const RankOutcomes outcomes = run_out_of_step(2, 0, 0, false, wrong);
  CHECK(wrong[0] + wrong[1] > 0);
  CHECK(outcomes.code(1).has_value());  // the others wait in vain for the last step
}

TEST_CASE("an exchange that was moved from is refused, and the one that it was moved to goes on") {
  run_ranks_or_throw(2, [](cpu::LocalComm& comm) {
    CpuBackend backend(comm, comm.split(0, comm.rank()));
    const auto stream = backend.create_stream();
    Exchange old(backend, {.max_tokens = 2, .num_query_heads = 2, .value_dim = 4});
    const Attended step(0, comm.rank(), 2, 2, 4);
    old.exchange(step.view, nullptr, stream);
    Exchange exchange(std::move(old));
    std::vector<float> combined(2 * 4);
    const auto refused = [](const std::string& message) {
      expect(message.find("KvpAllToAll: this object was moved from") != std::string::npos, message);
    };
    refused(failure_message([&] { old.exchange(step.view, nullptr, stream); }));
    refused(failure_message([&] { (void)old.outgoing({.tokens = 2}, nullptr); }));
    const auto messages = exchange.outgoing({.tokens = 2}, nullptr);
    refused(failure_message([&] {
      old.exchange_and_combine(messages, nullptr, TensorView<float, 3>(combined.data(), {2, 1, 4}), stream);
    }));
    exchange.exchange(step.view, nullptr, stream);
    backend.synchronize(stream);
  });
}

TEST_CASE("messages without headers say that attention may have written none") {
  const auto outcomes = run_ranks(2, [](cpu::LocalComm& comm) {
    CpuBackend backend(comm, comm.split(0, comm.rank()));
    const auto stream = backend.create_stream();
    Exchange exchange(backend, {.max_tokens = 2, .num_query_heads = 2, .value_dim = 4});
    std::vector<float> combined(2 * 4);
    exchange.exchange_and_combine(exchange.outgoing({.tokens = 2}, nullptr), nullptr,
                                  TensorView<float, 3>(combined.data(), {2, 1, 4}), stream);
    backend.synchronize(stream);
  });
  for (const int rank : {0, 1}) {
    CHECK(outcomes.code(rank) == ErrorCode::out_of_step);
    CHECK(outcomes.message(rank).find("wrote no headers") != std::string::npos);
  }
}

TEST_CASE("the epoch of a message depends on each position and its place, and is the count without them") {
  const std::vector<std::int64_t> base{5, 6, -1, 1'000'000};
  const auto epoch = [](std::uint64_t count, const std::vector<std::int64_t>& positions) {
    return exchange_epoch(count, positions.data(), static_cast<std::int64_t>(positions.size()));
  };
  CHECK(exchange_epoch(41, nullptr, 4) == 41);
  CHECK(epoch(41, {}) == 41);
  CHECK(epoch(42, base) == epoch(41, base) + 1);
  for (std::size_t i = 0; i < base.size(); ++i) {
    std::vector<std::int64_t> moved = base;
    ++moved[i];
    CHECK(epoch(41, moved) != epoch(41, base));
  }
  CHECK(epoch(41, {6, 5, -1, 1'000'000}) != epoch(41, base));
}

TEST_CASE("a message of another group is an error, whether or not both are at the same step") {
  for (const int steps_ahead : {0, 1}) {
    const RankOutcomes outcomes = run_ranks(2, [&](cpu::LocalComm& comm) {
      CpuBackend backend(comm, comm.split(0, comm.rank()));
      const auto stream = backend.create_stream();
      Exchange exchange(backend,
                        {.max_tokens = 2, .num_query_heads = 2, .value_dim = 4, .group = comm.rank()});
      const Attended attended(0, comm.rank(), 2, 2, 4);
      const std::vector<std::int64_t> positions{3, 4 + steps_ahead * comm.rank()};
      exchange.exchange(attended.view, positions.data(), stream);
      backend.synchronize(stream);
    });
    CAPTURE(steps_ahead, outcomes.all_messages());
    CHECK(outcomes.all_messages().find("the communicator has ranks of several KVP groups") !=
          std::string::npos);
    for (int rank = 0; rank < 2; ++rank) {
      REQUIRE(outcomes.code(rank).has_value());
      CHECK((outcomes.code(rank) == ErrorCode::out_of_step || outcomes.code(rank) == ErrorCode::peer_failed));
    }
  }
}

TEST_CASE("a header is refused for any one thing that differs, with words for it") {
  const std::vector<std::int64_t> positions{5, 6}, others{5, 7};
  const auto header = [](std::uint64_t count, const std::vector<std::int64_t>& at, std::uint32_t tokens,
                         std::uint32_t sender) {
    return ExchangeHeader{exchange_epoch(count, at.data(), 2), tokens, sender};
  };
  const ExchangeHeader own = header(7, positions, 2, 0);
  CHECK_NOTHROW(check_exchange_header(1, header(7, positions, 2, 1), own));
  using Catch::Matchers::ContainsSubstring;
  CHECK_THROWS_WITH(check_exchange_header(1, header(7, positions, 2, 2), own),
                    ContainsSubstring("the place of group rank 1 names rank 2"));
  CHECK_THROWS_WITH(check_exchange_header(1, header(8, positions, 2, 1), own),
                    ContainsSubstring("says step 8, 2 tokens") && ContainsSubstring("expected step 7"));
  CHECK_THROWS_WITH(check_exchange_header(1, header(7, others, 2, 1), own),
                    ContainsSubstring("positions of hash"));
  CHECK_THROWS_WITH(check_exchange_header(1, header(7, positions, 3, 1), own),
                    ContainsSubstring("says step 7, 3 tokens") && ContainsSubstring("expected step 7, 2"));
}

TEST_CASE("the tag of a row depends on its position and on the number of tokens") {
  const std::vector<std::int64_t> positions{5, 6};
  const std::uint32_t tag = exchange_row_tag(positions.data(), 0, 2);
  CHECK(exchange_row_tag(positions.data(), 1, 2) != tag);
  CHECK(exchange_row_tag(positions.data(), 0, 3) != tag);
  CHECK(exchange_row_tag(nullptr, 0, 2) != exchange_row_tag(nullptr, 0, 3));
}

TEST_CASE("groups begin with counts that differ, and whose parity is the same") {
  for (int group = 0; group < 256; ++group) {
    CHECK(first_exchange_count(group) % 2 == 0);
    for (int other = 0; other < group; ++other)
      CHECK(first_exchange_count(group) >> 24 != first_exchange_count(other) >> 24);
  }
  CHECK(first_exchange_count(0) == 0);
  CHECK(first_exchange_count(256) == 0);
}

TEST_CASE("ranks that disagree on the number of tokens fail alike") {
  const RankOutcomes outcomes = run_ranks(2, [](cpu::LocalComm& comm) {
    CpuBackend backend(comm, comm.split(0, comm.rank()));
    const auto stream = backend.create_stream();
    Exchange exchange(backend, {.max_tokens = 8, .num_query_heads = 2, .value_dim = 4});
    const Attended attended(0, comm.rank(), 3 + comm.rank(), 2, 4);
    exchange.exchange(attended.view, nullptr, stream);
    backend.synchronize(stream);
  });
  for (int rank = 0; rank < 2; ++rank) CHECK(outcomes.code(rank).has_value());
}

TEST_CASE(
    "slices of a step lie apart in the messages, whatever their sizes, and inside what the spec allocates") {
  for (const std::int64_t kvp : {2, 3, 8, 64}) {
    for (const std::int64_t heads : {kvp, 5 * kvp}) {
      for (const std::int64_t dim : {1, 63, 128, 512}) {
        for (const std::int64_t tokens : {1, 2, 7, 64}) {
          const ExchangeLayout layout(
              {.max_tokens = 64, .num_query_heads = heads, .value_dim = dim, .max_slices = 8}, 4);
          std::int64_t end = 0;
          for (int i = 0; i < static_cast<int>(std::min<std::int64_t>(tokens, 8)); ++i) {
            const Range part = split_evenly(tokens, std::min<std::int64_t>(tokens, 8), i);
            const std::int64_t begin =
                layout.begin({.index = i, .first_token = part.begin, .tokens = part.size()});
            REQUIRE(begin % 256 == 0);
            REQUIRE(begin >= end);
            const ExchangeMessage message(part.size(), heads / kvp, dim, 4);
            REQUIRE(message.out_begin % ExchangeMessage::kAlignment == 0);
            REQUIRE(message.head_bytes % ExchangeMessage::kAlignment == 0);
            end = begin + kvp * message.message_bytes;
          }
          REQUIRE(end <= layout.total_bytes());
        }
      }
    }
  }
}

TEST_CASE("a slice of any size after any other lies apart from the next one") {
  for (const std::int64_t heads : {1, 2, 3, 6, 16}) {
    for (const std::int64_t dim : {1, 2, 3, 8, 63}) {
      const ExchangeLayout layout(
          {.max_tokens = 32, .num_query_heads = heads, .value_dim = dim, .max_slices = 8}, 4);
      for (std::int64_t first = 0; first < 16; ++first) {
        for (std::int64_t tokens = 1; tokens <= 16; ++tokens) {
          CAPTURE(heads, dim, first, tokens);
          const std::int64_t end = layout.begin({.index = 1, .first_token = first, .tokens = tokens}) +
                                   ExchangeMessage(tokens, heads, dim, 4).message_bytes;
          REQUIRE(end <= layout.begin({.index = 2, .first_token = first + tokens, .tokens = 1}));
        }
      }
    }
  }
}

/// A communicator that provides the memory for messages, full of NaN.
class WindowComm : public cpu::LocalComm {
 public:
  explicit WindowComm(cpu::LocalComm comm) : LocalComm(std::move(comm)) {}
  WindowComm split(int color, int key) { return WindowComm(LocalComm::split(color, key)); }
  cpu::Buffer allocate_window(std::size_t bytes) {
    ++windows;
    cpu::Buffer buffer(bytes);
    std::fill_n(buffer.data(), bytes, std::byte{0xff});
    return buffer;
  }

  int windows = 0;
};

TEST_CASE("messages come from the communicator where it brings memory, and what was in it is never read") {
  CHECK_NOTHROW(run_ranks_or_throw(2, [](cpu::LocalComm& comm) {
    using Backend = cpu::Backend<WindowComm>;
    WindowComm stage(comm);
    Backend backend(stage, stage.split(0, comm.rank()));
    KvpAllToAll<Backend> exchange(backend, {.max_tokens = 3, .num_query_heads = 4, .value_dim = 8});
    expect(backend.comms().kvp->windows == 1, "the window");
    const auto stream = backend.create_stream();
    const Attended attended(0, comm.rank(), 2, 4, 8);
    const auto received = exchange.exchange(attended.view, nullptr, stream);
    expect(exchange.exchange(attended.view, nullptr, stream).out.data() == received.out.data(),
           "the same memory in each step");
    expect(backend.comms().kvp->windows == 1, "no second window");
    backend.synchronize(stream);
    for (std::int64_t r = 0; r < 2; ++r)
      for (std::int64_t t = 0; t < 2; ++t)
        expect(received.out(r, t, 1, 7) == stamp(0, r, t, comm.rank() * 2 + 1, 7), "what was sent");
  }));
}

TEST_CASE("wrong shapes are refused before anything is sent") {
  CHECK_NOTHROW(run_ranks_or_throw(2, [](cpu::LocalComm& comm) {
    CpuBackend backend(comm, comm.split(0, comm.rank()));
    const auto stream = backend.create_stream();
    Exchange exchange(backend, {.max_tokens = 4, .num_query_heads = 2, .value_dim = 4});
    const auto code = [&](const Attended& attended, LseConvention convention = LseConvention::natural) {
      try {
        exchange.exchange(attended.view, nullptr, stream, convention);
      } catch (const Error& error) {
        return error.code();
      }
      return ErrorCode::internal;
    };
    const Attended good(0, comm.rank(), 2, 2, 4);
    expect(code(Attended(0, 0, 5, 2, 4)) == ErrorCode::invalid_argument, "too many tokens");
    expect(code(Attended(0, 0, 2, 4, 4)) == ErrorCode::invalid_argument, "other heads");
    expect(code(Attended(0, 0, 2, 2, 8)) == ErrorCode::invalid_argument, "other value_dim");
    Attended null_out(0, 0, 2, 2, 4), null_lse(0, 0, 2, 2, 4);
    null_out.view.out = {nullptr, {2, 2, 4}};
    null_lse.view.lse = {nullptr, {2, 2}};
    expect(code(null_out) == ErrorCode::invalid_argument, "no outputs");
    expect(code(null_lse) == ErrorCode::invalid_argument, "no lse");
    Attended few_tokens(0, 0, 2, 2, 4), few_heads(0, 0, 2, 2, 4);
    few_tokens.view.lse = {few_tokens.view.lse.data(), {1, 2}};
    few_heads.view.lse = {few_heads.view.lse.data(), {2, 1}};
    expect(code(few_tokens) == ErrorCode::invalid_argument, "lse of fewer tokens");
    expect(code(few_heads) == ErrorCode::invalid_argument, "lse of fewer heads");
    try {
      Exchange(backend, {.max_tokens = 4, .num_query_heads = 3, .value_dim = 4});
      throw std::runtime_error("3 heads were taken for 2 ranks");
    } catch (const Error& error) {
      expect(error.code() == ErrorCode::invalid_argument, "heads that KVP does not divide");
    }
    expect(code(good, static_cast<LseConvention>(9)) == ErrorCode::invalid_argument, "no convention");
    const auto slice_code = [&](const ExchangeSlice& slice) {
      try {
        (void)exchange.outgoing(slice, nullptr);
      } catch (const Error& error) {
        return error.code();
      }
      return ErrorCode::internal;
    };
    expect(slice_code({.index = 1, .tokens = 1}) == ErrorCode::invalid_argument,
           "more slices than built for");
    expect(slice_code({.first_token = 3, .tokens = 2}) == ErrorCode::invalid_argument,
           "past the largest step");
    std::vector<float> combined(4 * 2 * 4);
    const auto combined_code = [&](const TensorView<float, 3>& to) {
      try {
        exchange.exchange_and_combine(exchange.outgoing({.tokens = 2, .value_dim = 4}, nullptr), nullptr, to,
                                      stream);
      } catch (const Error& error) {
        return error.code();
      }
      return ErrorCode::internal;
    };
    for (const auto& to :
         {TensorView<float, 3>(combined.data(), {1, 1, 4}), TensorView<float, 3>(combined.data(), {2, 2, 4}),
          TensorView<float, 3>(combined.data(), {2, 1, 3}),
          TensorView<float, 3>(combined.data(), {2, 1, 4}, {8, 8, 2}),
          TensorView<float, 3>(nullptr, {2, 1, 4})})
      expect(combined_code(to) == ErrorCode::invalid_argument, "a result of another shape, or none");
    expect(exchange.sent_payload_bytes() == 0, "nothing sent");
    backend.synchronize(stream);
    expect(code(good) == ErrorCode::internal, "the good one works");
    backend.synchronize(stream);
  }));
  CpuBackend backend;
  {
    const Attended attended(0, 0, 2, 2, 4);
    const auto stream = backend.create_stream();
    Exchange alone(backend, {.max_tokens = 4, .num_query_heads = 2, .value_dim = 4});
    CHECK_NOTHROW(alone.exchange(attended.view, nullptr, stream));
    CHECK_THROWS_AS(alone.exchange(attended.view, nullptr, stream, LseConvention::base2), Error);
    CHECK_THROWS_AS(alone.outgoing({.tokens = 2}, nullptr), Error);
  }
  CHECK_THROWS_AS(Exchange(backend, {.max_tokens = 4, .num_query_heads = 0, .value_dim = 4}), Error);
  CHECK_THROWS_AS(Exchange(backend, {.max_tokens = 4, .num_query_heads = 2, .value_dim = 4, .max_slices = 0}),
                  Error);
  CHECK_THROWS_AS(Exchange(backend, {.max_tokens = -1, .num_query_heads = 2, .value_dim = 4}), Error);
  CHECK_THROWS_AS(Exchange(backend, {.max_tokens = 4, .num_query_heads = 2, .value_dim = 4, .group = -1}),
                  Error);
  for (const std::int64_t size : {std::int64_t{1} << 33, std::int64_t{1} << 60, std::int64_t{1} << 62}) {
    CAPTURE(size);
    const auto refuses = [&](const KvpAllToAllSpec& spec) {
      CHECK_THROWS_WITH(Exchange(backend, spec), Catch::Matchers::ContainsSubstring(std::to_string(size)));
    };
    refuses({.max_tokens = size, .num_query_heads = 2, .value_dim = 4});
    refuses({.max_tokens = 4, .num_query_heads = size, .value_dim = 4});
    refuses({.max_tokens = 4, .num_query_heads = 2, .value_dim = size});
  }
}

}  // namespace
}  // namespace helix::test
