// SPDX-License-Identifier: Apache-2.0
// LocalLinks connects the ranks of a machine that use the same name, and carries messages and descriptors.
#include "comm/local_links.hpp"

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <helix/comm/bootstrap.hpp>

#include "comm/bootstrap_job.hpp"
#include "comm/bootstrap_wait.hpp"
#include "comm/host_call.hpp"
#include "comm/linked_group.hpp"
#include "support/catch.hpp"
#include "support/failure.hpp"
#include "support/free_port.hpp"

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using helix::ErrorCode;
using helix::comm::Bootstrap;
using helix::comm::BootstrapOptions;
using helix::comm::BootstrapWait;
using helix::comm::HostCall;
using helix::comm::kWatchGrace;
using helix::comm::LinkedGroup;
using helix::comm::LocalLinks;
using helix::comm::Socket;
using helix::test::expect;
using helix::test::run_bootstrap_job;

namespace {

std::shared_ptr<const LocalLinks> connected(Bootstrap& bootstrap) {
  auto links = LocalLinks::connect(bootstrap, "");
  expect(links->why_not().empty(), links->why_not().c_str());
  return links;
}

}  // namespace

TEST_CASE("every two processes of a machine are linked, and messages keep their order") {
  for (const int size : {1, 2, 5}) {
    const auto outcomes = run_bootstrap_job(size, [](BootstrapOptions options) {
      Bootstrap bootstrap(options);
      const auto links = connected(bootstrap);
      for (int round = 0; round < 50; ++round) {
        for (int to = 0; to < options.size; ++to) {
          const std::array<std::int32_t, 3> message{options.rank, to, round};
          if (to != options.rank) links->send(to, std::as_bytes(std::span(message)));
        }
      }
      for (int round = 0; round < 50; ++round) {
        for (int from = 0; from < options.size; ++from) {
          if (from == options.rank) continue;
          std::array<std::int32_t, 3> message{};
          expect(links->recv(from, std::as_writable_bytes(std::span(message))) == -1, "a descriptor came");
          expect(message == std::array<std::int32_t, 3>{from, options.rank, round}, "another message came");
        }
      }
      bootstrap.barrier();
    });
    for (const auto& outcome : outcomes) CHECK(outcome.message == "");
  }
}

TEST_CASE("a descriptor names the same memory at the other end") {
  const auto outcomes = run_bootstrap_job(3, [](BootstrapOptions options) {
    Bootstrap bootstrap(options);
    const auto links = connected(bootstrap);
    const int own = ::memfd_create("helix test", MFD_CLOEXEC);
    const std::int32_t value = 1000 + options.rank;
    expect(::pwrite(own, &value, sizeof(value), 0) == sizeof(value), "pwrite");
    const std::byte mark{7};
    for (int to = 0; to < options.size; ++to)
      if (to != options.rank) links->send(to, std::span(&mark, 1), own);
    ::close(own);
    for (int from = 0; from < options.size; ++from) {
      if (from == options.rank) continue;
      std::byte received{};
      const int descriptor = links->recv(from, std::span(&received, 1));
      std::int32_t theirs = 0;
      expect(descriptor >= 0 && ::pread(descriptor, &theirs, sizeof(theirs), 0) == sizeof(theirs), "pread");
      expect(received == mark && theirs == 1000 + from, "another memory came");
      ::close(descriptor);
    }
    bootstrap.barrier();
  });
  for (const auto& outcome : outcomes) CHECK(outcome.message == "");
}

TEST_CASE("ranks that give different names are not linked, and a group of links tells what its ranks say") {
  const std::vector<std::string> names = {"", "b", std::string(1000, 'c'), "b", "", std::string(1000, 'c'),
                                          "b"};
  const std::vector<int> neighbourhoods = {0, 1, 2, 1, 0, 2, 1};
  const auto outcomes = run_bootstrap_job(7, [&](BootstrapOptions options) {
    Bootstrap bootstrap(options);
    const auto links = LocalLinks::connect(bootstrap, names[static_cast<std::size_t>(options.rank)]);
    expect(links->why_not().empty(), links->why_not().c_str());
    expect(links->neighbourhoods() == neighbourhoods, "other neighbourhoods");
    std::vector<int> ranks;
    int rank = -1;
    for (int root_rank = options.size - 1; root_rank >= 0; --root_rank) {  // in any order
      if (names[static_cast<std::size_t>(root_rank)] != names[static_cast<std::size_t>(options.rank)])
        continue;
      if (root_rank == options.rank) rank = static_cast<int>(ranks.size());
      ranks.push_back(root_rank);
    }
    const LinkedGroup group(links, ranks, rank);
    for (int round = 0; round < 3; ++round) {
      const std::vector<int> told = group.all_of(10 * options.rank + round);
      for (std::size_t i = 0; i < ranks.size(); ++i)
        expect(told[i] == 10 * ranks[i] + round, "another value");
    }
    std::string lost;
    const std::vector<Socket> descriptors =
        group.exchange(options.rank == 1 ? Socket() : Socket(::dup(0)), lost);
    expect(lost.empty(), lost.c_str());
    for (std::size_t i = 0; i < ranks.size(); ++i)
      expect(descriptors[i].is_open() == (ranks[i] != options.rank && ranks[i] != 1), "another descriptor");
    bootstrap.barrier();
  });
  for (const auto& outcome : outcomes) CHECK(outcome.message == "");
}

TEST_CASE("a descriptor for which a process has no room is told, and the messages go on") {
  const int port = helix::test::free_port();
  const auto in_job = [&](int rank, const auto& body) {
    Bootstrap bootstrap({.rank = rank, .size = 2, .port = port, .timeout = 10s, .heartbeat = 50ms});
    const LinkedGroup group(connected(bootstrap), {0, 1}, rank);
    const Socket own(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    bootstrap.barrier();
    std::string lost;
    body(group, own, lost);
    expect(group.all_of(rank) == std::vector<int>{0, 1}, "another value");
    bootstrap.barrier();
  };
  const pid_t child = ::fork();
  if (child == 0) {
    int code = 1;
    try {
      in_job(1, [](const LinkedGroup& group, const Socket& own, std::string& lost) {
        const rlimit limit{64, 64};
        ::setrlimit(RLIMIT_NOFILE, &limit);
        std::vector<Socket> files;
        do {
          files.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
        } while (files.back().is_open());
        const std::vector<Socket> descriptors = group.exchange(own, lost);
        expect(!descriptors[0].is_open(), "a descriptor came");
        expect(lost.find("no room for the descriptor that rank 0 sent") == 0, "another reason");
      });
      code = 0;
    } catch (...) {
      // The exit code says so.
    }
    ::_exit(code);
  }
  in_job(0, [](const LinkedGroup& group, const Socket& own, std::string& lost) {
    CHECK(group.exchange(own, lost)[1].is_open());
    CHECK(lost.empty());
  });
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(status == 0);
}

TEST_CASE("host calls on different groups of the same ranks are told apart") {
  const auto outcomes = run_bootstrap_job(3, [](BootstrapOptions options) {
    Bootstrap bootstrap(options);
    const auto links = connected(bootstrap);
    const LinkedGroup all(links, {0, 1, 2}, options.rank);
    // Rank 2 has made a group of its own before; the others learn the number from it.
    HostCall call{.last_group = options.rank == 2 ? 7u : 0u, .is_split = 1};
    const std::vector<HostCall> first = all.all_of(call);
    expect_equal(first, all.root_ranks());
    call.last_group = helix::comm::next_group(first);
    const std::uint64_t second = helix::comm::next_group(all.all_of(call));
    expect(call.last_group == 8 && second == 9, "other numbers");
    if (options.rank == 2) return bootstrap.barrier();
    const LinkedGroup pair(links, {0, 1}, options.rank);
    const auto failure = helix::test::failure_of([&] {
      const HostCall own{.group = options.rank == 0 ? call.last_group : second, .bytes = 16, .multiple = 16};
      expect_equal(pair.all_of(own), pair.root_ranks());
    });
    expect(failure && failure->code == ErrorCode::invalid_argument &&
               failure->what.find("rank 0 calls allocate_window of 16 bytes in multiples of 16 on one group, "
                                  "rank 1 calls allocate_window of 16 bytes in multiples of 16 on another") !=
                   std::string::npos,
           failure ? failure->what.c_str() : "no error");
    expect_equal(pair.all_of(HostCall{.group = second}), pair.root_ranks());
    bootstrap.barrier();
  });
  for (const auto& outcome : outcomes) CHECK(outcome.message == "");
}

TEST_CASE("a rank that only reacted to the end of another is not named for its closed socket") {
  const auto outcomes = run_bootstrap_job(3, [](BootstrapOptions options) {
    Bootstrap bootstrap(options);
    auto links = connected(bootstrap);
    bootstrap.barrier();
    std::byte received{};
    if (options.rank == 1) {
      links.reset();  // like a rank that has noticed the failure first
      std::this_thread::sleep_for(50ms);
    }
    if (options.rank == 2) {
      std::this_thread::sleep_for(50ms);
      bootstrap.fail("disk on fire");
    }
    if (options.rank == 0) links->recv(1, std::span(&received, 1));
  });
  CHECK(outcomes[0].code == ErrorCode::peer_failed);
  CHECK_THAT(outcomes[0].message,
             ContainsSubstring("rank 2 of 3 failed") && ContainsSubstring("disk on fire"));
}

TEST_CASE("what came too late is not taken for the next message") {
  const auto outcomes = run_bootstrap_job(
      2,
      [](BootstrapOptions options) {
        Bootstrap bootstrap(options);
        const auto links = connected(bootstrap);
        std::array<std::byte, 2> message{};
        if (options.rank == 1) {
          links->send(0, std::span(message).first(1));
          {
            const BootstrapWait waiting(bootstrap);  // else the watch would name this rank
            std::this_thread::sleep_for(1200ms + kWatchGrace);
          }
          bootstrap.barrier();
          return;
        }
        const auto failure = helix::test::failure_of([&] { (void)links->recv(1, message); });
        expect(failure && failure->code == ErrorCode::timeout, "half a message came whole");
        const auto later =
            helix::test::failure_of([&] { (void)links->recv(1, std::span(message).first(1)); });
        expect(later && later->what == failure->what, "another error");
        bootstrap.barrier();
      },
      1s);
  for (const auto& outcome : outcomes) CHECK(outcome.message == "");
}

TEST_CASE("a rank that reads nothing is late, not gone") {
  const auto outcomes = run_bootstrap_job(
      2,
      [](BootstrapOptions options) {
        Bootstrap bootstrap(options);
        const auto links = connected(bootstrap);
        if (options.rank == 0) {
          const std::vector<std::byte> message(1 << 16);
          const auto failure = helix::test::failure_of([&] {
            for (int i = 0; i < 1000; ++i) links->send(1, message);
          });
          expect(failure && failure->code == ErrorCode::timeout &&
                     failure->what == "rank 1 read too little from its local socket within 1 s",
                 failure ? failure->what.c_str() : "1000 messages fit into the socket");
        } else {
          const BootstrapWait waiting(bootstrap);  // else the watch would name this rank
          std::this_thread::sleep_for(1200ms + kWatchGrace);
        }
        bootstrap.barrier();
      },
      1s);
  for (const auto& outcome : outcomes) CHECK(outcome.message == "");
}

TEST_CASE("who hangs is named, not a rank that waits for it on a local socket") {
  const auto outcomes = run_bootstrap_job(
      4,
      [](BootstrapOptions options) {
        Bootstrap bootstrap(options);
        const auto links = connected(bootstrap);
        bootstrap.barrier();
        bootstrap.begin_operation("split");
        if (options.rank == 0) {
          const BootstrapWait waiting(bootstrap);
          std::this_thread::sleep_for(2s);
        }
        if (options.rank == 1) (void)LinkedGroup(links, {1, 3}, 0).all_of(options.rank);
        if (options.rank == 2) (void)LinkedGroup(links, {1, 2}, 1).all_of(options.rank);
        if (options.rank == 3) {
          bootstrap.begin_operation("prefill");  // it is farther on than the ranks that wait
          std::this_thread::sleep_for(2s);
        }
        bootstrap.check();
      },
      1s);
  for (const auto& outcome : outcomes) {
    CHECK(outcome.code == ErrorCode::peer_failed);
    CHECK_THAT(outcome.message, ContainsSubstring("rank 3 of 4 failed in prefill"));
  }
}

TEST_CASE("a wait for a rank that sends nothing ends, at its end or at the timeout") {
  const auto outcomes = run_bootstrap_job(
      3,
      [](BootstrapOptions options) {
        Bootstrap bootstrap(options);
        const auto links = connected(bootstrap);
        std::byte received{};
        if (options.rank == 0) links->recv(2, std::span(&received, 1));
        if (options.rank == 1) std::this_thread::sleep_for(3s);
      },
      1s);
  CHECK((outcomes[0].code == ErrorCode::peer_failed || outcomes[0].code == ErrorCode::timeout));
  CHECK_THAT(outcomes[0].message, ContainsSubstring("rank 2"));
}
