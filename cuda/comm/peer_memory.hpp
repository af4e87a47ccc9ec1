// SPDX-License-Identifier: Apache-2.0
// PeerMemory: memory of one device that processes can share. PeerRange: one address range that maps that of
// all ranks of a group at a constant stride.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <cuda.h>

namespace helix::cuda {

/// Memory of one device that processes can share (the driver's virtual memory management).
class PeerMemory {
 public:
  /// Allocates memory of `device`, not zeroed; `bytes` is a multiple of granularity().
  /// @throws Error(capacity).
  static PeerMemory create(int device, std::size_t bytes, bool is_shared);
  /// Imports another process's memory from its descriptor. The caller still closes the descriptor.
  static PeerMemory import(int descriptor);

  PeerMemory(PeerMemory&& other) noexcept;
  PeerMemory& operator=(PeerMemory&& other) noexcept;
  ~PeerMemory();

  CUmemGenericAllocationHandle handle() const { return handle_; }
  /// A descriptor for import() in another process. The caller closes it.
  int export_descriptor() const;

  /// Sizes and strides of memory of `device` are multiples of this, in bytes.
  static std::size_t granularity(int device);
  /// Stride for memories of `device` with `bytes` each: a multiple of the granularity and of `multiple`.
  static std::size_t stride(int device, std::size_t bytes, std::size_t multiple);

 private:
  explicit PeerMemory(CUmemGenericAllocationHandle handle) : handle_(handle) {}
  CUmemGenericAllocationHandle handle_ = 0;
};

/// The memories of all ranks of a group, mapped contiguously. The destructor waits for the devices, whose
/// kernels may still use them.
class PeerRange {
 public:
  /// Maps memories[r], each of `stride` bytes, into the address space of `devices` of this process.
  /// @throws Error(unsupported) if a device cannot reach one of the memories.
  PeerRange(std::vector<PeerMemory> memories, std::size_t stride, std::vector<int> devices);
  PeerRange(const PeerRange&) = delete;
  PeerRange& operator=(const PeerRange&) = delete;
  ~PeerRange();

  std::byte* part(int rank) const { return first_ + static_cast<std::int64_t>(rank) * stride(); }
  std::int64_t stride() const { return static_cast<std::int64_t>(stride_); }
  /// Zeroes the part of `rank`, which is memory of `device`, and waits until that is done.
  void zero(int rank, int device) const;

 private:
  void unmap() noexcept;

  std::vector<PeerMemory> memories_;
  std::size_t stride_;
  std::vector<int> devices_;
  std::byte* first_ = nullptr;
  std::size_t mapped_ = 0;  // memories
};

/// Whether the driver supports this virtual memory and `device` can reach the memory of `other`.
bool can_share_memory(int device, int other);

}  // namespace helix::cuda
