// SPDX-License-Identifier: Apache-2.0
// DeviceScope: which device the calling thread's CUDA calls are for.
#pragma once

namespace helix::cuda {

/// Makes `device` the calling thread's until the end of the scope.
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
