// SPDX-License-Identifier: Apache-2.0
// AppendedTokens: which of a step's tokens this rank stores.
#pragma once

#include <cstdint>

#include <helix/backend/batch.hpp>
#include <helix/kv_format.hpp>

#include "cuda/kv_cache/kv_transfer.cuh"

namespace helix::cuda {

/// The tokens of a step. Those of a batch are appended, each by the rank that owns it.
struct AppendedTokens {
  const std::int32_t* query_offsets;
  const std::int64_t* positions;
  const std::int32_t* sequence_slots;
  std::int64_t sequences;
  TokenRange tokens;  ///< The batch's tokens within the step.
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

  /// Whether this rank stores the token at global `position`. A negative position is padding, which no rank
  /// stores.
  __device__ __forceinline__ bool owns(std::int64_t position) const {
    return position >= 0 && layout.owner(position) == kvp_rank;
  }
  /// Whether this rank stores `token` of the step, which is at `position`.
  __device__ __forceinline__ bool has(std::int64_t token, std::int64_t position) const {
    return token >= tokens.begin && token < tokens.end && owns(position);
  }
  /// The sequence that `token` belongs to. Called by whole warps.
  __device__ __forceinline__ unsigned sequence(std::int64_t token) const {
    return sequence_of(token, query_offsets, sequences);
  }
};

}  // namespace helix::cuda
