// SPDX-License-Identifier: Apache-2.0
// DeviceGate: keeps calls that wait for a whole device apart from kernels of which some are yet to be queued.
#pragma once

namespace helix::cuda {

/// Where ranks that are threads share a GPU, one's kernel may wait for another's that is not queued yet. A
/// call that waits for all kernels of the device, as cudaFree does, then waits for it too, and keeps the
/// other from being queued: neither would end. So these two sections of the process exclude each other; those
/// of one kind go side by side. A thread that is inside of one enters the other freely.
///
/// Whoever queues goes first: others may wait for its kernel. But before a call that its group has yet to
/// begin it lets those pass that wait for a device by then.
class DeviceGate {
 public:
  /// Returns when as many waits for a device have begun as were asked for when it was called.
  static void let_waits_begin();

  /// Around the time in which some ranks' kernels of a call are queued and others' are not.
  class Queueing {
   public:
    Queueing();
    ~Queueing();
    Queueing(const Queueing&) = delete;
    Queueing& operator=(const Queueing&) = delete;
  };

  /// Around a call that allocates, frees or maps memory of a device, or pinned memory.
  class Waiting {
   public:
    Waiting();
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
  };
};

}  // namespace helix::cuda
