// SPDX-License-Identifier: Apache-2.0
// cpu::Operators: penalize, log_probs and logit_norms, the operations on logits before and after a draw.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>

#include "cpu/sampling/logit_rows.hpp"

namespace helix::cpu {
namespace {

/// Keeps the row's num_best largest logits in `ids` and `logits`, in order; returns their number.
std::int64_t select_best(const LogProbsArgs<float>& args, std::int64_t row, std::int32_t* ids,
                         float* logits) {
  std::int64_t found = 0;
  for_each_logit(args, row, [&](float logit, std::int32_t id) {
    if (found == args.num_best && (found == 0 || !(logit > logits[found - 1]))) return;
    std::int64_t place = found < args.num_best ? found++ : found - 1;
    for (; place > 0 && logit > logits[place - 1]; --place) {
      ids[place] = ids[place - 1];
      logits[place] = logits[place - 1];
    }
    ids[place] = id;
    logits[place] = logit;
  });
  return found;
}

void find_log_probs(const LogProbsArgs<float>& args, std::int64_t row) {
  double max = -std::numeric_limits<double>::infinity();
  for_each_logit(args, row, [&](float logit, std::int32_t) { max = std::max(max, double{logit}); });
  double sum = 0.0;
  for_each_logit(args, row, [&](float logit, std::int32_t) { sum += std::exp(logit - max); });
  const double log_sum = max + std::log(sum);
  const float* chosen = find_logit(args, row, args.tokens[row]);
  args.log_probs[row] = chosen != nullptr ? static_cast<float>(*chosen - log_sum) : std::nanf("");
  std::int32_t* ids = args.best_ids + row * args.num_best;
  float* values = args.best_log_probs + row * args.num_best;
  const std::int64_t found = select_best(args, row, ids, values);
  for (std::int64_t i = 0; i < args.num_best; ++i) {
    if (i >= found) ids[i] = -1;
    values[i] = i < found ? static_cast<float>(values[i] - log_sum) : -std::numeric_limits<float>::infinity();
  }
}

}  // namespace

void Operators::penalize(const PenalizeArgs<float>& args, Stream stream) const {
  stream.enqueue([args] {
    for (std::int64_t i = 0; i < args.count; ++i) {
      const LogitPenalty& penalty = args.penalties[i];
      HELIX_EXPECTS(penalty.row >= 0 && penalty.row < args.logits.extent(1), ErrorCode::invalid_argument,
                    "penalize: penalties[", i, "] is for row ", penalty.row, "; the logits have rows [0, ",
                    args.logits.extent(1), ")");
      float* logit = find_logit(args, penalty.row, penalty.id);
      if (logit == nullptr) continue;
      *logit = *logit > 0.0f ? *logit / penalty.repetition : *logit * penalty.repetition;
      *logit -= penalty.subtract;
    }
  });
}

void Operators::log_probs(const LogProbsArgs<float>& args, Stream stream) const {
  stream.enqueue([args, pool = pool_] {
    pool->parallel_for(args.logits.extent(1), [&](std::int64_t row, int) { find_log_probs(args, row); });
  });
}

void Operators::logit_norms(const LogitNormsArgs<float>& args, Stream stream) const {
  stream.enqueue([args, pool = pool_] {
    const auto body = [&](std::int64_t row, int) {
      double squares = 0.0;
      for_each_logit(args, row, [&](float logit, std::int32_t) { squares += double{logit} * logit; });
      args.norms[row] = static_cast<float>(std::sqrt(squares));
    };
    pool->parallel_for(args.logits.extent(1), body);
  });
}

}  // namespace helix::cpu
