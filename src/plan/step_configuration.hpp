// SPDX-License-Identifier: Apache-2.0
// StepConfiguration: one layout and workload, and what the fullest rank holds and works on under them.
#pragma once

#include <helix/plan/layout.hpp>
#include <helix/plan/model.hpp>
#include <helix/plan/units.hpp>
#include <helix/plan/workload.hpp>

#include "plan/rank_elements.hpp"

namespace helix::plan::detail {

/// What determines the operators of a step, apart from the machine. Doubles enter products.
struct StepConfiguration {
  StepConfiguration(const Model& model, const Layout& layout, const Workload& workload)
      : model(model),
        layout(layout),
        workload(workload),
        rank(rank_elements(model, layout)),
        batch(rank_batch(layout, workload)),
        hidden(static_cast<double>(model.shape.hidden)),
        own_tokens(static_cast<double>(batch.attention * workload.step_tokens)),
        stage_tokens(static_cast<double>(batch.stage * workload.step_tokens)) {}

  bool uses_attn_dp() const { return layout.attn_dp > 1; }

  const Model& model;
  Layout layout;
  Workload workload;
  RankElements rank;
  RankBatch batch;
  double hidden;        ///< M.
  double own_tokens;    ///< Tokens that a rank works on in attention.
  double stage_tokens;  ///< Tokens of all ranks of the stage.
};

}  // namespace helix::plan::detail
