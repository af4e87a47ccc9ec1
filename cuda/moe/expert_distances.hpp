// SPDX-License-Identifier: Apache-2.0
// Whether the weights of a rank's experts lie at equal distances, so that one tensor map has all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include <helix/backend/layer.hpp>
#include <helix/dtype.hpp>

#include "cuda/runtime/rows.cuh"

namespace helix::cuda {

/// Bytes from one expert's weights to the next's.
struct ExpertDistances {
  std::int64_t gate_up;
  std::int64_t down;
};

/// The distance of one projection, if it is always the same and a tensor map may have it.
inline std::optional<std::int64_t> distance_of(std::span<const ExpertWeights> experts,
                                               WeightView ExpertWeights::*projection, DType dtype) {
  const auto address = [&](std::size_t e) { return address_of((experts[e].*projection).data); };
  const std::uintptr_t distance = experts.size() > 1 ? address(1) - address(0) : 16;
  for (std::size_t e = 0; e < experts.size(); ++e) {
    if ((experts[e].*projection).dtype != dtype || address(e) != address(0) + e * distance) return {};
  }
  const auto bytes = static_cast<std::int64_t>(distance);
  if (bytes == 0 || !is_map_stride(2, bytes) || common_alignment({address(0), distance}) < 16) return {};
  return bytes;
}

/// Of weights that are all of `dtype`.
inline std::optional<ExpertDistances> distances_of(std::span<const ExpertWeights> experts, DType dtype) {
  const auto gate_up = distance_of(experts, &ExpertWeights::gate_up, dtype);
  const auto down = distance_of(experts, &ExpertWeights::down, dtype);
  if (!gate_up || !down) return {};
  return ExpertDistances{*gate_up, *down};
}

}  // namespace helix::cuda
