// SPDX-License-Identifier: Apache-2.0
// Devices, streams, events and memory by calls of the CUDA runtime, whose failures become errors.
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>

#include <cuda_runtime_api.h>

#include <helix/cuda/runtime.hpp>
#include <helix/error.hpp>

#include "cuda/runtime/device_fault.hpp"
#include "cuda/runtime/device_gate.hpp"

namespace helix::cuda {
namespace {

ErrorCode code_of(cudaError_t status) {
  switch (status) {
    case cudaErrorMemoryAllocation:
      return ErrorCode::capacity;
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorInvalidDevice:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return ErrorCode::unsupported;
    default:
      return is_device_fault(status) ? ErrorCode::device_failed : ErrorCode::internal;
  }
}

std::string describe(cudaError_t status) {
  return std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status);
}

/// Returns null if the device has no more memory.
void* allocate_of_cuda(std::size_t bytes) {
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, bytes);
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return nullptr;
  }
  HELIX_CUDA_CHECK(status);
  return data;
}

[[noreturn]] void throw_out_of_memory(std::size_t bytes, std::string_view source) {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  (void)cudaMemGetInfo(&free_bytes, &total_bytes);
  throw Error(ErrorCode::capacity, "cannot allocate ", bytes, " bytes from ", source, ": ", free_bytes,
              " of ", total_bytes, " are free on the device; ask for fewer pages or sequences");
}

}  // namespace

void throw_on_error(int status, const char* call, const char* file, int line) {
  const auto error = static_cast<cudaError_t>(status);
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // clears the error, unless the context itself is lost
  int device = -1;
  (void)cudaGetDevice(&device);
  const std::string_view path(file);
  const std::size_t slash = path.rfind('/');
  throw Error(code_of(error), call, " failed on device ", device, " with ", describe(error), " (",
              path.substr(slash == std::string_view::npos ? 0 : slash + 1), ":", line, ")");
}

int device_count() {
  int count = 0;  // stays 0 without a driver
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return count;
}

std::string no_device_reason() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    return describe(status);
  }
  return count > 0 ? "" : "the driver shows no device";
}

void use_device(int device) {
  const int count = device_count();
  HELIX_EXPECTS(count > 0, ErrorCode::unsupported, "no CUDA device: ", no_device_reason(),
                "; use the CPU backend");
  HELIX_EXPECTS(device >= 0 && device < count, ErrorCode::unsupported, "CUDA device ", device,
                " does not exist; there are ", count);
  HELIX_CUDA_CHECK(cudaSetDevice(device));
}

std::string device_name(int device) {
  use_device(device);
  cudaDeviceProp properties{};
  HELIX_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  return properties.name;
}

DeviceMemory device_memory(int device) {
  use_device(device);
  DeviceMemory memory;
  HELIX_CUDA_CHECK(cudaMemGetInfo(&memory.free_bytes, &memory.total_bytes));
  return memory;
}

Stream Stream::create(bool high_priority) {
  int lowest = 0;
  int highest = 0;
  HELIX_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  cudaStream_t stream = nullptr;
  HELIX_CUDA_CHECK(
      cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, high_priority ? highest : lowest));
  return Stream(std::shared_ptr<CUstream_st>(stream, [](StreamHandle s) { (void)cudaStreamDestroy(s); }));
}

Stream Stream::borrow(StreamHandle handle) {
  return Stream(std::shared_ptr<CUstream_st>(handle, [](StreamHandle) {}));
}

Event Event::create(bool with_timing) {
  cudaEvent_t event = nullptr;
  HELIX_CUDA_CHECK(cudaEventCreateWithFlags(&event, with_timing ? cudaEventDefault : cudaEventDisableTiming));
  return Event(event);
}

void Event::Destroy::operator()(EventHandle handle) const noexcept {
  (void)cudaEventDestroy(handle);
}

void record(const Event& event, Stream stream) {
  HELIX_CUDA_CHECK(cudaEventRecord(event.handle(), stream.handle()));
}

void synchronize(Stream stream) {
  HELIX_CUDA_CHECK(cudaStreamSynchronize(stream.handle()));
}

void synchronize(const Event& event) {
  HELIX_CUDA_CHECK(cudaEventSynchronize(event.handle()));
}

float elapsed_ms(const Event& start, const Event& stop) {
  float ms = 0.0f;
  HELIX_CUDA_CHECK(cudaEventElapsedTime(&ms, start.handle(), stop.handle()));
  return ms;
}

Buffer::Buffer(std::size_t bytes, std::shared_ptr<const Allocator> allocator) {
  if (bytes == 0) return;
  int device = 0;
  HELIX_CUDA_CHECK(cudaGetDevice(&device));
  const DeviceGate::Waiting section;
  void* const data = allocator ? allocator->allocate(bytes) : allocate_of_cuda(bytes);
  if (data == nullptr) throw_out_of_memory(bytes, allocator ? "the engine's allocator" : "the device");
  data_ = std::unique_ptr<std::byte, Release>(
      static_cast<std::byte*>(data),
      Release{.bytes = bytes, .is_borrowed = false, .device = device, .allocator = std::move(allocator)});
  HELIX_CUDA_CHECK(cudaMemset(data, 0, bytes));
  HELIX_CUDA_CHECK(cudaStreamSynchronize(nullptr));  // for streams that do not wait for the default stream
}

Buffer Buffer::borrow(void* data, std::size_t bytes) {
  Buffer buffer;
  buffer.data_ =
      std::unique_ptr<std::byte, Release>(static_cast<std::byte*>(data), Release{bytes, true, 0, nullptr});
  return buffer;
}

void Buffer::Release::operator()(std::byte* data) const noexcept {
  if (is_borrowed) return;
  const DeviceGate::Waiting section;
  if (!allocator) {
    if (cudaFree(data) != cudaSuccess) (void)cudaGetLastError();  // waits for the device
    return;
  }
  int current = 0;
  (void)cudaGetDevice(&current);
  (void)cudaSetDevice(device);
  if (cudaDeviceSynchronize() != cudaSuccess) (void)cudaGetLastError();
  (void)cudaSetDevice(current);
  allocator->free(data, bytes);
}

PinnedBuffer::PinnedBuffer(std::size_t bytes) {
  if (bytes == 0) return;
  void* data = nullptr;
  const DeviceGate::Waiting section;
  HELIX_CUDA_CHECK(cudaHostAlloc(&data, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
  data_ = std::unique_ptr<std::byte, Release>(static_cast<std::byte*>(data), Release{bytes});
  std::memset(data, 0, bytes);
}

void PinnedBuffer::Release::operator()(std::byte* data) const noexcept {
  const DeviceGate::Waiting section;
  if (cudaFreeHost(data) != cudaSuccess) (void)cudaGetLastError();
}

}  // namespace helix::cuda
