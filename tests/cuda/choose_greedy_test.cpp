// SPDX-License-Identifier: Apache-2.0
// Greedy choice over the ranks' vocabulary shards in one kernel, compared with a plain loop over all logits:
// on one rank, and on ranks over peer memory; eager, captured, and with a rank that is out of step or absent.
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>

#include <helix/contract/catch.hpp>
#include <helix/contract/communicator.hpp>
#include <helix/cuda/backend.hpp>
#include <helix/cuda/graph.hpp>
#include <helix/cuda/peer_comm.hpp>

#include "cuda/gpu.hpp"
#include "cuda/peer_ranks.hpp"
#include "support/equal_bits.hpp"
#include "support/ranks.hpp"

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using helix::bf16;
using helix::ChooseGreedyArgs;
using helix::f16;
using helix::TensorView;
using helix::contract::require;
using helix::cuda::Buffer;
using helix::cuda::Graph;
using helix::cuda::PeerComm;
using helix::cuda::Stream;
using helix::test::device_of;
using helix::test::have_equal_bits;
using helix::test::make_group;
using helix::test::on_device;
using helix::test::on_host;
using helix::test::PeerBackend;
using helix::test::random_values;
using helix::test::RankOutcomes;
using helix::test::run_ranks;
using helix::test::run_ranks_or_throw;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Logits of all ranks, known to every rank: [rows, vocab]; rank r holds ids [begins[r], begins[r + 1]).
template <class T>
struct AllLogits {
  std::int64_t rows;
  std::int64_t vocab;
  std::vector<std::int64_t> begins;
  std::vector<T> values;

  AllLogits(std::int64_t num_rows, std::int64_t num_ids, int ranks, unsigned seed)
      : rows(num_rows), vocab(num_ids), values(random_values<T>(num_rows * num_ids, seed)) {
    for (int r = 0; r <= ranks; ++r) begins.push_back(vocab * r / ranks);
  }

  T& at(std::int64_t row, std::int64_t id) { return values[static_cast<std::size_t>(row * vocab + id)]; }
  float logit(std::int64_t row, std::int64_t id) const {
    return static_cast<float>(values[static_cast<std::size_t>(row * vocab + id)]);
  }

  /// Creates ties between and within ranks, -0 next to 0, and rows without a likeliest token.
  void make_hard() {
    for (std::int64_t row = 0; row < rows; ++row) {
      if (row % 7 == 1) {
        for (const std::int64_t id : {vocab - 1, vocab / 2, vocab / 3}) at(row, id) = T(5.0f);
      } else if (row % 7 == 2) {
        for (std::int64_t id = 0; id < vocab; ++id) at(row, id) = T(id % 3 == 1 ? 0.0f : -0.0f);
      } else if (row % 7 == 3) {
        at(row, vocab - 1) = T(std::numeric_limits<float>::quiet_NaN());
      } else if (row % 7 == 4) {
        at(row, 0) = T(kInfinity);
      } else if (row % 7 == 5) {
        for (std::int64_t id = 0; id < vocab; ++id) at(row, id) = T(-kInfinity);
        if (row % 2 == 0) at(row, vocab / 2) = T(-3.0f);
      }
    }
  }

  std::int32_t token(std::int64_t row) const {
    float best = -kInfinity;
    std::int32_t found = -1;
    for (std::int64_t id = 0; id < vocab; ++id) {
      const float x = logit(row, id);
      if (std::isnan(x) || x == kInfinity) return -1;
      if (x > best) {
        best = x;
        found = static_cast<std::int32_t>(id);
      }
    }
    return found;
  }

  double norm(std::int64_t row) const {
    double squares = 0.0;
    for (std::int64_t id = 0; id < vocab; ++id) squares += std::pow(static_cast<double>(logit(row, id)), 2);
    return std::sqrt(squares);
  }

  /// The shard of `rank`, [rows, width]; the columns after its ids are NaN.
  std::vector<T> shard(int rank, std::int64_t width) const {
    std::vector<T> own(static_cast<std::size_t>(rows * width), T(std::numeric_limits<float>::quiet_NaN()));
    const auto r = static_cast<std::size_t>(rank);
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t id = begins[r]; id < begins[r + 1]; ++id)
        own[static_cast<std::size_t>(row * width + id - begins[r])] = T(logit(row, id));
    return own;
  }
};

/// One rank's shard on its device, and the tokens that it draws.
template <class T>
struct Choice {
  PeerBackend<T>& backend;
  AllLogits<T> all;
  std::int64_t width;  // row width in memory
  Buffer logits, begins, positions, tokens, norms;

  Choice(PeerBackend<T>& of, const AllLogits<T>& logits_of_all, std::vector<std::int64_t> at,
         std::int64_t row_width)
      : backend(of),
        all(logits_of_all),
        width(row_width),
        logits(on_device(all.shard(rank(), width))),
        begins(on_device(all.begins)),
        positions(on_device(at)),
        tokens(on_device(std::vector<std::int32_t>(static_cast<std::size_t>(all.rows), -7))),
        norms(on_device(std::vector<float>(static_cast<std::size_t>(all.rows), -7.0f))) {}

  int rank() const { return backend.comms().stage->rank(); }

  void queue(const Stream& stream, bool has_norms = true) {
    const auto* own_begins = reinterpret_cast<const std::int64_t*>(begins.data()) + rank();
    const std::int64_t ids =
        all.begins[static_cast<std::size_t>(rank()) + 1] - all.begins[static_cast<std::size_t>(rank())];
    const bool is_queued = backend.choose_greedy(
        ChooseGreedyArgs<T>{
            .logits = {reinterpret_cast<const T*>(logits.data()), {1, all.rows, ids}, {0, width, 1}},
            .shard_begins = own_begins,
            .num_tokens = static_cast<std::int64_t>(positions.size_bytes() / sizeof(std::int64_t)),
            .positions = reinterpret_cast<const std::int64_t*>(positions.data()),
            .tokens = reinterpret_cast<std::int32_t*>(tokens.data()),
            .norms = has_norms ? reinterpret_cast<float*>(norms.data()) : nullptr},
        stream);
    require(is_queued, "there are windows, and choose_greedy() does not use them");
  }

  void check(const Stream& stream) {
    const auto rows = static_cast<std::size_t>(all.rows);
    std::vector<std::int32_t> drawn(rows);
    std::vector<float> found(rows);
    backend.download(drawn.data(), tokens.data(), rows * sizeof(std::int32_t), stream);
    backend.download(found.data(), norms.data(), rows * sizeof(float), stream);
    for (std::int64_t row = 0; row < all.rows; ++row) {
      const std::int32_t token = all.token(row);
      require(drawn[static_cast<std::size_t>(row)] == token, "row ", row, " of ", all.rows, " drew ",
              drawn[static_cast<std::size_t>(row)], ", the likeliest of ", all.vocab, " is ", token);
      const double norm = all.norm(row);
      const double got = found[static_cast<std::size_t>(row)];
      if (std::isfinite(norm))
        require(std::abs(got - norm) <= 1e-5 * norm, "row ", row, " has norm ", got, ", not ", norm);
    }
  }
};

}  // namespace

TEMPLATE_TEST_CASE("greedy choice over shards in one kernel draws what a loop over all logits does", "",
                   float, f16, bf16) {
  HELIX_REQUIRE_GPUS(1);
  const int size = GENERATE(1, 2, 3, 8);
  std::vector<std::vector<float>> norms(static_cast<std::size_t>(size));
  run_ranks_or_throw(make_group(size), [&](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    PeerBackend<TestType> backend(comm, comm.split(0, comm.rank()), device_of(comm));
    const Stream stream = backend.create_stream();
    unsigned seed = 5;
    for (const auto& [rows, vocab, padding] : std::vector<std::array<std::int64_t, 3>>{
             {1, 128256, 0},
             {1, 50000, 0},
             {2, 50000, 4},
             {4, 20001, 0},
             {9, 4096, 0},
             {40, 1003, 1},
             {130, 500, 3},
             {2100, 37, 0},
             {14, 3, 5}}) {  // fewer ids than ranks: some shards are empty
      AllLogits<TestType> all(rows, vocab, size, ++seed);
      all.make_hard();
      Choice<TestType> choice(backend, all, {3, 7, -1}, (vocab + size - 1) / size + padding);
      for (int round = 0; round < 3; ++round) {
        choice.queue(stream);
        choice.check(stream);
      }
      const auto own = static_cast<std::size_t>(comm.rank());
      std::vector<float> found(static_cast<std::size_t>(rows));
      backend.download(found.data(), choice.norms.data(), found.size() * sizeof(float), stream);
      norms[own].insert(norms[own].end(), found.begin(), found.end());
      comm.barrier(stream);
      backend.synchronize(stream);
    }
  });
  for (const auto& of_rank : norms) CHECK(have_equal_bits(of_rank, norms[0]));
}

TEST_CASE("captured greedy choices replay among other messages of the group") {
  HELIX_REQUIRE_GPUS(1);
  const int size = GENERATE(2, 4);
  run_ranks_or_throw(make_group(size), [size](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    PeerBackend<bf16> backend(comm, comm.split(0, comm.rank()), device_of(comm));
    const Stream stream = backend.create_stream();
    AllLogits<bf16> all(20, 2000, size, 9);
    all.make_hard();
    Choice<bf16> choice(backend, all, {1, 2}, 1000);
    const Buffer values = on_device(random_values<bf16>(64, 3));
    const auto queue = [&] {
      choice.queue(stream);
      comm.all_reduce(values.data(), values.data(), 64, helix::DType::bf16, stream);
      choice.queue(stream);
      choice.queue(stream, /*has_norms=*/false);
    };
    queue();
    backend.synchronize(stream);
    const Graph graph = Graph::capture(stream, queue);
    helix::test::replay_apart(backend, graph, stream, [&](int) { choice.check(stream); });
  });
}

TEST_CASE("a rank that chooses for another step, or does not come, is named") {
  HELIX_REQUIRE_GPUS(1);
  const bool is_absent = GENERATE(false, true);
  const RankOutcomes outcomes = run_ranks(make_group(2, 2s), [is_absent](PeerComm& comm) {
    helix::cuda::use_device(device_of(comm));
    PeerBackend<bf16> backend(comm, comm.split(0, comm.rank()), device_of(comm));
    const Stream stream = backend.create_stream();
    const AllLogits<bf16> all(3, 100, 2, 9);
    Choice<bf16> choice(backend, all, {4, 5}, 50);
    choice.queue(stream);
    choice.check(stream);
    if (comm.rank() == 1) choice.positions = on_device(std::vector<std::int64_t>{5, 6});
    if (is_absent && comm.rank() == 1) {
      std::this_thread::sleep_for(4s);
    } else {
      choice.queue(stream);
    }
    backend.synchronize(stream);
  });
  INFO(outcomes.all_messages());
  CHECK(outcomes.failures[0] != nullptr);
  CHECK_THAT(outcomes.message(0), ContainsSubstring("rank 1"));
  if (!is_absent) CHECK_THAT(outcomes.message(0), ContainsSubstring("out of step"));
}
