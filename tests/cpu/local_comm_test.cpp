// SPDX-License-Identifier: Apache-2.0
// LocalComm keeps the communicator contract, and its failures wake every rank with a message that names the
// culprit.
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <ctime>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <helix/backend.hpp>
#include <helix/contract/catch.hpp>
#include <helix/contract/communicator.hpp>
#include <helix/cpu/backend.hpp>
#include <helix/cpu/local_comm.hpp>
#include <helix/error.hpp>

#include "support/ranks.hpp"

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using helix::DType;
using helix::Error;
using helix::ErrorCode;
using helix::cpu::LocalComm;
using helix::cpu::Stream;
using helix::test::RankOutcomes;
using helix::test::run_ranks;
using helix::test::run_ranks_or_throw;

static_assert(helix::Communicator<LocalComm, LocalComm::Stream>);
static_assert(helix::comm::CollectiveComm<LocalComm>);

namespace {

/// The outcomes in a group of `size` when each rank runs `body`, with a short timeout.
template <class Body>
RankOutcomes run_failing(int size, Body body, std::chrono::milliseconds timeout = 20s) {
  return run_ranks(LocalComm::create_group(size, timeout), body);
}

}  // namespace

TEST_CASE("LocalComm keeps the communicator contract") {
  for (const int size : {1, 2, 3, 4, 8}) {
    for (const auto& row : helix::contract::communicator_contract<LocalComm>()) {
      DYNAMIC_SECTION(size << " ranks: " << row.name) {
        run_ranks_or_throw(size, row.body);
      }
    }
  }
}

TEST_CASE("a communicator and a backend that were moved from still name their group") {
  auto ranks = LocalComm::create_group(2);
  const LocalComm moved = std::move(ranks[1]);
  CHECK(ranks[1].rank() == 1);  // NOLINT(bugprone-use-after-move)
  CHECK(moved.size() == 2);
  helix::cpu::Backend<LocalComm> backend;
  const auto same = std::move(backend);
  CHECK(backend.comms().stage == same.comms().stage);  // NOLINT(bugprone-use-after-move)
}

TEST_CASE("large operations are shared between ranks and stay exact") {
  for (const int size : {2, 3, 8}) {
    run_ranks_or_throw(size, [](LocalComm& comm) {
      Stream stream;
      constexpr std::int64_t kCount = 300001;
      for (int round = 0; round < 3; ++round) {
        std::vector<float> values(kCount);
        for (std::int64_t i = 0; i < kCount; ++i) {
          values[static_cast<std::size_t>(i)] = static_cast<float>(comm.rank() * 3 + i % 1000 + round);
        }
        comm.all_reduce(values.data(), values.data(), kCount, DType::f32, stream);
        const std::int64_t slice = kCount / comm.size();
        std::vector<std::uint8_t> in(static_cast<std::size_t>(slice * comm.size()));
        std::vector<std::uint8_t> out(in.size());
        for (int to = 0; to < comm.size(); ++to) {
          for (std::int64_t i = 0; i < slice; ++i) {
            in[static_cast<std::size_t>(to * slice + i)] =
                helix::contract::pattern(comm.rank(), to, i, round);
          }
        }
        comm.all_to_all(in.data(), out.data(), slice, stream);
        stream.synchronize();
        const int size = comm.size();
        for (std::int64_t i = 0; i < kCount; ++i) {
          const auto expected = static_cast<float>(3 * size * (size - 1) / 2 + size * (i % 1000 + round));
          helix::contract::require(values[static_cast<std::size_t>(i)] == expected, "element ", i,
                                   " is wrong");
        }
        for (int from = 0; from < size; ++from) {
          for (std::int64_t i = 0; i < slice; ++i) {
            helix::contract::require(out[static_cast<std::size_t>(from * slice + i)] ==
                                         helix::contract::pattern(from, comm.rank(), i, round),
                                     "byte ", i, " from rank ", from, " is wrong");
          }
        }
      }
    });
  }
}

TEST_CASE("all_to_all_v works past the counts that fit in a task") {
  run_ranks_or_throw(33, [](LocalComm& comm) { helix::contract::all_to_all_v_contract(comm); });
}

TEST_CASE("calls that differ between ranks are an error on all of them, with both values") {
  struct Row {
    const char* name;
    void (*call)(LocalComm&, void*, Stream&);
    std::vector<std::string> parts;
  };
  const std::vector<Row> rows = {
      {"sizes",
       [](LocalComm& comm, void* p, Stream& s) {
         comm.all_reduce(p, p, comm.rank() == 2 ? 5 : 4, DType::f32, s);
       },
       {"rank 0 calls all_reduce of 4 x f32", "rank 2 calls all_reduce of 5 x f32"}},
      {"types",
       [](LocalComm& comm, void* p, Stream& s) {
         comm.all_reduce(p, p, 4, comm.rank() == 1 ? DType::bf16 : DType::f16, s);
       },
       {"rank 0 calls all_reduce of 4 x f16", "rank 1 calls all_reduce of 4 x bf16"}},
      {"operations",
       [](LocalComm& comm, void* p, Stream& s) {
         if (comm.rank() == 1) {
           comm.barrier(s);
         } else {
           comm.broadcast(p, 0, 0, s);
         }
       },
       {"rank 0 calls broadcast of 0 bytes", "rank 1 calls barrier"}},
      {"roots",
       [](LocalComm& comm, void* p, Stream& s) { comm.broadcast(p, 4, comm.rank() == 2 ? 1 : 0, s); },
       {"broadcast of 4 bytes from group rank 0", "rank 2 calls broadcast of 4 bytes from group rank 1"}},
      {"counts of a pair",
       [](LocalComm& comm, void* p, Stream& s) {
         const std::vector<std::int64_t> send(3, 2);
         std::vector<std::int64_t> recv(3, 2);
         if (comm.rank() == 1) recv[2] = 3;
         comm.all_to_all_v(p, send, p, recv, s);
       },
       {"rank 2 sends 2 bytes to rank 1, which expects 3"}},
  };
  for (const Row& row : rows) {
    DYNAMIC_SECTION(row.name) {
      const RankOutcomes outcomes = run_failing(3, [&](LocalComm& comm) {
        Stream stream;
        std::vector<float> data(64);
        row.call(comm, data.data(), stream);
        stream.synchronize();
      });
      for (int rank = 0; rank < 3; ++rank) {
        CAPTURE(rank);
        CHECK(outcomes.code(rank) == ErrorCode::invalid_argument);
        for (const std::string& part : row.parts) CHECK_THAT(outcomes.message(rank), ContainsSubstring(part));
      }
    }
  }
}

TEST_CASE("a message of another size than expected is an error on both sides") {
  const RankOutcomes outcomes = run_failing(2, [](LocalComm& comm) {
    Stream stream;
    std::array<char, 16> data{};
    if (comm.rank() == 0) {
      comm.send(data.data(), 8, 1, stream);
    } else {
      comm.recv(data.data(), 9, 0, stream);
    }
    stream.synchronize();
  });
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(outcomes.code(rank) == ErrorCode::invalid_argument);
    CHECK_THAT(outcomes.message(rank),
               ContainsSubstring("send of 8 bytes") && ContainsSubstring("recv of 9 bytes"));
  }
}

TEST_CASE("a rank that never arrives is named by the timeout, and the group is over") {
  const auto begin = std::chrono::steady_clock::now();
  const RankOutcomes outcomes = run_failing(
      4,
      [](LocalComm& comm) {
        Stream stream;
        float value = 1;
        if (comm.rank() == 2) {
          std::this_thread::sleep_for(1000ms);  // arrives late and finds the group aborted
        }
        comm.all_reduce(&value, &value, 1, DType::f32, stream);
        stream.synchronize();
      },
      400ms);
  CHECK(std::chrono::steady_clock::now() - begin < 20s);
  for (const int rank : {0, 1, 3}) {
    CAPTURE(rank);
    CHECK(outcomes.code(rank) == ErrorCode::timeout);
    CHECK_THAT(outcomes.message(rank),
               ContainsSubstring("all_reduce: rank 2 did not arrive within 0.4 s; rank"));
  }
  CHECK(outcomes.code(2) == ErrorCode::peer_failed);
  CHECK_THAT(outcomes.message(2), ContainsSubstring("rank 2 did not arrive"));
}

TEST_CASE("ranks of a part are named by their numbers in the whole") {
  const RankOutcomes outcomes = run_failing(
      4,
      [](LocalComm& comm) {
        LocalComm part = comm.split(comm.rank() % 2, comm.rank());
        Stream stream;
        if (comm.rank() != 3) part.barrier(stream);
        stream.synchronize();
        if (comm.rank() == 3) std::this_thread::sleep_for(1000ms);
      },
      400ms);
  CHECK(outcomes.message(0).empty());
  CHECK(outcomes.message(2).empty());
  CHECK(outcomes.code(1) == ErrorCode::timeout);
  CHECK_THAT(outcomes.message(1), ContainsSubstring("barrier: rank 3 did not arrive"));
}

TEST_CASE("a send without its recv, a recv without its send and a split without a rank time out") {
  const RankOutcomes send = run_failing(
      2,
      [](LocalComm& comm) {
        Stream stream;
        char byte = 0;
        if (comm.rank() == 0) comm.send(&byte, 1, 1, stream);
        stream.synchronize();
      },
      400ms);
  CHECK(send.code(0) == ErrorCode::timeout);
  CHECK_THAT(send.message(0), ContainsSubstring("send: rank 1 did not arrive"));
  const RankOutcomes recv = run_failing(
      2,
      [](LocalComm& comm) {
        Stream stream;
        char byte = 0;
        if (comm.rank() == 0) comm.recv(&byte, 1, 1, stream);
        stream.synchronize();
      },
      400ms);
  CHECK(recv.code(0) == ErrorCode::timeout);
  CHECK_THAT(recv.message(0), ContainsSubstring("recv: rank 1 did not arrive"));
  const RankOutcomes split = run_failing(
      3,
      [](LocalComm& comm) {
        if (comm.rank() > 0) comm.split(0, 0);
      },
      400ms);
  CHECK(split.message(0).empty());
  CHECK(split.code(1).has_value());
  CHECK(split.code(2).has_value());
  CHECK_THAT(split.message(1), ContainsSubstring("split: rank 0 did not arrive"));
}

TEST_CASE("an abort wakes every waiting rank of the group, its parts and its parents, and ends later calls") {
  std::atomic<bool> later_call_failed = true;
  const auto begin = std::chrono::steady_clock::now();
  const RankOutcomes outcomes = run_failing(6, [&](LocalComm& comm) {
    LocalComm part = comm.split(comm.rank() % 2, comm.rank());
    Stream stream;
    char byte = 0;
    switch (comm.rank()) {
      case 0:
        comm.barrier(stream);
        break;  // waits in the whole group
      case 1:
        part.barrier(stream);
        break;  // waits in its part
      case 2:
        comm.split(0, 0);
        break;  // waits on the host
      case 3:
        comm.recv(&byte, 1, 4, stream);
        break;
      case 4: {
        std::this_thread::sleep_for(50ms);
        part.abort("disk on fire");
        part.abort("the second reason is dropped");
        comm.abort("and the third");
        break;
      }
      case 5:
        part.send(&byte, 1, 1, stream);
        break;  // rank 1 of the part is rank 3
    }
    try {
      stream.synchronize();
    } catch (...) {
      try {
        Stream fresh;
        comm.barrier(fresh);
        fresh.synchronize();
        later_call_failed = false;
      } catch (const Error& error) {
        if (error.code() != ErrorCode::peer_failed) later_call_failed = false;
      }
      throw;
    }
  });
  CHECK(std::chrono::steady_clock::now() - begin < 15s);
  for (const int rank : {0, 1, 2, 3, 5}) {
    CAPTURE(rank);
    CHECK(outcomes.code(rank) == ErrorCode::peer_failed);
    CHECK(outcomes.message(rank) == "rank 4 failed: disk on fire");
  }
  CHECK(outcomes.message(4).empty());
  CHECK(later_call_failed);
}

TEST_CASE("an abort in one group leaves other groups alone, and reaches a part of one rank") {
  std::vector<LocalComm> first = LocalComm::create_group(1);
  std::vector<LocalComm> second = LocalComm::create_group(1);
  LocalComm part = first[0].split(0, 0);
  first[0].abort("over");
  Stream stream;
  second[0].barrier(stream);
  stream.synchronize();
  float value = 1;
  part.all_reduce(&value, &value, 1, DType::f32, stream);
  CHECK_THROWS_WITH(stream.synchronize(), "rank 0 failed: over");
}

TEST_CASE("a failing stream keeps its own error and its ranks learn of it through the handler") {
  const RankOutcomes outcomes = run_failing(3, [](LocalComm& comm) {
    Stream stream;
    stream.on_failure([comm](std::exception_ptr failure) mutable {
      try {
        std::rethrow_exception(failure);
      } catch (const std::exception& error) {
        comm.abort(error.what());
      }
    });
    if (comm.rank() == 1) stream.enqueue([] { throw Error(ErrorCode::capacity, "no pages left"); });
    comm.barrier(stream);
    stream.synchronize();
  });
  CHECK(outcomes.message(1) == "no pages left");
  CHECK(outcomes.code(1) == ErrorCode::capacity);
  for (const int rank : {0, 2}) {
    CHECK(outcomes.code(rank) == ErrorCode::peer_failed);
    CHECK(outcomes.message(rank) == "rank 1 failed: no pages left");
  }
}

TEST_CASE("one communicator on two streams at once is refused") {
  const RankOutcomes outcomes = run_failing(2, [](LocalComm& comm) {
    Stream first;
    Stream second;
    if (comm.rank() == 0) {
      comm.barrier(first);
      comm.barrier(second);
      try {
        first.synchronize();
      } catch (const Error&) {
      }
      second.synchronize();
      first.synchronize();
    } else {
      std::this_thread::sleep_for(100ms);
      comm.barrier(first);
      first.synchronize();
    }
  });
  CHECK(outcomes.code(1) == ErrorCode::peer_failed);
  CHECK_THAT(outcomes.message(1), ContainsSubstring("use one stream for each communicator"));
  CHECK(outcomes.code(0).has_value());
}

TEST_CASE("ranks that are stopped together for longer than the timeout go on") {
  const pid_t child = ::fork();
  if (child == 0) {
    const RankOutcomes outcomes = run_failing(
        2,
        [](LocalComm& comm) {
          std::timespec used{};
          while (comm.rank() == 1 && used.tv_sec == 0 && used.tv_nsec < 200'000'000)
            ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);  // what it did not compute before the stop
          Stream stream;
          comm.barrier(stream);
          stream.synchronize();
        },
        1s);
    ::_exit(outcomes.all_messages().empty() ? 0 : 1);
  }
  std::this_thread::sleep_for(100ms);
  ::kill(child, SIGSTOP);
  std::this_thread::sleep_for(1300ms);
  ::kill(child, SIGCONT);
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
}

TEST_CASE("the longest timeout of all waits for a rank that is late") {
  const RankOutcomes outcomes =
      run_ranks(LocalComm::create_group(2, std::chrono::milliseconds::max()), [](LocalComm& comm) {
        Stream stream;
        float value = 1;
        if (comm.rank() == 1) std::this_thread::sleep_for(100ms);
        comm.all_reduce(&value, &value, 1, DType::f32, stream);
        stream.synchronize();
      });
  CHECK(outcomes.all_messages() == "");
}

TEST_CASE("a group has at least one rank and a positive timeout") {
  CHECK_THROWS_AS(LocalComm::create_group(0), Error);
  CHECK_THROWS_AS(LocalComm::create_group(-1), Error);
  CHECK_THROWS_AS(LocalComm::create_group(std::numeric_limits<int>::max()), Error);
  CHECK_THROWS_AS(LocalComm::create_group(2, 0ms), Error);
  const std::vector<LocalComm> group = LocalComm::create_group(3);
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(group[static_cast<std::size_t>(rank)].rank() == rank);
    CHECK(group[static_cast<std::size_t>(rank)].size() == 3);
  }
}

TEST_CASE("the rank runner reports a hang instead of sharing it") {
  CHECK_THROWS_WITH(
      run_ranks(
          2,
          [](LocalComm& comm) {
            Stream stream;
            if (comm.rank() == 1) comm.barrier(stream);
            stream.synchronize();
          },
          1s),
      ContainsSubstring("ranks 1 did not finish within 1000 ms") && ContainsSubstring("the test gave up"));
}
