// SPDX-License-Identifier: Apache-2.0
// Faults in a generation on rank threads of the CPU: every one ends all ranks in time, names the rank that
// had it, and leaves the threads able to generate.
#include "faults/rank_faults.hpp"

#include <array>
#include <chrono>
#include <memory>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/local_comm.hpp>

namespace helix::test {
namespace {

struct CpuThreads {
  using Comm = cpu::LocalComm;
  /// How long ranks wait for one that stands still; long enough for a healthy one on a busy machine.
  static constexpr std::chrono::milliseconds kDeadline{1000};
  static constexpr std::array kFaults = {
      Fault::host_exception, Fault::queue_exception, Fault::no_memory, Fault::host_stop,
      Fault::queue_stop,     Fault::mismatch,        Fault::skip};

  static std::vector<Comm> create_group(int size, std::chrono::milliseconds timeout) {
    return Comm::create_group(size, timeout);
  }
  static auto make_backend(const JobComms<FaultyComm<Comm>>& comms, const std::shared_ptr<FaultPoint>& point,
                           int /*rank*/) {
    return FaultyBackend<cpu::Backend<FaultyComm<Comm>>>(comms, point);
  }
};

struct JobSpec {
  const char* model;
  TopologySpec topology;
};
const std::vector<JobSpec> kJobs = {
    {"llama-tiny", {.kvp = 2, .tpa = 2}},
    {"llama-tiny", {.kvp = 2, .pp = 2}},
    {"deepseek-tiny", {.kvp = 4}},
};

TEST_CASE("faults: each ends all ranks, is named, and the threads work afterwards") {
  for (const JobSpec& spec : kJobs) inject<CpuThreads>(Job(spec.model, spec.topology), 12, 1);
}

TEST_CASE("faults: a thousand of them", "[full]") {
  for (const JobSpec& spec : kJobs) inject<CpuThreads>(Job(spec.model, spec.topology), 334, 2);
}

}  // namespace
}  // namespace helix::test
