// SPDX-License-Identifier: Apache-2.0
// Collectives over peer memory: what their kernels are given.
#pragma once

#include <cstddef>
#include <cstdint>

#include <helix/cuda/runtime.hpp>
#include <helix/dtype.hpp>

#include "cuda/comm/peer_channel.hpp"

namespace helix::cuda {

/// Bytes that a rank sends to, and receives from, each rank of the group, itself included; flags carry them,
/// so that two ranks that disagree fail. Two ranks that have nothing for each other meet only if `all_meet`.
struct PeerMoves {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  std::int64_t send_begin[kMaxPeers] = {};
  std::int64_t send_bytes[kMaxPeers] = {};
  std::int64_t recv_begin[kMaxPeers] = {};
  std::int64_t recv_bytes[kMaxPeers] = {};
  bool all_meet = false;
  std::uint32_t tag = 0;  ///< Of the call; equal on the two ends.
};

/// Queues the moves on `blocks` channels, equal on all ranks that meet.
void peer_move(const PeerChannel& channel, const PeerMoves& moves, int blocks, StreamHandle stream);

/// out [count] = the sum over ranks r, in rank order and in f32, of in [count] of rank r, or of slice `rank`
/// of in [size, count] where `is_scatter`. `out` may be `in`, or the rank's own slice of it.
struct PeerReduction {
  const void* in = nullptr;
  void* out = nullptr;
  std::int64_t count = 0;
  DType dtype = DType::f32;
  bool is_scatter = false;
  std::uint32_t tag = 0;
};

/// Queues the reduction on `blocks` channels, equal on all ranks.
void peer_reduce(const PeerChannel& channel, const PeerReduction& reduction, int blocks, StreamHandle stream);

}  // namespace helix::cuda
