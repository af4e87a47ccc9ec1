// SPDX-License-Identifier: Apache-2.0
// What a stage of the model is built for: the capacities and options of its steps. RankMemory: what a rank
// takes.
#pragma once

#include <cstdint>
#include <vector>

#include <helix/mla_prefill.hpp>

namespace helix::decode {

/// Capacities of a stage. Equal on all ranks.
struct StageLimits {
  std::int64_t max_sequences = 0;
  std::int64_t max_step_tokens = 0;
  std::int64_t max_logit_rows = 0;
  int max_slices = 8;
  MlaPrefill mla_prefill{.form = MlaForm::absorbed};  ///< Setting of all layers.
};

/// Options that stay the same from step to step. Equal on all ranks.
struct StepOptions {
  int hop_b_slices = 0;          ///< 0: chosen automatically, 1: off.
  bool has_logit_norms = false;  ///< Whether the last stage computes the norm of each logit row.
  /// Whether decode steps of equal shapes are replayed, if the backend and the ranks allow it.
  bool captures = true;
};

/// Steps that a model runs before its first real one, see StageModel::warm_up(). Equal on all ranks.
struct WarmUp {
  std::int64_t prefill_tokens = 0;  ///< Tokens of one sequence; 0: no prefill step.
  /// Lengths of prompts whose last prefill_tokens run too, each in a step of its own. Prompts may take a path
  /// that padding does not take (MlaPrefill).
  std::vector<std::int64_t> prompts{};
  std::int64_t sequences = 0;      ///< Sequences of a decode step; 0: no decode step.
  std::int64_t decode_tokens = 1;  ///< Tokens of each of these sequences.
  bool is_random = false;          ///< Whether tokens are drawn at random.
};

/// Memory of one rank.
struct RankMemory {
  /// All weights: those in buffers, and those used in place in the checkpoint's files.
  std::int64_t weights_bytes = 0;
  /// Part of weights_bytes that is used in place in the files; all ranks of a machine share these pages.
  std::int64_t weights_in_place_bytes = 0;
  std::int64_t kv_bytes = 0;  ///< Pages in use, over all layers.
  std::int64_t workspace_bytes = 0;
  /// Peak resident memory of the rank's process, which rank threads share. Measured, not planned.
  std::int64_t resident_bytes = 0;
};

}  // namespace helix::decode
