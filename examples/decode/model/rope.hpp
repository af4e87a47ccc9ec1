// SPDX-License-Identifier: Apache-2.0
// RopeConfig: a rotary embedding as given in a config, and the constants that follow from it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace helix::decode {

/// `dynamic` changes the frequencies only of sequences longer than max_position_embeddings, which are
/// refused.
enum class RopeType : std::uint8_t { standard, linear, dynamic, llama3, yarn };

/// Rotary embedding as given in the config; `standard` uses only theta.
struct RopeConfig {
  RopeType type = RopeType::standard;
  double theta = 10000.0;
  std::int64_t rotary_dim = 0;  ///< Rotated dimensions of a head: the whole head, or MLA's qk_rope_head_dim.
  bool is_interleaved = false;
  double factor = 1.0;                                ///< Factor of every type but standard.
  std::int64_t original_max_position_embeddings = 0;  ///< llama3 and yarn.
  double low_freq_factor = 1.0;                       ///< llama3.
  double high_freq_factor = 4.0;                      ///< llama3.
  double beta_fast = 32.0;                            ///< yarn.
  double beta_slow = 1.0;                             ///< yarn.
  double mscale = 0.0;                                ///< yarn; 0: not given.
  double mscale_all_dim = 0.0;                        ///< Every type but standard; 0: not given.
  std::optional<double> attention_factor{};           ///< yarn.
  bool truncate = true;  ///< yarn: round the correction range to whole dimensions.

  /// Inverse frequency of each rotary pair, [rotary_dim / 2], scaled for `type`. Computed in float32 with the
  /// same sequence of operations as in transformers.
  std::vector<float> inverse_frequencies() const;

  /// Factor on cos and sin: yarn's attention factor, otherwise 1.
  float magnitude() const;

  /// Factor on the softmax scale of latent attention: yarn's m^2 for mscale_all_dim, which transformers
  /// applies to every type except `standard`; 1 if mscale_all_dim is not given.
  double latent_softmax_factor() const;
};

}  // namespace helix::decode
