// SPDX-License-Identifier: Apache-2.0
// cuda::Operators: route.
#include <climits>
#include <cstdint>

#include <helix/cuda/backend.hpp>
#include <helix/error.hpp>
#include <helix/limits.hpp>

#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/operators_state.hpp"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {
namespace {

// Three f32 arrays of this size fit in the shared memory that any launch may use.
static_assert(3 * kMaxRoutedExperts * static_cast<std::int64_t>(sizeof(float)) <= 48 * 1024);

struct RouteTokens {
  const float* logits;    // [tokens, num_experts]
  const float* bias;      // [num_experts] or null
  std::int32_t* experts;  // [tokens, top_k]
  float* weights;         // [tokens, top_k]
  std::int64_t logits_stride;
  std::int64_t experts_stride;
  std::int64_t weights_stride;
  int num_experts;
  int top_k;
  int num_groups;
  int groups_kept;
  RouterScoring scoring;
  bool normalize;
  float scale;
};

/// Replaces NaN by -inf, because NaN marks experts that have been taken.
__device__ __forceinline__ float selectable(float value) {
  return isnan(value) ? -kInfinity : value;
}

/// Index of the largest of values [count] in shared memory, the lowest index on ties; marks it as taken.
/// Returns the same in all lanes of the warp. At least one value must not be taken.
__device__ int take_best(float* values, int count) {
  float best = -kInfinity;
  int index = INT_MAX;
  for (int i = threadIdx.x; i < count; i += kWarp) {
    const float value = values[i];
    if (value > best || (value == best && i < index)) {
      best = value;
      index = i;
    }
  }
  const unsigned order = ordered_bits(best);
  index = __reduce_min_sync(~0u, order == __reduce_max_sync(~0u, order) ? index : INT_MAX);
  if (threadIdx.x == 0) values[index] = NAN;
  __syncwarp();
  return index;
}

/// The score of a group: its best expert, or with sigmoid scores the sum of its two best.
__device__ float group_score(const float* choice, int width, RouterScoring scoring) {
  float first = -kInfinity;
  float second = -kInfinity;
  for (int i = 0; i < width; ++i) {
    const float score = choice[i];
    second = fmaxf(second, fminf(first, score));
    first = fmaxf(first, score);
  }
  return scoring == RouterScoring::softmax || width == 1 ? first : first + second;
}

/// One warp, and one block, per token. Shared memory: scores, choice (what the selection sees) [num_experts]
/// and groups [num_groups]. Latency-bound: top_k rounds of a warp-wide maximum.
__global__ void __launch_bounds__(kWarp) route_kernel(RouteTokens route) {
  follow_previous();
  extern __shared__ float shared[];
  float* scores = shared;
  float* choice = scores + route.num_experts;
  float* groups = choice + route.num_experts;
  const int lane = threadIdx.x;
  const std::int64_t token = blockIdx.x;
  const float* logits = route.logits + token * route.logits_stride;

  // Scores.
  if (route.scoring == RouterScoring::softmax) {
    float max = -kInfinity;
    for (int e = lane; e < route.num_experts; e += kWarp) max = fmaxf(max, scores[e] = logits[e]);
    max = warp_max(max);
    float sum = 0.0f;
    for (int e = lane; e < route.num_experts; e += kWarp) sum += scores[e] = expf(scores[e] - max);
    sum = warp_sum(sum);
    for (int e = lane; e < route.num_experts; e += kWarp) scores[e] /= sum;
  } else {
    for (int e = lane; e < route.num_experts; e += kWarp) scores[e] = 1.0f / (1.0f + expf(-logits[e]));
  }
  for (int e = lane; e < route.num_experts; e += kWarp)
    choice[e] = selectable(scores[e] + (route.bias != nullptr ? route.bias[e] : 0.0f));
  __syncwarp();

  // Groups: a kept one is a taken one.
  if (route.groups_kept < route.num_groups) {
    const int width = route.num_experts / route.num_groups;
    for (int g = lane; g < route.num_groups; g += kWarp)
      groups[g] = selectable(group_score(choice + g * width, width, route.scoring));
    __syncwarp();
    for (int i = 0; i < route.groups_kept; ++i) take_best(groups, route.num_groups);
    for (int e = lane; e < route.num_experts; e += kWarp) {
      if (!isnan(groups[e / width])) choice[e] = -kInfinity;
    }
    __syncwarp();
  }

  // The choice and its weights.
  std::int32_t* experts = route.experts + token * route.experts_stride;
  float* weights = route.weights + token * route.weights_stride;
  float sum = 0.0f;
  for (int i = 0; i < route.top_k; ++i) {
    const int expert = take_best(choice, route.num_experts);
    sum += scores[expert];
    if (lane == 0) experts[i] = expert;
  }
  __syncwarp();
  const float factor = route.normalize ? route.scale / (sum + 1e-20f) : route.scale;
  for (int i = lane; i < route.top_k; i += kWarp) weights[i] = scores[experts[i]] * factor;
}

}  // namespace

template <class T>
void Operators<T>::route(const RouteArgs& args, Stream stream) const {
  const std::int64_t tokens = args.logits.extent(0);
  const std::int64_t experts = args.logits.extent(1);
  const std::int64_t top_k = args.experts.extent(1);
  detail::check_route(args);
  if (tokens == 0 || top_k == 0) return;
  const DeviceScope scope(state_->device);
  const RouteTokens route{args.logits.data(),
                          args.bias,
                          args.experts.data(),
                          args.weights.data(),
                          args.logits.stride(0),
                          args.experts.stride(0),
                          args.weights.stride(0),
                          static_cast<int>(experts),
                          static_cast<int>(top_k),
                          static_cast<int>(args.num_groups),
                          static_cast<int>(args.groups_kept),
                          args.scoring,
                          args.normalize,
                          args.scale};
  const auto shared_bytes = static_cast<std::size_t>(2 * experts + args.num_groups) * sizeof(float);
  launch_early(route_kernel, static_cast<unsigned>(tokens), kWarp, shared_bytes, stream.handle(),
               state_->is_hopper, route);
}

#define HELIX_INSTANTIATE(T) template void Operators<T>::route(const RouteArgs&, Stream) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
