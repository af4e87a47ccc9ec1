// SPDX-License-Identifier: Apache-2.0
// The driver's virtual memory management. The library does not link the driver; it looks up its functions
// once.
#include "cuda/comm/peer_memory.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include <cuda_runtime_api.h>

#include <helix/cuda/runtime.hpp>
#include <helix/error.hpp>
#include <helix/integers.hpp>

#include "cuda/runtime/device_fault.hpp"
#include "cuda/runtime/device_gate.hpp"
#include "cuda/runtime/device_scope.hpp"

namespace helix::cuda {
namespace {

template <class Function>
Function driver_function(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  HELIX_CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found));
  HELIX_EXPECTS(found == cudaDriverEntryPointSuccess && entry != nullptr, ErrorCode::unsupported,
                "the driver has no ", name, "; it must be of CUDA 12.0 or newer");
  return reinterpret_cast<Function>(entry);
}

struct Driver {
#define HELIX_DRIVER(name) decltype(&cu##name) name = driver_function<decltype(&cu##name)>("cu" #name);
  HELIX_DRIVER(DeviceGet)
  HELIX_DRIVER(GetErrorName)
  HELIX_DRIVER(MemCreate)
  HELIX_DRIVER(MemRelease)
  HELIX_DRIVER(MemGetAllocationGranularity)
  HELIX_DRIVER(MemAddressReserve)
  HELIX_DRIVER(MemAddressFree)
  HELIX_DRIVER(MemMap)
  HELIX_DRIVER(MemUnmap)
  HELIX_DRIVER(MemSetAccess)
  HELIX_DRIVER(MemExportToShareableHandle)
  HELIX_DRIVER(MemImportFromShareableHandle)
#undef HELIX_DRIVER
};

const Driver& driver() {
  static const Driver functions;
  return functions;
}

/// What a machine does not support is `unsupported`: there may be another way. The error of an earlier
/// kernel, which any call may return, is not.
ErrorCode code_of(CUresult result) {
  if (result == CUDA_ERROR_OUT_OF_MEMORY) return ErrorCode::capacity;
  static_assert(static_cast<int>(CUDA_ERROR_LAUNCH_FAILED) == static_cast<int>(cudaErrorLaunchFailure));
  return is_device_fault(static_cast<cudaError_t>(result)) ? ErrorCode::device_failed
                                                           : ErrorCode::unsupported;
}

void check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  (void)driver().GetErrorName(result, &name);
  throw Error(code_of(result), call, " failed with ", name == nullptr ? "an unknown error" : name);
}

CUmemAllocationProp properties(int device, bool is_shared) {
  CUdevice handle{};
  check(driver().DeviceGet(&handle, device), "cuDeviceGet");
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, {handle}};
  prop.requestedHandleTypes = is_shared ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  return prop;
}

}  // namespace

PeerMemory PeerMemory::create(int device, std::size_t bytes, bool is_shared) {
  const CUmemAllocationProp prop = properties(device, is_shared);
  CUmemGenericAllocationHandle handle = 0;
  const DeviceGate::Waiting section;
  check(driver().MemCreate(&handle, bytes, &prop, 0), "cuMemCreate");
  return PeerMemory(handle);
}

PeerMemory PeerMemory::import(int descriptor) {
  CUmemGenericAllocationHandle handle = 0;
  check(driver().MemImportFromShareableHandle(&handle,
                                              reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor)),
                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "cuMemImportFromShareableHandle");
  return PeerMemory(handle);
}

PeerMemory::PeerMemory(PeerMemory&& other) noexcept : handle_(std::exchange(other.handle_, 0)) {}

PeerMemory& PeerMemory::operator=(PeerMemory&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}

PeerMemory::~PeerMemory() {
  if (handle_ == 0) return;
  const DeviceGate::Waiting section;
  (void)driver().MemRelease(handle_);
}

int PeerMemory::export_descriptor() const {
  int descriptor = -1;
  check(
      driver().MemExportToShareableHandle(&descriptor, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
      "cuMemExportToShareableHandle");
  return descriptor;
}

std::size_t PeerMemory::granularity(int device) {
  const CUmemAllocationProp prop = properties(device, true);
  std::size_t bytes = 0;
  check(driver().MemGetAllocationGranularity(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "cuMemGetAllocationGranularity");
  return bytes;
}

std::size_t PeerMemory::stride(int device, std::size_t bytes, std::size_t multiple) {
  return round_up(bytes, std::lcm(granularity(device), multiple));
}

PeerRange::PeerRange(std::vector<PeerMemory> memories, std::size_t stride, std::vector<int> devices)
    : memories_(std::move(memories)), stride_(stride), devices_(std::move(devices)) {
  std::sort(devices_.begin(), devices_.end());
  devices_.erase(std::unique(devices_.begin(), devices_.end()), devices_.end());
  CUdeviceptr first = 0;
  const DeviceGate::Waiting section;
  check(driver().MemAddressReserve(&first, memories_.size() * stride_, 0, 0, 0), "cuMemAddressReserve");
  first_ = reinterpret_cast<std::byte*>(first);
  try {
    for (; mapped_ < memories_.size(); ++mapped_) {
      check(driver().MemMap(first + mapped_ * stride_, stride_, 0, memories_[mapped_].handle(), 0),
            "cuMemMap");
    }
    std::vector<CUmemAccessDesc> access;
    for (const int device : devices_) {
      access.push_back({properties(device, false).location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    }
    check(driver().MemSetAccess(first, memories_.size() * stride_, access.data(), access.size()),
          "cuMemSetAccess");
  } catch (...) {
    unmap();
    throw;
  }
}

PeerRange::~PeerRange() {
  const DeviceGate::Waiting section;
  int current = 0;
  (void)cudaGetDevice(&current);
  for (const int device : devices_) {
    (void)cudaSetDevice(device);
    (void)cudaDeviceSynchronize();
  }
  (void)cudaSetDevice(current);
  (void)cudaGetLastError();  // clears the error of a wait for a stream under capture
  unmap();
}

void PeerRange::unmap() noexcept {
  const auto first = reinterpret_cast<CUdeviceptr>(first_);
  for (std::size_t i = 0; i < mapped_; ++i) (void)driver().MemUnmap(first + i * stride_, stride_);
  (void)driver().MemAddressFree(first, memories_.size() * stride_);
}

void PeerRange::zero(int rank, int device) const {
  const DeviceScope scope(device);
  HELIX_CUDA_CHECK(cudaMemset(part(rank), 0, stride_));
  HELIX_CUDA_CHECK(cudaStreamSynchronize(nullptr));
}

bool can_share_memory(int device, int other) {
  int reaches = 1;
  if (device != other && cudaDeviceCanAccessPeer(&reaches, device, other) != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  try {
    return reaches != 0 && PeerMemory::granularity(other) > 0;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace helix::cuda
