// SPDX-License-Identifier: Apache-2.0
// One rank of an MPI job: keeps the communicator contract, or fails in the way that its argument names.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <helix/contract/communicator.hpp>
#include <helix/cpu/backend.hpp>
#include <helix/cpu/mpi_comm.hpp>
#include <helix/error.hpp>

using namespace std::chrono_literals;
using helix::DType;
using helix::Error;
using helix::ErrorCode;
using helix::contract::require;
using helix::cpu::MpiComm;
using helix::cpu::MpiSession;
using helix::cpu::Stream;

static_assert(helix::Communicator<MpiComm, MpiComm::Stream>);
static_assert(helix::comm::CollectiveComm<MpiComm>);
static_assert(helix::Backend<helix::cpu::Backend<MpiComm>>);

namespace {

/// The most bytes that MpiComm sends as one MPI message.
constexpr std::int64_t kMessageBytes = 64 << 20;

/// Sums whose slices are longer than the library's eager messages.
void long_sum_row(MpiComm& comm) {
  Stream stream;
  constexpr std::int64_t kCount = 100003;
  std::vector<float> values(kCount);
  std::vector<float> sum(kCount, -1.0f);
  for (std::int64_t i = 0; i < kCount; ++i) {
    values[static_cast<std::size_t>(i)] = static_cast<float>(comm.rank() * 3 + i % 1000);
  }
  comm.all_reduce(values.data(), sum.data(), kCount, DType::f32, stream);
  comm.all_reduce(values.data(), values.data(), kCount, DType::f32, stream);
  stream.synchronize();
  for (std::int64_t i = 0; i < kCount; ++i) {
    const auto expected =
        static_cast<float>(3 * comm.size() * (comm.size() - 1) / 2 + comm.size() * (i % 1000));
    require(sum[static_cast<std::size_t>(i)] == expected, "element ", i, " is ",
            sum[static_cast<std::size_t>(i)], ", expected ", expected);
    require(values[static_cast<std::size_t>(i)] == expected, "element ", i, " in place is wrong");
  }
}

/// Transfers of more than one MPI message, with a last piece of no byte or one.
void long_message_row(MpiComm& comm) {
  if (comm.size() == 1 || comm.rank() > 1) return;
  for (const std::int64_t bytes : {kMessageBytes, kMessageBytes + 1}) {
    Stream stream;
    std::vector<std::uint8_t> data(static_cast<std::size_t>(bytes), 0);
    if (comm.rank() == 0) {
      for (std::int64_t i = 0; i < bytes; ++i)
        data[static_cast<std::size_t>(i)] = helix::contract::pattern(0, 1, i);
      comm.send(data.data(), bytes, 1, stream);
    } else {
      comm.recv(data.data(), bytes, 0, stream);
    }
    stream.synchronize();
    for (std::int64_t i = 0; i < bytes; ++i) {
      require(data[static_cast<std::size_t>(i)] == helix::contract::pattern(0, 1, i), "byte ", i, " of ",
              bytes, " is wrong");
    }
  }
}

/// The group remembers a failure; other groups continue. Every rank detects that the sizes differ.
void size_mismatch_row(MpiComm& comm) {
  if (comm.size() == 1) return;
  MpiComm doomed = comm.split(0, comm.rank());
  Stream stream;
  std::vector<float> data(64, 1.0f);
  doomed.all_gather(data.data(), data.data() + 32, comm.rank() == 0 ? 8 : 4, stream);
  try {
    stream.synchronize();
    require(false, "sizes that differ were not noticed");
  } catch (const Error& error) {
    require(error.code() == ErrorCode::invalid_argument, "unexpected error: ", error.what());
    require(std::strstr(error.what(), "expects") != nullptr, "unexpected message: ", error.what());
  }
  Stream fresh;
  doomed.barrier(fresh);
  try {
    fresh.synchronize();
    require(false, "a failed group went on");
  } catch (const Error& error) {
    require(error.code() == ErrorCode::invalid_argument, "unexpected error: ", error.what());
  }
  Stream healthy;
  comm.barrier(healthy);
  healthy.synchronize();
}

/// Rank 0 broadcasts long transfers of which rank 1 expects fewer or more bytes. A byte that follows must not
/// be taken for what is missing, and nobody waits for what does not come.
void long_size_mismatch_row(MpiComm& comm) {
  if (comm.size() == 1) return;
  struct Row {
    std::int64_t sent;
    std::int64_t expected;
    bool is_followed;
  };
  std::vector<std::uint8_t> data;
  if (comm.rank() <= 1) data.resize(static_cast<std::size_t>(2 * kMessageBytes));
  for (const auto& [sent, expected, is_followed] :
       {Row{2 * kMessageBytes, kMessageBytes, true}, Row{kMessageBytes, 2 * kMessageBytes, false},
        Row{kMessageBytes + 1, kMessageBytes, false}, Row{kMessageBytes, kMessageBytes + 1, true}}) {
    MpiComm doomed = comm.split(comm.rank() <= 1 ? 0 : 1, comm.rank());
    if (comm.rank() <= 1) {
      Stream stream;
      doomed.broadcast(data.data(), comm.rank() == 0 ? sent : expected, 0, stream);
      if (comm.rank() == 0 && is_followed) doomed.broadcast(data.data(), 1, 0, stream);
      try {
        stream.synchronize();
        require(comm.rank() == 0, sent, " bytes were taken for ", expected);
      } catch (const Error& error) {
        require(error.code() == ErrorCode::invalid_argument, "unexpected error: ", error.what());
        const std::string size = std::to_string(expected);
        require(std::strstr(error.what(), size.c_str()) != nullptr, "unexpected message: ", error.what());
      }
    }
    Stream healthy;
    comm.barrier(healthy);
    healthy.synchronize();
  }
}

/// One rank skips one collective: the others name it.
void timeout_row(MpiComm& comm) {
  if (comm.size() == 1) return;
  MpiComm patient(MPI_COMM_WORLD);
  MpiComm hasty(MPI_COMM_WORLD, 500ms);
  const int absent = comm.size() - 1;
  if (comm.rank() != absent) {
    Stream stream;
    float value = 1;
    hasty.all_reduce(&value, &value, 1, DType::f32, stream);
    try {
      stream.synchronize();
      require(false, "a rank was absent, and nobody noticed");
    } catch (const Error& error) {
      require(error.code() == ErrorCode::timeout, "unexpected error: ", error.what());
      const std::string expected =
          "all_reduce: world rank " + std::to_string(absent) + " did not arrive within 0.5 s";
      require(std::strstr(error.what(), expected.c_str()) != nullptr, "unexpected message: ", error.what());
    }
  }
  Stream stream;
  patient.barrier(stream);
  stream.synchronize();
}

int run_contract(MpiSession& session) {
  MpiComm world(MPI_COMM_WORLD);
  auto rows = helix::contract::communicator_contract<MpiComm>();
  rows.push_back({"long sums equal the exact ones", long_sum_row});
  rows.push_back({"long messages go in pieces", long_message_row});
  rows.push_back({"sizes that differ are an error on every rank", size_mismatch_row});
  rows.push_back({"sizes of long messages that differ are an error too", long_size_mismatch_row});
  rows.push_back({"an absent rank is named by the timeout", timeout_row});
  for (const auto& row : rows) {
    const auto begin = std::chrono::steady_clock::now();
    try {
      row.body(world);
    } catch (const std::exception& error) {
      session.abort(std::string(row.name) + ": " + error.what());
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    if (world.rank() == 0)
      std::printf("%d ranks: %s: passed, %.3f s\n", world.size(), row.name, seconds.count());
  }
  return EXIT_SUCCESS;
}

/// Lets one or all ranks of a job of 4 fail in the given way. Every surviving rank waits in a barrier with a
/// timeout of a minute.
void run_failure(MpiSession& session, const std::string& way) {
  MpiComm world(MPI_COMM_WORLD, way == "absent" ? 1000ms : 60000ms);
  Stream stream;
  stream.on_failure([world](std::exception_ptr failure) mutable {
    try {
      std::rethrow_exception(failure);
    } catch (const std::exception& error) {
      world.abort(error.what());
    }
  });
  const bool is_culprit = session.world_rank() == 2;
  if (way == "stream" && is_culprit) stream.enqueue([] { throw std::runtime_error("bad task"); });
  if (way == "throw" && is_culprit) throw std::runtime_error("bad rank");
  if (way == "exit" && is_culprit) std::_Exit(3);
  if (way == "terminate" && is_culprit) std::terminate();
  if (way == "all") throw std::runtime_error("all ranks agree to fail");
  if (way == "absent" && is_culprit) std::this_thread::sleep_for(60s);
  world.barrier(stream);
  stream.synchronize();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "leave") {  // an exception that is caught outside ends the session
    try {
      MpiSession session(&argc, &argv);
      MpiComm world(MPI_COMM_WORLD);
      Stream stream;
      if (session.world_rank() == 2) throw std::runtime_error("leave");
      world.barrier(stream);
      stream.synchronize();
    } catch (const std::exception&) {
    }
    return EXIT_SUCCESS;
  }
  MpiSession session(&argc, &argv);
  try {
    if (argc <= 1) return run_contract(session);
    run_failure(session, argv[1]);
  } catch (const std::exception& error) {
    session.abort(error.what());
  }
  return EXIT_SUCCESS;
}
