// SPDX-License-Identifier: Apache-2.0
// What all operations of one rank on a GPU share: its device, the record of failures, the matrix library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include <helix/backend.hpp>
#include <helix/cuda/backend.hpp>
#include <helix/cuda/runtime.hpp>

#include "cuda/attention/kernel.hpp"

namespace helix::cuda {

/// Query tiles times KV heads of one launch of an attention kernel.
inline constexpr std::size_t kAttentionCounters = 1 << 16;

/// Most bytes that queue_download() takes: what a step of some hundred rows draws.
inline constexpr std::size_t kDownloadBytes = 16384;

/// Whether the kernels for compute capability 9.0 were built with code of their own. Loads one: not for a
/// step.
bool has_hopper_code();

/// What a kernel found wrong: host memory that the device writes. The first failure stays.
struct FailureRecord {
  std::uint32_t is_complete = 0;  ///< written last
  std::uint32_t peer = 0;         ///< check_exchange: whose message
  std::uint32_t sender = 0;
  std::uint64_t epoch = 0;
  std::uint64_t expected_epoch = 0;
  std::uint32_t tokens = 0;
  std::uint32_t expected_tokens = 0;
};

/// cuBLASLt handle, workspace and plans of a rank. Defined in cuda/linear/matmul.cpp.
class MatmulLibrary;
struct MatmulLibraryDelete {
  void operator()(MatmulLibrary* library) const noexcept;
};

template <class T>
struct Operators<T>::State {
  std::shared_ptr<const Allocator> allocator;  // null: CUDA's own
  int device = 0;
  int num_sms = 0;
  bool is_hopper = false;  // compute capability 9.0: its own kernels run
  SharedMemory shared_memory;
  int attention_blocks = 0;  // 0: all
  AttentionTarget attention_target = AttentionTarget::this_gpu;
  PinnedBuffer failure;                     // a FailureRecord
  PinnedBuffer downloaded;                  // what queue_download() brings
  std::optional<std::size_t> queued_bytes;  // until take_download() has them
  Event is_downloaded;                      // behind its copy
  Buffer failure_claim;       // not 0: it is taken. On the device, as atomics on host memory need not work
  Buffer attention_counters;  // partial_attention's self-resetting counters
  std::unique_ptr<MatmulLibrary, MatmulLibraryDelete> matmul;

  FailureRecord* failure_record() const { return reinterpret_cast<FailureRecord*>(failure.data()); }
};

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
