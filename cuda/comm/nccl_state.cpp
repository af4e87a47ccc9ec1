// SPDX-License-Identifier: Apache-2.0
// Identity and end of a communicator, and how all groups of a root end together.
#include "cuda/comm/nccl_state.hpp"

#include <chrono>
#include <condition_variable>
#include <sstream>
#include <utility>

#include "comm/bootstrap_wait.hpp"
#include "comm/meeting.hpp"
#include "comm/rank_names.hpp"
#include "comm/start_thread.hpp"
#include "cuda/comm/last_work.hpp"

namespace helix::cuda {
namespace {

/// Longest time that a failure waits until the communicators of its process are gone. By then each abort has
/// waited for a call that hangs, and has told its kernels to end.
constexpr milliseconds kAbortGrace{2000};

/// How often the calls of a process are checked.
constexpr milliseconds kCallPoll{100};

}  // namespace

/// Shared by a family and its thread, which may outlive the family.
struct NcclFamily::CallWatch {
  std::mutex mutex;
  std::condition_variable over;
  bool is_over = false;
  comm::Thread thread;
};

std::shared_ptr<NcclFamily> NcclFamily::make() {
  auto family = std::make_shared<NcclFamily>();
  auto watch = std::make_shared<CallWatch>();
  watch->thread =
      comm::start_thread("the thread that bounds NCCL's calls", [watch, weak = std::weak_ptr(family)] {
        std::unique_lock lock(watch->mutex);
        while (!watch->over.wait_for(lock, kCallPoll, [&] { return watch->is_over; })) {
          lock.unlock();
          try {
            const LastWork work;
            if (const auto alive = weak.lock()) alive->check_calls();  // this may be the last reference
          } catch (...) {
            // Out of memory: try again at the next turn.
          }
          lock.lock();
        }
      });
  family->watch_ = std::move(watch);
  return family;
}

NcclFamily::~NcclFamily() {
  if (!watch_) return;
  {
    const std::lock_guard lock(watch_->mutex);
    watch_->is_over = true;
  }
  watch_->over.notify_all();
  if (watch_->thread.is_current()) {
    watch_->thread.detach();
  } else {
    watch_->thread.join();
  }
}

void NcclFamily::check_calls() {
  std::vector<std::shared_ptr<NcclComm::State>> alive;
  {
    const std::lock_guard lock(mutex);
    if (has_failed) return;
    for (const auto& member : members) {
      if (auto state = member.lock()) alive.push_back(std::move(state));
    }
  }
  for (const auto& state : alive) {
    const Clock::rep since = state->call_since.load();
    if (since == 0) continue;
    const Clock::duration waited = Clock::now().time_since_epoch() - Clock::duration(since);
    if (bootstrap && waited > kCallPoll) report_call(*state, since);
    if (waited < state->timeout + (bootstrap ? comm::kWatchGrace : milliseconds(0))) continue;
    std::ostringstream text;
    text << "NCCL " << state->operation.load(std::memory_order_relaxed) << " on " << state->name()
         << " has waited on the host for " << comm::seconds(state->timeout) << " s for another rank"
         << places();
    return state->fail_everywhere(text.str());
  }
}

void NcclFamily::report_call(const NcclComm::State& member, Clock::rep since) {
  // Under this lock a call either ends before it is reported, or ends later and then withdraws the report.
  const std::lock_guard lock(reporting_);
  if (reported_ != nullptr || member.call_since.load() != since) return;
  reported_wait_ = bootstrap->begin_wait();
  reported_ = &member;
}

void NcclFamily::end_call(NcclComm::State& member) {
  if (!bootstrap) return member.call_since.store(0);
  const std::lock_guard lock(reporting_);
  member.call_since.store(0);
  if (reported_ == &member) {
    reported_ = nullptr;
    bootstrap->end_wait(reported_wait_);
  }
}

std::string NcclFamily::places() const {
  std::ostringstream text;
  for (std::size_t rank = 0; rank < progress.size(); ++rank) {
    text << (rank == 0 ? "; " : ", ") << "rank " << rank << " made " << progress[rank].made()
         << " calls, the last " << progress[rank].last_call();
  }
  return text.str();
}

void NcclFamily::throw_if_failed() {
  if (!has_failed.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex);
  throw Error(ErrorCode::peer_failed, failure.empty() ? comm::kUnnamedFailure : failure.c_str());
}

void NcclFamily::begin(int root_rank, const char* operation) {
  if (bootstrap) bootstrap->begin_operation(operation);
  if (!progress.empty()) progress[static_cast<std::size_t>(root_rank)].begin(operation);
}

void NcclFamily::end_step(int root_rank) {
  if (bootstrap) bootstrap->begin_operation("");
  if (!progress.empty()) progress[static_cast<std::size_t>(root_rank)].count();
}

std::string NcclFamily::laggards(int root_rank) const {
  std::ostringstream text;
  for (std::size_t rank = 0; rank < progress.size(); ++rank)
    name_if_behind(text, static_cast<int>(rank), progress[rank],
                   progress[static_cast<std::size_t>(root_rank)].made());
  return text.str();
}

void NcclFamily::fail(const std::string& text) noexcept {
  std::vector<std::weak_ptr<NcclComm::State>> to_abort;
  {
    const std::lock_guard lock(mutex);
    if (has_failed) return;
    try {
      failure = text;
    } catch (...) {
      // Out of memory for the text: still abort all members.
    }
    has_failed.store(true, std::memory_order_release);
    to_abort.swap(members);  // a member that joins later finds the failure
  }
  // Abort all at once: the abort of one rank may wait for another rank of this process. Bound the wait: an
  // abort may wait for graphs that the calling thread is to destroy.
  struct Aborts {
    std::mutex mutex;
    std::condition_variable changed;
    std::size_t left = 0;

    void count(bool begins) {
      const std::lock_guard lock(mutex);
      if (begins) {
        ++left;
      } else if (--left == 0) {
        changed.notify_all();
      }
    }
  };
  std::shared_ptr<Aborts> aborts;
  for (const auto& member : to_abort) {
    auto state = member.lock();
    if (!state) continue;
    bool is_counted = false;
    try {
      if (!aborts) aborts = std::make_shared<Aborts>();
      auto abort_one = [aborts, work = std::make_shared<LastWork>(), state]() mutable {
        state->abort_now();
        state.reset();
        work.reset();
        aborts->count(false);
      };
      aborts->count(true);
      is_counted = true;
      comm::start_thread("the thread that aborts a communicator", std::move(abort_one)).detach();
    } catch (...) {  // no thread or no memory: abort on this thread
      if (is_counted) aborts->count(false);
      state->abort_now();
    }
  }
  if (!aborts) return;
  std::unique_lock lock(aborts->mutex);
  (void)aborts->changed.wait_for(lock, kAbortGrace, [&] { return aborts->left == 0; });
}

NcclComm::State::State(Origin origin)
    : family(std::move(origin.family)),
      is_owned(origin.handle.get_deleter().is_owned),
      may_abort(origin.may_abort),
      timeout(origin.timeout),
      comm(origin.handle.release()) {}

NcclComm::State::~State() {
  const ncclComm_t handle = comm.exchange(nullptr);
  if (handle == nullptr || !is_owned) return;
  (void)(family->has_failed ? ncclCommAbort(handle) : ncclCommDestroy(handle));
}

std::shared_ptr<NcclComm::State> NcclComm::State::make(Origin origin) {
  const ncclComm_t handle = origin.handle.get();
  const int parent_root_rank = origin.parent_root_rank;
  auto state = std::make_shared<State>(std::move(origin));
  check_nccl(ncclCommUserRank(handle, &state->rank), "ncclCommUserRank");
  check_nccl(ncclCommCount(handle, &state->size), "ncclCommCount");
  check_nccl(ncclCommCuDevice(handle, &state->device), "ncclCommCuDevice");
  state->root_rank = parent_root_rank < 0 ? state->rank : parent_root_rank;
  const DeviceScope scope(state->device);
  state->barrier_value = Buffer(sizeof(float));
  const std::lock_guard lock(state->family->mutex);
  std::erase_if(state->family->members, [](const auto& member) { return member.expired(); });
  state->family->members.push_back(state);
  return state;
}

std::string NcclComm::State::name() const {
  std::ostringstream text;
  text << "rank " << rank << " of " << size;
  if (root_rank != rank) text << " (" << root_rank << " of the root)";
  return text.str();
}

void NcclComm::State::abort_now() noexcept {
  if (!may_abort) return;
  try {
    ncclComm_t handle = nullptr;
    {
      const std::unique_lock lock(calls, std::chrono::seconds(1));
      handle = comm.exchange(nullptr);
    }
    // Not under the lock: this waits until no graph holds the communicator. The thread that should destroy
    // the graphs may be about to make a call, which needs the lock and then throws.
    if (handle != nullptr) (void)ncclCommAbort(handle);
  } catch (...) {
    // The lock failed: nothing more can be done.
  }
}

std::optional<ncclResult_t> NcclComm::State::async_error() const {
  const std::unique_lock lock(calls, std::try_to_lock);
  const ncclComm_t handle = lock.owns_lock() ? comm.load(std::memory_order_acquire) : nullptr;
  ncclResult_t result = ncclSuccess;
  if (handle == nullptr || ncclCommGetAsyncError(handle, &result) != ncclSuccess) return std::nullopt;
  if (result == ncclSuccess || result == ncclInProgress) return std::nullopt;
  return result;
}

}  // namespace helix::cuda
