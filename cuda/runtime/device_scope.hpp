// SPDX-License-Identifier: Apache-2.0
// DeviceScope: sets the device of the calling thread's CUDA calls.
#pragma once

namespace helix::cuda {

/// Makes `device` current for the calling thread until the end of the scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = -1;
};

}  // namespace helix::cuda
