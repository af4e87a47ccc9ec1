// SPDX-License-Identifier: Apache-2.0
// planner_model: a checkpoint's config as the planner sees it.
#pragma once

#include <helix/plan/model.hpp>

#include "model/model_config.hpp"

namespace helix::decode {

/// The model of `config`. @throws Error(invalid_argument) for sizes that no model has.
plan::Model planner_model(const ModelConfig& config);

}  // namespace helix::decode
