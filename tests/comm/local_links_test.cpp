// SPDX-License-Identifier: Apache-2.0
// LocalLinks connects all ranks of a machine, carries messages and descriptors, and keeps strangers out.
#include "comm/local_links.hpp"

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include <helix/comm/bootstrap.hpp>

#include "comm/bootstrap_job.hpp"
#include "support/catch.hpp"

using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using helix::ErrorCode;
using helix::comm::Bootstrap;
using helix::comm::BootstrapOptions;
using helix::comm::LocalLinks;
using helix::test::expect;
using helix::test::run_bootstrap_job;

namespace {

std::shared_ptr<LocalLinks> connected(Bootstrap& bootstrap) {
  std::string why_not;
  auto links = LocalLinks::connect(bootstrap, why_not);
  expect(links != nullptr, why_not.c_str());
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
  CHECK_THAT(outcomes[0].message, Contains("rank 2"));
}
