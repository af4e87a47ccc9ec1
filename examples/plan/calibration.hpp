// SPDX-License-Identifier: Apache-2.0
// Calibrates a hardware description with measurements by helix-bench-cuda: single operators and collectives,
// never whole steps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <helix/plan/hardware.hpp>
#include <helix/plan/model.hpp>

#include "bench_results.hpp"

namespace helix::plan_cli {

/// `base` updated with the measurements of the cases; all other values stay:
/// - read: the reads measured beside the operators, by size. Smaller sizes take the time of the smallest
///   read, or that of `base` if the smallest read is above 4 MB;
/// - attention_read: the cases of is_step_attention() with one query token, by size of the KV;
/// - per_operator: by how much small kernels exceed a read of their bytes (median);
/// - per_slice: the combine that each HOP-B slice adds; that attention starts and ends again is part of its
///   curve;
/// - measured all_to_all: KvpAllToAll and combine, measured alone or else in a layer's bench, minus the
///   modelled combine; only where they take longer than the combine;
/// - measured all_reduce: the all-reduce of a layer's hidden states, measured alone.
/// Collectives are measured over NCCL, or over windows if nothing was measured over NCCL.
/// @throws Error(invalid_file) naming the files if the cases hold none of this or contradict themselves.
plan::Hardware calibrate(const plan::Hardware& base, const std::vector<BenchCase>& cases);

/// Like calibrate(), but without the case of that name; returns `base` if the other cases hold no
/// measurements.
plan::Hardware calibrate_without(const plan::Hardware& base, std::vector<BenchCase> cases,
                                 const std::string& name);

/// Whether the case is attention of decode steps as in BenchShape and the presets: bf16 in Helix's own pages,
/// heads of BenchShape::kDim, with the kernel that the GPU chooses, and not of many short sequences.
/// @throws Error(invalid_file) if the name's "tokens" are no number.
bool is_step_attention(const BenchCase& at);

/// The shape of the decode_layer and attention_scaling cases, whose names do not state it: layers of
/// Llama-405B.
struct BenchShape {
  static constexpr std::int64_t kHidden = 16384;
  static constexpr std::int64_t kHeads = 128;
  static constexpr std::int64_t kKvHeads = 8;
  static constexpr std::int64_t kDim = 128;
  static constexpr std::int64_t kFfn = 53248;
  static constexpr double kElementBytes = 2;  ///< Bytes of bf16: weights, KV and activations.
};

/// Bytes of the partials that a rank holds before the exchange: outputs and a log-sum-exp for each token and
/// head.
plan::Bytes partial_bytes(std::int64_t tokens, std::int64_t heads, std::int64_t dim);

}  // namespace helix::plan_cli
