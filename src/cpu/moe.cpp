// SPDX-License-Identifier: Apache-2.0
// cpu::Operators: chooses experts, and runs those of this rank.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>
#include <helix/workspace.hpp>

#include "cpu/linear/product.hpp"
#include "cpu/row_tasks.hpp"
#include "cpu/swiglu.hpp"

namespace helix::cpu {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();
constexpr auto kMaxExperts = static_cast<std::size_t>(kMaxRoutedExperts);  // bounds stack arrays

/// Replaces NaN by -inf, because NaN marks experts that have been taken.
float selectable(float value) {
  return std::isnan(value) ? kMasked : value;
}

/// Indices of the `count` largest of `scores`, best first, the lower index on ties. No score may be NaN; each
/// chosen score becomes NaN.
template <class Index>
void take_best(std::span<float> scores, std::int64_t count, Index* chosen) {
  for (std::int64_t i = 0; i < count; ++i) {
    float best = kMasked;
    std::size_t at = scores.size();
    for (std::size_t j = 0; j < scores.size(); ++j) {
      if (scores[j] > best || (scores[j] == best && at == scores.size())) {
        best = scores[j];
        at = j;
      }
    }
    chosen[i] = static_cast<Index>(at);
    scores[at] = std::numeric_limits<float>::quiet_NaN();
  }
}

float group_score(std::span<const float> scores, RouterScoring scoring) {
  float first = kMasked;
  float second = kMasked;
  for (float score : scores) {
    if (score > first) {
      second = first;
      first = score;
    } else {
      second = std::max(second, score);
    }
  }
  if (scoring == RouterScoring::softmax || scores.size() == 1) return first;
  return first + second;
}

/// Scores of all experts of one token.
void score_experts(const float* logits, RouterScoring scoring, std::span<float> scores) {
  if (scoring == RouterScoring::softmax) {
    const float max = *std::max_element(logits, logits + scores.size());
    float sum = 0.0f;
    for (std::size_t e = 0; e < scores.size(); ++e) sum += scores[e] = std::exp(logits[e] - max);
    for (float& score : scores) score /= sum;
  } else {
    for (std::size_t e = 0; e < scores.size(); ++e) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
  }
}

/// Masks the experts of all groups but the args.groups_kept best ones.
void mask_groups(const RouteArgs& args, std::span<float> choice) {
  if (args.groups_kept == args.num_groups) return;
  const std::size_t width = choice.size() / static_cast<std::size_t>(args.num_groups);
  std::array<float, kMaxExperts> group_storage;
  std::array<bool, kMaxExperts> kept{};
  const std::span<float> groups(group_storage.data(), static_cast<std::size_t>(args.num_groups));
  for (std::size_t g = 0; g < groups.size(); ++g)
    groups[g] = selectable(group_score(choice.subspan(g * width, width), args.scoring));
  std::array<std::int32_t, kMaxExperts> best;
  take_best(groups, args.groups_kept, best.data());
  for (std::int64_t i = 0; i < args.groups_kept; ++i)
    kept[static_cast<std::size_t>(best[static_cast<std::size_t>(i)])] = true;
  for (std::size_t e = 0; e < choice.size(); ++e) {
    if (!kept[e / width]) choice[e] = kMasked;
  }
}

void route_token(const RouteArgs& args, std::int64_t token) {
  const auto experts = static_cast<std::size_t>(args.logits.extent(1));
  const std::int64_t top_k = args.experts.extent(1);
  std::array<float, kMaxExperts> score_storage;
  std::array<float, kMaxExperts> choice_storage;
  const std::span<float> scores(score_storage.data(), experts);
  const std::span<float> choice(choice_storage.data(), experts);  // what the selection sees
  score_experts(&args.logits(token, 0), args.scoring, scores);
  for (std::size_t e = 0; e < experts; ++e)
    choice[e] = selectable(scores[e] + (args.bias != nullptr ? args.bias[e] : 0.0f));
  mask_groups(args, choice);

  std::int32_t* chosen = &args.experts(token, 0);
  float* weights = &args.weights(token, 0);
  take_best(choice, top_k, chosen);
  float sum = 0.0f;
  for (std::int64_t i = 0; i < top_k; ++i) sum += weights[i] = scores[static_cast<std::size_t>(chosen[i])];
  const float factor = args.normalize ? args.scale / (sum + 1e-20f) : args.scale;
  for (std::int64_t i = 0; i < top_k; ++i) weights[i] *= factor;
}

/// Scratch of expert_ffn. A row is a (token, choice) pair that this rank serves. Rows are sorted by expert,
/// then token.
struct ExpertBuffers {
  TensorView<std::int32_t, 1> ends;    // [local experts], one past the expert's last row
  TensorView<std::int32_t, 1> active;  // [local experts], those with rows
  TensorView<std::int32_t, 2> row_of;  // [tokens, top_k], -1: an expert of another rank
  TensorView<float, 2> in;             // [tokens * top_k, M]
  TensorView<float, 2> gate_up;        // [tokens * top_k, 2F]
  TensorView<float, 2> out;            // [tokens * top_k, M]
};

ExpertBuffers carve(std::int64_t tokens, std::int64_t top_k, std::int64_t hidden, std::int64_t ffn,
                    WorkspaceArena& arena) {
  ExpertBuffers buffers;
  buffers.ends = arena.take<std::int32_t, 1>({static_cast<std::int64_t>(kMaxExperts)});
  buffers.active = arena.take<std::int32_t, 1>({static_cast<std::int64_t>(kMaxExperts)});
  buffers.row_of = arena.take<std::int32_t, 2>({tokens, top_k});
  buffers.in = arena.take<float, 2>({tokens * top_k, hidden});
  buffers.gate_up = arena.take<float, 2>({tokens * top_k, 2 * ffn});
  buffers.out = arena.take<float, 2>({tokens * top_k, hidden});
  return buffers;
}

/// Fills ends, active and row_of by a counting sort. Returns the number of active experts.
std::int64_t sort_by_expert(const ExpertFfnArgs<float>& args, const ExpertBuffers& buffers) {
  const std::int64_t tokens = args.experts.extent(0);
  const std::int64_t top_k = args.experts.extent(1);
  const auto num_experts = static_cast<std::int64_t>(args.local_experts.size());
  const auto local = [&](std::int64_t token, std::int64_t choice) {
    const std::int64_t expert = args.experts(token, choice) - args.first_expert;
    return expert >= 0 && expert < num_experts ? expert : -1;
  };
  std::int32_t* ends = buffers.ends.data();
  std::fill_n(ends, num_experts, 0);
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (std::int64_t choice = 0; choice < top_k; ++choice) {
      if (const std::int64_t expert = local(token, choice); expert >= 0) ++ends[expert];
    }
  }
  std::int64_t num_active = 0;
  std::int32_t begin = 0;
  for (std::int64_t expert = 0; expert < num_experts; ++expert) {
    const std::int32_t count = ends[expert];
    if (count > 0) buffers.active(num_active++) = static_cast<std::int32_t>(expert);
    ends[expert] = begin;  // advances to the end while rows are assigned
    begin += count;
  }
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (std::int64_t choice = 0; choice < top_k; ++choice) {
      const std::int64_t expert = local(token, choice);
      buffers.row_of(token, choice) = expert < 0 ? -1 : ends[expert]++;
    }
  }
  return num_active;
}

/// One projection of all active experts at once: two hand-overs to the threads per layer, not two per expert.
template <class WeightOf>
void project(const linear::Products& products, const ExpertBuffers& buffers, std::int64_t num_active,
             TensorView<const float, 2> in, TensorView<float, 2> out, const WeightOf& weight_of) {
  products.multiply(num_active, [&](std::int64_t index) {
    const std::int64_t expert = buffers.active(index);
    const std::int64_t begin = expert == 0 ? 0 : buffers.ends(expert - 1);
    return linear::Product{.in = in.data() + begin * in.stride(0),
                           .in_stride = in.stride(0),
                           .num_rows = buffers.ends(expert) - begin,
                           .weight = weight_of(expert),
                           .out = out.data() + begin * out.stride(0),
                           .out_stride = out.stride(0)};
  });
}

/// Adds a token's weighted expert outputs to its row of out, in increasing expert id regardless of threads.
void add_experts(const ExpertFfnArgs<float>& args, const ExpertBuffers& buffers, std::int64_t token) {
  const std::int64_t top_k = args.experts.extent(1);
  const std::int64_t hidden = args.in.extent(1);
  float* target = &args.out(token, 0);
  std::int32_t done = -1;  // rows grow with the expert id
  for (;;) {
    std::int64_t next = -1;
    for (std::int64_t choice = 0; choice < top_k; ++choice) {
      const std::int32_t row = buffers.row_of(token, choice);
      if (row > done && (next < 0 || row < buffers.row_of(token, next))) next = choice;
    }
    if (next < 0) return;
    done = buffers.row_of(token, next);
    const float weight = args.weights(token, next);
    const float* source = &buffers.out(done, 0);
    for (std::int64_t i = 0; i < hidden; ++i) target[i] += weight * source[i];
  }
}

void run_experts(const ExpertFfnArgs<float>& args, ThreadPool& pool, ProductInputs inputs) {
  const linear::Products products(pool, inputs);
  const std::int64_t tokens = args.in.extent(0);
  const std::int64_t top_k = args.experts.extent(1);
  const std::int64_t hidden = args.in.extent(1);
  if (tokens == 0 || args.local_experts.empty()) return;
  const std::int64_t ffn = args.local_experts.front().down.cols;
  WorkspaceArena arena(args.workspace);
  const ExpertBuffers buffers = carve(tokens, top_k, hidden, ffn, arena);
  const std::int64_t num_active = sort_by_expert(args, buffers);
  if (num_active == 0) return;
  const std::int64_t rows = buffers.ends(buffers.active(num_active - 1));

  for_each_row(pool, tokens, top_k * hidden, [&](std::int64_t token) {
    for (std::int64_t choice = 0; choice < top_k; ++choice) {
      const std::int32_t row = buffers.row_of(token, choice);
      if (row < 0) continue;
      std::memcpy(&buffers.in(row, 0), &args.in(token, 0), static_cast<std::size_t>(hidden) * sizeof(float));
    }
  });
  const auto weights_of = [&](std::int64_t expert) -> const ExpertWeights& {
    return args.local_experts[static_cast<std::size_t>(expert)];
  };
  project(products, buffers, num_active, buffers.in, buffers.gate_up,
          [&](std::int64_t expert) -> const WeightView& { return weights_of(expert).gate_up; });
  for_each_row(pool, rows, 4 * ffn, [&](std::int64_t row) {  // the exponential costs as much as four elements
    float* gate = &buffers.gate_up(row, 0);
    swiglu_row(gate, gate + ffn, gate, ffn);
  });
  project(products, buffers, num_active, buffers.gate_up.slice(1, 0, ffn), buffers.out,
          [&](std::int64_t expert) -> const WeightView& { return weights_of(expert).down; });
  for_each_row(pool, tokens, top_k * hidden, [&](std::int64_t token) { add_experts(args, buffers, token); });
}

}  // namespace

void Operators::route(const RouteArgs& args, Stream stream) const {
  detail::check_route(args);
  stream.enqueue([args, pool = pool_] {
    for_each_row(*pool, args.logits.extent(0), 8 * args.logits.extent(1),
                 [&](std::int64_t token) { route_token(args, token); });
  });
}

void Operators::expert_ffn(const ExpertFfnArgs<float>& args, Stream stream) const {
  HELIX_EXPECTS(args.local_experts.size() <= kMaxExperts, ErrorCode::unsupported,
                "expert_ffn: ", args.local_experts.size(),
                " experts on this rank; this backend is built for up to ", kMaxExperts);
  constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max();
  HELIX_EXPECTS(args.experts.size() <= kMaxRows, ErrorCode::unsupported,
                "expert_ffn: ", args.experts.extent(0), " tokens with ", args.experts.extent(1),
                " choices each; this backend is built for up to ", kMaxRows, " choices");
  stream.enqueue([args, pool = pool_, inputs = product_inputs_] { run_experts(args, *pool, inputs); });
}

std::size_t Operators::expert_ffn_workspace_bytes(std::int64_t num_tokens, std::int64_t top_k,
                                                  std::int64_t hidden, std::int64_t expert_ffn) const {
  WorkspaceArena measure;
  carve(num_tokens, top_k, hidden, expert_ffn, measure);
  return measure.used_bytes();
}

}  // namespace helix::cpu
