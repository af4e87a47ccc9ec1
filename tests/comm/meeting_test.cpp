// SPDX-License-Identifier: Apache-2.0
// Meetings of ranks with failures on some ranks or a lack of memory on one: no rank finds a call that has
// ended, and a failure without a message is a failure too.
#include <array>
#include <chrono>
#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <thread>
#include <vector>

#include "comm/local_group.hpp"
#include "support/allocations.hpp"
#include "support/catch.hpp"
#include "support/failure.hpp"

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using helix::Error;
using helix::ErrorCode;
using helix::comm::Call;
using helix::comm::Group;
using helix::comm::Move;
using helix::comm::Operation;
using helix::comm::Root;

namespace {

std::shared_ptr<Group> group_of(int size) {
  auto root = std::make_shared<Root>();
  root->timeout = 20ms;
  return Group::whole(std::move(root), size);
}

void meet(Group& group, int rank) {
  Call call;
  group.collective(rank, call, [](const std::vector<Call*>&) { return Move(); });
}

}  // namespace

TEST_CASE("what fails on one rank ends the group with its words, what fails on all ends nothing") {
  const auto group = group_of(3);
  group->root->timeout = 20s;
  const auto meet_with = [&](int rank, bool has_failed) {
    Call call;
    if (has_failed) call.failure = "no such kernel";
    group->collective(rank, call, [](const std::vector<Call*>&) { return Move(); });
  };
  const auto run = [&](bool has_failed) {
    std::vector<std::optional<helix::test::Failure>> failures(3);
    {
      std::vector<std::jthread> threads;
      for (int rank = 0; rank < 3; ++rank) {
        threads.emplace_back([&, rank] {
          failures[static_cast<std::size_t>(rank)] =
              helix::test::failure_of([&] { meet_with(rank, has_failed || rank == 1); });
        });
      }
    }
    return failures;
  };
  for (const auto& failure : run(true)) CHECK(!failure);
  CHECK(!group->root->has_failed);
  for (const auto& failure : run(false)) {
    REQUIRE(failure);
    CHECK(failure->code == ErrorCode::peer_failed);
    CHECK(failure->what == "rank 1 failed: no such kernel");
  }
  CHECK(group->root->failure == "rank 1 failed: no such kernel");
}

TEST_CASE("ranks that ask for windows in other multiples disagree, with both multiples in the message") {
  // They are equal in their lower 32 bits.
  constexpr std::array<std::size_t, 2> kMultiples = {16, (std::size_t{1} << 32) + 16};
  const auto group = group_of(2);
  group->root->timeout = 20s;
  const auto ask = [&](int rank) {
    Call call{.operation = Operation::allocate_window,
              .count = 64,
              .multiple = kMultiples[static_cast<std::size_t>(rank)]};
    return helix::test::failure_of(
        [&] { group->collective(rank, call, [](const std::vector<Call*>&) { return Move(); }); });
  };
  std::optional<helix::test::Failure> of_other;
  std::thread other([&] { of_other = ask(1); });
  const auto failure = ask(0);
  other.join();
  REQUIRE((failure && of_other));
  CHECK(failure->code == ErrorCode::invalid_argument);
  CHECK_THAT(failure->what, ContainsSubstring("allocate_window of 64 bytes in multiples of 16, rank 1") &&
                                ContainsSubstring("in multiples of 4294967312;"));
  CHECK(of_other->what == failure->what);
}

TEST_CASE("a rank that has no memory to say who is missing has not come, and may come again") {
  const auto group = group_of(2);
  std::size_t num_failed = 0;
  for (std::int64_t number = 0; number < 100 && !group->root->has_failed; ++number) {
    helix::test::fail_own_allocation(number);
    try {
      meet(*group, 0);
      FAIL("rank 1 has not come");
    } catch (const std::bad_alloc&) {
      ++num_failed;
    } catch (const Error&) {
    }
    helix::test::stop_failing_own_allocations();
    for (const Call* call : group->collectives->calls) CHECK(call == nullptr);
    CHECK(group->collectives->arrived == 0);
    if (number > 0) continue;
    group->root->timeout = 20s;
    std::thread other([&] { meet(*group, 1); });
    meet(*group, 0);
    other.join();
    group->root->timeout = 20ms;
  }
  CHECK(num_failed > 0);
}

TEST_CASE("a rank that ends a group without memory for the reason ends it all the same") {
  const auto group = group_of(2);
  helix::test::fail_own_allocation(0);
  group->abort(1, "a reason that is too long for a string of no allocation");
  CHECK(helix::test::stop_failing_own_allocations() == 1);
  CHECK(group->root->has_failed);
  const auto failure = helix::test::failure_of([&] { meet(*group, 0); });
  REQUIRE(failure.has_value());
  CHECK(failure->code == ErrorCode::peer_failed);
  CHECK(failure->what == "rank 1 failed: no memory was left to say why");
}
