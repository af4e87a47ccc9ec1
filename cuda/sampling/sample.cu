// SPDX-License-Identifier: Apache-2.0
// cuda::Operators: sample.
#include <cmath>
#include <cstdint>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include <helix/cuda/backend.hpp>
#include <helix/error.hpp>
#include <helix/philox.hpp>

#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/operators_state.hpp"
#include "cuda/sampling/logit_rows.cuh"

namespace helix::cuda {
namespace {

using Mass =
    unsigned long long;  // integer probability, scaled so that a row's sum fits; sums do not depend on order

constexpr int kThreads = kLogitThreads;
constexpr int kBuckets = 2 * kThreads;

/// Launch arguments.
template <class T>
struct SampleRows {
  LogitRows<T> row;
  const SamplingConfig* configs;
  const std::uint64_t* counters;
  std::int32_t* tokens;
};

/// Mass per bucket as two words, because shared memory adds 32 bits at a time.
struct Histogram {
  std::uint32_t low[kBuckets];
  std::uint32_t high[kBuckets];

  __device__ void clear() {
    for (int i = threadIdx.x; i < kBuckets; i += kThreads) low[i] = high[i] = 0;
  }
  __device__ void add(int bucket, Mass mass) {
    const auto added = static_cast<std::uint32_t>(mass);
    const std::uint32_t before = atomicAdd(&low[bucket], added);
    const std::uint32_t carry = before + added < added ? 1 : 0;
    const std::uint32_t rest = static_cast<std::uint32_t>(mass >> 32) + carry;
    if (rest != 0) atomicAdd(&high[bucket], rest);
  }
  __device__ Mass at(int bucket) const { return static_cast<Mass>(high[bucket]) << 32 | low[bucket]; }

  /// Gives each block of the row the sum over all of its blocks. Ends with a barrier.
  __device__ void combine() {
    RowBlocks::sync();
    if (RowBlocks::count() == 1) return;
    constexpr int kEach = kBuckets / kThreads;
    Mass sums[kEach] = {};
    for (int block = 0; block < RowBlocks::count(); ++block) {
      const Histogram& other = RowBlocks::of(block, *this);
#pragma unroll
      for (int i = 0; i < kEach; ++i) sums[i] += other.at(static_cast<int>(threadIdx.x) + i * kThreads);
    }
    RowBlocks::sync();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int bucket = static_cast<int>(threadIdx.x) + i * kThreads;
      low[bucket] = static_cast<std::uint32_t>(sums[i]);
      high[bucket] = static_cast<std::uint32_t>(sums[i] >> 32);
    }
    __syncthreads();
  }
};

using Scan = cub::BlockScan<Mass, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;  // raking variants spill 700 bytes
using Reduce = cub::BlockReduce<Mass, kThreads>;

struct SharedState {
  Histogram by_value;  // the whole row, in buckets of equal width in the logit
  Histogram by_place;  // a part of the row
  union {
    typename Scan::TempStorage scan;
    typename Reduce::TempStorage reduce;
  };
  Mass broadcast[2];
};

/// The first bucket at which the running sum reaches `goal` (1 .. the sum of all), and the sum before it.
struct Bucket {
  int index;
  Mass before;
};

/// Called by all threads, after a barrier that follows the last add(). Ends with a barrier.
__device__ Bucket find_bucket(SharedState& shared, const Histogram& histogram, Mass goal) {
  const int first = 2 * static_cast<int>(threadIdx.x);
  const Mass a = histogram.at(first);
  const Mass b = histogram.at(first + 1);
  Mass before = 0;
  Scan(shared.scan).ExclusiveSum(a + b, before);
  if (before < goal && goal <= before + a + b) {
    const bool is_second = goal > before + a;
    shared.broadcast[0] = static_cast<Mass>(first + (is_second ? 1 : 0));
    shared.broadcast[1] = is_second ? before + a : before;
  }
  __syncthreads();
  const Bucket found{static_cast<int>(shared.broadcast[0]), shared.broadcast[1]};
  __syncthreads();
  return found;
}

/// Narrows [low, high] to the one ordinal at which the running sum of masses, in increasing ordinal, reaches
/// `goal`. Subtracts the sum before it from the goal. `for_each(add)` calls add(ordinal, mass) for this
/// thread's share of a row.
template <class ForEach>
__device__ std::uint32_t find_ordinal(SharedState& shared, std::uint32_t low, std::uint32_t high, Mass& goal,
                                      const ForEach& for_each) {
  while (low < high) {
    const int shift = max(0, 32 - __clz(static_cast<int>(high - low)) - 11);
    static_assert(kBuckets == 1 << 11);
    shared.by_place.clear();
    __syncthreads();
    for_each([&](std::uint32_t ordinal, Mass mass) {
      if (ordinal >= low && ordinal <= high && mass != 0)
        shared.by_place.add(static_cast<int>((ordinal - low) >> shift), mass);
    });
    shared.by_place.combine();
    const Bucket bucket = find_bucket(shared, shared.by_place, goal);
    goal -= bucket.before;
    low += static_cast<std::uint32_t>(bucket.index) << shift;
    high = min(high, low + ((1u << shift) - 1));
  }
  return low;
}

/// A token by its place in the order of likelihood: number `rank`, from 0, of the tokens with this key.
struct Place {
  std::uint32_t key;
  Mass rank;
  Mass mass;  // of all tokens up to and including this one
};

/// One row's tokens, likeliest first (the lower id on ties), without sorting them and using only the block's
/// memory: selects by mass, bucket by bucket.
template <bool kIsAligned, class T>
class RankedRow {
 public:
  __device__ RankedRow(const LogitRows<T>& rows, SharedState& shared, const SamplingConfig& config,
                       std::uint32_t max_key, int mass_bits)
      : rows_(rows),
        shared_(shared),
        max_key_(max_key),
        max_(logit_of<T>(max_key)),
        smallest_(smallest_logit(config)),
        inverse_temperature_(1.0 / static_cast<double>(config.temperature)),
        unit_(exp2(static_cast<double>(mass_bits))),
        // The mass rounds to 0 for a logit (mass_bits + 1) ln 2 temperatures below the largest. Must be
        // finite, so that the largest logit itself is in bucket 0.
        buckets_a_logit_(
            fminf(1e30f, kBuckets / (0.6931472f * static_cast<float>(mass_bits + 1) * config.temperature))) {
    shared_.by_value.clear();
    __syncthreads();
    for_each_logit<kIsAligned>(rows_, [&](float logit, std::int32_t) {
      const Mass added = mass(logit);
      if (added != 0) shared_.by_value.add(value_bucket(logit), added);
    });
    shared_.by_value.combine();
    Mass share = 0;
    for (int i = threadIdx.x; i < kBuckets; i += kThreads) share += shared_.by_value.at(i);
    const Mass total = Reduce(shared_.reduce).Sum(share);
    if (threadIdx.x == 0) shared_.broadcast[0] = total;
    __syncthreads();
    total_ = shared_.broadcast[0];
    __syncthreads();
  }

  __device__ Mass total() const { return total_; }

  /// The first token at which the running mass, including its own, reaches `goal`, 1 .. total().
  __device__ Place find(Mass goal) const {
    const Bucket bucket = find_bucket(shared_, shared_.by_value, goal);
    Mass left = goal - bucket.before;
    // Ordinals are distances from the largest key.
    const std::uint32_t last = max_key_ - lowest_key(bucket.index);
    const std::uint32_t first = bucket.index == 0 ? 0 : max_key_ - lowest_key(bucket.index - 1) + 1;
    const std::uint32_t ordinal = find_ordinal(shared_, first, last, left, [&](const auto& add) {
      for_each_logit<kIsAligned>(rows_, [&](float logit, std::int32_t) {
        const std::uint32_t distance = max_key_ - key_of<T>(logit);
        if (distance >= first && distance <= last) add(distance, mass(logit));
      });
    });
    Place place;
    place.key = max_key_ - ordinal;
    const Mass each = mass(logit_of<T>(place.key));
    place.rank = (left - 1) / each;
    place.mass = goal - left + (place.rank + 1) * each;
    return place;
  }

  __device__ std::int32_t token_at(const Place& place) const {
    Mass goal = place.rank + 1;
    const auto last = static_cast<std::uint32_t>(rows_.shard_begins[rows_.shards] - 1);
    return static_cast<std::int32_t>(find_ordinal(shared_, 0, last, goal, [&](const auto& add) {
      for_each_logit<kIsAligned>(rows_, [&](float logit, std::int32_t id) {
        if (key_of<T>(logit) == place.key) add(static_cast<std::uint32_t>(id), 1);
      });
    }));
  }

 private:
  /// The smallest logit that top_k and min_p keep.
  __device__ double smallest_logit(const SamplingConfig& config) const {
    double smallest = -static_cast<double>(kInfinity);
    if (config.top_k > 0 && config.top_k < rows_.shard_begins[rows_.shards]) {
      // Finds the k-th largest logit by giving each a mass of one.
      Mass goal = static_cast<Mass>(config.top_k);
      const std::uint32_t ordinal =
          find_ordinal(shared_, 0, max_key_ - key_of<T>(-kInfinity), goal, [&](const auto& add) {
            for_each_logit<kIsAligned>(
                rows_, [&](float logit, std::int32_t) { add(max_key_ - key_of<T>(logit), 1); });
          });
      smallest = static_cast<double>(logit_of<T>(max_key_ - ordinal));
    }
    if (config.min_p > 0.0f) {
      const double log_min_p = log(static_cast<double>(config.min_p));
      smallest =
          max(smallest, static_cast<double>(max_) + static_cast<double>(config.temperature) * log_min_p);
    }
    return smallest;
  }

  __device__ Mass mass(float logit) const {
    if (static_cast<double>(logit) < smallest_) return 0;
    return __double2ull_rn(exp((static_cast<double>(logit) - max_) * inverse_temperature_) * unit_);
  }

  /// Does not decrease as the logit falls.
  __device__ int value_bucket(float logit) const {
    return static_cast<int>(fminf((max_ - logit) * buckets_a_logit_, static_cast<float>(kBuckets - 1)));
  }

  /// The lowest key whose value bucket is at most `bucket`.
  __device__ std::uint32_t lowest_key(int bucket) const {
    std::uint32_t low = key_of<T>(-kInfinity);
    std::uint32_t high = max_key_;
    while (low < high) {
      const std::uint32_t middle = low + (high - low) / 2;
      if (value_bucket(logit_of<T>(middle)) <= bucket) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  const LogitRows<T>& rows_;
  SharedState& shared_;
  std::uint32_t max_key_;
  float max_;
  double smallest_;
  double inverse_temperature_;
  double unit_;
  float buckets_a_logit_;
  Mass total_ = 0;
};

/// The largest of the row's logits.
template <bool kIsAligned, class T>
__device__ Ranked likeliest(const LogitRows<T>& rows, SharedState& shared) {
  Ranked best = 0;
  for_each_logit<kIsAligned>(
      rows, [&](float logit, std::int32_t id) { best = max(best, ranked_of<T>(logit, id)); });
  best = Reduce(shared.reduce).Reduce(best, [](Ranked a, Ranked b) { return a > b ? a : b; });
  if (threadIdx.x == 0) shared.broadcast[0] = best;
  RowBlocks::sync();
  best = 0;
  for (int block = 0; block < RowBlocks::count(); ++block)
    best = max(best, RowBlocks::of(block, shared.broadcast[0]));
  RowBlocks::sync();
  return best;
}

/// The blocks of a cluster share a row and read it once for the largest logit. To draw, they read it once for
/// the masses, and one to three times each for the nucleus, the draw and the token's id; top_k reads it up to
/// three times more. Masses are integers, so the draw depends neither on threads nor on shards. It equals
/// that of cpu::Operators, which sums in double, unless the random number falls near the border between two
/// tokens: masses are rounded to 2^-mass_bits of the largest, together up to 4e-9 of all with 131072 logits,
/// 1.6e-8 with 262144. Shared memory: 33 KiB. Latency-bound.
template <bool kIsAligned, class T>
__global__ void __launch_bounds__(kThreads) sample_kernel(SampleRows<T> args, int mass_bits) {
  __shared__ SharedState shared;
  const Ranked best = likeliest<kIsAligned>(args.row, shared);
  const SamplingConfig config = args.configs == nullptr ? SamplingConfig{} : args.configs[RowBlocks::row()];
  std::int32_t token = token_of<T>(best);
  if (token >= 0 && config.temperature != 0.0f) {
    const RankedRow<kIsAligned, T> ranked(args.row, shared, config, key_of_ranked(best), mass_bits);
    // The nucleus ends where its mass reaches top_p of the total; it holds at least one token.
    Mass nucleus = ranked.total();
    if (config.top_p < 1.0f) {
      const auto wanted =
          __double2ull_ru(static_cast<double>(config.top_p) * __ull2double_rn(ranked.total()));
      nucleus = ranked.find(min(max(wanted, Mass{1}), ranked.total())).mass;
    }
    const double uniform = philox_uniform(config.seed, args.counters[RowBlocks::row()]);
    const Mass target = __double2ull_rd(uniform * __ull2double_rn(nucleus));
    token = ranked.token_at(ranked.find(min(target + 1, nucleus)));
  }
  if (threadIdx.x == 0 && RowBlocks::rank() == 0) args.tokens[RowBlocks::row()] = token;
}

}  // namespace

template <class T>
void Operators<T>::sample(const SampleArgs<T>& args, Stream stream) const {
  const std::int64_t num_rows = args.logits.extent(1);
  if (num_rows == 0) return;
  const DeviceScope scope(state_->device);
  const SampleRows<T> rows{LogitRows<T>(args.logits, args.shard_begins), args.configs, args.counters,
                           args.tokens};
  // The largest logit's mass is 1 << mass_bits; a row's sum stays below 2^62.
  const auto most_logits = static_cast<double>(args.logits.extent(0) * args.logits.extent(2));
  const int mass_bits = 62 - static_cast<int>(std::ceil(std::log2(most_logits + 1)));
  const auto kernel = rows.row.is_aligned() ? sample_kernel<true, T> : sample_kernel<false, T>;
  const int blocks = blocks_a_row(num_rows, state_->num_sms, state_->is_hopper);
  launch_with(LaunchAttributes().clusters(blocks), kernel, num_rows * blocks, kThreads, 0, stream.handle(),
              rows, mass_bits);
}

#define HELIX_INSTANTIATE(T) template void Operators<T>::sample(const SampleArgs<T>&, Stream) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
