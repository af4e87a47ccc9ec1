// SPDX-License-Identifier: Apache-2.0
// What a request needs of a model and of each rank, known before a weight is loaded.
#pragma once

#include <cstdint>

#include <helix/mla_prefill.hpp>
#include <helix/sharded_kv_cache.hpp>
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

/// Checks the request's own sizes, after which all that follows from them stays inside int64
/// (helix/limits.hpp).
/// @throws Error(invalid_argument) naming the size and its limit.
void check_sizes(const GenerationRequest& request);

/// @throws Error(invalid_argument) naming the limit that is out of range.
void check_serving(const ServeLimits& limits, const ModelConfig& model);

/// Checks the request, its sizes too, against the model, on values that all ranks share.
/// @throws Error(invalid_argument) naming the sequence and the values.
void check_request(const GenerationRequest& request, const ModelConfig& model, const Topology& topo);

/// The cache that `stage` of `replica` needs for the request: pages for the longest that each sequence gets.
KvCacheSpec plan_cache(const GenerationRequest& request, const Topology& topo, int stage, int replica);

/// Bytes of the pages that the rank at `at` needs for `sequence` of the request at its longest, all layers of
/// its stage.
std::int64_t planned_kv_bytes(const GenerationRequest& request, const Topology& topo,
                              const RankCoordinates& at, std::int64_t sequence);

/// Bytes of all pages of the rank at `at` of a serving decoder, all layers of its stage.
std::int64_t planned_pool_bytes(const GenerationRequest& request, const Topology& topo,
                                const RankCoordinates& at);

/// Bytes of K and V that one token of context adds over all layers and all ranks of a replica.
std::int64_t kv_bytes_per_token(const GenerationRequest& request, const Topology& topo);

/// How prompts attend, the same on all replicas. Room is for the longest sequence, up to 8192 tokens a rank:
/// those of DeepSeek-V3 take 650 MiB as bf16. Weights to expand with are needed only where there is room.
MlaPrefill plan_mla_prefill(const GenerationRequest& request, const Topology& topo);

/// Capacities of the request's steps on `replica`.
StageLimits plan_limits(const GenerationRequest& request, const Topology& topo, int replica);

/// The first steps of the request on `replica`, as far as they are known; of a serving decoder a prompt's and
/// one sequence's.
WarmUp plan_warm_up(const GenerationRequest& request, const Topology& topo, int replica);

}  // namespace helix::decode
