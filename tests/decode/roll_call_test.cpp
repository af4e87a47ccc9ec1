// SPDX-License-Identifier: Apache-2.0
// Ranks that work for different times, over a communicator whose timeout is shorter than the difference.
#include "generate/roll_call.hpp"

#include <chrono>
#include <cstddef>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include <helix/cpu/backend.hpp>
#include <helix/cpu/local_comm.hpp>

#include "cli/rank_threads.hpp"
#include "support/catch.hpp"

namespace helix::test {
namespace {

using Backend = cpu::Backend<cpu::LocalComm>;
using std::chrono::milliseconds;

/// The work of one rank: pieces of work of a team.
struct Work {
  int team = 0;
  int num_pieces = 0;
  milliseconds piece{0};
};

/// Runs ranks that wait for each other for at most `timeout`. The ranks of a team sum after each piece.
/// Returns the message of the first failure.
std::string failure_of(const std::vector<Work>& work, milliseconds timeout, milliseconds interval) {
  auto world = cpu::LocalComm::create_group(static_cast<int>(work.size()), timeout);
  std::vector<std::string> failures(work.size());
  decode::run_on_threads(work.size(), [&](std::size_t rank) {
    const Work& mine = work[rank];
    try {
      cpu::LocalComm team = world[rank].split(mine.team, static_cast<int>(rank));
      Backend backend(team, team, 1);
      const auto stream = backend.create_stream();
      decode::RollCall<Backend> roll_call(backend, world[rank], stream, mine.team, team.size(), interval);
      for (int piece = 0; piece < mine.num_pieces; ++piece) {
        std::this_thread::sleep_for(mine.piece);
        const float one = 1.0f;
        float sum = 0.0f;
        team.all_reduce(&one, &sum, 1, DType::f32, stream);
        backend.synchronize(stream);
        roll_call.work_goes_on();
      }
      roll_call.finish();
    } catch (const std::exception& error) {
      failures[rank] = error.what();
      world[rank].abort(error.what());
    }
  });
  for (const std::string& failure : failures) {
    if (!failure.empty()) return failure;
  }
  return "";
}

}  // namespace

TEST_CASE("ranks that are done wait for those that work on, for longer than one may be waited for",
          "[quick]") {
  const milliseconds timeout{1000};
  const milliseconds interval{50};
  const std::vector<std::vector<Work>> cases = {
      {{0, 0, {}}, {1, 300, milliseconds(5)}},  // teams of one, which use their clocks
      {{0, 3, milliseconds(1)}, {1, 75, milliseconds(20)}, {2, 0, {}}},  //
      {{0, 300, milliseconds(5)}, {0, 300, milliseconds(1)}, {1, 3, milliseconds(1)}, {1, 3, {}}},
      {{0, 40, milliseconds(40)},
       {1, 1000, milliseconds(1)},
       {0, 40, {}},
       {1, 1000, {}},
       {2, 0, {}},
       {2, 0, {}}}};
  for (std::size_t i = 0; i < cases.size(); ++i) {
    INFO("case " << i);
    CHECK(failure_of(cases[i], timeout, interval).empty());
  }
  // Negative control: without a meeting, the first rank waits too long.
  CHECK_FALSE(failure_of({{0, 0, {}}, {1, 300, milliseconds(5)}}, timeout, std::chrono::hours(1)).empty());
}

TEST_CASE("a rank that meets no more fails the others in time", "[quick]") {
  const auto begin = std::chrono::steady_clock::now();
  const std::string failure =
      failure_of({{0, 0, {}}, {1, 1, std::chrono::seconds(3)}}, milliseconds(500), milliseconds(50));
  CHECK(failure.find("did not arrive within") != std::string::npos);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
}

}  // namespace helix::test
