// SPDX-License-Identifier: Apache-2.0
// Who a communicator is, how it ends, and how all groups of a root end together.
#include "cuda/comm/nccl_state.hpp"

#include <chrono>
#include <condition_variable>
#include <sstream>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

namespace helix::cuda {
namespace {

/// Longest that a failure waits for the communicators of its process to be gone. By then each has waited for
/// a call that hangs, and has told its kernels to end.
constexpr milliseconds kAbortGrace{2000};

}  // namespace

void NcclFamily::throw_if_failed() {
  if (!has_failed.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(mutex);
  throw Error(ErrorCode::peer_failed, failure);
}

void NcclFamily::begin(int root_rank, const char* operation) {
  if (bootstrap) bootstrap->begin_operation(operation);
  if (progress.empty()) return;
  NcclProgress& own = progress[static_cast<std::size_t>(root_rank)];
  own.last.store(operation, std::memory_order_relaxed);
  own.operations.fetch_add(1, std::memory_order_relaxed);
}

std::string NcclFamily::laggards(int root_rank) const {
  std::ostringstream text;
  if (progress.empty()) return "";
  const std::uint64_t own =
      progress[static_cast<std::size_t>(root_rank)].operations.load(std::memory_order_relaxed);
  for (std::size_t rank = 0; rank < progress.size(); ++rank) {
    const std::uint64_t operations = progress[rank].operations.load(std::memory_order_relaxed);
    if (operations >= own) continue;
    const std::string_view last = progress[rank].last.load(std::memory_order_relaxed);
    text << "; rank " << rank << " is behind: its call " << operations << " was "
         << (last.empty() ? "the start of a step" : last) << ", this rank made " << own;
  }
  return text.str();
}

void NcclFamily::fail(const std::string& text) {
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
    auto abort_one = [aborts, state = std::move(state)]() mutable {
      state->abort_now();
      state.reset();
      const std::lock_guard lock(aborts->mutex);
      if (--aborts->left == 0) aborts->changed.notify_all();
    };
    try {
      std::thread(abort_one).detach();
    } catch (const std::system_error&) {
      abort_one();  // no thread to be had: here, then
    }
  }
  std::unique_lock lock(aborts->mutex);
  (void)aborts->changed.wait_for(lock, kAbortGrace, [&] { return aborts->left == 0; });
}

NcclComm::State::State(Origin origin)
    : family(std::move(origin.family)),
      is_owned(origin.is_owned),
      may_abort(origin.may_abort),
      timeout(origin.timeout),
      comm(origin.handle) {}

NcclComm::State::~State() {
  const ncclComm_t handle = comm.exchange(nullptr);
  if (handle == nullptr || !is_owned) return;
  (void)(family->has_failed ? ncclCommAbort(handle) : ncclCommDestroy(handle));
}

std::shared_ptr<NcclComm::State> NcclComm::State::make(Origin origin) {
  const ncclComm_t handle = origin.handle;
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
    // Not under the lock: this waits until no graph holds the communicator, and the thread that is to
    // destroy them may be on its way into a call, which then throws.
    if (handle != nullptr) (void)ncclCommAbort(handle);
  } catch (...) {
    // The lock failed: the process is beyond help.
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

void NcclComm::State::fail_everywhere(const std::string& reason) {
  std::ostringstream text;
  text << "rank " << root_rank << " failed: " << reason;
  if (family->bootstrap) family->bootstrap->fail(reason);  // its callback comes back to the family
  family->fail(text.str());
}

}  // namespace helix::cuda
