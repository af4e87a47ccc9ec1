// SPDX-License-Identifier: Apache-2.0
// planner_model(): converts a checkpoint's config to the planner's model.
#pragma once

#include <helix/plan/model.hpp>

#include "model/model_config.hpp"

namespace helix::decode {

/// The planner's model of `config`.
/// @throws Error(invalid_argument) for sizes that no model has.
plan::Model planner_model(const ModelConfig& config);

}  // namespace helix::decode
