// SPDX-License-Identifier: Apache-2.0
// The sections of DeviceGate: counts under one mutex of the process.
#include "cuda/runtime/device_gate.hpp"

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace helix::cuda {
namespace {

struct Sections {
  std::mutex mutex;
  std::condition_variable changed;
  int to_queue = 0;  // threads waiting to enter
  int queueing = 0;  // threads inside
  int waiting = 0;   // threads inside
  std::uint64_t waits_asked = 0;
  std::uint64_t waits_begun = 0;
};

/// Never destroyed: memory freed at the end of the process uses it too.
Sections& sections() {
  static auto* const all = new Sections;
  return *all;
}

/// How many sections this thread is in.
thread_local int depth = 0;

}  // namespace

void DeviceGate::let_waits_begin() {
  Sections& all = sections();
  std::unique_lock lock(all.mutex);
  all.changed.wait(lock, [&, asked = all.waits_asked] { return all.waits_begun >= asked; });
}

DeviceGate::Queueing::Queueing() {
  if (depth++ > 0) return;
  Sections& all = sections();
  std::unique_lock lock(all.mutex);
  ++all.to_queue;
  all.changed.wait(lock, [&] { return all.waiting == 0; });
  --all.to_queue;
  ++all.queueing;
}

DeviceGate::Queueing::~Queueing() {
  if (--depth > 0) return;
  Sections& all = sections();
  const std::lock_guard lock(all.mutex);
  if (--all.queueing == 0) all.changed.notify_all();
}

DeviceGate::Waiting::Waiting() {
  if (depth++ > 0) return;
  Sections& all = sections();
  std::unique_lock lock(all.mutex);
  ++all.waits_asked;
  all.changed.wait(lock, [&] { return all.queueing == 0 && all.to_queue == 0; });
  ++all.waits_begun;
  ++all.waiting;
  all.changed.notify_all();
}

DeviceGate::Waiting::~Waiting() {
  if (--depth > 0) return;
  Sections& all = sections();
  const std::lock_guard lock(all.mutex);
  if (--all.waiting == 0) all.changed.notify_all();
}

}  // namespace helix::cuda
