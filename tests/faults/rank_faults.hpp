// SPDX-License-Identifier: Apache-2.0
// Faults in a generation on rank threads, on any machine: which faults are injected, and what must still
// hold.
#pragma once

#include <barrier>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <helix/error.hpp>
#include <helix/job_comms.hpp>

#include "decode/golden.hpp"
#include "faults/injection.hpp"
#include "generate/generate.hpp"
#include "support/catch.hpp"
#include "support/ranks.hpp"

namespace helix::test {

/// Time that threads and sanitizers may add to a wait.
inline constexpr std::chrono::milliseconds kSlack{4000};

/// A job, its request and the expected tokens.
struct Job {
  Job(const std::string& name, const TopologySpec& spec) : model(name), topo(spec, model.config.shape) {
    const Golden golden = model.golden();
    request = golden_request(golden);
    request.max_new_tokens = 3;
    for (const decode::TokenIds& tokens : golden.greedy)
      expected.emplace_back(tokens.begin(), tokens.begin() + request.max_new_tokens);
  }

  int num_ranks() const { return topo.world_size(); }

  /// One rank's part. `Machine` provides the communicators and backends, as CpuThreads does.
  template <class Machine>
  decode::GenerationResult generate(typename Machine::Comm& comm,
                                    const std::shared_ptr<FaultPoint>& point) const {
    FaultyComm<typename Machine::Comm> world(comm, point);
    JobComms<FaultyComm<typename Machine::Comm>> comms = split_world(world, topo);
    auto backend = Machine::make_backend(comms, point, comm.rank());
    return decode::generate(backend, world, comms.pipeline, topo, model.checkpoint, model.config, request,
                            {});
  }

  /// Describes what is wrong with a result; empty if it is correct.
  std::string wrong_tokens(const decode::GenerationResult& result) const {
    if (result.sequences.size() != expected.size()) return "another number of sequences";
    for (std::size_t i = 0; i < expected.size(); ++i)
      if (result.sequences[i].tokens != expected[i]) return "wrong tokens in sequence " + std::to_string(i);
    return "";
  }

  ReferenceModel model;
  Topology topo;
  decode::GenerationRequest request;
  std::vector<decode::TokenIds> expected;
};

/// The outcome of one injection.
struct Outcome {
  RankOutcomes ranks;                 ///< of the generation with the fault
  std::string where;                  ///< the call that failed; empty if the generation ended before
  std::string wrong_tokens;           ///< of a rank that finished despite the fault
  std::chrono::milliseconds time{0};  ///< until all ranks had ended
  std::string again;                  ///< what was wrong with the next generation on the same threads
};

/// Runs the job with a fault on `rank`, then a second time without, on the same threads.
template <class Machine>
Outcome run_with_fault(const Job& job, int rank, const Injection& injection) {
  const int size = job.num_ranks();
  Outcome outcome;
  outcome.ranks.failures.resize(static_cast<std::size_t>(size));
  std::vector<std::shared_ptr<FaultPoint>> points;
  for (int i = 0; i < size; ++i)
    points.push_back(std::make_shared<FaultPoint>(i == rank ? injection : Injection{}));
  auto faulty = Machine::create_group(size, Machine::kDeadline);
  std::vector<std::string> wrong(static_cast<std::size_t>(size));
  std::barrier all_ended(size);
  const std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  const RankOutcomes again = run_ranks(
      Machine::create_group(size, std::chrono::seconds(60)),
      [&](typename Machine::Comm& sound) {
        const auto me = static_cast<std::size_t>(sound.rank());
        try {
          wrong[me] = job.wrong_tokens(job.template generate<Machine>(faulty[me], points[me]));
        } catch (const std::exception& error) {
          outcome.ranks.failures[me] = std::current_exception();
          faulty[me].abort(error.what());
        }
        all_ended.arrive_and_wait();
        if (me == 0)
          outcome.time =
              std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start);
        const std::string difference =
            job.wrong_tokens(job.template generate<Machine>(sound, std::make_shared<FaultPoint>()));
        if (!difference.empty()) throw Error(ErrorCode::internal, difference);
      },
      std::chrono::seconds(120));
  outcome.where = points[static_cast<std::size_t>(rank)]->where();
  for (const std::string& text : wrong)
    if (!text.empty()) outcome.wrong_tokens = text;
  outcome.again = again.all_messages();
  return outcome;
}

/// Which promise of docs/reliability.md the outcome breaks; empty if none.
template <class Machine>
std::string broken_promise(const Outcome& outcome, int rank, const Injection& injection) {
  const std::chrono::milliseconds bound =
      (is_stop(injection.fault) || is_of_collectives(injection.fault) ? 2 * Machine::kDeadline
                                                                      : std::chrono::milliseconds(0)) +
      kSlack + injection.stop;
  if (outcome.time > bound) return "the ranks took " + std::to_string(outcome.time.count()) + " ms to end";
  if (!outcome.again.empty()) return "the generation after it failed: " + outcome.again;
  if (!outcome.wrong_tokens.empty()) return outcome.wrong_tokens;
  if (outcome.where.empty()) return "";  // the fault did not occur
  const std::string messages = outcome.ranks.all_messages();
  // Stopping a rank that no other rank needs any more does no harm.
  if (messages.empty()) return is_stop(injection.fault) ? "" : "nobody noticed";
  const std::string name = "rank " + std::to_string(rank);
  for (std::size_t other = 0; other < outcome.ranks.failures.size(); ++other) {
    if (static_cast<int>(other) == rank || !outcome.ranks.failures[other]) continue;
    const std::string message = outcome.ranks.message(static_cast<int>(other));
    if (message.find(name) == std::string::npos)
      return "rank " + std::to_string(other) + " does not name it: " + message;
  }
  return "";
}

/// Number of calls of each rank in a generation without a fault.
template <class Machine>
std::vector<std::int64_t> count_calls(const Job& job) {
  std::vector<std::int64_t> calls(static_cast<std::size_t>(job.num_ranks()));
  run_ranks_or_throw(
      Machine::create_group(job.num_ranks(), std::chrono::seconds(60)), [&](typename Machine::Comm& comm) {
        const auto point = std::make_shared<FaultPoint>();
        const std::string difference = job.wrong_tokens(job.template generate<Machine>(comm, point));
        if (!difference.empty()) throw Error(ErrorCode::internal, difference);
        calls[static_cast<std::size_t>(comm.rank())] = point->num_calls();
      });
  return calls;
}

/// Injects `count` of the machine's faults, chosen at random from `seed`, into the job.
template <class Machine>
void inject(const Job& job, int count, unsigned seed) {
  const std::vector<std::int64_t> calls = count_calls<Machine>(job);
  std::mt19937 random(seed);
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  int num_noticed = 0;
  for (int i = 0; i < count; ++i) {
    const int rank = static_cast<int>(draw(0, job.num_ranks() - 1));
    const Injection injection{
        .fault = Machine::kFaults[static_cast<std::size_t>(draw(0, std::ssize(Machine::kFaults) - 1))],
        .call = draw(0, calls[static_cast<std::size_t>(rank)] - 1),
        .stop = 3 * Machine::kDeadline / 2};
    const Outcome outcome = run_with_fault<Machine>(job, rank, injection);
    INFO("injection " << i << " of seed " << seed << ": " << to_string(injection.fault) << " on rank " << rank
                      << " from call " << injection.call << " on, at " << outcome.where);
    INFO(outcome.ranks.all_messages());
    CHECK(broken_promise<Machine>(outcome, rank, injection) == "");
    num_noticed += outcome.ranks.all_messages().empty() ? 0 : 1;
  }
  CHECK(num_noticed >= count * 3 / 4);  // the rest did not occur, or no rank needed the failed one any more
}

}  // namespace helix::test
