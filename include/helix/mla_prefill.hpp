// SPDX-License-Identifier: Apache-2.0
// MlaPrefill: whether a chunk of a sequence attends in the latent space or with expanded keys and values.
#pragma once

#include <cstdint>

#include <helix/model_shape.hpp>

namespace helix {

/// The two forms of multi-head latent attention, with equal results up to rounding.
enum class MlaForm : std::uint8_t {
  automatic,  ///< The form that takes less time, by multiply-adds and MlaPrefillCosts.
  absorbed,   ///< Queries are taken into the latent space and read the latents as they are cached.
  expanded    ///< The latents that a chunk sees are first expanded to keys and values of each head.
};

/// In which form prompt chunks attend. Must be equal on all ranks. By default max_tokens is 0, so that all
/// attention is absorbed. Layers with a window are always absorbed.
struct MlaPrefill {
  MlaForm form = MlaForm::automatic;
  /// Most tokens of a sequence that a rank expands. The workspace has room for them: (latent_dim() + Hq *
  /// (qk_head_dim() + v_head_dim)) elements each. A chunk that sees more tokens attends absorbed; 0: all
  /// chunks do.
  std::int64_t max_tokens = 0;

  /// Tokens for which the workspace has room.
  constexpr std::int64_t room() const { return form == MlaForm::absorbed ? 0 : max_tokens; }
};

/// What the host knows of one sequence in a step. Equal on all ranks.
struct MlaChunk {
  std::int64_t tokens = 0;        ///< T, query tokens.
  std::int64_t length = 0;        ///< S, tokens of the sequence, query tokens included.
  std::int64_t local_tokens = 0;  ///< Tokens of S that the fullest KVP rank stores.
  std::int64_t heads = 1;         ///< Query heads of a rank.
  int kvp = 1;
};

/// Measured costs by which the form is chosen, in addition to multiply-adds. A backend may state its own as
/// `kMlaPrefillCosts`.
struct MlaPrefillCosts {
  double expanded_time = 1.0;  ///< Time of a multiply-add when expanded, in units of one when absorbed.
  double launch_work = 0.0;    ///< Cost of the additional launches of an expanded chunk, in multiply-adds.
  double absorbed_keys = 0.0;  ///< Fixed cost of an absorbed query, in keys in addition to those it sees.
};

/// Fewest query tokens for which MlaForm::automatic expands. Decode steps and drafts have few queries; their
/// time depends on memory and launches, which the count of multiply-adds leaves out.
inline constexpr std::int64_t kMinExpandedTokens = 32;

/// Multiply-adds of one head on one rank if `chunk` attends absorbed: W_UK for each query, a latent row as
/// key and its value part for each query and key, and W_UV for each query of a head that the rank combines.
constexpr double absorbed_work(const MlaShape& mla, const MlaChunk& chunk) {
  const auto tokens = static_cast<double>(chunk.tokens);
  const double pairs = tokens * (static_cast<double>(chunk.length) - (tokens - 1) / 2) / chunk.kvp;
  const auto lora = static_cast<double>(mla.kv_lora_rank);
  return pairs * static_cast<double>(mla.latent_dim() + mla.kv_lora_rank) +
         tokens * lora *
             (static_cast<double>(mla.qk_nope_head_dim) + static_cast<double>(mla.v_head_dim) / chunk.kvp);
}

/// Multiply-adds of one head on one rank if `chunk` attends expanded: W_UK and W_UV for each token that it
/// sees, then keys and values of the heads' own sizes. With DeepSeek-V3's sizes each pair of a query and a
/// key takes 320 multiply-adds instead of 1088. In all, expansion takes fewer from about 170 query tokens
/// after a long context, and at any length if the chunk is the whole sequence.
constexpr double expanded_work(const MlaShape& mla, const MlaChunk& chunk) {
  const auto tokens = static_cast<double>(chunk.tokens);
  const double pairs = tokens * (static_cast<double>(chunk.length) - (tokens - 1) / 2) / chunk.kvp;
  return static_cast<double>(chunk.length) / chunk.kvp * static_cast<double>(mla.kv_lora_rank) *
             static_cast<double>(mla.qk_nope_head_dim + mla.v_head_dim) +
         pairs * static_cast<double>(mla.qk_head_dim() + mla.v_head_dim);
}

/// Whether the chunk attends expanded. Depends only on values that are equal on all ranks.
constexpr bool expands(const MlaPrefill& prefill, const MlaShape& mla, const MlaChunk& chunk,
                       const MlaPrefillCosts& costs = {}) {
  // Partials of expanded values must fit messages that are built for latents.
  if (chunk.kvp > 1 && mla.v_head_dim > mla.kv_lora_rank) return false;
  if (chunk.tokens < 1 || chunk.local_tokens < 1 || chunk.local_tokens > prefill.room()) return false;
  if (prefill.form == MlaForm::expanded) return true;
  const double beside = static_cast<double>(chunk.tokens) * costs.absorbed_keys *
                        static_cast<double>(mla.latent_dim() + mla.kv_lora_rank);
  const double saved = absorbed_work(mla, chunk) + beside - expanded_work(mla, chunk) * costs.expanded_time;
  return chunk.tokens >= kMinExpandedTokens && saved * static_cast<double>(chunk.heads) > costs.launch_work;
}

}  // namespace helix
