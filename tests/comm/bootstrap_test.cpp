// SPDX-License-Identifier: Apache-2.0
// Bootstrap finds all ranks or reports on each rank what is wrong, and names the rank that fails. Needs no
// GPU.
#include <array>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <future>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <helix/comm/bootstrap.hpp>

#include "comm/bootstrap_job.hpp"
#include "comm/bootstrap_wait.hpp"
#include "comm/lag.hpp"
#include "comm/socket.hpp"
#include "support/catch.hpp"
#include "support/free_port.hpp"

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using helix::Error;
using helix::ErrorCode;
using helix::comm::Beat;
using helix::comm::Bootstrap;
using helix::comm::BootstrapOptions;
using helix::comm::BootstrapWait;
using helix::comm::Standing;
using helix::test::expect;
using helix::test::free_port;
using helix::test::Outcome;
using helix::test::run_bootstrap_job;

namespace {

/// Waits for the failure that a Bootstrap reports.
class FailureWatch {
 public:
  explicit FailureWatch(Bootstrap& bootstrap) {
    bootstrap.on_failure([this](const Error& error) {
      const std::lock_guard lock(mutex_);
      ++num_calls_;
      text_ = error.what();
      changed_.notify_all();
    });
  }
  std::string wait() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, 20s, [&] { return num_calls_ > 0; });
    return num_calls_ == 1 ? text_ : "called " + std::to_string(num_calls_) + " times";
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int num_calls_ = 0;
  std::string text_;
};

/// Starts a process that runs body(options) as rank 1 of 2 and then dies without cleaning up.
pid_t start_rank_1(int port, std::chrono::milliseconds timeout, const std::function<void(Bootstrap&)>& body) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  try {
    Bootstrap bootstrap({.rank = 1, .size = 2, .port = port, .timeout = timeout, .heartbeat = 50ms});
    body(bootstrap);
    ::_exit(0);  // without a farewell
  } catch (...) {
    ::_exit(1);
  }
}

/// The place of one rank. lag_of() returns "2 it is behind" if rank 2 lags, given the places of all ranks and
/// a timeout of one second.
struct Place {
  std::uint64_t step = 0;
  std::uint64_t operations = 0;
  std::uint32_t waited_ms = 0;
  bool has_left = false;
  bool is_still = true;
};
std::string lag_of(const std::vector<Place>& places) {
  std::vector<Beat> beats(places.size());
  std::vector<Standing> ranks;
  for (std::size_t i = 0; i < places.size(); ++i) {
    beats[i].rank = static_cast<std::int32_t>(i);
    beats[i].step = places[i].step;
    beats[i].operations = places[i].operations;
    beats[i].waited_ms = places[i].waited_ms;
    ranks.push_back({.beat = &beats[i], .has_left = places[i].has_left, .is_still = places[i].is_still});
  }
  const auto lag = helix::comm::find_lag(ranks, 1s);
  return lag ? std::to_string(lag->behind->rank) + " " + std::string(lag->how) : "";
}

/// Whether the process ended by itself with exit code 0.
bool ended_well(pid_t child) {
  int status = 0;
  return ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

using Variables = std::vector<std::pair<std::string, std::string>>;

/// The result of from_environment() with these variables only.
BootstrapOptions options_from(const Variables& variables) {
  for (const char* name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NNODES"}) {
    ::unsetenv(name);
  }
  for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  return BootstrapOptions::from_environment();
}

}  // namespace

TEST_CASE("bootstrap broadcasts from rank 0 and gathers in rank order") {
  for (const int size : {1, 2, 5}) {
    const std::vector<Outcome> outcomes = run_bootstrap_job(size, [](const BootstrapOptions& options) {
      Bootstrap bootstrap(options);
      for (const std::size_t bytes : {0, 1, 128, 1'000'000}) {
        std::vector<std::byte> data(bytes, static_cast<std::byte>(options.rank));
        bootstrap.broadcast(data);
        for (const std::byte value : data) expect(value == std::byte{0}, "broadcast");
        const std::vector<std::byte> own(bytes + static_cast<std::size_t>(options.rank),
                                         static_cast<std::byte>(options.rank));
        const auto all = bootstrap.gather(own);
        expect(all.size() == (options.rank == 0 ? static_cast<std::size_t>(options.size) : 0u), "gather");
        for (std::size_t r = 0; r < all.size(); ++r) {
          expect(all[r] == std::vector<std::byte>(bytes + r, static_cast<std::byte>(r)), "gathered");
        }
      }
      bootstrap.barrier();
      bootstrap.check();
    });
    for (const Outcome& outcome : outcomes) CHECK(outcome.message == "");
  }
}

TEST_CASE("bootstrap waits with the longest timeout and heartbeat of all") {
  const std::vector<Outcome> outcomes = run_bootstrap_job(
      2,
      [](BootstrapOptions options) {
        if (options.rank == 1) std::this_thread::sleep_for(100ms);
        options.heartbeat = std::chrono::milliseconds::max();
        Bootstrap bootstrap(options);
        if (options.rank == 1) std::this_thread::sleep_for(100ms);
        bootstrap.barrier();
        bootstrap.check();
      },
      std::chrono::milliseconds::max());
  for (const Outcome& outcome : outcomes) CHECK(outcome.message == "");
}

TEST_CASE("bootstrap refuses jobs whose ranks contradict each other, on all ranks") {
  struct Row {
    const char* name;
    std::function<void(BootstrapOptions&)> change;
    const char* part;
  };
  const std::vector<Row> rows = {
      {"size", [](BootstrapOptions& o) { o.size = o.rank == 2 ? 4 : 3; },
       "rank 2 says the job has 4 ranks, rank 0 says 3"},
      {"configuration", [](BootstrapOptions& o) { o.config_hash = o.rank == 1 ? 0xabc : 0xdef; },
       "rank 1 has another configuration (hash abc) than rank 0 (hash def)"},
      {"rank", [](BootstrapOptions& o) { o.rank = o.rank == 2 ? 1 : o.rank; },
       "two processes call themselves rank 1"},
  };
  for (const Row& row : rows) {
    DYNAMIC_SECTION(row.name) {
      for (const Outcome& outcome : run_bootstrap_job(3, [&](BootstrapOptions options) {
             row.change(options);
             Bootstrap bootstrap(options);
           })) {
        CHECK(outcome.code == ErrorCode::invalid_argument);
        CHECK_THAT(outcome.message, ContainsSubstring(row.part));
      }
    }
  }
}

TEST_CASE("bootstrap refuses ports and sizes out of range before it opens a socket") {
  const auto start = std::chrono::steady_clock::now();
  for (const int port : {-1, 0, 65536, 70000}) {
    CHECK_THROWS_WITH(Bootstrap({.rank = 1, .size = 2, .port = port, .timeout = 60s}),
                      ContainsSubstring("port is " + std::to_string(port) + "; it must be in [1, 65535]"));
  }
  CHECK_THROWS_WITH(Bootstrap({.rank = 1, .size = 65537, .timeout = 60s}),
                    ContainsSubstring("up to 65536 ranks"));
  CHECK(std::chrono::steady_clock::now() - start < 10s);
}

TEST_CASE("bootstrap names the ranks that never come, and a rank says whom it cannot reach") {
  const std::vector<Outcome> outcomes = run_bootstrap_job(
      4,
      [](const BootstrapOptions& options) {
        if (options.rank < 2) Bootstrap bootstrap(options);
      },
      500ms);
  for (const int rank : {0, 1}) {
    CHECK(outcomes[static_cast<std::size_t>(rank)].code == ErrorCode::timeout);
    CHECK_THAT(outcomes[static_cast<std::size_t>(rank)].message,
               ContainsSubstring("ranks 2, 3 of 4 did not connect"));
  }
  const std::vector<Outcome> alone = run_bootstrap_job(
      2,
      [](const BootstrapOptions& options) {
        if (options.rank == 1) Bootstrap bootstrap(options);
      },
      300ms);
  CHECK(alone[1].code == ErrorCode::timeout);
  CHECK_THAT(alone[1].message, ContainsSubstring("rank 1 of 2 could not connect to rank 0 at 127.0.0.1:"));
}

TEST_CASE("a stray connection does not disturb the rendezvous") {
  const std::vector<Outcome> outcomes = run_bootstrap_job(2, [](const BootstrapOptions& options) {
    if (options.rank == 1) {
      std::this_thread::sleep_for(100ms);
      const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
      sockaddr_in target{};
      target.sin_family = AF_INET;
      target.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      target.sin_port = htons(static_cast<std::uint16_t>(options.port));
      expect(::connect(fd, reinterpret_cast<const sockaddr*>(&target), sizeof(target)) == 0, "connect");
      expect(::send(fd, "GET / HTTP/1.1\r\nHost: helix\r\n\r\n......", 37, MSG_NOSIGNAL) == 37, "send");
      ::close(fd);
    }
    Bootstrap bootstrap(options);
    bootstrap.barrier();
  });
  for (const Outcome& outcome : outcomes) CHECK(outcome.message == "");
}

TEST_CASE("a rank on which a transfer has failed makes no other that would take what is left of it") {
  // Rank 1 arrives too late for the first gather. Its second gather must not be taken for rank 0's second.
  std::array<std::string, 2> seen;
  const std::vector<Outcome> late = run_bootstrap_job(
      2,
      [&](const BootstrapOptions& options) {
        Bootstrap bootstrap(options);
        if (options.rank == 1) {
          std::this_thread::sleep_for(700ms);
          for (const char* step : {"one", "two"}) bootstrap.gather(std::as_bytes(std::span(step, 3)));
          return;
        }
        for (std::string& message : seen) {
          try {
            message = std::to_string(bootstrap.gather({}).size()) + " gave something";
          } catch (const Error& error) {
            message = error.what();
          }
          std::this_thread::sleep_for(500ms);
        }
      },
      300ms);
  CHECK_THAT(seen[0], ContainsSubstring(
                          "rank 1 of 2 failed in start at step 0 (operation 0): it did not arrive: rank 0 "
                          "has waited for") &&
                          ContainsSubstring("ms in bootstrap gather at step 0"));
  CHECK(seen[1] == seen[0]);
  std::promise<void> sent;
  const std::vector<Outcome> unlike = run_bootstrap_job(2, [&](const BootstrapOptions& options) {
    Bootstrap bootstrap(options);
    std::array<std::byte, 8> bytes{};
    const std::size_t expected = options.rank == 0 ? 8 : 4;
    try {
      bootstrap.broadcast(std::span(bytes).first(expected));
    } catch (const Error& error) {
      expect(error.code() == ErrorCode::invalid_argument, "sizes differ");
      sent.get_future().wait_for(20s);  // rank 0 would notice if this rank left
    }
    bootstrap.broadcast(std::span(bytes).first(4));
    if (options.rank == 0) sent.set_value();
  });
  CHECK(unlike[0].message == "");
  CHECK_THAT(unlike[1].message, ContainsSubstring("rank 0 sends 8 bytes, rank 1 expects 4"));
}

TEST_CASE("a rank that hangs before an exchange is named on all ranks") {
  struct Row {
    const char* name;
    void (*exchange)(Bootstrap&);
    std::vector<int> hanging;  // ranks that hang, each in a job of its own
  };
  const std::vector<Row> rows = {
      {"barrier", [](Bootstrap& bootstrap) { bootstrap.barrier(); }, {0, 1, 2, 3}},
      {"broadcast", [](Bootstrap& bootstrap) { bootstrap.broadcast({}); }, {0}},
      // Ranks that have sent their part are done, and wait for no other rank.
      {"gather", [](Bootstrap& bootstrap) { bootstrap.gather({}); }, {1, 2, 3}},
  };
  for (const Row& row : rows) {
    for (const int hanging : row.hanging) {
      const auto start = std::chrono::steady_clock::now();
      const std::vector<Outcome> outcomes = run_bootstrap_job(
          4,
          [&](const BootstrapOptions& options) {
            Bootstrap bootstrap(options);
            FailureWatch watch(bootstrap);
            bootstrap.barrier();
            if (options.rank != hanging) row.exchange(bootstrap);
            watch.wait();
            bootstrap.check();
          },
          500ms);
      const auto elapsed = std::chrono::steady_clock::now() - start;
      INFO(row.name << ", rank " << hanging << " hangs");
      const std::string name = "rank " + std::to_string(hanging) + " of 4 failed in start at step 0";
      for (const Outcome& outcome : outcomes) {
        CHECK(outcome.code == ErrorCode::peer_failed);
        CHECK_THAT(outcome.message, StartsWith(name) && ContainsSubstring("ms in bootstrap "));
      }
      CHECK(elapsed < 1500ms);  // twice the timeout, plus delays of a busy machine
    }
  }
}

TEST_CASE("who waits for rank 0 hears whom it missed or saw leave") {
  struct Row {
    const char* name;
    void (*rank_2)(Bootstrap&);
    std::optional<ErrorCode> code;  // on rank 0
    const char* text;
  };
  for (const Row& row :
       {Row{"it waits for something else",
            [](Bootstrap& bootstrap) {
              bootstrap.begin_wait();
              FailureWatch(bootstrap).wait();
            },
            ErrorCode::timeout, "bootstrap gather: rank 2 did not arrive within 1.5 s; rank 0 waited"},
        Row{"it leaves", [](Bootstrap&) {}, ErrorCode::peer_failed,
            "bootstrap gather: rank 2 closed its connection to rank 0"}}) {
    DYNAMIC_SECTION(row.name) {
      const std::vector<Outcome> outcomes = run_bootstrap_job(
          4,
          [&](const BootstrapOptions& options) {
            Bootstrap bootstrap(options);
            if (options.rank == 2) return row.rank_2(bootstrap);
            bootstrap.barrier();
          },
          1s);
      for (const std::size_t rank : {0u, 1u, 3u}) {
        CHECK(outcomes[rank].code == (rank == 0 ? row.code : ErrorCode::peer_failed));
        CHECK(outcomes[rank].message == row.text);
      }
    }
  }
}

TEST_CASE("what a full socket did not take is what is left to send") {
  std::array<int, 2> ends{};
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0);
  const helix::comm::Socket from(ends[0]);
  const helix::comm::Socket to(ends[1]);
  std::vector<std::byte> sent(std::size_t{4} << 20);
  for (std::size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<std::byte>(i * 7 >> 3);
  std::span<const std::byte> rest(sent);
  const auto soon = [] { return helix::comm::deadline_after(50ms); };
  CHECK(helix::comm::send_rest(from.fd(), rest, soon(), helix::comm::kKeepWaiting) ==
        helix::comm::Transfer::late);
  REQUIRE((!rest.empty() && rest.size() < sent.size()));
  std::vector<std::byte> received(sent.size());
  std::thread reader([&] {
    helix::comm::recv_all(to.fd(), received.data(), received.size(), helix::comm::deadline_after(20s),
                          helix::comm::kKeepWaiting);
  });
  CHECK(helix::comm::send_rest(from.fd(), rest, helix::comm::deadline_after(20s),
                               helix::comm::kKeepWaiting) == helix::comm::Transfer::done);
  reader.join();
  CHECK(received == sent);
}

TEST_CASE("a process that dies is named with its operation and step") {
  const int port = free_port();
  const pid_t child = start_rank_1(port, 10s, [](Bootstrap& bootstrap) {
    bootstrap.set_step(7);
    bootstrap.begin_operation("all_reduce");
    std::this_thread::sleep_for(300ms);
  });
  Bootstrap bootstrap({.rank = 0, .size = 2, .port = port, .timeout = 10s, .heartbeat = 50ms});
  FailureWatch watch(bootstrap);
  CHECK(watch.wait() == "rank 1 of 2 failed in all_reduce at step 7 (operation 1): its connection closed");
  CHECK(bootstrap.has_failed());
  CHECK_THROWS_AS(bootstrap.check(), Error);
  CHECK_THROWS_AS(bootstrap.barrier(), Error);
  int later_calls = 0;
  bootstrap.on_failure([&](const Error& error) { later_calls += error.code() == ErrorCode::peer_failed; });
  CHECK(later_calls == 1);
  ::waitpid(child, nullptr, 0);
}

TEST_CASE("a process that stops is named by its silence") {
  const int port = free_port();
  const pid_t child = start_rank_1(port, 600ms, [](Bootstrap&) { std::this_thread::sleep_for(20s); });
  Bootstrap bootstrap({.rank = 0, .size = 2, .port = port, .timeout = 600ms, .heartbeat = 50ms});
  FailureWatch watch(bootstrap);
  ::kill(child, SIGSTOP);
  CHECK_THAT(watch.wait(),
             ContainsSubstring("rank 1 of 2 failed") && ContainsSubstring("no sign of life for 0.6 s"));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST_CASE("a rank that gives up, and one that lags, are named on all ranks") {
  const std::vector<Outcome> gave_up = run_bootstrap_job(4, [](const BootstrapOptions& options) {
    Bootstrap bootstrap(options);
    FailureWatch watch(bootstrap);
    if (options.rank == 2) {
      bootstrap.set_step(3);
      bootstrap.fail("disk on fire");
      bootstrap.fail("and the network");
    }
    watch.wait();
    bootstrap.check();
  });
  for (const Outcome& outcome : gave_up) {
    CHECK(outcome.code == ErrorCode::peer_failed);
    CHECK(outcome.message == "rank 2 of 4 failed in start at step 3 (operation 0): disk on fire");
  }
  const std::vector<Outcome> lagged = run_bootstrap_job(
      3,
      [](const BootstrapOptions& options) {
        Bootstrap bootstrap(options);
        FailureWatch watch(bootstrap);
        bootstrap.begin_operation("all_to_all");
        if (options.rank != 2) {
          bootstrap.begin_operation("all_reduce");
          bootstrap.begin_wait();
        }
        watch.wait();
        bootstrap.check();
      },
      500ms);
  for (const Outcome& outcome : lagged) {
    CHECK(outcome.code == ErrorCode::peer_failed);
    CHECK_THAT(outcome.message, ContainsSubstring("rank 2 of 3 failed in all_to_all at step 0") &&
                                    ContainsSubstring("it is behind: rank") &&
                                    ContainsSubstring("in all_reduce"));
  }
}

TEST_CASE("who keeps ranks waiting is a rank that waits for nobody, whatever operations it made") {
  struct Row {
    const char* name;
    std::vector<Place> places;
    const char* lag;
  };
  const std::vector<Row> rows = {
      {"nobody has waited for long", {{5, 9, 999}, {4, 8, 0}}, ""},
      {"all wait in one step", {{5, 50, 1500}, {5, 60, 1200}, {5, 40, 1500}}, ""},
      {"a rank hangs", {{5, 9, 1000}, {5, 8, 0}}, "1 it is behind"},
      {"this rank hangs", {{5, 8, 0}, {5, 9, 1000}}, "0 it is behind"},
      {"it hangs in a stage of more operations",
       {{51, 510, 2000}, {51, 510, 2000}, {51, 612, 2000}, {51, 605, 0}},
       "3 it waits for nobody"},
      {"it hangs in a step that another rank waits in, while ranks of a later one wait too",
       {{51, 102, 1000}, {51, 102, 1000}, {50, 100, 1000}, {50, 100, 0}},
       "3 it is behind"},
      {"the rank that waits longest is not the one that is farthest on",
       {{51, 102, 1000}, {51, 102, 1000}, {50, 100, 3000}, {50, 101, 0}},
       "3 it is behind"},
      {"another rank is between two waits",
       {{5, 90, 1500}, {5, 10, 0, false, false}, {5, 95, 0}},
       "2 it waits for nobody"},
      {"only ranks that move on do not wait", {{5, 90, 1500}, {5, 10, 0, false, false}, {5, 95, 900}}, ""},
      {"a slow rank is steps behind", {{5, 90, 1500}, {4, 80, 0, false, false}}, "1 it is behind"},
      {"a rank that waits is steps behind", {{5, 9, 1500}, {4, 8, 1500}}, "1 it is behind, and waits too"},
      {"but another one hangs ahead", {{5, 9, 1500}, {4, 8, 1500}, {6, 9, 0}}, ""},
      {"another one moves on ahead",
       {{5, 9, 1500}, {4, 8, 1500}, {6, 9, 0, false, false}},
       "1 it is behind, and waits too"},
      {"who waited and has left waits no more", {{6, 10, 1500, true}, {5, 9, 0}}, ""},
      {"a rank that waited has left, and another hangs ahead",
       {{5, 9, 1500}, {4, 8, 700, true}, {6, 9, 0}},
       "1 it has left"},
      {"it has left in the step, before what the other waits in",
       {{2, 3, 1500}, {2, 1, 0, true}},
       "1 it has left"},
      {"a rank has left", {{2, 2, 1500}, {2, 2, 1500}, {1, 1, 0, true}}, "2 it has left"},
      {"it has left after its last step", {{2, 2, 1500}, {2, 2, 0, true}}, ""},
      {"one has left, and one hangs", {{2, 3, 1500}, {2, 1, 0, true}, {2, 2, 0}}, "2 it is behind"},
      {"the first rank that waits is not the one that is farthest on",
       {{50, 100, 1500}, {51, 102, 1500}, {50, 101, 0, false, false}},
       "2 it is behind"},
      {"of two that hang in one step, the one of fewer operations",
       {{5, 9, 1500}, {5, 8, 0}, {5, 7, 0}},
       "2 it is behind"},
      {"of two that wait for nobody, one moves on",
       {{5, 9, 1500}, {4, 8, 0, false, false}, {5, 9, 0}},
       "2 it waits for nobody"},
  };
  for (const Row& row : rows) {
    CAPTURE(row.name);
    CHECK(lag_of(row.places) == row.lag);
  }
}

TEST_CASE("a rank that hangs is named though a rank of another stage made fewer operations and waits") {
  const std::vector<Outcome> outcomes = run_bootstrap_job(
      3,
      [](const BootstrapOptions& options) {
        Bootstrap bootstrap(options);
        FailureWatch watch(bootstrap);
        const std::vector<int> operations = {10, 12, 11};
        bootstrap.set_step(51);
        for (int i = 0; i < operations[static_cast<std::size_t>(options.rank)]; ++i)
          bootstrap.begin_operation("exchange");
        if (options.rank != 2) bootstrap.begin_wait();
        watch.wait();
        bootstrap.check();
      },
      500ms);
  for (const Outcome& outcome : outcomes) {
    CHECK(outcome.code == ErrorCode::peer_failed);
    CHECK_THAT(outcome.message,
               ContainsSubstring("rank 2 of 3 failed in exchange at step 51 (operation 11)"));
  }
}

TEST_CASE("a rank still waits when the shorter wait of another of its threads has ended") {
  const std::vector<Outcome> outcomes = run_bootstrap_job(
      3,
      [](const BootstrapOptions& options) {
        Bootstrap bootstrap(options);
        FailureWatch watch(bootstrap);
        bootstrap.barrier();
        for (int i = 0; i <= options.rank; ++i) bootstrap.begin_operation("all_reduce");
        if (options.rank != 2) bootstrap.begin_wait();
        if (options.rank == 1) bootstrap.end_wait(bootstrap.begin_wait());
        watch.wait();
        bootstrap.check();
      },
      500ms);
  for (const Outcome& outcome : outcomes) {
    CHECK(outcome.code == ErrorCode::peer_failed);
    CHECK_THAT(outcome.message, StartsWith("rank 2 of 3 failed in all_reduce"));
  }
}

TEST_CASE("short waits of several threads that overlap do not add up to a long one") {
  const std::vector<Outcome> outcomes = run_bootstrap_job(
      2,
      [](const BootstrapOptions& options) {
        Bootstrap bootstrap(options);
        if (options.rank == 0) std::this_thread::sleep_for(3s);
        for (std::uint64_t i = 0, last = 0; options.rank == 1 && i < 30; ++i) {
          const std::uint64_t next = bootstrap.begin_wait();
          bootstrap.end_wait(last);
          last = next;
          std::this_thread::sleep_for(100ms);
          if (i == 29) bootstrap.end_wait(last);
        }
        bootstrap.barrier();
      },
      2s);
  for (const Outcome& outcome : outcomes) CHECK(outcome.message == "");
}

TEST_CASE("a rank that left before the others were done is named by those that wait") {
  const std::vector<Outcome> outcomes = run_bootstrap_job(
      3,
      [](const BootstrapOptions& options) {
        Bootstrap bootstrap(options);
        FailureWatch watch(bootstrap);
        bootstrap.set_step(1);
        bootstrap.begin_operation("all_reduce");
        bootstrap.barrier();
        if (options.rank == 2) return;
        bootstrap.set_step(2);
        bootstrap.begin_wait();
        watch.wait();
        bootstrap.check();
      },
      500ms);
  for (const int rank : {0, 1}) {
    const Outcome& outcome = outcomes[static_cast<std::size_t>(rank)];
    CHECK(outcome.code == ErrorCode::peer_failed);
    CHECK_THAT(outcome.message,
               ContainsSubstring("rank 2 of 3 failed in all_reduce at step 1 (operation 1): it has left: "
                                 "rank"));
  }
}

TEST_CASE("a heartbeat is sent often enough for the timeout, however seldom it is asked for") {
  const std::vector<Outcome> outcomes = run_bootstrap_job(
      2,
      [](BootstrapOptions options) {
        options.heartbeat = 700ms;
        Bootstrap bootstrap(options);
        std::this_thread::sleep_for(1s);
        bootstrap.check();
        bootstrap.barrier();
      },
      600ms);
  for (const Outcome& outcome : outcomes) CHECK(outcome.message == "");
}

TEST_CASE("a failure whose callback throws is told to the others, and to the next callback") {
  const std::vector<Outcome> outcomes = run_bootstrap_job(2, [](const BootstrapOptions& options) {
    Bootstrap bootstrap(options);
    bootstrap.on_failure([](const Error&) { throw std::bad_alloc(); });
    FailureWatch watch(bootstrap);
    bootstrap.barrier();
    if (options.rank == 1) bootstrap.fail("disk on fire");
    expect(watch.wait() == "rank 1 of 2 failed in start at step 0 (operation 0): disk on fire",
           "another failure");
  });
  for (const Outcome& outcome : outcomes) CHECK(outcome.message == "");
}

TEST_CASE("the reason of a rank that ends at once after it has failed is heard") {
  for (int round = 0; round < 10; ++round) {
    const int port = free_port();
    const pid_t child = start_rank_1(port, 10s, [](Bootstrap& bootstrap) {
      bootstrap.barrier();
      bootstrap.fail("disk on fire");
    });
    Bootstrap bootstrap({.rank = 0, .size = 2, .port = port, .timeout = 10s, .heartbeat = 50ms});
    FailureWatch watch(bootstrap);
    bootstrap.barrier();
    CHECK_THAT(watch.wait(), ContainsSubstring("disk on fire"));
    CHECK(ended_well(child));
  }
}

TEST_CASE("a job that is stopped as a whole for longer than the timeout goes on") {
  const int port = free_port();
  const pid_t child = ::fork();
  if (child == 0) {
    const std::vector<Outcome> outcomes = run_bootstrap_job(
        3,
        [](const BootstrapOptions& options) {
          Bootstrap bootstrap(options);
          const std::uint64_t wait = options.rank == 1 ? bootstrap.begin_wait() : 0;
          if (options.rank != 0) std::this_thread::sleep_for(1400ms);  // rank 0 waits for this
          bootstrap.end_wait(wait);
          bootstrap.barrier();
        },
        600ms, port);
    int code = 0;
    for (const Outcome& outcome : outcomes) code |= outcome.message.empty() ? 0 : 2;
    ::_exit(code);
  }
  std::this_thread::sleep_for(200ms);
  ::kill(child, SIGSTOP);
  std::this_thread::sleep_for(800ms);
  ::kill(child, SIGCONT);
  CHECK(ended_well(child));
}

TEST_CASE("a rank that leaves in order is no failure") {
  const std::vector<Outcome> outcomes = run_bootstrap_job(3, [](const BootstrapOptions& options) {
    Bootstrap bootstrap(options);
    bootstrap.barrier();
    if (options.rank != 1) std::this_thread::sleep_for(options.rank == 2 ? 300ms : 600ms);
    bootstrap.check();
  });
  for (const Outcome& outcome : outcomes) CHECK(outcome.message == "");
}

TEST_CASE("the variables of torchrun, Open MPI and Slurm are understood") {
  const BootstrapOptions alone = options_from({});
  CHECK((alone.rank == 0 && alone.size == 1));
  const BootstrapOptions torchrun = options_from({{"RANK", "5"},
                                                  {"WORLD_SIZE", "8"},
                                                  {"LOCAL_RANK", "1"},
                                                  {"MASTER_ADDR", "host"},
                                                  {"MASTER_PORT", "1234"},
                                                  {"TORCHELASTIC_RUN_ID", "x"}});
  CHECK((torchrun.rank == 5 && torchrun.size == 8 && torchrun.local_rank == 1));
  CHECK((torchrun.address == "host" && torchrun.port == 1235));
  const BootstrapOptions mpirun = options_from({{"OMPI_COMM_WORLD_RANK", "1"},
                                                {"OMPI_COMM_WORLD_SIZE", "2"},
                                                {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                                {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  CHECK((mpirun.rank == 1 && mpirun.size == 2 && mpirun.local_rank == 1));
  CHECK((mpirun.address == "127.0.0.1" && mpirun.port == 29500));
  CHECK_THROWS_WITH(options_from({{"SLURM_PROCID", "3"}, {"SLURM_NTASKS", "4"}, {"SLURM_LOCALID", "1"}}),
                    ContainsSubstring("MASTER_ADDR is not set"));
  CHECK_THROWS_WITH(options_from({{"RANK", "1"}}), ContainsSubstring("WORLD_SIZE is not set"));
  for (const char* rank : {"x", "-1", "2", "1.5"}) {
    CHECK_THROWS_WITH(options_from({{"RANK", rank}, {"WORLD_SIZE", "2"}}),
                      ContainsSubstring("RANK is") && ContainsSubstring("0 to 1"));
  }
}

namespace {

/// Works as a rank does that makes operations and waits for nobody.
void make_operations(Bootstrap& bootstrap, std::chrono::milliseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
    bootstrap.begin_operation("all_reduce");
    std::this_thread::sleep_for(10ms);
  }
}

}  // namespace

TEST_CASE("a rank that makes operations is not named, though another waits for longer than the timeout") {
  const int working = GENERATE(0, 1);
  CAPTURE(working);
  const std::vector<Outcome> outcomes = run_bootstrap_job(
      2,
      [&](const BootstrapOptions& options) {
        Bootstrap bootstrap(options);
        bootstrap.barrier();
        if (options.rank == working) {
          make_operations(bootstrap, 3500ms);
        } else {
          const BootstrapWait waiting(bootstrap);
          std::this_thread::sleep_for(3500ms);
        }
        bootstrap.check();
        bootstrap.barrier();
      },
      2s);
  for (const Outcome& outcome : outcomes) CHECK(outcome.message == "");
}

TEST_CASE("a rank is not named by an exchange that has just begun, though another waits for something else") {
  const std::vector<Outcome> outcomes = run_bootstrap_job(
      3,
      [](const BootstrapOptions& options) {
        Bootstrap bootstrap(options);
        bootstrap.barrier();
        if (options.rank == 2) {
          const BootstrapWait waiting(bootstrap);
          std::this_thread::sleep_for(3200ms);
        } else {
          make_operations(bootstrap, options.rank == 0 ? 2600ms : 3200ms);
        }
        bootstrap.barrier();
      },
      2s);
  for (const Outcome& outcome : outcomes) CHECK(outcome.message == "");
}

TEST_CASE("a failure is told at once and the last rank leaves at once, however seldom heartbeats are") {
  const std::vector<Outcome> outcomes = run_bootstrap_job(
      2,
      [](BootstrapOptions options) {
        options.heartbeat = 10s;
        const auto has_taken = [](auto& since) {
          return std::chrono::steady_clock::now() - std::exchange(since, std::chrono::steady_clock::now());
        };
        auto since = std::chrono::steady_clock::now();
        {
          Bootstrap bootstrap(options);
          FailureWatch watch(bootstrap);
          bootstrap.barrier();
          has_taken(since);
          if (options.rank == 1) bootstrap.fail("disk on fire");
          expect(options.rank == 0 || has_taken(since) < 2s, "fail() returned late");
          (void)watch.wait();
          expect(has_taken(since) < 2s, "heard late");
          std::this_thread::sleep_for(3s);  // the watching thread now sleeps until its next heartbeat
          has_taken(since);
        }
        expect(has_taken(since) < 2s, "left late");
      },
      60s);
  for (const Outcome& outcome : outcomes) CHECK(outcome.message == "");
}

TEST_CASE("a rank whose heartbeat is asked for seldom is alive to the others") {
  const std::vector<Outcome> outcomes = run_bootstrap_job(
      2,
      [](BootstrapOptions options) {
        if (options.rank == 1) options.heartbeat = 20s;
        Bootstrap bootstrap(options);
        std::this_thread::sleep_for(4s);
        bootstrap.check();
        bootstrap.barrier();
      },
      2s);
  for (const Outcome& outcome : outcomes) CHECK(outcome.message == "");
}
