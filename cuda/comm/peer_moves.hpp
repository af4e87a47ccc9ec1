// SPDX-License-Identifier: Apache-2.0
// Arguments of the kernels of collectives over peer memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/cuda/runtime.hpp>
#include <helix/dtype.hpp>

#include "cuda/comm/peer_channel.hpp"

namespace helix::cuda {

/// Bytes that a rank sends to, and receives from, each rank of the group, itself included. Flags carry the
/// lengths, so ranks that disagree fail. Two ranks with nothing for each other exchange flags only if
/// `all_meet`.
struct PeerMoves {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  std::int64_t send_begin[kMaxPeers] = {};
  std::int64_t send_bytes[kMaxPeers] = {};
  std::int64_t recv_begin[kMaxPeers] = {};
  std::int64_t recv_bytes[kMaxPeers] = {};
  bool all_meet = false;
  std::uint32_t tag = 0;  ///< Identifies the call; equal on both ends.
};

/// Queues the moves on `blocks` channels; all ranks that meet must use the same number.
void peer_move(const PeerChannel& channel, const PeerMoves& moves, int blocks, StreamHandle stream);

/// out [count] = the sum over ranks r, in rank order and in f32, of in [count] of rank r. If `is_scatter`, in
/// is [size, count], and out gets the sum of slice `rank` of each. `out` may be `in`, or the rank's own slice
/// of it.
struct PeerReduction {
  const void* in = nullptr;
  void* out = nullptr;
  std::int64_t count = 0;
  DType dtype = DType::f32;
  bool is_scatter = false;
  std::uint32_t tag = 0;
};

/// Queues the reduction on `blocks` channels; all ranks must use the same number.
void peer_reduce(const PeerChannel& channel, const PeerReduction& reduction, int blocks, StreamHandle stream);

}  // namespace helix::cuda
