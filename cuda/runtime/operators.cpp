// SPDX-License-Identifier: Apache-2.0
// cuda::Operators: construction, memory, streams and events. The operations are in the sibling folders.
#include <atomic>
#include <cstring>
#include <memory>
#include <utility>

#include <cuda_runtime_api.h>

#include <helix/cuda/backend.hpp>
#include <helix/error.hpp>

#include "cuda/runtime/operators_state.hpp"

namespace helix::cuda {

template <class T>
Operators<T>::Operators(int device, Allocator allocator) : state_(std::make_shared<State>()) {
  HELIX_EXPECTS(!allocator.allocate == !allocator.free, ErrorCode::invalid_argument,
                "cuda::Operators: the allocator has only ", allocator.allocate ? "allocate" : "free",
                "; give both functions, or neither");
  use_device(device);
  if (allocator.allocate) state_->allocator = std::make_shared<const Allocator>(std::move(allocator));
  state_->device = device;
  HELIX_CUDA_CHECK(cudaDeviceGetAttribute(&state_->num_sms, cudaDevAttrMultiProcessorCount, device));
  HELIX_CUDA_CHECK(cudaDeviceGetAttribute(&state_->shared_memory.block_bytes,
                                          cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  HELIX_CUDA_CHECK(cudaDeviceGetAttribute(&state_->shared_memory.sm_bytes,
                                          cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
  int major = 0;
  HELIX_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  HELIX_EXPECTS(major >= 8, ErrorCode::unsupported, "CUDA device ", device, " has compute capability ", major,
                ".x; 8.0 is the least that the kernels are built for");
  state_->is_hopper = major == 9 && has_hopper_code();
  state_->attention_counters = Buffer(kAttentionCounters * sizeof(int), state_->allocator);
  state_->failure = PinnedBuffer(sizeof(FailureRecord));
  state_->downloaded = PinnedBuffer(kDownloadBytes);
  state_->is_downloaded = Event::create();
  state_->failure_claim = Buffer(sizeof(std::uint32_t), state_->allocator);
  state_->matmul = make_matmul_library(state_->allocator);
}

template <class T>
int Operators<T>::device() const {
  return state_->device;
}

template <class T>
void Operators<T>::set_attention_blocks(int blocks) {
  HELIX_EXPECTS(blocks >= 0, ErrorCode::invalid_argument, "set_attention_blocks: ", blocks,
                " blocks; give at least 1, or 0 for all");
  state_->attention_blocks = blocks;
}

template <class T>
void Operators<T>::set_shares_device(bool shares) {
  state_->shares_device = shares;
}

template <class T>
void Operators<T>::set_kernel_target(KernelTarget target) {
  state_->kernel_target = target;
}

template <class T>
Buffer Operators<T>::allocate(std::size_t bytes) const {
  const DeviceScope scope(state_->device);
  return Buffer(bytes, state_->allocator);
}

template <class T>
Stream Operators<T>::create_stream() const {
  const DeviceScope scope(state_->device);
  return Stream::create();
}

template <class T>
Event Operators<T>::create_event() const {
  const DeviceScope scope(state_->device);
  return Event::create();
}

template <class T>
void Operators<T>::record(Event& event, Stream stream) const {
  const DeviceScope scope(state_->device);  // a default stream is that of the current device
  cuda::record(event, stream);
}

template <class T>
void Operators<T>::wait(Stream stream, const Event& event) const {
  const DeviceScope scope(state_->device);
  HELIX_CUDA_CHECK(cudaStreamWaitEvent(stream.handle(), event.handle(), 0));
}

namespace {

/// Throws the failure that a kernel recorded, if any.
void throw_if_failed(const FailureRecord& failure) {
  if (std::atomic_ref<const std::uint32_t>(failure.is_complete).load(std::memory_order_acquire) == 0) return;
  check_exchange_header(failure.peer, failure.header, failure.expected);
}

}  // namespace

template <class T>
void Operators<T>::synchronize(Stream stream) const {
  const DeviceScope scope(state_->device);
  cuda::synchronize(stream);
  throw_if_failed(*state_->failure_record());
}

template <class T>
const Event& Operators<T>::downloaded() const {
  return state_->is_downloaded;
}

template <class T>
void Operators<T>::upload(void* target, const void* source, std::size_t bytes, Stream stream) const {
  if (bytes == 0) return;
  const DeviceScope scope(state_->device);
  // From pageable memory the runtime copies through its own staging: the source is free on return.
  HELIX_CUDA_CHECK(cudaMemcpyAsync(target, source, bytes, cudaMemcpyHostToDevice, stream.handle()));
}

template <class T>
bool Operators<T>::queue_download(const void* source, std::size_t bytes, Stream stream) const {
  if (bytes > kDownloadBytes || state_->queued_bytes) return false;
  const DeviceScope scope(state_->device);
  if (bytes > 0)
    HELIX_CUDA_CHECK(
        cudaMemcpyAsync(state_->downloaded.data(), source, bytes, cudaMemcpyDeviceToHost, stream.handle()));
  cuda::record(state_->is_downloaded, stream);
  state_->queued_bytes = bytes;
  return true;
}

template <class T>
void Operators<T>::take_download(void* target, std::size_t bytes) const {
  HELIX_EXPECTS(state_->queued_bytes && bytes <= *state_->queued_bytes, ErrorCode::invalid_argument,
                "take_download: ", bytes, " bytes are asked for, and ", state_->queued_bytes.value_or(0),
                " were queued");
  state_->queued_bytes.reset();
  cuda::synchronize(state_->is_downloaded);
  throw_if_failed(*state_->failure_record());
  std::memcpy(target, state_->downloaded.data(), bytes);
}

template <class T>
void Operators<T>::download(void* target, const void* source, std::size_t bytes, Stream stream) const {
  const DeviceScope scope(state_->device);
  if (bytes > 0)
    HELIX_CUDA_CHECK(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToHost, stream.handle()));
  synchronize(stream);
}

template <class T>
void Operators<T>::copy(void* target, const void* source, std::size_t bytes, Stream stream) const {
  if (bytes == 0) return;
  const DeviceScope scope(state_->device);
  HELIX_CUDA_CHECK(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, stream.handle()));
}

template <class T>
void Operators<T>::fill_zero(void* target, std::size_t bytes, Stream stream) const {
  if (bytes == 0) return;
  const DeviceScope scope(state_->device);
  HELIX_CUDA_CHECK(cudaMemsetAsync(target, 0, bytes, stream.handle()));
}

// Each kernel's file instantiates its own members.
#define HELIX_INSTANTIATE(T)                                                           \
  template Operators<T>::Operators(int, Allocator);                                    \
  template int Operators<T>::device() const;                                           \
  template void Operators<T>::set_attention_blocks(int);                               \
  template void Operators<T>::set_shares_device(bool);                                 \
  template void Operators<T>::set_kernel_target(KernelTarget);                         \
  template Buffer Operators<T>::allocate(std::size_t) const;                           \
  template Stream Operators<T>::create_stream() const;                                 \
  template Event Operators<T>::create_event() const;                                   \
  template void Operators<T>::record(Event&, Stream) const;                            \
  template void Operators<T>::wait(Stream, const Event&) const;                        \
  template void Operators<T>::synchronize(Stream) const;                               \
  template const Event& Operators<T>::downloaded() const;                              \
  template void Operators<T>::upload(void*, const void*, std::size_t, Stream) const;   \
  template bool Operators<T>::queue_download(const void*, std::size_t, Stream) const;  \
  template void Operators<T>::take_download(void*, std::size_t) const;                 \
  template void Operators<T>::download(void*, const void*, std::size_t, Stream) const; \
  template void Operators<T>::copy(void*, const void*, std::size_t, Stream) const;     \
  template void Operators<T>::fill_zero(void*, std::size_t, Stream) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
