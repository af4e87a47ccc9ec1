// SPDX-License-Identifier: Apache-2.0
// MlaPrefill: whether a chunk of a sequence attends in the latent space or with keys and values expanded from
// it.
#pragma once

#include <cstdint>

#include <helix/model_shape.hpp>

namespace helix {

/// The two forms of multi-head latent attention, the same up to rounding.
enum class MlaForm : std::uint8_t {
  automatic,  ///< What takes less time, by multiply-adds and MlaPrefillCosts.
  absorbed,   ///< Queries go into the latent space: what a query sees is read as it is cached.
  expanded    ///< The latents that a chunk sees become keys and values of each head first.
};

/// How long chunks attend. Equal on all ranks. As it is, all attention is absorbed; so is that of a layer
/// with a window, whatever is said here.
struct MlaPrefill {
  MlaForm form = MlaForm::automatic;
  /// Most tokens of a sequence that a rank expands, for which the workspace has room: (latent_dim() + Hq *
  /// (qk_head_dim() + v_head_dim)) elements each. What sees more attends absorbed; 0: all does.
  std::int64_t max_tokens = 0;

  /// Tokens that the workspace has room for.
  constexpr std::int64_t room() const { return form == MlaForm::absorbed ? 0 : max_tokens; }
};

/// What the host knows of one sequence in a step; the same on all ranks.
struct MlaChunk {
  std::int64_t tokens = 0;        ///< T, query tokens.
  std::int64_t length = 0;        ///< S, with them.
  std::int64_t local_tokens = 0;  ///< As many of S as the fullest KVP rank stores.
  std::int64_t heads = 1;         ///< Query heads of a rank.
  int kvp = 1;
};

/// What the form is chosen by beside multiply-adds, as measured: a backend may state its own as
/// `kMlaPrefillCosts`.
struct MlaPrefillCosts {
  double expanded_time = 1.0;  ///< Time of a multiply-add of the expanded form, in that of an absorbed one.
  double launch_work = 0.0;    ///< Multiply-adds that the further launches of an expanded chunk are worth.
  double absorbed_keys = 0.0;  ///< Keys beside those it sees that an absorbed query takes as long as.
};

/// Fewest query tokens that are expanded by choice: decode steps and drafts, whose queries are few, are a
/// matter of memory and of launches, and neither is in the count of multiply-adds.
inline constexpr std::int64_t kMinExpandedTokens = 32;

/// Multiply-adds of a head on one rank where `chunk` attends absorbed: W_UK for each query, a latent row as
/// key and its value part for each query and key, and W_UV for each query of a head that it combines.
constexpr double absorbed_work(const MlaShape& mla, const MlaChunk& chunk) {
  const auto tokens = static_cast<double>(chunk.tokens);
  const double pairs = tokens * (static_cast<double>(chunk.length) - (tokens - 1) / 2) / chunk.kvp;
  const auto lora = static_cast<double>(mla.kv_lora_rank);
  return pairs * static_cast<double>(mla.latent_dim() + mla.kv_lora_rank) +
         tokens * lora *
             (static_cast<double>(mla.qk_nope_head_dim) + static_cast<double>(mla.v_head_dim) / chunk.kvp);
}

/// The same where it attends expanded: W_UK and W_UV for each token that it sees, then keys and values of the
/// heads' own sizes. Of DeepSeek-V3 320 multiply-adds for each query and key instead of 1088: less in all
/// from about 170 tokens behind a long context, and at any length where the chunk is the whole sequence.
constexpr double expanded_work(const MlaShape& mla, const MlaChunk& chunk) {
  const auto tokens = static_cast<double>(chunk.tokens);
  const double pairs = tokens * (static_cast<double>(chunk.length) - (tokens - 1) / 2) / chunk.kvp;
  return static_cast<double>(chunk.length) / chunk.kvp * static_cast<double>(mla.kv_lora_rank) *
             static_cast<double>(mla.qk_nope_head_dim + mla.v_head_dim) +
         pairs * static_cast<double>(mla.qk_head_dim() + mla.v_head_dim);
}

/// Whether the chunk attends expanded. A function of what all ranks know alike.
constexpr bool expands(const MlaPrefill& prefill, const MlaShape& mla, const MlaChunk& chunk,
                       const MlaPrefillCosts& costs = {}) {
  // Partials of expanded values travel in messages that are built for latents.
  if (chunk.kvp > 1 && mla.v_head_dim > mla.kv_lora_rank) return false;
  if (chunk.tokens < 1 || chunk.local_tokens < 1 || chunk.local_tokens > prefill.room()) return false;
  if (prefill.form == MlaForm::expanded) return true;
  const double beside = static_cast<double>(chunk.tokens) * costs.absorbed_keys *
                        static_cast<double>(mla.latent_dim() + mla.kv_lora_rank);
  const double saved = absorbed_work(mla, chunk) + beside - expanded_work(mla, chunk) * costs.expanded_time;
  return chunk.tokens >= kMinExpandedTokens && saved * static_cast<double>(chunk.heads) > costs.launch_work;
}

}  // namespace helix
