// SPDX-License-Identifier: Apache-2.0
// The exchange of partials and reduce_norm through peer memory: compared with sums in double, equal on all
// ranks, replayed with odd numbers of exchanges, and a rank that is out of step is named.
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <helix/contract/catch.hpp>
#include <helix/contract/communicator.hpp>
#include <helix/cuda/backend.hpp>
#include <helix/cuda/graph.hpp>
#include <helix/cuda/peer_comm.hpp>
#include <helix/kvp_all_to_all.hpp>
#include <helix/reduce_norm.hpp>

#include "cuda/gpu.hpp"
#include "cuda/peer_ranks.hpp"
#include "support/ranks.hpp"

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using helix::bf16;
using helix::ErrorCode;
using helix::KvpAllToAll;
using helix::TensorView;
using helix::contract::require;
using helix::cuda::Buffer;
using helix::cuda::Graph;
using helix::cuda::PeerComm;
using helix::cuda::Stream;
using helix::test::device_of;
using helix::test::make_group;
using helix::test::on_device;
using helix::test::on_host;
using helix::test::PeerBackend;
using helix::test::random_values;
using helix::test::RankOutcomes;
using helix::test::run_ranks;
using helix::test::run_ranks_or_throw;

namespace {

struct ExchangeCase {
  std::int64_t tokens;
  std::int64_t heads;  // total over all ranks of the group
  std::int64_t dim;
};

/// The log-sum-exps of a rank; -inf for an empty shard, whose outputs are NaN.
std::vector<float> lse_of(int rank, const ExchangeCase& c, unsigned step) {
  std::vector<float> lse =
      random_values<float>(c.tokens * c.heads, 1000u * step + 7u * static_cast<unsigned>(rank));
  for (std::size_t i = 0; i < lse.size(); ++i)
    if ((i + static_cast<std::size_t>(rank)) % 5 == 0) lse[i] = -INFINITY;
  return lse;
}

template <class T>
std::vector<T> out_of(int rank, const ExchangeCase& c, unsigned step) {
  auto out = random_values<T>(c.tokens * c.heads * c.dim, 31u + 100u * step + static_cast<unsigned>(rank));
  const std::vector<float> lse = lse_of(rank, c, step);
  for (std::size_t row = 0; row < lse.size(); ++row)
    if (lse[row] == -INFINITY)
      for (std::int64_t i = 0; i < c.dim; ++i)
        out[row * static_cast<std::size_t>(c.dim) + static_cast<std::size_t>(i)] = T(NAN);
  return out;
}

/// The expected combined result of rank `rank`: [tokens, heads / size, dim].
template <class T>
void check_combined(const std::vector<T>& got, int rank, int size, const ExchangeCase& c, unsigned step) {
  std::vector<std::vector<float>> lse;
  std::vector<std::vector<T>> out;
  for (int r = 0; r < size; ++r) {
    lse.push_back(lse_of(r, c, step));
    out.push_back(out_of<T>(r, c, step));
  }
  const std::int64_t heads = c.heads / size;
  for (std::int64_t token = 0; token < c.tokens; ++token) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto row = static_cast<std::size_t>(token * c.heads + rank * heads + h);
      for (std::int64_t i = 0; i < c.dim; ++i) {
        double total = 0.0;
        double sum = 0.0;
        for (std::size_t r = 0; r < lse.size(); ++r) {
          if (lse[r][row] == -INFINITY) continue;
          const double weight = std::exp(double{lse[r][row]});
          total += weight;
          sum += weight * double{static_cast<float>(
                              out[r][row * static_cast<std::size_t>(c.dim) + static_cast<std::size_t>(i)])};
        }
        const double expected = total == 0.0 ? 0.0 : sum / total;
        const auto value = static_cast<double>(
            static_cast<float>(got[static_cast<std::size_t>(((token * heads) + h) * c.dim + i)]));
        require(std::abs(value - expected) <= 1.0 / 64 * (1.0 + std::abs(expected)), "token ", token,
                " head ", h, " column ", i, " is ", value, ", expected ", expected, " in step ", step);
      }
    }
  }
}

/// The backend of a rank whose KVP group is its stage.
template <class T>
PeerBackend<T> backend_of(PeerComm& comm) {
  helix::cuda::use_device(device_of(comm));
  return {comm, comm.split(0, comm.rank()), device_of(comm)};
}

/// One rank's exchange, with partials on the device for two steps.
template <class T>
struct Exchange {
  PeerBackend<T>& backend;
  ExchangeCase shape;
  KvpAllToAll<PeerBackend<T>> all_to_all;
  std::vector<Buffer> out, lse;
  Buffer positions;
  std::int64_t shift;  // offset of the result in elements, so that it is aligned to only one element
  Buffer combined;

  Exchange(PeerBackend<T>& of, const ExchangeCase& c, std::int64_t max_tokens, bool has_lines, int group = 0)
      : backend(of),
        shape(c),
        all_to_all(of, {.max_tokens = max_tokens,
                        .num_query_heads = c.heads,
                        .value_dim = c.dim,
                        .has_lines = has_lines,
                        .group = group}),
        positions(on_device(std::vector<std::int64_t>(static_cast<std::size_t>(c.tokens + 1), 5))),
        shift(c.dim == 12 ? 1 : 0),
        combined(static_cast<std::size_t>(shift + c.tokens * c.heads / of.comms().kvp->size() * c.dim) *
                 sizeof(T)) {
    for (unsigned step = 0; step < 2; ++step) {
      out.push_back(on_device(out_of<T>(of.comms().kvp->rank(), c, step)));
      lse.push_back(on_device(lse_of(of.comms().kvp->rank(), c, step)));
    }
  }

  bool are_lines() const {
    return all_to_all.outgoing({.tokens = shape.tokens}, nullptr).target.lines.rows.out != nullptr;
  }

  TensorView<T, 3> result() {
    return {reinterpret_cast<T*>(combined.data()) + shift,
            {shape.tokens, shape.heads / backend.comms().kvp->size(), shape.dim}};
  }

  /// Writes the partials of `step` as attention would, and combines them.
  void queue(unsigned step, const Stream& stream) {
    const auto messages = all_to_all.outgoing({.tokens = shape.tokens},
                                              reinterpret_cast<const std::int64_t*>(positions.data()));
    backend.pack_partial(
        {.out = {reinterpret_cast<const T*>(out[step].data()), {shape.tokens, shape.heads, shape.dim}},
         .lse = {reinterpret_cast<const float*>(lse[step].data()), {shape.tokens, shape.heads}},
         .target = messages.target},
        stream);
    all_to_all.exchange_and_combine(messages, nullptr, result(), stream);
  }

  void check(unsigned step, const Stream& stream) {
    auto got = on_host<T>(backend, combined, static_cast<std::size_t>(shift + result().size()), stream);
    got.erase(got.begin(), got.begin() + shift);
    check_combined(got, backend.comms().kvp->rank(), backend.comms().kvp->size(), shape, step);
  }
};

/// A rank that exchanges one token.
struct OneToken {
  PeerBackend<bf16> backend;
  Stream stream = backend.create_stream();
  Exchange<bf16> exchange;

  OneToken(PeerComm& comm, bool has_lines, int group = 0)
      : backend(backend_of<bf16>(comm)), exchange(backend, {1, 8, 128}, 1, has_lines, group) {
    exchange.queue(0, stream);
    backend.synchronize(stream);
  }
};

}  // namespace

TEMPLATE_TEST_CASE("partials combine exactly through the memory of peers", "", bf16, float) {
  HELIX_REQUIRE_GPUS(1);
  const int size = GENERATE(2, 4, 10);
  const bool has_lines = GENERATE(false, true);
  run_ranks_or_throw(make_group(size), [size, has_lines](PeerComm& comm) {
    auto backend = backend_of<TestType>(comm);
    const Stream stream = backend.create_stream();
    // Rows of 7 do not fill whole lines, and the last step has too many bytes for lines.
    for (const auto& [c, can_be_lines] : {std::pair{ExchangeCase{1, 2 * size, 128}, true},
                                          {ExchangeCase{3, size, 7}, false},
                                          {ExchangeCase{9, 3 * size, 12}, true},
                                          {ExchangeCase{33, size, 64}, true},
                                          {ExchangeCase{3200 / size, size, 512}, false}}) {
      Exchange<TestType> exchange(backend, c, c.tokens + 2, has_lines);
      require(exchange.all_to_all.has_windows(), "no windows");
      require(exchange.are_lines() == (has_lines && can_be_lines), "lines of ", c.tokens, " tokens");
      for (int round = 0; round < 5; ++round) {
        const unsigned step = round % 2 == 0 ? 0 : 1;
        exchange.queue(step, stream);
        exchange.check(step, stream);
      }
      for (int round = 0; round < 20; ++round) exchange.queue(round % 3 == 0 ? 1 : 0, stream);
      exchange.check(0, stream);
      comm.barrier(stream);
      backend.synchronize(stream);
    }
  });
}

TEST_CASE("captured steps with odd numbers of exchanges replay rightly") {
  HELIX_REQUIRE_GPUS(1);
  const int count = GENERATE(1, 2, 3);
  const bool has_lines = GENERATE(false, true);
  run_ranks_or_throw(make_group(2), [count, has_lines](PeerComm& comm) {
    auto backend = backend_of<bf16>(comm);
    const Stream stream = backend.create_stream();
    Exchange<bf16> exchange(backend, {2, 8, 128}, 2, has_lines);
    for (unsigned step = 0; step < 2; ++step) exchange.queue(step, stream);
    backend.synchronize(stream);
    const Graph graph = Graph::capture(stream, [&] {
      for (int i = 0; i < count; ++i) exchange.queue(i % 2 == 0 ? 0 : 1, stream);
    });
    helix::test::replay_apart(backend, graph, stream,
                              [&](int) { exchange.check(count % 2 == 0 ? 1 : 0, stream); });
  });
}

TEST_CASE("a rank that skips an exchange or is at other positions is named") {
  HELIX_REQUIRE_GPUS(1);
  const bool skips = GENERATE(false, true);
  const bool has_lines = GENERATE(false, true);
  const RankOutcomes outcomes = run_ranks(make_group(2, 2s), [skips, has_lines](PeerComm& comm) {
    OneToken one(comm, has_lines);
    Buffer others = on_device(std::vector<std::int64_t>{6, 6});
    if (comm.rank() == 1) std::swap(one.exchange.positions, others);  // frees nothing
    if (skips && comm.rank() == 1) {
      std::this_thread::sleep_for(4s);
    } else {
      one.exchange.queue(1, one.stream);
    }
    one.backend.synchronize(one.stream);
  });
  INFO(outcomes.all_messages());
  CHECK(outcomes.failures[0] != nullptr);
  CHECK_THAT(outcomes.message(0), ContainsSubstring("rank 1"));
  if (!skips) CHECK_THAT(outcomes.message(0), ContainsSubstring("out of step"));
}

TEST_CASE("a rank that comes after another has given up does not combine what that one writes next") {
  HELIX_REQUIRE_GPUS(1);
  const bool has_lines = GENERATE(false, true);
  const RankOutcomes outcomes = run_ranks(make_group(2, 2s), [has_lines](PeerComm& comm) {
    OneToken one(comm, has_lines);
    const Graph graph = Graph::capture(one.stream, [&] {
      one.exchange.queue(0, one.stream);
      one.exchange.queue(1, one.stream);
    });
    if (comm.rank() == 0) std::this_thread::sleep_for(3s);
    // Rank 1 gives up in the first exchange, and then writes partials of the second.
    graph.replay(one.stream);
    if (comm.rank() == 1) std::this_thread::sleep_for(5s);  // and its host does not look at the result
    one.backend.synchronize(one.stream);
  });
  CAPTURE(has_lines, outcomes.all_messages());
  REQUIRE(outcomes.failures[0] != nullptr);
  CHECK_THAT(outcomes.message(0), ContainsSubstring("rank 1"));
}

TEST_CASE("ranks of two KVP groups in one communicator end in an error over windows, not in a wrong result") {
  HELIX_REQUIRE_GPUS(1);
  const bool has_lines = GENERATE(false, true);
  const RankOutcomes outcomes =
      run_ranks(make_group(2, 1s), [has_lines](PeerComm& comm) { OneToken(comm, has_lines, comm.rank()); });
  CAPTURE(has_lines, outcomes.all_messages());
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(outcomes.code(rank).has_value());
    CHECK_THAT(outcomes.message(rank),
               ContainsSubstring("rank " + std::to_string(1 - rank)) || ContainsSubstring("out of step"));
  }
}

TEMPLATE_TEST_CASE("reduce_norm over windows equals the norm of the sum with equal bits on all ranks", "",
                   bf16, float) {
  HELIX_REQUIRE_GPUS(1);
  const int size = GENERATE(2, 3, 8);
  run_ranks_or_throw(make_group(size), [size](PeerComm& comm) {
    auto backend = backend_of<TestType>(comm);
    const Stream stream = backend.create_stream();
    struct Shape {
      std::int64_t rows, width;
    };
    // The last two take two shots, and with 8 ranks so do 9 rows of 16384.
    for (const Shape& s : {Shape{1, 64},
                           {1, 2048},
                           {2, 4096},
                           {5, 8192},
                           {70, 1024},
                           {9, 16384},
                           {3, 24},
                           {2, 100},
                           {250, 4096},
                           {1021, 1000}}) {
      for (const bool has_norm : {true, false}) {
        const auto count = static_cast<std::size_t>(s.rows * s.width);
        const auto seed = [&](int rank) { return static_cast<unsigned>(17 * rank + 3); };
        const auto before = random_values<TestType>(s.rows * s.width, 5);
        const Buffer summand = on_device(random_values<TestType>(s.rows * s.width, seed(comm.rank())));
        const Buffer residual = on_device(before);
        const auto weights = random_values<TestType>(s.width, 11);
        const Buffer weight = on_device(weights);
        const Buffer out(count * sizeof(TestType));
        const auto view = [&](const Buffer& buffer) {
          return TensorView<TestType, 2>(reinterpret_cast<TestType*>(buffer.data()), {s.rows, s.width});
        };
        helix::reduce_norm(
            backend,
            {.summand = view(summand),
             .residual = view(residual),
             .weight = has_norm ? helix::WeightView{weight.data(), helix::kDTypeOf<TestType>, 1, s.width}
                                : helix::WeightView{},
             .out = has_norm ? view(out) : TensorView<TestType, 2>{}},
            stream);
        const auto sum = on_host<TestType>(backend, residual, count, stream);
        const auto normed = on_host<TestType>(backend, out, count, stream);
        std::vector<double> exact(count, 0.0);
        for (int r = 0; r < size; ++r) {
          const auto part = random_values<TestType>(s.rows * s.width, seed(r));
          for (std::size_t i = 0; i < count; ++i) exact[i] += double{static_cast<float>(part[i])};
        }
        const double unit = std::is_same_v<TestType, float> ? 1e-5 : 1.0 / 32;
        for (std::int64_t row = 0; row < s.rows; ++row) {
          double squares = 0.0;
          for (std::int64_t i = 0; i < s.width; ++i) {
            const auto at = static_cast<std::size_t>(row * s.width + i);
            const double x = exact[at] + double{static_cast<float>(before[at])};
            squares += x * x;
            require(std::abs(x - double{static_cast<float>(sum[at])}) <= unit * (1.0 + std::abs(x)), "row ",
                    row, " column ", i, ": residual ", static_cast<float>(sum[at]), ", expected ", x,
                    "; rows ", s.rows, " width ", s.width);
          }
          const double scale = 1.0 / std::sqrt(squares / static_cast<double>(s.width) + 1e-5);
          for (std::int64_t i = 0; has_norm && i < s.width; ++i) {
            const auto at = static_cast<std::size_t>(row * s.width + i);
            const double expected = (exact[at] + double{static_cast<float>(before[at])}) * scale *
                                    double{static_cast<float>(weights[static_cast<std::size_t>(i)])};
            require(std::abs(expected - double{static_cast<float>(normed[at])}) <=
                        unit * (1.0 + std::abs(expected)),
                    "row ", row, " column ", i, ": out ", static_cast<float>(normed[at]), ", expected ",
                    expected, "; rows ", s.rows, " width ", s.width);
          }
        }
        // The bits of all ranks.
        const Buffer all(count * sizeof(TestType) * static_cast<std::size_t>(size));
        comm.all_gather(residual.data(), all.data(), static_cast<std::int64_t>(count * sizeof(TestType)),
                        stream);
        const auto gathered = on_host<TestType>(backend, all, count * static_cast<std::size_t>(size), stream);
        for (std::size_t i = 0; i < gathered.size(); ++i)
          require(std::memcmp(&gathered[i], &sum[i % count], sizeof(TestType)) == 0, "rank ", i / count,
                  " has other bits at ", i % count);
      }
    }
  });
}
