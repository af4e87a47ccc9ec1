// SPDX-License-Identifier: Apache-2.0
// cpu::Operators: choosing experts and running this rank's.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <span>

#include <helix/cpu/backend.hpp>
#include <helix/error.hpp>
#include <helix/topology.hpp>
#include <helix/workspace.hpp>

#include "cpu/linear_kernels.hpp"

namespace helix::cpu {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();
constexpr std::size_t kMaxExperts = 4096;  // bounds the stack arrays of one token's choice

/// Indices of the `count` largest of `scores`, best first, the smaller index on ties; each of them is then
/// masked.
template <class Index>
void take_best(std::span<float> scores, std::int64_t count, Index* chosen) {
  for (std::int64_t i = 0; i < count; ++i) {
    const auto best = std::max_element(scores.begin(), scores.end());
    chosen[i] = static_cast<Index>(best - scores.begin());
    *best = kMasked;
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

void route_token(const RouteArgs<float>& args, std::int64_t token) {
  const auto experts = static_cast<std::size_t>(args.logits.extent(1));
  const std::int64_t top_k = args.experts.extent(1);
  const float* logits = &args.logits(token, 0);
  std::array<float, kMaxExperts> score_storage;
  std::array<float, kMaxExperts> choice_storage;
  const std::span<float> scores(score_storage.data(), experts);
  const std::span<float> choice(choice_storage.data(), experts);  // what the selection sees

  if (args.scoring == RouterScoring::softmax) {
    const float max = *std::max_element(logits, logits + experts);
    float sum = 0.0f;
    for (std::size_t e = 0; e < experts; ++e) sum += scores[e] = std::exp(logits[e] - max);
    for (float& score : scores) score /= sum;
  } else {
    for (std::size_t e = 0; e < experts; ++e) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
  }
  for (std::size_t e = 0; e < experts; ++e)
    choice[e] = scores[e] + (args.bias != nullptr ? args.bias[e] : 0.0f);

  if (args.groups_kept < args.num_groups) {
    const std::size_t width = experts / static_cast<std::size_t>(args.num_groups);
    std::array<float, kMaxExperts> group_storage;
    std::array<bool, kMaxExperts> kept{};
    const std::span<float> groups(group_storage.data(), static_cast<std::size_t>(args.num_groups));
    for (std::size_t g = 0; g < groups.size(); ++g)
      groups[g] = group_score(choice.subspan(g * width, width), args.scoring);
    std::array<std::int32_t, kMaxExperts> best;
    take_best(groups, args.groups_kept, best.data());
    for (std::int64_t i = 0; i < args.groups_kept; ++i)
      kept[static_cast<std::size_t>(best[static_cast<std::size_t>(i)])] = true;
    for (std::size_t e = 0; e < experts; ++e) {
      if (!kept[e / width]) choice[e] = kMasked;
    }
  }
  std::int32_t* chosen = &args.experts(token, 0);
  float* weights = &args.weights(token, 0);
  take_best(choice, top_k, chosen);
  float sum = 0.0f;
  for (std::int64_t i = 0; i < top_k; ++i) sum += weights[i] = scores[static_cast<std::size_t>(chosen[i])];
  const float factor = args.normalize ? args.scale / (sum + 1e-20f) : args.scale;
  for (std::int64_t i = 0; i < top_k; ++i) weights[i] *= factor;
}

/// Scratch of expert_ffn. Rows are (token, choice) pairs that this rank serves, sorted by expert.
struct ExpertBuffers {
  TensorView<std::int32_t, 2> tokens;  // [rows, 2]: token, choice
  TensorView<std::int32_t, 1> begins;  // [local experts + 1]
  TensorView<float, 2> in;             // [rows, M]
  TensorView<float, 2> gate_up;        // [rows, 2F]
  TensorView<float, 2> out;            // [rows, M]
};

ExpertBuffers carve(std::int64_t rows, std::int64_t hidden, std::int64_t ffn, WorkspaceArena& arena) {
  ExpertBuffers buffers;
  buffers.tokens = arena.take<std::int32_t, 2>({rows, 2});
  buffers.begins = arena.take<std::int32_t, 1>({static_cast<std::int64_t>(kMaxExperts) + 1});
  buffers.in = arena.take<float, 2>({rows, hidden});
  buffers.gate_up = arena.take<float, 2>({rows, 2 * ffn});
  buffers.out = arena.take<float, 2>({rows, hidden});
  return buffers;
}

/// out [rows, weight.rows] = in [rows, weight.cols] * weight^T, one slice of weight rows.
void multiply_slice(TensorView<const float, 2> in, const WeightView& weight, TensorView<float, 2> out,
                    std::int64_t slice) {
  const std::int64_t first = slice * kLinearTaskRows;
  LinearTask task;
  task.in = in.data();
  task.in_stride = in.stride(0);
  task.num_rows = in.extent(0);
  task.weight = static_cast<const std::byte*>(weight.data) +
                first * weight.cols * static_cast<std::int64_t>(size_bytes(weight.dtype));
  task.dtype = weight.dtype;
  task.cols = weight.cols;
  task.num_weight_rows = std::min(kLinearTaskRows, weight.rows - first);
  task.out = out.data() + first;
  task.out_stride = out.stride(0);
  multiply(task);
}

std::int64_t num_slices(const WeightView& weight) {
  return (weight.rows + kLinearTaskRows - 1) / kLinearTaskRows;
}

void run_experts(const ExpertFfnArgs<float>& args, ThreadPool& pool) {
  const std::int64_t tokens = args.in.extent(0);
  const std::int64_t top_k = args.experts.extent(1);
  const std::int64_t hidden = args.in.extent(1);
  const auto num_experts = static_cast<std::int64_t>(args.local_experts.size());
  if (num_experts == 0) return;
  const std::int64_t ffn = args.local_experts.front().down.cols;
  WorkspaceArena arena(args.workspace);
  const ExpertBuffers buffers = carve(tokens * top_k, hidden, ffn, arena);

  // Counting sort of the pairs by expert; within an expert by token, so that the order is fixed.
  std::int32_t* begins = buffers.begins.data();
  std::fill_n(begins, num_experts + 1, 0);
  const auto local = [&](std::int64_t token, std::int64_t choice) {
    const std::int64_t expert = args.experts(token, choice) - args.first_expert;
    return expert >= 0 && expert < num_experts ? expert : -1;
  };
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (std::int64_t choice = 0; choice < top_k; ++choice) {
      if (const std::int64_t expert = local(token, choice); expert >= 0) ++begins[expert + 1];
    }
  }
  for (std::int64_t expert = 0; expert < num_experts; ++expert) begins[expert + 1] += begins[expert];
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (std::int64_t choice = 0; choice < top_k; ++choice) {
      const std::int64_t expert = local(token, choice);
      if (expert < 0) continue;
      const std::int64_t row = begins[expert]++;
      buffers.tokens(row, 0) = static_cast<std::int32_t>(token);
      buffers.tokens(row, 1) = static_cast<std::int32_t>(choice);
      std::memcpy(&buffers.in(row, 0), &args.in(token, 0), static_cast<std::size_t>(hidden) * sizeof(float));
    }
  }
  // begins[e] now holds the end of expert e.
  const auto rows_of = [&](std::int64_t expert) {
    return Range{expert == 0 ? 0 : begins[expert - 1], begins[expert]};
  };
  for (std::int64_t expert = 0; expert < num_experts; ++expert) {
    const Range rows = rows_of(expert);
    if (rows.size() == 0) continue;
    const ExpertWeights& weights = args.local_experts[static_cast<std::size_t>(expert)];
    const auto in = buffers.in.slice(0, rows.begin, rows.size());
    const auto gate_up = buffers.gate_up.slice(0, rows.begin, rows.size());
    const auto out = buffers.out.slice(0, rows.begin, rows.size());
    const auto up_projection = [&](std::int64_t slice, int) {
      multiply_slice(in, weights.gate_up, gate_up, slice);
    };
    pool.parallel_for(num_slices(weights.gate_up), std::ref(up_projection));
    for (std::int64_t row = 0; row < rows.size(); ++row) {
      float* gate = &gate_up(row, 0);
      const float* up = gate + ffn;
      for (std::int64_t i = 0; i < ffn; ++i) gate[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
    }
    const TensorView<const float, 2> activated = gate_up.slice(1, 0, ffn);
    const auto down_projection = [&](std::int64_t slice, int) {
      multiply_slice(activated, weights.down, out, slice);
    };
    pool.parallel_for(num_slices(weights.down), std::ref(down_projection));
    // Experts one after the other: a token's contributions add up in increasing expert id.
    for (std::int64_t row = 0; row < rows.size(); ++row) {
      const std::int32_t token = buffers.tokens(rows.begin + row, 0);
      const float weight = args.weights(token, buffers.tokens(rows.begin + row, 1));
      float* target = &args.out(token, 0);
      const float* source = &out(row, 0);
      for (std::int64_t i = 0; i < hidden; ++i) target[i] += weight * source[i];
    }
  }
}

}  // namespace

void Operators::route(const RouteArgs<float>& args, Stream stream) const {
  HELIX_EXPECTS(args.logits.extent(1) <= static_cast<std::int64_t>(kMaxExperts), ErrorCode::unsupported,
                "route: ", args.logits.extent(1), " experts; this backend is built for up to ", kMaxExperts);
  stream.enqueue([args, pool = pool_] {
    const auto body = [&](std::int64_t token, int) { route_token(args, token); };
    pool->parallel_for(args.logits.extent(0), std::ref(body));
  });
}

void Operators::expert_ffn(const ExpertFfnArgs<float>& args, Stream stream) const {
  stream.enqueue([args, pool = pool_] { run_experts(args, *pool); });
}

std::size_t Operators::expert_ffn_workspace_bytes(std::int64_t num_tokens, std::int64_t top_k,
                                                  std::int64_t hidden, std::int64_t expert_ffn) const {
  WorkspaceArena measure;
  carve(num_tokens * top_k, hidden, expert_ffn, measure);
  return measure.used_bytes();
}

}  // namespace helix::cpu
