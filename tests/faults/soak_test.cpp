// SPDX-License-Identifier: Apache-2.0
// Generates hundreds of thousands of tokens on the CPU.
#include "faults/soak.hpp"

#include <cstdint>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/local_comm.hpp>

#include "support/resident_memory.hpp"

namespace helix::test {
namespace {

using LocalBackend = cpu::Backend<cpu::LocalComm>;

constexpr std::int64_t kGrowthBytes = 1 << 20;  // memory that the allocator may keep

void soak_on_cpu(const TopologySpec& spec, int ranks, int rounds, std::int64_t tokens_a_round) {
  soak<LocalBackend>(
      spec, rounds, tokens_a_round, cpu::LocalComm::create_group(ranks),
      [](const JobComms<cpu::LocalComm>& comms, int) { return LocalBackend(comms.stage, comms.kvp); },
      [] { return ResidentMemory::now().all(); }, kGrowthBytes);
}

TEST_CASE("soak: rounds of one rank and of four give equal tokens in flat memory", "[quick]") {
  soak_on_cpu({}, 1, 5, 100);
  soak_on_cpu({.kvp = 2, .tpa = 2}, 4, 5, 100);
}

TEST_CASE("soak: 200000 tokens of one rank", "[full]") {
  soak_on_cpu({}, 1, 25, 8000);
}

TEST_CASE("soak: 200000 tokens of four ranks", "[full]") {
  soak_on_cpu({.kvp = 2, .tpa = 2}, 4, 25, 8000);
}

}  // namespace
}  // namespace helix::test
