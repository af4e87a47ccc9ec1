// SPDX-License-Identifier: Apache-2.0
// MpiComm: each operation as a task of the stream.
#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include <helix/cpu/mpi_comm.hpp>
#include <helix/error.hpp>

#include "comm/collective_arguments.hpp"
#include "cpu/mpi_group.hpp"
#include "cpu/mpi_watchdog.hpp"

namespace helix::cpu {

using comm::Operation;

MpiComm::MpiComm(MPI_Comm comm, milliseconds timeout) {
  HELIX_EXPECTS(mpi::is_running(), ErrorCode::invalid_argument,
                "MPI is not running; call MPI_Init_thread or create an MpiSession before an MpiComm");
  HELIX_EXPECTS(comm != MPI_COMM_NULL, ErrorCode::invalid_argument,
                "the communicator is MPI_COMM_NULL; pass one that this rank belongs to");
  comm::expect_timeout(timeout);
  int provided = MPI_THREAD_SINGLE;
  mpi::check(MPI_Query_thread(&provided), "MPI_Query_thread");
  HELIX_EXPECTS(provided >= MPI_THREAD_MULTIPLE, ErrorCode::unsupported, "MPI runs at thread level ",
                provided, "; streams need MPI_THREAD_MULTIPLE (", MPI_THREAD_MULTIPLE,
                "): ask MPI_Init_thread for it");
  std::shared_ptr<mpi::Alarm> alarm = mpi::session_alarm();
  if (!alarm) {
    alarm = std::make_shared<mpi::Alarm>();
    alarm->comm = mpi::duplicate(comm, MPI_COMM_NULL, timeout);
  }
  // The alarm's communicator has all of these ranks: it is the world's, or this communicator's.
  MPI_Comm own = mpi::duplicate(comm, alarm->comm, timeout);
  group_ = std::make_shared<Group>(own, timeout, std::move(alarm));
}

int MpiComm::rank() const {
  return group_->rank;
}
int MpiComm::size() const {
  return group_->size;
}

void MpiComm::all_reduce(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
  comm::expect_reduction("all_reduce", in, out, count, dtype);
  stream.enqueue([group = group_, in, out, count, dtype] {
    group->run_collective(Operation::all_reduce, [&] { group->all_reduce(in, out, count, dtype); });
  });
}

void MpiComm::reduce_scatter(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
  comm::expect_reduction("reduce_scatter", in, out, count, dtype);
  stream.enqueue([group = group_, in, out, count, dtype] {
    group->run_collective(Operation::reduce_scatter, [&] {
      group->reduce_slices(Operation::reduce_scatter, in, out, dtype, [&](int r) { return r * count; });
    });
  });
}

void MpiComm::all_gather(const void* in, void* out, std::int64_t bytes, Stream stream) {
  comm::expect_buffers("all_gather", in, out, bytes);
  stream.enqueue([group = group_, in, out, bytes] {
    group->run_collective(Operation::all_gather,
                          [&] { group->all_gather(Operation::all_gather, in, out, bytes); });
  });
}

void MpiComm::all_to_all(const void* in, void* out, std::int64_t bytes, Stream stream) {
  comm::expect_buffers("all_to_all", in, out, bytes);
  stream.enqueue([group = group_, in, out, bytes] {
    const auto equal = [&](int) { return bytes; };
    group->run_collective(Operation::all_to_all, [&] {
      group->exchange(
          Operation::all_to_all, [&](int r) { return static_cast<const std::byte*>(in) + r * bytes; }, equal,
          [&](int r) { return static_cast<std::byte*>(out) + r * bytes; }, equal);
    });
  });
}

void MpiComm::all_to_all_v(const void* in, std::span<const std::int64_t> send_bytes, void* out,
                           std::span<const std::int64_t> recv_bytes, Stream stream) {
  comm::expect_peer_bytes(in, send_bytes, out, recv_bytes, size());
  comm::expect_own_bytes(send_bytes, recv_bytes, rank());
  stream.enqueue([group = group_, in, out, counts = comm::PeerBytes(send_bytes, recv_bytes)] {
    const auto offset = [](const std::int64_t* bytes, int r) {
      return std::accumulate(bytes, bytes + r, std::int64_t{0});
    };
    group->run_collective(Operation::all_to_all_v, [&] {
      group->exchange(
          Operation::all_to_all_v,
          [&](int r) { return static_cast<const std::byte*>(in) + offset(counts.send(), r); },
          [&](int r) { return counts.send()[r]; },
          [&](int r) { return static_cast<std::byte*>(out) + offset(counts.recv(), r); },
          [&](int r) { return counts.recv()[r]; });
    });
  });
}

void MpiComm::broadcast(void* buffer, std::int64_t bytes, int root, Stream stream) {
  comm::expect_buffer("broadcast", "buffer", buffer, bytes);
  comm::expect_root("broadcast", root, size());
  stream.enqueue([group = group_, buffer, bytes, root] {
    group->run_collective(Operation::broadcast, [&] {
      if (group->rank == root) {
        for (int step = 1; step < group->size; ++step) {
          group->post_send(buffer, bytes, (root + step) % group->size, Operation::broadcast);
        }
      } else {
        group->post_recv(buffer, bytes, root, Operation::broadcast);
      }
      group->wait(Operation::broadcast);
    });
  });
}

void MpiComm::send(const void* buffer, std::int64_t bytes, int peer, Stream stream) {
  comm::expect_buffer("send", "buffer", buffer, bytes);
  comm::expect_peer("send", peer, rank(), size());
  stream.enqueue([group = group_, buffer, bytes, peer] {
    group->run([&] {
      group->post_send(buffer, bytes, peer, Operation::send);
      group->wait(Operation::send);
    });
  });
}

void MpiComm::recv(void* buffer, std::int64_t bytes, int peer, Stream stream) {
  comm::expect_buffer("recv", "buffer", buffer, bytes);
  comm::expect_peer("recv", peer, rank(), size());
  stream.enqueue([group = group_, buffer, bytes, peer] {
    group->run([&] {
      group->post_recv(buffer, bytes, peer, Operation::recv);
      group->wait(Operation::recv);
    });
  });
}

void MpiComm::barrier(Stream stream) {
  // Empty messages between all pairs, not MPI_Ibarrier: a timeout can then name the missing ranks.
  stream.enqueue([group = group_] {
    const auto none = [](int) { return std::int64_t{0}; };
    group->run_collective(Operation::barrier, [&] {
      group->exchange(
          Operation::barrier, [](int) { return static_cast<const std::byte*>(nullptr); }, none,
          [](int) { return static_cast<std::byte*>(nullptr); }, none);
    });
  });
}

MpiComm MpiComm::split(int color, int key) {
  std::shared_ptr<Group> part;
  group_->run_collective(Operation::split, [&] {
    // The bounded gather shows that all ranks are here, so MPI_Comm_split, which waits without bound, waits
    // only if a rank stops just then. It also maps any colors to the non-negative ones that MPI requires.
    std::vector<int> colors(static_cast<std::size_t>(size()));
    group_->all_gather(Operation::split, &color, colors.data(), sizeof(int));
    std::sort(colors.begin(), colors.end());
    const int index =
        static_cast<int>(std::lower_bound(colors.begin(), colors.end(), color) - colors.begin());
    MPI_Comm comm = MPI_COMM_NULL;
    {
      const mpi::Watchdog bound(
          group_->timeout,
          message({"world rank ", group_->name(rank()), " has waited in MPI_Comm_split for ",
                   comm::seconds(group_->timeout), " s for ranks that had come and have stopped since"}));
      mpi::check(MPI_Comm_split(group_->comm, index, key, &comm), "MPI_Comm_split");
    }
    mpi::check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    part = std::make_shared<Group>(comm, group_->timeout, group_->alarm);
  });
  return MpiComm(std::move(part));
}

void MpiComm::abort(std::string_view reason) noexcept {
  group_->alarm->raise(reason);
}

void MpiComm::before_abort(std::function<void(std::string_view)> last_words) {
  const std::lock_guard lock(group_->alarm->speaking);
  group_->alarm->last_words = std::move(last_words);
}

}  // namespace helix::cpu
