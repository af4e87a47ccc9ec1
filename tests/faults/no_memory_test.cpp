// SPDX-License-Identifier: Apache-2.0
// One rank's host runs out of memory, at each allocation in turn: all ranks end, and the threads can generate
// again.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/local_comm.hpp>
#include <helix/job_comms.hpp>

#include "decode/golden.hpp"
#include "generate/generate.hpp"
#include "support/allocations.hpp"
#include "support/catch.hpp"
#include "support/ranks.hpp"

namespace helix::test {
namespace {

using CpuBackend = cpu::Backend<cpu::LocalComm>;

/// Two ranks that generate two tokens.
struct Job {
  explicit Job(const std::string& name) : model(name), topo({.kvp = 2}, model.config.shape) {
    const Golden golden = model.golden();
    request = golden_request(golden);
    request.max_new_tokens = 2;
    for (const decode::TokenIds& tokens : golden.greedy)
      expected.emplace_back(tokens.begin(), tokens.begin() + 2);
  }

  decode::GenerationResult generate(cpu::LocalComm& world) const {
    JobComms<cpu::LocalComm> comms = split_world(world, topo);
    CpuBackend backend(comms.stage, comms.kvp);
    return decode::generate(backend, world, comms.pipeline, topo, model.checkpoint, model.config, request,
                            {});
  }

  void expect_right_tokens(const decode::GenerationResult& result) const {
    for (std::size_t i = 0; i < expected.size(); ++i)
      HELIX_EXPECTS(result.sequences[i].tokens == expected[i], ErrorCode::internal,
                    "wrong tokens in sequence ", i);
  }

  ReferenceModel model;
  Topology topo;
  decode::GenerationRequest request;
  std::vector<decode::TokenIds> expected;
};

struct Outcome {
  RankOutcomes ranks;
  std::int64_t allocations = 0;  ///< Allocations on the failing rank's host.
  /// What was wrong with the next generation on the same threads; empty if nothing.
  std::string again;
};

/// Generates while allocation `number` on the host of `failing_rank` fails, and then once more without a
/// failure.
Outcome run_without_memory(const Job& job, int failing_rank, std::int64_t number) {
  Outcome outcome;
  outcome.ranks.failures.resize(2);
  std::vector<cpu::LocalComm> group = cpu::LocalComm::create_group(2, std::chrono::seconds(10));
  std::barrier all_ended(2);
  outcome.again = run_ranks(2, [&](cpu::LocalComm& sound) {
                    const auto me = static_cast<std::size_t>(sound.rank());
                    const bool fails = sound.rank() == failing_rank;
                    try {
                      if (fails) fail_own_allocation(number);
                      const decode::GenerationResult result = job.generate(group[me]);
                      if (fails) outcome.allocations = stop_failing_own_allocations();
                      job.expect_right_tokens(result);
                    } catch (const std::exception& error) {
                      if (fails) outcome.allocations = stop_failing_own_allocations();
                      outcome.ranks.failures[me] = std::current_exception();
                      group[me].abort(error.what());
                    }
                    all_ended.arrive_and_wait();
                    job.expect_right_tokens(job.generate(sound));
                  }).all_messages();
  return outcome;
}

/// Lets about `count` allocations of each rank fail, evenly spread, or all if there are fewer.
void fail_allocations(const std::string& model, std::int64_t count) {
  const Job job(model);
  for (int rank = 0; rank < 2; ++rank) {
    const std::int64_t total = run_without_memory(job, rank, -1).allocations;
    REQUIRE(total > 0);
    std::int64_t num_failed = 0;
    std::int64_t num_noticed = 0;
    const std::int64_t stride = std::max<std::int64_t>(1, total / count);
    for (std::int64_t number = 0; number < total; number += stride) {
      const Outcome outcome = run_without_memory(job, rank, number);
      INFO("allocation " << number << " of " << total << " on rank " << rank << "\n"
                         << outcome.ranks.all_messages());
      CHECK(outcome.again == "");
      ++num_failed;
      // Allocations in a clean-up may fail without harm.
      if (!outcome.ranks.failures[static_cast<std::size_t>(rank)]) continue;
      ++num_noticed;
      const std::string other = outcome.ranks.message(1 - rank);
      // The other rank may already have received everything it needs.
      CHECK((other.empty() || other.find("rank " + std::to_string(rank)) != std::string::npos));
    }
    CHECK(num_noticed > num_failed / 2);
  }
}

TEST_CASE("no memory: an allocation of the host that fails ends all ranks") {
  fail_allocations("llama-tiny", 25);
}

TEST_CASE("no memory: many allocations that fail", "[full]") {
  fail_allocations("llama-tiny", 400);
  fail_allocations("deepseek-tiny", 200);
}

}  // namespace
}  // namespace helix::test
