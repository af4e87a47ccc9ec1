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

#include "cuda/runtime/device_scope.hpp"
#include "cuda/runtime/shared_memory.hpp"

namespace helix::cuda {

/// Query tiles times KV heads of one launch of an attention kernel, or times its blocks of a cluster.
inline constexpr std::size_t kAttentionCounters = 1 << 16;

/// Most bytes that queue_download() takes: what a step of some hundred rows draws.
inline constexpr std::size_t kDownloadBytes = 16384;

/// Whether the kernels for compute capability 9.0 were built with code of their own. Loads one: not for a
/// step. Defined in cuda/runtime/hopper_code.cu.
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
using OwnedMatmulLibrary = std::unique_ptr<MatmulLibrary, MatmulLibraryDelete>;
/// For the calling thread's device. Workspaces come from `allocator` (null: CUDA's own), for the first two
/// streams that multiply, when they first do so outside of a capture; a third stream, and a captured one
/// until then, use algorithms without one.
/// @throws Error(internal) if the library does not start.
OwnedMatmulLibrary make_matmul_library(std::shared_ptr<const Allocator> allocator);

template <class T>
struct Operators<T>::State {
  std::shared_ptr<const Allocator> allocator;  // null: CUDA's own
  int device = 0;
  int num_sms = 0;
  bool is_hopper = false;  // compute capability 9.0: its own kernels run
  SharedMemory shared_memory;
  int attention_blocks = 0;    // 0: all
  bool shares_device = false;  // with ranks whose kernels wait for this one's
  KernelTarget kernel_target = KernelTarget::this_gpu;

  /// Whether attention and experts take their kernels for compute capability 9.0.
  bool runs_hopper_kernels() const { return is_hopper && kernel_target == KernelTarget::this_gpu; }
  PinnedBuffer failure;                     // a FailureRecord
  PinnedBuffer downloaded;                  // what queue_download() brings
  std::optional<std::size_t> queued_bytes;  // until take_download() has them
  Event is_downloaded;                      // behind its copy
  Buffer failure_claim;       // not 0: it is taken. On the device, as atomics on host memory need not work
  Buffer attention_counters;  // partial_attention's self-resetting counters
  OwnedMatmulLibrary matmul;

  FailureRecord* failure_record() const { return reinterpret_cast<FailureRecord*>(failure.data()); }
};

}  // namespace helix::cuda
