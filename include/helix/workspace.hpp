// SPDX-License-Identifier: Apache-2.0
// WorkspaceArena: carves caller-given workspace into aligned views, or measures how much they would take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include <helix/error.hpp>
#include <helix/integers.hpp>
#include <helix/tensor_view.hpp>

namespace helix {

/// Hands out consecutive pieces of memory that begin at multiples of 256 bytes from its start. They are as
/// aligned as the memory, up to 256 bytes. A default-constructed arena only measures: it hands out null views
/// and counts bytes, so that one function both sizes a workspace and lays it out.
class WorkspaceArena {
 public:
  static constexpr std::size_t kAlignment = 256;

  /// An arena that only measures.
  WorkspaceArena() = default;
  /// An arena that hands out `memory` from its start.
  explicit WorkspaceArena(std::span<std::byte> memory)
      : base_(memory.data()), capacity_(memory.size()), measures_(false) {}

  /// Takes the next `bytes` bytes. @throws Error(capacity) with both sizes if the workspace is too small.
  std::span<std::byte> take_bytes(std::size_t bytes) {
    const std::size_t begin = used_;
    // Absurd sums of sizes are refused here, before they wrap into a buffer that is too small.
    constexpr std::size_t kMax = std::size_t{1} << 62;
    HELIX_EXPECTS(bytes <= kMax && used_ <= kMax, ErrorCode::capacity, "a workspace of ", used_, " and ",
                  bytes, " more bytes exceeds the address space; use fewer tokens a step");
    used_ += round_up(bytes, kAlignment);
    if (measures_) return {};
    HELIX_EXPECTS(used_ <= capacity_, ErrorCode::capacity, "workspace is ", capacity_, " bytes; at least ",
                  used_, " are needed: size it with the workspace_bytes() of the operation");
    return {base_ + begin, bytes};
  }

  /// Takes a dense view of `extents`.
  template <class T, int R>
  TensorView<T, R> take(typename TensorView<T, R>::extents_type extents) {
    std::int64_t bytes = sizeof(T);
    for (const std::int64_t extent : extents) bytes = saturating_product(bytes, extent);
    return {reinterpret_cast<T*>(take_bytes(static_cast<std::size_t>(bytes)).data()), extents};
  }

  /// Bytes handed out or measured so far, alignment included.
  std::size_t used_bytes() const { return used_; }

 private:
  std::byte* base_ = nullptr;
  std::size_t capacity_ = 0;
  std::size_t used_ = 0;
  bool measures_ = true;
};

}  // namespace helix
