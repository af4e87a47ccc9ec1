// SPDX-License-Identifier: Apache-2.0
// A machine from what helix-bench-cuda measured on it: single operators and collectives, never whole steps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <helix/plan/hardware.hpp>
#include <helix/plan/model.hpp>

#include "bench_results.hpp"

namespace helix::plan_cli {

/// `base` with what the cases measured; the rest stays:
/// - read: the reads beside the operators, by size; less than the smallest takes as long as it, or as `base`
///   has it where the smallest is above 4 MB;
/// - attention_read: the cases of is_step_attention() with one query token, by size of the KV;
/// - per_operator: by how much small kernels exceed a read of their bytes (median);
/// - per_slice: the combine that each HOP-B slice has of its own; that attention starts and ends again is in
///   its curve;
/// - measured all_to_all: KvpAllToAll and combine, alone or else in a layer's bench, less the combine, which
///   the model counts apart, where they take longer than that;
/// - measured all_reduce: alone, of a layer's hidden states.
/// Collectives are those over NCCL; those over windows where nothing went over NCCL.
/// @throws Error(invalid_file) naming the files if the cases hold none of it, or what contradicts itself.
plan::Hardware calibrate(const plan::Hardware& base, const std::vector<BenchCase>& cases);

/// As calibrate(), without the case of that name; `base` where the others hold nothing.
plan::Hardware calibrate_without(const plan::Hardware& base, std::vector<BenchCase> cases,
                                 const std::string& name);

/// Whether the case is attention of decode steps as BenchShape and the presets have it: bf16 in Helix's own
/// pages, heads of BenchShape::kDim, by the kernel that the GPU chooses.
bool is_step_attention(const BenchCase& at);

/// Of decode_layer and attention_scaling, whose names do not say it: Llama-405B's layers.
struct BenchShape {
  static constexpr std::int64_t kHidden = 16384;
  static constexpr std::int64_t kHeads = 128;
  static constexpr std::int64_t kKvHeads = 8;
  static constexpr std::int64_t kDim = 128;
  static constexpr std::int64_t kFfn = 53248;
  static constexpr double kElementBytes = 2;  ///< Bytes of bf16: weights, KV and activations.
};

/// What a rank holds before the exchange: outputs and a log-sum-exp for each token and head.
plan::Bytes partial_bytes(std::int64_t tokens, std::int64_t heads, std::int64_t dim);

}  // namespace helix::plan_cli
