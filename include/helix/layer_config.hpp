// SPDX-License-Identifier: Apache-2.0
// LayerConfig: the numbers of a layer that are neither weights nor sizes.
#pragma once

#include <cstdint>

#include <helix/backend/layer.hpp>
#include <helix/mla_prefill.hpp>

namespace helix {

/// How an MoE layer chooses experts; see RouteArgs.
struct RouterConfig {
  RouterScoring scoring = RouterScoring::softmax;
  std::int64_t num_groups = 1;
  std::int64_t groups_kept = 1;
  bool normalize = false;
  float scale = 1.0f;  ///< Factor on the experts' weights, after normalize.
};

/// Numbers of one layer that are not weights. They must be equal on all ranks.
struct LayerConfig {
  float norm_epsilon = 1e-5f;         ///< Epsilon of the layer's norms, and of those of q and k.
  float latent_norm_epsilon = 1e-6f;  ///< Epsilon of MLA's norms of compressed queries and keys.
  float softmax_scale = 0.0f;
  std::int64_t window = 0;  ///< Sliding window in tokens; 0: none.
  float soft_cap = 0.0f;    ///< Soft cap of scores; 0: none.
  RopeView rope{};
  RouterConfig router{};     ///< Choice of experts, with MoeWeights.
  MlaPrefill mla_prefill{};  ///< Choice of absorbed or expanded attention, with MlaWeights.
};

}  // namespace helix
