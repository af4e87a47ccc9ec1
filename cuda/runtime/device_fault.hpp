// SPDX-License-Identifier: Apache-2.0
// Which errors of CUDA mean that the device or its context is lost.
#pragma once

#include <cuda_runtime_api.h>

namespace helix::cuda {

/// Whether all later calls of this process fail too. The driver's errors have the same numbers.
constexpr bool is_device_fault(cudaError_t error) {
  // cudaErrorContained, of memory of a peer, and cudaErrorTensorMemoryLeak: not every toolkit has their
  // names.
  if (error == static_cast<cudaError_t>(226) || error == static_cast<cudaError_t>(721)) return true;
  switch (error) {
    case cudaErrorCudartUnloading:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorContextIsDestroyed:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
      return true;
    default:
      return false;
  }
}

}  // namespace helix::cuda
