// SPDX-License-Identifier: Apache-2.0
// The row of latents that the kernels over latents are built for: 512 latent columns and 64 rope columns.
#pragma once

#include <cstdint>

namespace helix::cuda {

inline constexpr int kLatentColumns = 512;  ///< Latent columns of a key: its first ones, and the whole value.
inline constexpr int kRopeColumns = 64;     ///< Rope columns of a key, not part of the value.
inline constexpr int kLatentKeyColumns = kLatentColumns + kRopeColumns;

constexpr bool is_latent_shape(std::int64_t head_dim, std::int64_t value_dim) {
  return head_dim == kLatentKeyColumns && value_dim == kLatentColumns;
}

}  // namespace helix::cuda
