// SPDX-License-Identifier: Apache-2.0
// DeviceGate: keeps calls that wait for a whole device out of the time in which only some ranks' kernels are
// queued.
#pragma once

namespace helix::cuda {

/// When ranks that are threads share a GPU, a rank's kernel may wait for another's that is not queued yet. A
/// call that waits for the whole device, such as cudaFree, then waits for that kernel and keeps the other
/// from being queued: a deadlock. So the two kinds of sections below exclude each other within the process.
/// Sections of one kind may overlap, and a thread inside either kind may enter the other.
///
/// Queueing has priority, because others may wait for its kernel. But before a group begins a call,
/// let_waits_begin() lets the calls that already wait for a device go first.
class DeviceGate {
 public:
  /// Returns once as many Waiting sections have begun as had been requested when it was called.
  static void let_waits_begin();

  /// Held while some ranks' kernels of a call are queued and others' are not.
  class Queueing {
   public:
    Queueing();
    ~Queueing();
    Queueing(const Queueing&) = delete;
    Queueing& operator=(const Queueing&) = delete;
  };

  /// Held around a call that allocates, frees or maps device memory or pinned memory.
  class Waiting {
   public:
    Waiting();
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
  };
};

}  // namespace helix::cuda
