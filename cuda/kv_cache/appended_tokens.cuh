// SPDX-License-Identifier: Apache-2.0
// AppendedTokens: which of a step's tokens this rank stores, as kernels read a Batch and a KvView.
#pragma once

#include <cstdint>

#include <helix/backend/batch.hpp>
#include <helix/kv_format.hpp>

#include "cuda/kv_cache/kv_transfer.cuh"

namespace helix::cuda {

/// The tokens of a step, of which those of a batch are appended, by the rank that owns each.
struct AppendedTokens {
  const std::int32_t* query_offsets;
  const std::int64_t* positions;
  const std::int32_t* sequence_slots;
  std::int64_t sequences;
  TokenRange tokens;  ///< Of the step's.
  KvLayout layout;
  std::int64_t kvp_rank;

  AppendedTokens(const Batch& batch, const KvView& kv)
      : query_offsets(batch.query_offsets),
        positions(batch.positions),
        sequence_slots(batch.sequence_slots),
        sequences(batch.num_sequences()),
        tokens{batch.first_token(), batch.first_token() + batch.num_tokens()},
        layout(kv.layout),
        kvp_rank(kv.kvp_rank) {}

  /// Whether this rank stores what is at global `position`; below 0 is padding, which nobody stores.
  __device__ __forceinline__ bool owns(std::int64_t position) const {
    return position >= 0 && layout.owner(position) == kvp_rank;
  }
  /// Whether it stores `token` of the step, which is at `position`.
  __device__ __forceinline__ bool has(std::int64_t token, std::int64_t position) const {
    return token >= tokens.begin && token < tokens.end && owns(position);
  }
  /// Sequence that `token` belongs to; whole warps.
  __device__ __forceinline__ unsigned sequence(std::int64_t token) const {
    return sequence_of(token, query_offsets, sequences);
  }
};

}  // namespace helix::cuda
