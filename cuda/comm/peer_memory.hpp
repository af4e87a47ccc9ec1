// SPDX-License-Identifier: Apache-2.0
// PeerRange: one range of addresses in which the memory of all ranks of a group lies at a constant stride.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <cuda.h>

namespace helix::cuda {

/// Memory of one device that processes can share, as the driver's virtual memory has it.
class PeerMemory {
 public:
  /// Memory of `device`, not zeroed; `bytes` is a multiple of granularity(). @throws Error(capacity).
  static PeerMemory create(int device, std::size_t bytes, bool is_shared);
  /// The memory behind another process's descriptor, which stays the caller's to close.
  static PeerMemory import(int descriptor);

  PeerMemory(PeerMemory&& other) noexcept;
  PeerMemory& operator=(PeerMemory&& other) noexcept;
  ~PeerMemory();

  CUmemGenericAllocationHandle handle() const { return handle_; }
  /// A descriptor for import() elsewhere, for the caller to close.
  int export_descriptor() const;

  /// Bytes that sizes and strides of memory of `device` are multiples of.
  static std::size_t granularity(int device);
  /// Stride of memories of `device` of `bytes` each: whole granules, and a multiple of `multiple`.
  static std::size_t stride(int device, std::size_t bytes, std::size_t multiple);

 private:
  explicit PeerMemory(CUmemGenericAllocationHandle handle) : handle_(handle) {}
  CUmemGenericAllocationHandle handle_ = 0;
};

/// The memories of all ranks of a group, mapped one behind the other. Its end waits for the devices, which
/// may use it.
class PeerRange {
 public:
  /// Maps memories[r], each of `stride` bytes, for `devices` of this process to use.
  /// @throws Error(unsupported) if one of them cannot reach one of the memories.
  PeerRange(std::vector<PeerMemory> memories, std::size_t stride, std::vector<int> devices);
  PeerRange(const PeerRange&) = delete;
  PeerRange& operator=(const PeerRange&) = delete;
  ~PeerRange();

  std::byte* part(int rank) const { return first_ + static_cast<std::int64_t>(rank) * stride(); }
  std::int64_t stride() const { return static_cast<std::int64_t>(stride_); }
  /// Zeroes the part of `rank`, which is memory of `device`, and waits for that.
  void zero(int rank, int device) const;

 private:
  void unmap() noexcept;

  std::vector<PeerMemory> memories_;
  std::size_t stride_;
  std::vector<int> devices_;
  std::byte* first_ = nullptr;
  std::size_t mapped_ = 0;  // memories
};

/// Whether the driver gives the virtual memory that this needs, and `device` reaches that of `other`.
bool can_share_memory(int device, int other);

}  // namespace helix::cuda
