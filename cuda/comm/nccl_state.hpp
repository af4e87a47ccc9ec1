// SPDX-License-Identifier: Apache-2.0
// The state of a NcclComm: its communicator, and what all groups of its root share.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <nccl.h>

#include <helix/comm/bootstrap.hpp>
#include <helix/cuda/nccl_comm.hpp>
#include <helix/cuda/runtime.hpp>
#include <helix/error.hpp>

#include "comm/timeout.hpp"
#include "cuda/comm/fail_everywhere.hpp"
#include "cuda/comm/nccl_calls.hpp"
#include "cuda/comm/rank_progress.hpp"
#include "cuda/runtime/device_scope.hpp"

namespace helix::cuda {

using comm::Clock;
using comm::milliseconds;

/// After an error of NCCL, how long to wait for the watch to notice that a peer's connection has closed.
inline constexpr milliseconds kClosedGrace{300};

/// All groups of one root that live in this process, and a thread that bounds their calls: NCCL connects to a
/// peer in the first call that needs it, and waits on the host until the peer calls too.
struct NcclFamily {
  std::mutex mutex;
  std::atomic<bool> has_failed = false;
  std::string failure;
  std::vector<std::weak_ptr<NcclComm::State>> members;
  std::vector<RankProgress> progress;  // by root rank; empty unless this process has all ranks
  std::optional<comm::Bootstrap> bootstrap;

  /// Makes a family without members and starts its thread. @throws Error(capacity) if that cannot be started.
  static std::shared_ptr<NcclFamily> make();
  NcclFamily() = default;
  NcclFamily(const NcclFamily&) = delete;
  NcclFamily& operator=(const NcclFamily&) = delete;
  ~NcclFamily();

  /// Aborts all members, waiting for a bounded time only. The first failure wins.
  void fail(const std::string& text) noexcept;
  void throw_if_failed();

  /// Records the call that a rank makes next.
  void begin(int root_rank, const char* operation);
  /// Records that the call of `member` has ended, and withdraws the report that it waits.
  void end_call(NcclComm::State& member);
  /// Records that a rank has queued a step.
  void end_step(int root_rank);
  /// "; rank 2 is behind: its call 7 was all_reduce, this rank made 8" or nothing.
  std::string laggards(int root_rank) const;

 private:
  struct CallWatch;

  /// Fails the family if a call of a member has outlasted its timeout.
  void check_calls();
  /// Tells the bootstrap that `member` waits, unless the call that began at `since` has ended.
  void report_call(const NcclComm::State& member, Clock::rep since);
  /// "; rank 0 made 8 calls, the last all_reduce, ..." or nothing.
  std::string places() const;

  std::shared_ptr<CallWatch> watch_;
  std::mutex reporting_;
  const NcclComm::State* reported_ = nullptr;  // the member whose call was reported as a wait
  std::uint64_t reported_wait_ = 0;            // the number of that wait
};

/// Frees a communicator without waiting for its other ranks. One borrowed from an engine is left alone.
struct NcclAbort {
  bool is_owned = true;

  void operator()(ncclComm_t comm) const noexcept {
    if (is_owned) (void)ncclCommAbort(comm);
  }
};

/// A communicator that has no NcclComm::State yet.
using NcclHandle = std::unique_ptr<ncclComm, NcclAbort>;

/// The places where NCCL writes the communicators that it makes. Aborts those that were not taken.
class NcclHandles {
 public:
  explicit NcclHandles(std::size_t count) : handles_(count, nullptr) {}
  NcclHandles(const NcclHandles&) = delete;
  NcclHandles& operator=(const NcclHandles&) = delete;
  ~NcclHandles() {
    for (std::size_t i = 0; i < handles_.size(); ++i) (void)take(i);
  }

  std::size_t size() const { return handles_.size(); }
  ncclComm_t* place(std::size_t i) { return &handles_[i]; }
  NcclHandle take(std::size_t i) { return NcclHandle(std::exchange(handles_[i], nullptr)); }

 private:
  std::vector<ncclComm_t> handles_;
};

struct NcclComm::State {
  /// Arguments from which a State is made.
  struct Origin {
    std::shared_ptr<NcclFamily> family;
    NcclHandle handle;
    milliseconds timeout{0};
    bool may_abort = true;
    int parent_root_rank = -1;  // -1: a root, whose ranks are root ranks
  };

  std::shared_ptr<NcclFamily> family;
  int rank = 0;
  int size = 1;
  int root_rank = 0;
  int device = 0;
  bool is_owned = true;
  bool may_abort = true;
  milliseconds timeout{0};
  Buffer barrier_value;

  mutable std::timed_mutex calls;  // held during each NCCL call, so that an abort does not free what it uses
  std::atomic<ncclComm_t> comm = nullptr;  // null after an abort
  std::atomic<const char*> operation = "start";
  std::atomic<Clock::rep> call_since = 0;  // when the running call began; 0: no call is running

  explicit State(Origin origin);
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State();

  /// Asks NCCL for the rank, size and device, and joins the family.
  static std::shared_ptr<State> make(Origin origin);

  /// "rank 1 of 4", with the root rank if that differs.
  std::string name() const;

  /// Calls body(comm), which throws nothing, with the device current, and checks the result.
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
    call_since.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
    const ncclResult_t result = body(handle);
    family->end_call(*this);
    if (result == ncclSuccess) return;
    if (family->bootstrap) std::this_thread::sleep_for(kClosedGrace);  // the watch may soon hear of a death
    family->throw_if_failed();  // an abort or a death is the cause to report
    throw_nccl(result, what, name());
  }

  /// Calls body(comm, queue) as call() does; `queue` is the stream's. A stream that names no queue is refused
  /// before the call begins.
  template <class Body>
  void enqueue(const char* what, const Stream& stream, Body&& body) {
    const StreamHandle queue = stream.handle();
    call(what, [&](ncclComm_t handle) { return body(handle, queue); });
  }

  /// As enqueue(), but NCCL treats the messages of `body` as one operation.
  template <class Body>
  void enqueue_group(const char* what, const Stream& stream, Body&& body) {
    enqueue(what, stream, [&](ncclComm_t handle, StreamHandle queue) {
      if (const ncclResult_t started = ncclGroupStart(); started != ncclSuccess) return started;
      const ncclResult_t result = body(handle, queue);
      const ncclResult_t ended = ncclGroupEnd();  // also after a failure: must close the group
      return result != ncclSuccess ? result : ended;
    });
  }

  /// Frees the communicator, which ends its waiting kernels. A thread that hangs in an NCCL call returns once
  /// the abort has begun, so waits for such a call only briefly.
  void abort_now() noexcept;

  /// The error that NCCL's own threads met, or nothing.
  std::optional<ncclResult_t> async_error() const;

  /// Ends the family, and the job if there is a Bootstrap.
  void fail_everywhere(std::string_view reason) noexcept {
    cuda::fail_everywhere(*family, root_rank, reason);
  }
};

}  // namespace helix::cuda
