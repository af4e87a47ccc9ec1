// SPDX-License-Identifier: Apache-2.0
// MpiComm: every collective as nonblocking messages between pairs, polled up to a deadline.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <helix/cpu/mpi_comm.hpp>
#include <helix/error.hpp>

#include "comm/collective_arguments.hpp"
#include "comm/reduce.hpp"

namespace helix::cpu {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// MPI counts are int. Larger transfers go in pieces of this size, which the MPI library pipelines in smaller
// ones anyway.
constexpr std::int64_t kMessageBytes = 64 << 20;
constexpr int kAlarmTag = 1;

/// Distinct tags keep different operations from pairing up with each other: such a mistake is a timeout, not
/// wrong data.
enum class Operation : int {
  all_reduce = 2,
  reduce_scatter,
  all_gather,
  all_to_all,
  all_to_all_v,
  broadcast,
  message,
  barrier,
  split
};

std::string_view to_string(Operation operation) {
  switch (operation) {
    case Operation::all_reduce:
      return "all_reduce";
    case Operation::reduce_scatter:
      return "reduce_scatter";
    case Operation::all_gather:
      return "all_gather";
    case Operation::all_to_all:
      return "all_to_all";
    case Operation::all_to_all_v:
      return "all_to_all_v";
    case Operation::broadcast:
      return "broadcast";
    case Operation::message:
      return "send/recv";
    case Operation::barrier:
      return "barrier";
    case Operation::split:
      return "split";
  }
  return "unknown";
}

std::string mpi_message(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) return "MPI error " + std::to_string(code);
  return std::string(text.data(), static_cast<std::size_t>(length));
}

void check(int code, std::string_view call) {
  if (code != MPI_SUCCESS) throw Error(ErrorCode::io, call, " failed: ", mpi_message(code));
}

bool is_running() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

/// Polls `done` until it holds or the deadline is past; returns whether it held.
template <class Done>
bool poll_until(Clock::time_point deadline, Done&& done) {
  // Ranks may outnumber cores: yield from the first poll on, and sleep when the peer is clearly busy with its
  // own work.
  for (int poll = 0;; ++poll) {
    if (done()) return true;
    if (poll < 200) {
      std::this_thread::yield();
    } else {
      if (Clock::now() >= deadline) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(poll < 2000 ? 20 : 200));
    }
  }
}

/// Where ranks that abort learn of each other. Shared by a group and all groups split from it, or, if the
/// application has an MpiSession, by all groups.
struct Alarm {
  MPI_Comm comm = MPI_COMM_NULL;

  Alarm() = default;
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;
  ~Alarm() {
    if (comm != MPI_COMM_NULL && is_running()) MPI_Comm_free(&comm);
  }

  /// Ends the job. Of the ranks that abort at about the same time the lowest one speaks: each tells the
  /// higher ones, then listens a while. Returns only if this process is ending already.
  void raise(std::string_view reason) noexcept {
    static std::atomic<bool> is_raised = false;  // several groups and threads of this process
    if (is_raised.exchange(true) || !is_running()) return;
    int rank = 0;
    int size = 1;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    for (int peer = rank + 1; peer < size; ++peer) {
      MPI_Request request = MPI_REQUEST_NULL;
      if (MPI_Isend(nullptr, 0, MPI_BYTE, peer, kAlarmTag, comm, &request) == MPI_SUCCESS)
        MPI_Request_free(&request);
    }
    int is_silent = 0;
    const Clock::time_point deadline = Clock::now() + milliseconds(100);
    while (rank > 0 && is_silent == 0 && Clock::now() < deadline) {
      MPI_Iprobe(MPI_ANY_SOURCE, kAlarmTag, comm, &is_silent, MPI_STATUS_IGNORE);
      std::this_thread::sleep_for(milliseconds(1));
    }
    if (is_silent == 0) {
      std::fprintf(stderr, "helix: world rank %d failed: %.*s\n", world_rank(),
                   static_cast<int>(reason.size()), reason.data());
      std::fflush(stderr);
    } else {
      std::this_thread::sleep_for(std::chrono::seconds(2));  // the lower rank ends this process too
    }
    MPI_Abort(comm, EXIT_FAILURE);
    std::_Exit(EXIT_FAILURE);  // MPI_Abort only promises to do its best
  }
};

std::shared_ptr<Alarm>& session_alarm() {
  static std::shared_ptr<Alarm> alarm;
  return alarm;
}

/// Duplicates `comm`, collective, bounded.
MPI_Comm duplicate(MPI_Comm comm, milliseconds timeout) {
  MPI_Comm copy = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Comm_idup(comm, &copy, &request), "MPI_Comm_idup");
  const bool is_done = poll_until(Clock::now() + timeout, [&] {
    int flag = 0;
    check(MPI_Test(&request, &flag, MPI_STATUS_IGNORE), "MPI_Test");
    return flag != 0;
  });
  HELIX_EXPECTS(is_done, ErrorCode::timeout, "MpiComm: some rank of the communicator did not arrive within ",
                std::chrono::duration<double>(timeout).count(), " s; all of its ranks must construct one");
  check(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return copy;
}

/// What one thread has posted and not yet waited for. Kept by thread, so that operations do not allocate each
/// time.
struct Posted {
  struct Message {
    int peer;
    bool is_recv;
    std::int64_t bytes;
  };
  std::vector<MPI_Request> requests;
  std::vector<Message> messages;  // what each request is for
  std::vector<MPI_Status> statuses;

  void clear() {
    requests.clear();
    messages.clear();
  }
};
thread_local Posted posted;

}  // namespace

MpiSession::MpiSession(int* argc, char*** argv) : exceptions_(std::uncaught_exceptions()) {
  int provided = MPI_THREAD_SINGLE;
  check(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
  if (provided < MPI_THREAD_MULTIPLE) {
    MPI_Finalize();
    throw Error(ErrorCode::unsupported, "the MPI library provides thread level ", provided,
                "; MPI_THREAD_MULTIPLE (", MPI_THREAD_MULTIPLE,
                ") is needed: use a build of MPI with thread support");
  }
  auto alarm = std::make_shared<Alarm>();
  alarm->comm = duplicate(MPI_COMM_WORLD, std::chrono::seconds(60));
  session_alarm() = std::move(alarm);
}

MpiSession::~MpiSession() {
  if (!is_running()) return;
  if (std::uncaught_exceptions() > exceptions_) abort("an exception left main()");
  session_alarm().reset();
  MPI_Finalize();
}

int MpiSession::world_rank() const {
  return cpu::world_rank();
}

int MpiSession::world_size() const {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

void MpiSession::abort(std::string_view reason) noexcept {
  session_alarm()->raise(reason);
  // A stream of this process was faster and is about to end it.
  std::this_thread::sleep_for(std::chrono::seconds(5));
  std::_Exit(EXIT_FAILURE);
}

struct MpiComm::Group {
  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0;
  int size = 1;
  std::vector<int> world_ranks;  // of each member, for messages
  milliseconds timeout{0};
  std::shared_ptr<Alarm> alarm;

  std::mutex in_use;               // held by the collective that runs
  std::vector<std::byte> scratch;  // other ranks' terms of a sum; grows to the largest

  std::mutex failure_mutex;
  std::atomic<bool> has_failed = false;
  ErrorCode failure_code = ErrorCode::internal;
  std::string failure;

  /// Takes over `own`.
  Group(MPI_Comm own, milliseconds limit, std::shared_ptr<Alarm> shared_alarm)
      : comm(own), timeout(limit), alarm(std::move(shared_alarm)) {
    check(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
    check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
    world_ranks.resize(static_cast<std::size_t>(size));
    std::vector<int> ranks(world_ranks.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    MPI_Group members = MPI_GROUP_NULL;
    MPI_Group world = MPI_GROUP_NULL;
    check(MPI_Comm_group(comm, &members), "MPI_Comm_group");
    check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
    check(MPI_Group_translate_ranks(members, size, ranks.data(), world, world_ranks.data()),
          "MPI_Group_translate_ranks");
    MPI_Group_free(&members);
    MPI_Group_free(&world);
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() {
    if (is_running()) MPI_Comm_free(&comm);
  }

  int name(int peer) const { return world_ranks[static_cast<std::size_t>(peer)]; }

  void check_alive() {
    if (!has_failed.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(failure_mutex);
    throw Error(failure_code, failure);
  }

  /// Runs `body`; the first failure is remembered for all later calls.
  template <class Body>
  void run(Body&& body) {
    check_alive();
    posted.clear();
    try {
      body();
    } catch (const Error& error) {
      const std::lock_guard lock(failure_mutex);
      if (!has_failed) {
        failure_code = error.code();
        failure = error.what();
        has_failed.store(true, std::memory_order_release);
      }
      throw;
    }
  }

  /// As run(), for operations of all ranks, of which only one may be under way.
  template <class Body>
  void run_collective(Operation operation, Body&& body) {
    run([&] {
      const std::unique_lock lock(in_use, std::try_to_lock);
      HELIX_EXPECTS(lock.owns_lock(), ErrorCode::invalid_argument, to_string(operation), ": world rank ",
                    name(rank),
                    " called it while another collective of the group was running; use one stream for each "
                    "communicator, or order the streams by events");
      body();
    });
  }

  /// Calls post(begin, bytes) for each message; an empty transfer is one too, so that differing sizes are
  /// noticed.
  template <class Post>
  static void in_messages(std::int64_t bytes, Post&& post) {
    std::int64_t begin = 0;
    do {
      const std::int64_t piece = std::min(bytes - begin, kMessageBytes);
      post(begin, static_cast<int>(piece));
      begin += piece;
    } while (begin < bytes);
  }

  void post_send(const void* buffer, std::int64_t bytes, int peer, Operation operation) {
    in_messages(bytes, [&](std::int64_t begin, int piece) {
      MPI_Request request = MPI_REQUEST_NULL;
      const std::byte* source = buffer == nullptr ? nullptr : static_cast<const std::byte*>(buffer) + begin;
      check(MPI_Isend(source, piece, MPI_BYTE, peer, static_cast<int>(operation), comm, &request),
            "MPI_Isend");
      posted.requests.push_back(request);
      posted.messages.push_back({peer, false, piece});
    });
  }

  void post_recv(void* buffer, std::int64_t bytes, int peer, Operation operation) {
    in_messages(bytes, [&](std::int64_t begin, int piece) {
      MPI_Request request = MPI_REQUEST_NULL;
      std::byte* target = buffer == nullptr ? nullptr : static_cast<std::byte*>(buffer) + begin;
      check(MPI_Irecv(target, piece, MPI_BYTE, peer, static_cast<int>(operation), comm, &request),
            "MPI_Irecv");
      posted.requests.push_back(request);
      posted.messages.push_back({peer, true, piece});
    });
  }

  /// Waits for all that this thread posted.
  void wait(Operation operation) {
    posted.statuses.resize(posted.requests.size());
    int result = MPI_SUCCESS;
    const bool is_done = poll_until(Clock::now() + timeout, [&] {
      int flag = 0;
      result = MPI_Testall(static_cast<int>(posted.requests.size()), posted.requests.data(), &flag,
                           posted.statuses.data());
      return flag != 0 || result != MPI_SUCCESS;
    });
    if (!is_done) give_up(operation);
    for (std::size_t i = 0; i < posted.messages.size(); ++i) {
      check_message(operation, posted.messages[i], posted.statuses[i],
                    result == MPI_ERR_IN_STATUS ? posted.statuses[i].MPI_ERROR : result);
    }
    posted.clear();
  }

  void check_message(Operation operation, const Posted::Message& message, const MPI_Status& status,
                     int code) const {
    int error_class = MPI_SUCCESS;
    MPI_Error_class(code, &error_class);
    if (error_class == MPI_ERR_PENDING) return;  // the error is another message's
    HELIX_EXPECTS(error_class != MPI_ERR_TRUNCATE, ErrorCode::invalid_argument, to_string(operation),
                  ": world rank ", name(message.peer), " sent more than the ", message.bytes,
                  " bytes that world rank ", name(rank), " expects; all must call with the same sizes");
    HELIX_EXPECTS(error_class == MPI_SUCCESS, ErrorCode::peer_failed, to_string(operation),
                  " with world rank ", name(message.peer), " failed: ", mpi_message(code));
    if (!message.is_recv) return;
    int received = 0;
    MPI_Get_count(&status, MPI_BYTE, &received);
    HELIX_EXPECTS(received == message.bytes, ErrorCode::invalid_argument, to_string(operation),
                  ": world rank ", name(message.peer), " sent ", received, " bytes, world rank ", name(rank),
                  " expects ", message.bytes, "; all must call with the same sizes");
  }

  [[noreturn]] void give_up(Operation operation) {
    std::vector<int> missing;
    for (std::size_t i = 0; i < posted.requests.size(); ++i) {
      MPI_Request& request = posted.requests[i];
      if (request == MPI_REQUEST_NULL) continue;
      int is_complete = 0;
      MPI_Request_get_status(request, &is_complete, MPI_STATUS_IGNORE);
      if (is_complete == 0) missing.push_back(name(posted.messages[i].peer));
      if (is_complete == 0 && posted.messages[i].is_recv) MPI_Cancel(&request);
      MPI_Request_free(&request);
    }
    std::sort(missing.begin(), missing.end());
    missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
    std::ostringstream names;
    for (std::size_t i = 0; i < missing.size(); ++i) names << (i == 0 ? "" : ", ") << missing[i];
    throw Error(ErrorCode::timeout, to_string(operation), ": world rank", missing.size() == 1 ? " " : "s ",
                names.str(), " did not arrive within ", std::chrono::duration<double>(timeout).count(),
                " s; world rank ", name(rank), " waited");
  }

  std::byte* scratch_of(std::int64_t bytes) {
    if (std::ssize(scratch) < bytes) scratch.resize(static_cast<std::size_t>(bytes));
    return scratch.data();
  }

  /// Sends send_bytes(r) from send(r) to each rank r, and receives recv_bytes(r) from it to recv(r).
  template <class Send, class SendBytes, class Recv, class RecvBytes>
  void exchange(Operation operation, Send&& send, SendBytes&& send_bytes, Recv&& recv,
                RecvBytes&& recv_bytes) {
    HELIX_EXPECTS(send_bytes(rank) == recv_bytes(rank), ErrorCode::invalid_argument, to_string(operation),
                  ": world rank ", name(rank), " sends ", send_bytes(rank), " bytes to itself, but expects ",
                  recv_bytes(rank));
    for (int step = 1; step < size; ++step) {
      const int from = (rank + size - step) % size;
      post_recv(recv(from), recv_bytes(from), from, operation);
    }
    for (int step = 1; step < size; ++step) {
      const int to = (rank + step) % size;
      post_send(send(to), send_bytes(to), to, operation);
    }
    // A rank's own slice may already be in place.
    if (send_bytes(rank) > 0 && send(rank) != recv(rank)) {
      std::memcpy(recv(rank), send(rank), static_cast<std::size_t>(send_bytes(rank)));
    }
    wait(operation);
  }

  void all_gather(Operation operation, const void* in, void* out, std::int64_t bytes) {
    const auto equal = [=](int) { return bytes; };
    exchange(
        operation, [=](int) { return static_cast<const std::byte*>(in); }, equal,
        [=](int r) { return static_cast<std::byte*>(out) + r * bytes; }, equal);
  }

  /// out[i] = sum over r of terms[r][i], in rank order; terms [size, count].
  void sum(const std::byte* terms, void* out, std::int64_t count, DType dtype) const {
    const auto width = static_cast<std::int64_t>(size_bytes(dtype));
    std::array<float, comm::kReduceBlock> total;
    for (std::int64_t begin = 0; begin < count; begin += comm::kReduceBlock) {
      const std::int64_t block = std::min(comm::kReduceBlock, count - begin);
      for (int r = 0; r < size; ++r) {
        comm::add_to_sum(total.data(), terms + (r * count + begin) * width, block, dtype, r == 0);
      }
      comm::store_sum(static_cast<std::byte*>(out) + begin * width, total.data(), block, dtype);
    }
  }

  /// Elements [begin(r), begin(r + 1)) of every rank's `in` go to rank r, which sums them into `out`.
  template <class Begin>
  void reduce_slices(Operation operation, const void* in, void* out, DType dtype, Begin&& begin) {
    const auto width = static_cast<std::int64_t>(size_bytes(dtype));
    const std::int64_t own_count = begin(rank + 1) - begin(rank);
    const std::int64_t own_bytes = own_count * width;
    std::byte* terms = scratch_of(size * own_bytes);
    exchange(
        operation, [&](int r) { return static_cast<const std::byte*>(in) + begin(r) * width; },
        [&](int r) { return (begin(r + 1) - begin(r)) * width; },
        [&](int r) { return terms + r * own_bytes; }, [&](int) { return own_bytes; });
    sum(terms, out, own_count, dtype);
  }

  /// Sums slices, then gathers them. Whole vectors in one round were tried for short sums: within the noise
  /// at 2 and 4 ranks, up to twice as slow at 8.
  void all_reduce(const void* in, void* out, std::int64_t count, DType dtype) {
    const auto width = static_cast<std::int64_t>(size_bytes(dtype));
    const auto begin = [&](int r) { return count * r / size; };
    std::byte* result = static_cast<std::byte*>(out);
    const std::byte* own = result + begin(rank) * width;
    reduce_slices(Operation::all_reduce, in, result + begin(rank) * width, dtype, begin);
    exchange(
        Operation::all_reduce, [&](int) { return own; },
        [&](int) { return (begin(rank + 1) - begin(rank)) * width; },
        [&](int r) { return result + begin(r) * width; },
        [&](int r) { return (begin(r + 1) - begin(r)) * width; });
  }
};

MpiComm::MpiComm(MPI_Comm comm, milliseconds timeout) {
  HELIX_EXPECTS(is_running(), ErrorCode::invalid_argument,
                "MPI is not running; call MPI_Init_thread or create an MpiSession before an MpiComm");
  HELIX_EXPECTS(comm != MPI_COMM_NULL, ErrorCode::invalid_argument,
                "the communicator is MPI_COMM_NULL; pass one that this rank belongs to");
  HELIX_EXPECTS(timeout.count() > 0, ErrorCode::invalid_argument, "timeout is ", timeout.count(),
                " ms; it must be positive");
  int provided = MPI_THREAD_SINGLE;
  check(MPI_Query_thread(&provided), "MPI_Query_thread");
  HELIX_EXPECTS(provided >= MPI_THREAD_MULTIPLE, ErrorCode::unsupported, "MPI runs at thread level ",
                provided, "; streams need MPI_THREAD_MULTIPLE (", MPI_THREAD_MULTIPLE,
                "): ask MPI_Init_thread for it");
  std::shared_ptr<Alarm> alarm = session_alarm();
  if (!alarm) {
    alarm = std::make_shared<Alarm>();
    alarm->comm = duplicate(comm, timeout);
  }
  group_ = std::make_shared<Group>(duplicate(comm, timeout), timeout, std::move(alarm));
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
      group->post_send(buffer, bytes, peer, Operation::message);
      group->wait(Operation::message);
    });
  });
}

void MpiComm::recv(void* buffer, std::int64_t bytes, int peer, Stream stream) {
  comm::expect_buffer("recv", "buffer", buffer, bytes);
  comm::expect_peer("recv", peer, rank(), size());
  stream.enqueue([group = group_, buffer, bytes, peer] {
    group->run([&] {
      group->post_recv(buffer, bytes, peer, Operation::message);
      group->wait(Operation::message);
    });
  });
}

void MpiComm::barrier(Stream stream) {
  // Empty messages between all pairs rather than MPI_Ibarrier: a timeout can then name who is missing.
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
    // The bounded gather shows that everybody is here, so that MPI_Comm_split, which waits without bound,
    // does not wait. It also turns any colors into the non-negative ones that MPI takes.
    std::vector<int> colors(static_cast<std::size_t>(size()));
    group_->all_gather(Operation::split, &color, colors.data(), sizeof(int));
    std::sort(colors.begin(), colors.end());
    const int index =
        static_cast<int>(std::lower_bound(colors.begin(), colors.end(), color) - colors.begin());
    MPI_Comm comm = MPI_COMM_NULL;
    check(MPI_Comm_split(group_->comm, index, key, &comm), "MPI_Comm_split");
    check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    part = std::make_shared<Group>(comm, group_->timeout, group_->alarm);
  });
  return MpiComm(std::move(part));
}

void MpiComm::abort(std::string_view reason) noexcept {
  group_->alarm->raise(reason);
}

}  // namespace helix::cpu
