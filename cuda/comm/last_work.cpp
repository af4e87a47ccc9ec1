// SPDX-License-Identifier: Apache-2.0
// Counts the work in flight, and waits for it in the destructor of a static object, at most for a grace
// period.
#include "cuda/comm/last_work.hpp"

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace helix::cuda {
namespace {

/// An abort may wait for graphs that main() has left behind, so bound the wait.
constexpr std::chrono::seconds kExitGrace{3};

struct Pending {
  std::mutex mutex;
  std::condition_variable over;
  int count = 0;
};

/// Never destroyed: work that outlasts the grace period still uses it.
Pending& pending() {
  static Pending* const all = new Pending;
  // Constructed after CUDA's and NCCL's statics, so that it is destroyed before them.
  static const struct Exit {
    ~Exit() {
      std::unique_lock lock(all->mutex);
      (void)all->over.wait_for(lock, kExitGrace, [] { return all->count == 0; });
    }
  } exit;
  return *all;
}

}  // namespace

LastWork::LastWork() {
  Pending& all = pending();
  const std::lock_guard lock(all.mutex);
  ++all.count;
}

LastWork::~LastWork() {
  Pending& all = pending();
  const std::lock_guard lock(all.mutex);
  if (--all.count == 0) all.over.notify_all();
}

}  // namespace helix::cuda
