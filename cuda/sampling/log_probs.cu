// SPDX-License-Identifier: Apache-2.0
// cuda::Operators: penalize and log_probs, the operations on logits before and after a draw.
#include <cmath>
#include <cstdint>
#include <cub/block/block_reduce.cuh>

#include <helix/cuda/backend.hpp>

#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/operators_state.hpp"
#include "cuda/sampling/logit_rows.cuh"

namespace helix::cuda {
namespace {

constexpr int kPenaltyThreads = 128;

/// The logit of `id` in row `row` of logits [shards, rows, width]; null beyond the vocabulary.
template <class T>
__device__ T* find_logit(const TensorView<T, 3>& logits, const std::int64_t* shard_begins, std::int64_t row,
                         std::int64_t id) {
  for (std::int64_t shard = 0; shard < logits.extent(0); ++shard)
    if (id >= shard_begins[shard] && id < shard_begins[shard + 1])
      return &logits(shard, row, id - shard_begins[shard]);
  return nullptr;
}

/// One thread per penalty. Every operation rounds as on the CPU; the result is rounded to T.
template <class T>
__global__ void __launch_bounds__(kPenaltyThreads) penalize_kernel(PenalizeArgs<T> args) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kPenaltyThreads + threadIdx.x;
  if (i >= args.count) return;
  const LogitPenalty penalty = args.penalties[i];
  T* const place = find_logit(args.logits, args.shard_begins, penalty.row, penalty.id);
  if (place == nullptr) return;
  const float logit = to_float(*place);
  const float scaled =
      logit > 0.0f ? __fdiv_rn(logit, penalty.repetition) : __fmul_rn(logit, penalty.repetition);
  *place = from_float<T>(__fsub_rn(scaled, penalty.subtract));
}

/// Launch arguments.
template <class T>
struct LogProbRows {
  TensorView<const T, 3> logits;
  LogitRows<T> row;
  const std::int32_t* tokens;
  int num_best;
  float* log_probs;
  std::int32_t* best_ids;
  float* best_log_probs;
};

using ReduceRanked = cub::BlockReduce<Ranked, kLogitThreads>;
using ReduceSum = cub::BlockReduce<double, kLogitThreads>;

/// One block per row, which reads it num_best + 1 times, at least twice: for its largest logit, for the sum,
/// and once for each further best one.
template <bool kIsAligned, class T>
__global__ void __launch_bounds__(kLogitThreads) log_probs_kernel(LogProbRows<T> args) {
  __shared__ union {
    typename ReduceRanked::TempStorage ranked;
    typename ReduceSum::TempStorage sum;
  } shared;
  __shared__ Ranked best;
  __shared__ double log_sum;
  const int row = RowBlocks::row();

  // The likeliest token that ranks below `below`; 0 if there is none.
  const auto find_below = [&](Ranked below) {
    Ranked mine = 0;
    for_each_logit<kIsAligned>(args.row, [&](float logit, std::int32_t id) {
      const Ranked ranked = static_cast<Ranked>(key_of<T>(logit)) << 32 | ~static_cast<std::uint32_t>(id);
      if (ranked < below) mine = max(mine, ranked);
    });
    mine = ReduceRanked(shared.ranked).Reduce(mine, [](Ranked a, Ranked b) { return a > b ? a : b; });
    if (threadIdx.x == 0) best = mine;
    __syncthreads();
    const Ranked found = best;
    __syncthreads();
    return found;
  };

  Ranked at = find_below(~Ranked{0});
  const double largest = logit_of<T>(static_cast<std::uint32_t>(at >> 32));
  double sum = 0.0;
  for_each_logit<kIsAligned>(args.row, [&](float logit, std::int32_t) { sum += exp(logit - largest); });
  sum = ReduceSum(shared.sum).Sum(sum);
  if (threadIdx.x == 0) {
    log_sum = largest + log(sum);
    const std::int32_t token = args.tokens[row];
    float log_prob = __uint_as_float(0x7fc00000u);  // NaN: no token was drawn
    if (const T* const logit = find_logit(args.logits, args.row.shard_begins, row, token); logit != nullptr)
      log_prob = static_cast<float>(static_cast<double>(to_float(*logit)) - log_sum);
    args.log_probs[row] = log_prob;
  }
  __syncthreads();
  for (int i = 0; i < args.num_best; ++i) {
    if (i > 0 && at != 0) at = find_below(at);
    if (threadIdx.x != 0) continue;
    const std::int64_t place = static_cast<std::int64_t>(row) * args.num_best + i;
    const auto logit = static_cast<double>(logit_of<T>(static_cast<std::uint32_t>(at >> 32)));
    args.best_ids[place] = at == 0 ? -1 : static_cast<std::int32_t>(~static_cast<std::uint32_t>(at));
    args.best_log_probs[place] = at == 0 ? -kInfinity : static_cast<float>(logit - log_sum);
  }
}

}  // namespace

template <class T>
void Operators<T>::penalize(const PenalizeArgs<T>& args, Stream stream) const {
  if (args.count == 0) return;
  const DeviceScope scope(state_->device);
  penalize_kernel<<<grid_blocks(args.count, kPenaltyThreads), kPenaltyThreads, 0, stream.handle()>>>(args);
  HELIX_CHECK_LAUNCH();
}

template <class T>
void Operators<T>::log_probs(const LogProbsArgs<T>& args, Stream stream) const {
  const std::int64_t num_rows = args.logits.extent(1);
  if (num_rows == 0) return;
  const DeviceScope scope(state_->device);
  const LogProbRows<T> rows{args.logits,        LogitRows<T>(args.logits, args.shard_begins),
                            args.tokens,        static_cast<int>(args.num_best),
                            args.log_probs,     args.best_ids,
                            args.best_log_probs};
  const auto kernel = rows.row.is_aligned() ? log_probs_kernel<true, T> : log_probs_kernel<false, T>;
  kernel<<<static_cast<unsigned>(num_rows), kLogitThreads, 0, stream.handle()>>>(rows);
  HELIX_CHECK_LAUNCH();
}

#define HELIX_INSTANTIATE(T)                                                  \
  template void Operators<T>::penalize(const PenalizeArgs<T>&, Stream) const; \
  template void Operators<T>::log_probs(const LogProbsArgs<T>&, Stream) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
