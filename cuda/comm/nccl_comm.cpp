// SPDX-License-Identifier: Apache-2.0
// cuda::NcclComm: NCCL calls with checks, bounded waits, and aborts that reach all groups of a root.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <helix/cuda/nccl_comm.hpp>
#include <helix/error.hpp>

#include "comm/collective_arguments.hpp"
#include "cuda/runtime/operators_state.hpp"

namespace helix::cuda {

using comm::expect_buffer;
using comm::expect_buffers;
using comm::expect_peer;
using comm::expect_peer_bytes;
using comm::expect_reduction;
using comm::expect_root;

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Longest that a failure waits for the communicators of its process to be gone. By then each has waited for
/// a call that hangs, and has told its kernels to end.
constexpr milliseconds kAbortGrace{2000};

/// Before NCCL reads its environment, which it does once.
void turn_multicast_off() {
  static std::once_flag once;
  std::call_once(once, [] { (void)::setenv("NCCL_NVLS_ENABLE", "0", 1); });
}

ErrorCode code_of(ncclResult_t result) {
  switch (result) {
    case ncclInvalidArgument:
    case ncclInvalidUsage:
      return ErrorCode::invalid_argument;
    case ncclSystemError:
      return ErrorCode::io;
    case ncclRemoteError:
      return ErrorCode::peer_failed;
    default:
      return ErrorCode::internal;
  }
}

/// `who`: "rank 1 of 4", empty where that is not known.
[[noreturn]] void throw_nccl(ncclResult_t result, std::string_view operation, std::string_view who) {
  const char* detail = ncclGetLastError(nullptr);
  throw Error(code_of(result), "NCCL ", operation, who.empty() ? "" : " on ", who,
              " failed: ", ncclGetErrorString(result), detail == nullptr || *detail == '\0' ? "" : ": ",
              detail == nullptr ? "" : detail);
}

void check_nccl(ncclResult_t result, std::string_view operation, std::string_view who = {}) {
  if (result != ncclSuccess) throw_nccl(result, operation, who);
}

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return ncclFloat16;
    case DType::bf16:
      return ncclBfloat16;
    default:
      return ncclFloat32;
  }
}

std::size_t unsigned_count(std::int64_t count) {
  return static_cast<std::size_t>(count);
}

std::byte* at(void* base, std::int64_t offset) {
  return static_cast<std::byte*>(base) + offset;
}
const std::byte* at(const void* base, std::int64_t offset) {
  return static_cast<const std::byte*>(base) + offset;
}

/// Runs `body`, which may wait for other ranks without bound, on a thread of its own. Past the deadline, or
/// when `give_up()` throws, that thread is left behind; `body` must own all that it uses.
/// Returns whether it finished in time.
template <class Body, class GiveUp>
bool run_bounded(milliseconds timeout, Body body, GiveUp&& give_up) {
  struct Outcome {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_done = false;
    std::exception_ptr failure;
  };
  const auto outcome = std::make_shared<Outcome>();
  std::thread([outcome, body = std::move(body)] {
    std::exception_ptr failure;
    try {
      body();
    } catch (...) {
      failure = std::current_exception();
    }
    const std::lock_guard lock(outcome->mutex);
    outcome->is_done = true;
    outcome->failure = failure;
    outcome->changed.notify_all();
  }).detach();
  const Clock::time_point deadline = Clock::now() + timeout;
  std::unique_lock lock(outcome->mutex);
  while (!outcome->changed.wait_for(lock, milliseconds(20), [&] { return outcome->is_done; })) {
    give_up();
    if (Clock::now() >= deadline) return false;
  }
  if (outcome->failure) std::rethrow_exception(outcome->failure);
  return true;
}

/// What one rank of this process has called so far, to name those that are behind.
struct Progress {
  std::atomic<std::uint64_t> operations = 0;
  std::atomic<const char*> last = "start";
};

/// All groups of one root that live in this process.
struct Family {
  std::mutex mutex;
  std::atomic<bool> has_failed = false;
  ErrorCode code = ErrorCode::internal;
  std::string failure;
  std::vector<std::weak_ptr<NcclComm::State>> members;
  std::vector<Progress> progress;  // by root rank where all ranks are of this process, else empty
  std::optional<comm::Bootstrap> bootstrap;

  void throw_if_failed() {
    if (!has_failed.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(mutex);
    throw Error(ErrorCode::peer_failed, failure);
  }

  void begin(int root_rank, const char* operation) {
    if (bootstrap) bootstrap->begin_operation(operation);
    if (progress.empty()) return;
    Progress& own = progress[static_cast<std::size_t>(root_rank)];
    own.last.store(operation, std::memory_order_relaxed);
    own.operations.fetch_add(1, std::memory_order_relaxed);
  }

  /// "; rank 2 is behind, at its operation 7 (all_reduce)" or nothing.
  std::string laggards(int root_rank) const {
    std::ostringstream text;
    if (progress.empty()) return "";
    const std::uint64_t own =
        progress[static_cast<std::size_t>(root_rank)].operations.load(std::memory_order_relaxed);
    for (std::size_t rank = 0; rank < progress.size(); ++rank) {
      const std::uint64_t operations = progress[rank].operations.load(std::memory_order_relaxed);
      if (operations >= own) continue;
      text << "; rank " << rank << " is behind: its call " << operations << " was "
           << progress[rank].last.load(std::memory_order_relaxed) << ", this rank made " << own;
    }
    return text.str();
  }

  void fail(const std::string& text);
};

}  // namespace

struct NcclComm::State {
  std::shared_ptr<Family> family;
  int rank = 0;
  int size = 1;
  int root_rank = 0;
  int device = 0;
  bool is_owned = true;
  bool may_abort = true;
  milliseconds timeout{0};
  Buffer barrier_value;

  mutable std::timed_mutex calls;  // held by each NCCL call, so that an abort does not free what it uses
  std::atomic<ncclComm_t> comm = nullptr;  // null after an abort
  std::atomic<const char*> operation = "start";

  State(std::shared_ptr<Family> shared_family, ncclComm_t handle, bool owned, bool abortable,
        milliseconds limit)
      : family(std::move(shared_family)),
        is_owned(owned),
        may_abort(abortable),
        timeout(limit),
        comm(handle) {}
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    const ncclComm_t handle = comm.exchange(nullptr);
    if (handle == nullptr || !is_owned) return;
    (void)(family->has_failed ? ncclCommAbort(handle) : ncclCommDestroy(handle));
  }

  /// Asks NCCL who this is. `parent_rank` -1: the root's rank is the group's.
  static std::shared_ptr<State> make(std::shared_ptr<Family> family, ncclComm_t handle, bool owned,
                                     bool abortable, milliseconds limit, int parent_root_rank = -1) {
    auto state = std::make_shared<State>(std::move(family), handle, owned, abortable, limit);
    check_nccl(ncclCommUserRank(handle, &state->rank), "ncclCommUserRank");
    check_nccl(ncclCommCount(handle, &state->size), "ncclCommCount");
    check_nccl(ncclCommCuDevice(handle, &state->device), "ncclCommCuDevice");
    state->root_rank = parent_root_rank < 0 ? state->rank : parent_root_rank;
    const DeviceScope scope(state->device);
    state->barrier_value = Buffer(sizeof(float));
    {
      const std::lock_guard lock(state->family->mutex);
      std::erase_if(state->family->members, [](const auto& member) { return member.expired(); });
      state->family->members.push_back(state);
    }
    return state;
  }

  std::string name() const {
    std::ostringstream text;
    text << "rank " << rank << " of " << size;
    if (root_rank != rank) text << " (" << root_rank << " of the root)";
    return text.str();
  }

  /// Calls body(comm) with the device current; its result is checked.
  template <class Body>
  void call(const char* what, Body&& body) {
    const std::lock_guard lock(calls);
    family->throw_if_failed();
    const ncclComm_t handle = comm.load(std::memory_order_acquire);
    HELIX_EXPECTS(handle != nullptr, ErrorCode::peer_failed, "NCCL ", what, " on ", name(),
                  ": the communicator has been aborted");
    operation.store(what, std::memory_order_relaxed);
    family->begin(root_rank, what);
    const DeviceScope scope(device);
    const ncclResult_t result = body(handle);
    if (result == ncclSuccess) return;
    family->throw_if_failed();  // an abort is the cause, not the result
    throw_nccl(result, what, name());
  }

  /// As call(), for several messages that NCCL is to see as one operation.
  template <class Body>
  void call_group(const char* what, Body&& body) {
    call(what, [&](ncclComm_t handle) {
      if (const ncclResult_t started = ncclGroupStart(); started != ncclSuccess) return started;
      const ncclResult_t result = body(handle);
      const ncclResult_t ended = ncclGroupEnd();  // also after a failure, or the thread stays in the group
      return result != ncclSuccess ? result : ended;
    });
  }

  /// Frees the communicator, which ends what waits on the device. NCCL lets a thread that hangs in a call out
  /// once abort has begun, so such a call is waited for only a while.
  void abort_now() noexcept {
    if (!may_abort) return;
    try {
      ncclComm_t handle = nullptr;
      {
        const std::unique_lock lock(calls, std::chrono::seconds(1));
        handle = comm.exchange(nullptr);
      }
      // Not under the lock: this waits until no graph holds the communicator, and the thread that is to
      // destroy them may be on its way into a call, which then throws.
      if (handle != nullptr) (void)ncclCommAbort(handle);
    } catch (...) {
      // The lock failed: the process is beyond help.
    }
  }

  /// Nothing, or what NCCL found wrong on its own threads.
  std::optional<ncclResult_t> async_error() const {
    const std::unique_lock lock(calls, std::try_to_lock);
    const ncclComm_t handle = lock.owns_lock() ? comm.load(std::memory_order_acquire) : nullptr;
    ncclResult_t result = ncclSuccess;
    if (handle == nullptr || ncclCommGetAsyncError(handle, &result) != ncclSuccess) return std::nullopt;
    if (result == ncclSuccess || result == ncclInProgress) return std::nullopt;
    return result;
  }

  void fail_everywhere(const std::string& reason) {
    std::ostringstream text;
    text << "rank " << root_rank << " failed: " << reason;
    if (family->bootstrap) family->bootstrap->fail(reason);  // its callback comes back to the family
    family->fail(text.str());
  }
};

namespace {

void Family::fail(const std::string& text) {
  std::vector<std::shared_ptr<NcclComm::State>> to_abort;
  {
    const std::lock_guard lock(mutex);
    if (has_failed) return;
    failure = text;
    has_failed.store(true, std::memory_order_release);
    for (const auto& member : members) {
      if (auto state = member.lock()) to_abort.push_back(std::move(state));
    }
  }
  // All at once: the abort of one rank may wait for another of this process. And not forever: it may wait for
  // graphs that the calling thread is to destroy.
  struct Aborts {
    std::mutex mutex;
    std::condition_variable changed;
    std::size_t left = 0;
  };
  const auto aborts = std::make_shared<Aborts>();
  aborts->left = to_abort.size();
  for (auto& state : to_abort) {
    std::thread([aborts, state = std::move(state)]() mutable {
      state->abort_now();
      state.reset();
      const std::lock_guard lock(aborts->mutex);
      if (--aborts->left == 0) aborts->changed.notify_all();
    }).detach();
  }
  std::unique_lock lock(aborts->mutex);
  (void)aborts->changed.wait_for(lock, kAbortGrace, [&] { return aborts->left == 0; });
}

void expect_timeout(milliseconds timeout) {
  HELIX_EXPECTS(timeout.count() > 0, ErrorCode::invalid_argument, "timeout is ", timeout.count(),
                " ms; it must be positive");
}

double seconds(milliseconds time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

void NcclComm::disable_graph_mixing() {
  (void)::setenv("NCCL_GRAPH_MIXING_SUPPORT", "0", 0);
}

NcclComm NcclComm::borrow(ncclComm* comm, bool may_abort, milliseconds timeout) {
  turn_multicast_off();
  expect_timeout(timeout);
  HELIX_EXPECTS(comm != nullptr, ErrorCode::invalid_argument, "NcclComm: the communicator is null");
  return NcclComm(State::make(std::make_shared<Family>(), comm, false, may_abort, timeout));
}

std::vector<NcclComm> NcclComm::create_group(std::span<const int> devices, milliseconds timeout) {
  turn_multicast_off();
  expect_timeout(timeout);
  HELIX_EXPECTS(!devices.empty(), ErrorCode::invalid_argument, "NcclComm: a group needs at least one device");
  for (std::size_t i = 0; i < devices.size(); ++i) {
    HELIX_EXPECTS(std::count(devices.begin(), devices.end(), devices[i]) == 1, ErrorCode::invalid_argument,
                  "NcclComm: device ", devices[i],
                  " is given to two ranks; NCCL needs one GPU each, LocalComm shares one");
    const int count = device_count();
    HELIX_EXPECTS(devices[i] >= 0 && devices[i] < count, ErrorCode::unsupported, "NcclComm: rank ", i,
                  " wants device ", devices[i], "; there are ", count);
  }
  const auto handles = std::make_shared<std::vector<ncclComm_t>>(devices.size());
  const bool is_done = run_bounded(
      timeout,
      [handles, devices = std::vector<int>(devices.begin(), devices.end())] {
        ncclUniqueId id;
        check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
        check_nccl(ncclGroupStart(), "ncclGroupStart");
        ncclResult_t result = ncclSuccess;
        for (std::size_t rank = 0; rank < devices.size() && result == ncclSuccess; ++rank) {
          if (cudaSetDevice(devices[rank]) != cudaSuccess) result = ncclUnhandledCudaError;
          if (result == ncclSuccess)
            result = ncclCommInitRank(&(*handles)[rank], static_cast<int>(devices.size()), id,
                                      static_cast<int>(rank));
        }
        const ncclResult_t ended = ncclGroupEnd();
        check_nccl(result != ncclSuccess ? result : ended, "ncclCommInitRank");
      },
      [] {});
  HELIX_EXPECTS(is_done, ErrorCode::timeout, "NcclComm: ", devices.size(),
                " GPUs of this process did not connect within ", seconds(timeout),
                " s; NCCL_DEBUG=INFO shows why");
  const auto family = std::make_shared<Family>();
  family->progress = std::vector<Progress>(devices.size());
  std::vector<NcclComm> comms;
  for (const ncclComm_t handle : *handles) {
    comms.push_back(NcclComm(State::make(family, handle, true, true, timeout)));
  }
  return comms;
}

NcclComm NcclComm::connect(comm::Bootstrap bootstrap, int device) {
  turn_multicast_off();
  use_device(device);
  ncclUniqueId id{};
  if (bootstrap.rank() == 0) check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId", "rank 0");
  bootstrap.broadcast(std::as_writable_bytes(std::span(id.internal)));
  bootstrap.barrier();  // bounded, and names who is missing; NCCL does neither
  const auto handle = std::make_shared<ncclComm_t>(nullptr);
  const int rank = bootstrap.rank();
  const int size = bootstrap.size();
  const bool is_done = run_bounded(
      bootstrap.timeout(),
      [handle, id, rank, size, device] {
        HELIX_CUDA_CHECK(cudaSetDevice(device));
        std::ostringstream who;
        who << "rank " << rank << " of " << size << ", device " << device;
        check_nccl(ncclCommInitRank(handle.get(), size, id, rank), "ncclCommInitRank", who.str());
      },
      [&] { bootstrap.check(); });
  if (!is_done) {
    std::ostringstream text;
    text << "NCCL did not connect rank " << rank << " of " << size << " within "
         << seconds(bootstrap.timeout()) << " s; NCCL_DEBUG=INFO shows why";
    bootstrap.fail(text.str());
    throw Error(ErrorCode::timeout, text.str());
  }
  const auto family = std::make_shared<Family>();
  family->bootstrap = bootstrap;
  NcclComm comm(State::make(family, *handle, true, true, bootstrap.timeout()));
  bootstrap.on_failure([weak = std::weak_ptr(family)](const Error& error) {
    if (const auto alive = weak.lock()) alive->fail(error.what());
  });
  return comm;
}

int NcclComm::rank() const {
  return state_->rank;
}
int NcclComm::size() const {
  return state_->size;
}

void NcclComm::all_reduce(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
  comm::expect_reduction("all_reduce", in, out, count, dtype);
  state_->call("all_reduce", [&](ncclComm_t comm) {
    if (count == 0) return ncclSuccess;
    return ncclAllReduce(in, out, unsigned_count(count), nccl_type(dtype), ncclSum, comm, stream.handle());
  });
}

void NcclComm::reduce_scatter(const void* in, void* out, std::int64_t count, DType dtype, Stream stream) {
  comm::expect_reduction("reduce_scatter", in, out, count, dtype);
  state_->call("reduce_scatter", [&](ncclComm_t comm) {
    if (count == 0) return ncclSuccess;
    return ncclReduceScatter(in, out, unsigned_count(count), nccl_type(dtype), ncclSum, comm,
                             stream.handle());
  });
}

void NcclComm::all_gather(const void* in, void* out, std::int64_t bytes, Stream stream) {
  comm::expect_buffers("all_gather", in, out, bytes);
  state_->call("all_gather", [&](ncclComm_t comm) {
    if (bytes == 0) return ncclSuccess;
    return ncclAllGather(in, out, unsigned_count(bytes), ncclInt8, comm, stream.handle());
  });
}

void NcclComm::all_to_all(const void* in, void* out, std::int64_t bytes, Stream stream) {
  comm::expect_buffers("all_to_all", in, out, bytes);
  state_->call_group("all_to_all", [&](ncclComm_t comm) {
    // NCCL turns the slice to oneself into a copy of the same kernel.
    ncclResult_t result = ncclSuccess;
    for (int peer = 0; peer < state_->size && bytes > 0 && result == ncclSuccess; ++peer) {
      result = ncclSend(at(in, peer * bytes), unsigned_count(bytes), ncclInt8, peer, comm, stream.handle());
      if (result == ncclSuccess)
        result =
            ncclRecv(at(out, peer * bytes), unsigned_count(bytes), ncclInt8, peer, comm, stream.handle());
    }
    return result;
  });
}

void NcclComm::all_to_all_v(const void* in, std::span<const std::int64_t> send_bytes, void* out,
                            std::span<const std::int64_t> recv_bytes, Stream stream) {
  comm::expect_peer_bytes(in, send_bytes, out, recv_bytes, size());
  const auto own = static_cast<std::size_t>(rank());
  HELIX_EXPECTS(send_bytes[own] == recv_bytes[own], ErrorCode::invalid_argument, "all_to_all_v: rank ", own,
                " sends ", send_bytes[own], " bytes to itself, but expects ", recv_bytes[own]);
  state_->call_group("all_to_all_v", [&](ncclComm_t comm) {
    ncclResult_t result = ncclSuccess;
    std::int64_t send_begin = 0;
    std::int64_t recv_begin = 0;
    for (std::size_t i = 0; i < send_bytes.size() && result == ncclSuccess; ++i) {
      const int peer = static_cast<int>(i);
      if (send_bytes[i] > 0)
        result = ncclSend(at(in, send_begin), unsigned_count(send_bytes[i]), ncclInt8, peer, comm,
                          stream.handle());
      if (recv_bytes[i] > 0 && result == ncclSuccess)
        result = ncclRecv(at(out, recv_begin), unsigned_count(recv_bytes[i]), ncclInt8, peer, comm,
                          stream.handle());
      send_begin += send_bytes[i];
      recv_begin += recv_bytes[i];
    }
    return result;
  });
}

void NcclComm::broadcast(void* buffer, std::int64_t bytes, int root, Stream stream) {
  comm::expect_buffer("broadcast", "buffer", buffer, bytes);
  comm::expect_root("broadcast", root, size());
  state_->call("broadcast", [&](ncclComm_t comm) {
    if (bytes == 0) return ncclSuccess;
    return ncclBroadcast(buffer, buffer, unsigned_count(bytes), ncclInt8, root, comm, stream.handle());
  });
}

void NcclComm::send(const void* buffer, std::int64_t bytes, int peer, Stream stream) {
  comm::expect_buffer("send", "buffer", buffer, bytes);
  comm::expect_peer("send", peer, rank(), size());
  state_->call("send", [&](ncclComm_t comm) {
    if (bytes == 0) return ncclSuccess;
    return ncclSend(buffer, unsigned_count(bytes), ncclInt8, peer, comm, stream.handle());
  });
}

void NcclComm::recv(void* buffer, std::int64_t bytes, int peer, Stream stream) {
  comm::expect_buffer("recv", "buffer", buffer, bytes);
  comm::expect_peer("recv", peer, rank(), size());
  state_->call("recv", [&](ncclComm_t comm) {
    if (bytes == 0) return ncclSuccess;
    return ncclRecv(buffer, unsigned_count(bytes), ncclInt8, peer, comm, stream.handle());
  });
}

void NcclComm::barrier(Stream stream) {
  state_->call("barrier", [&](ncclComm_t comm) {
    void* value = state_->barrier_value.data();
    return ncclAllReduce(value, value, 1, ncclFloat32, ncclSum, comm, stream.handle());
  });
}

NcclComm NcclComm::split(int color, int key) {
  HELIX_EXPECTS(color >= 0, ErrorCode::invalid_argument, "split: color is ", color,
                "; NCCL needs one that is not negative");
  const auto handle = std::make_shared<ncclComm_t>(nullptr);
  const bool is_done = run_bounded(
      state_->timeout,
      [handle, state = state_, color, key] {
        state->call("split",
                    [&](ncclComm_t comm) { return ncclCommSplit(comm, color, key, handle.get(), nullptr); });
      },
      [&] { state_->family->throw_if_failed(); });
  if (!is_done) {
    std::ostringstream text;
    text << "split: some rank did not arrive within " << seconds(state_->timeout) << " s; " << state_->name()
         << " waited" << state_->family->laggards(state_->root_rank);
    state_->fail_everywhere(text.str());
    throw Error(ErrorCode::timeout, text.str());
  }
  return NcclComm(State::make(state_->family, *handle, true, true, state_->timeout, state_->root_rank));
}

void NcclComm::abort(std::string_view reason) noexcept {
  try {
    state_->fail_everywhere(std::string(reason));
  } catch (...) {
    // Out of memory for the message or a thread: the timeouts of the other ranks still end their waits.
  }
}

// A decode step is waited for awake: a thread that sleeps comes late.
constexpr milliseconds kAwake(100);

void NcclComm::synchronize(Stream stream) const {
  State& state = *state_;
  Family& family = *state.family;
  struct Waiting {
    std::optional<comm::Bootstrap>& bootstrap;
    explicit Waiting(std::optional<comm::Bootstrap>& b) : bootstrap(b) {
      if (bootstrap) bootstrap->begin_wait();
    }
    ~Waiting() {
      if (bootstrap) bootstrap->end_wait();
    }
  } waiting(family.bootstrap);
  // The watch of a job learns after the same time who is behind, and says it better than a bare timeout.
  const milliseconds grace = family.bootstrap ? milliseconds(2000) : milliseconds(0);
  const Clock::time_point begin = Clock::now();
  Clock::duration next_look = milliseconds(1);  // at errors and deadlines
  for (;;) {
    const cudaError_t status = cudaStreamQuery(stream.handle());
    family.throw_if_failed();  // an aborted kernel ends as if it had succeeded
    if (status == cudaSuccess) return;
    if (status != cudaErrorNotReady)
      throw_on_error(static_cast<int>(status), "cudaStreamQuery", __FILE__, __LINE__);
    const auto waited = Clock::now() - begin;
    if (waited < next_look) {
      std::this_thread::yield();
      continue;
    }
    next_look = waited + milliseconds(1);
    if (const std::optional<ncclResult_t> error = state.async_error()) {
      std::ostringstream text;
      text << "NCCL reports after " << state.operation.load(std::memory_order_relaxed) << " on "
           << state.name() << ": " << ncclGetErrorString(*error);
      state.fail_everywhere(text.str());
      throw Error(code_of(*error), text.str());
    }
    if (waited >= state.timeout + grace) {
      std::ostringstream text;
      text << state.operation.load(std::memory_order_relaxed) << ": the stream of " << state.name()
           << " did not finish within " << seconds(state.timeout) << " s" << family.laggards(state.root_rank);
      state.fail_everywhere(text.str());
      throw Error(ErrorCode::timeout, text.str());
    }
    if (waited >= kAwake) std::this_thread::sleep_for(milliseconds(1));
  }
}

}  // namespace helix::cuda
