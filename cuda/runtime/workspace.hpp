// SPDX-License-Identifier: Apache-2.0
// aligned_part: makes a caller's workspace of any alignment fit WorkspaceArena.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include <helix/workspace.hpp>

namespace helix::cuda {

/// The part of `workspace` from the first byte with the arena's alignment; empty if there is none.
inline std::span<std::byte> aligned_part(std::span<std::byte> workspace) {
  void* data = workspace.data();
  std::size_t bytes = workspace.size();
  if (std::align(WorkspaceArena::kAlignment, 0, data, bytes) == nullptr) return {};
  return {static_cast<std::byte*>(data), bytes};
}

}  // namespace helix::cuda
