// SPDX-License-Identifier: Apache-2.0
// What a request needs from the model and from each rank, known before a weight is loaded.
#pragma once

#include <cstdint>

#include <helix/kv_cache_spec.hpp>
#include <helix/mla_prefill.hpp>
#include <helix/topology.hpp>

#include "generate/generation.hpp"
#include "model/model_config.hpp"
#include "model/stage_plan.hpp"

namespace helix::decode {

/// Sequences of the request that `replica` generates.
inline Range replica_sequences(const Topology& topo, const GenerationRequest& request, int replica) {
  return split_evenly(request.num_sequences(), topo.dp(), replica);
}

/// @throws Error(invalid_argument) naming the penalty that is NaN or out of range.
void check_penalties(const Penalties& penalties);

/// Checks the request's own sizes. Everything computed from them afterwards fits in int64 (helix/limits.hpp).
/// @throws Error(invalid_argument) naming the size and its limit.
void check_sizes(const GenerationRequest& request);

/// Checks the request, including its sizes, against the model. Uses only values that all ranks share.
/// @throws Error(invalid_argument) naming the sequence and the values.
void check_request(const GenerationRequest& request, const ModelConfig& model, const Topology& topo);

/// The cache that `stage` of `replica` needs for the request: enough pages for each sequence at its longest.
KvCacheSpec plan_cache(const GenerationRequest& request, const Topology& topo, int stage, int replica);

/// Bytes of the pages that the rank at `at` needs for `sequence` of the request at its longest, for all
/// layers of its stage.
std::int64_t planned_kv_bytes(const GenerationRequest& request, const Topology& topo,
                              const RankCoordinates& at, std::int64_t sequence);

/// Bytes of all pages that the rank at `at` of a serving decoder has, for all layers of its stage.
std::int64_t planned_pool_bytes(const GenerationRequest& request, const Topology& topo,
                                const RankCoordinates& at);

/// Bytes of K and V that one token of context adds, over all layers and all ranks of a replica.
std::int64_t kv_bytes_per_token(const GenerationRequest& request, const Topology& topo);

/// How prompts attend; equal on all replicas. There is room for the longest sequence, up to 8192 tokens per
/// rank: for DeepSeek-V3 these take 650 MiB as bf16. The weights for expansion are loaded only if there is
/// room.
MlaPrefill plan_mla_prefill(const GenerationRequest& request, const Topology& topo);

/// Capacities of the request's steps on `replica`.
StageLimits plan_limits(const GenerationRequest& request, const Topology& topo, int replica);

/// The first steps of the request on `replica`, as far as they are known. For a serving decoder these are a
/// prompt step and a decode step of one sequence.
WarmUp plan_warm_up(const GenerationRequest& request, const Topology& topo, int replica);

}  // namespace helix::decode
