// SPDX-License-Identifier: Apache-2.0
// Whether the weights of a rank's experts are equally spaced, so that one tensor map covers them all.
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

/// The distance for one projection, if it is constant and a tensor map allows it.
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

/// The distances for weights that are all of `dtype`.
inline std::optional<ExpertDistances> distances_of(std::span<const ExpertWeights> experts, DType dtype) {
  const auto gate_up = distance_of(experts, &ExpertWeights::gate_up, dtype);
  const auto down = distance_of(experts, &ExpertWeights::down, dtype);
  if (!gate_up || !down) return {};
  return ExpertDistances{*gate_up, *down};
}

}  // namespace helix::cuda
