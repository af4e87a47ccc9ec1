// SPDX-License-Identifier: Apache-2.0
// State shared by all operations of one rank on a GPU: its device, failure record and matrix library.
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

/// Most query tiles times KV heads of one attention launch, or times the blocks of a cluster.
inline constexpr std::size_t kAttentionCounters = 1 << 16;

/// Most bytes that queue_download() takes: enough for what a step of some hundred rows draws.
inline constexpr std::size_t kDownloadBytes = 16384;

/// Whether the kernels for compute capability 9.0 were built with their own code. Loads a kernel, so do not
/// call it in a step. Defined in cuda/runtime/hopper_code.cu.
bool has_hopper_code();

/// A failure that a kernel found. Host memory, written by the device. Only the first is recorded.
struct FailureRecord {
  std::uint32_t is_complete = 0;  ///< written last
  std::uint32_t peer = 0;         ///< check_exchange: the peer whose message is wrong
  ExchangeHeader header{};        ///< What the message begins with.
  ExchangeHeader expected{};      ///< What it should begin with.
};

/// cuBLASLt handle, workspace and plans of a rank. Defined in cuda/linear/matmul.cpp.
class MatmulLibrary;
struct MatmulLibraryDelete {
  void operator()(MatmulLibrary* library) const noexcept;
};
using OwnedMatmulLibrary = std::unique_ptr<MatmulLibrary, MatmulLibraryDelete>;
/// For the calling thread's device. Each of the first two streams that multiply gets a workspace from
/// `allocator` (null: CUDA's own) at its first product outside of a capture. A third stream, and a captured
/// one without a workspace, use algorithms that need none.
/// @throws Error(internal) if the library does not start.
OwnedMatmulLibrary make_matmul_library(std::shared_ptr<const Allocator> allocator);

template <class T>
struct Operators<T>::State {
  std::shared_ptr<const Allocator> allocator;  // null: CUDA's own
  int device = 0;
  int num_sms = 0;
  bool is_hopper = false;  // compute capability 9.0, whose kernels then run
  SharedMemory shared_memory;
  int attention_blocks = 0;    // at most; 0: all
  bool shares_device = false;  // with ranks whose kernels wait for this one's
  KernelTarget kernel_target = KernelTarget::this_gpu;

  /// Whether attention and experts use their kernels for compute capability 9.0.
  bool runs_hopper_kernels() const { return is_hopper && kernel_target == KernelTarget::this_gpu; }
  PinnedBuffer failure;                     // a FailureRecord
  PinnedBuffer downloaded;                  // where queue_download() copies to
  std::optional<std::size_t> queued_bytes;  // set until take_download()
  Event is_downloaded;                      // recorded after the download's copy
  Buffer failure_claim;       // not 0: taken. Device memory, because atomics on host memory may not work
  Buffer attention_counters;  // partial_attention's self-resetting counters
  OwnedMatmulLibrary matmul;

  FailureRecord* failure_record() const { return reinterpret_cast<FailureRecord*>(failure.data()); }
};

}  // namespace helix::cuda
