// SPDX-License-Identifier: Apache-2.0
// Operators::expert_ffn: this rank's chosen experts, in four steps: sorts the (token, choice) pairs by expert
// if they are many, then computes gate and up with SwiGLU, down, and each token's weighted sum. With few
// tokens there are two steps (few_rows_experts.hpp).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cub/block/block_scan.cuh>
#include <limits>
#include <optional>
#include <span>
#include <type_traits>

#include <helix/cuda/backend.hpp>
#include <helix/error.hpp>
#include <helix/workspace.hpp>

#include "cuda/linear/dot_rows.cuh"
#include "cuda/moe/expert_distances.hpp"
#include "cuda/moe/expert_dots.cuh"
#include "cuda/moe/expert_items.cuh"
#include "cuda/moe/expert_tiles.cuh"
#include "cuda/moe/few_rows_experts.hpp"
#include "cuda/moe/warp_group_experts.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/operators_state.hpp"
#include "cuda/runtime/rows.cuh"
#include "cuda/runtime/tensor_map.cuh"
#include "cuda/runtime/weight_type.hpp"
#include "cuda/runtime/workspace.hpp"

namespace helix::cuda {
namespace {

constexpr int kSortThreads = 1024;
constexpr int kExpertsPerSortThread = kMaxLocalExperts / kSortThreads;
static_assert(kMaxLocalExperts % kSortThreads == 0);

/// Mean pairs per expert up to which dots are faster than tiles of warps. With 32 experts of 7168 x 2048,
/// dots and tiles take 874 us and 910 to 927 for 2 pairs each, 1066 and 1020 to 1043 for 4 pairs each (H100).
/// Warp groups are faster whenever pairs are sorted.
constexpr std::int64_t kDotPairs = 2;

/// Scratch. A pair is token * top_k + choice.
struct ExpertBuffers {
  ExpertItem* items;             // [tokens * top_k]
  std::int32_t* num_used_items;  // [1]
  std::int32_t* pairs;           // [tokens * top_k]: pairs of this rank's experts, by expert
  // [tokens * top_k, F], after SwiGLU. For tensor cores it has the activations' type, for few tokens the
  // shape [chosen experts, tokens, F].
  float* hidden;
  float* outputs;  // [tokens * top_k, M]
};

ExpertBuffers carve(std::int64_t tokens, std::int64_t top_k, std::int64_t hidden, std::int64_t ffn,
                    WorkspaceArena& arena) {
  const std::int64_t pairs = tokens * top_k;
  const std::int64_t few_rows = few_rows_hidden_elements(tokens, top_k, ffn) / 2;  // two elements per float
  ExpertBuffers buffers{};
  buffers.items = arena.take<ExpertItem, 1>({pairs}).data();
  buffers.num_used_items = arena.take<std::int32_t, 1>({1}).data();
  buffers.pairs = arena.take<std::int32_t, 1>({pairs}).data();
  buffers.hidden = arena.take<float, 1>({std::max(pairs * ffn, few_rows)}).data();
  buffers.outputs = arena.take<float, 2>({pairs, hidden}).data();
  return buffers;
}

/// Calls use(pair, expert) for this rank's pairs, by all threads of the only block. Loads several choices at
/// a time.
template <class Use>
__device__ __forceinline__ void for_each_pair(const Choices& choices, const Use& use) {
  constexpr int kBatch = 4;
  for (int first = static_cast<int>(threadIdx.x); first < choices.num_pairs; first += kBatch * kSortThreads) {
    int experts[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int pair = first + i * kSortThreads;
      experts[i] = pair < choices.num_pairs ? local_expert(choices, pair) : -1;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (experts[i] >= 0) use(first + i * kSortThreads, experts[i]);
  }
}

/// One block. Counting sort of the pairs by expert, divided into `num_items` items of up to `item_pairs`; all
/// of an expert but the last have one size; unused ones get count 0. The order of an expert's pairs is not
/// fixed, but no result depends on it: each pair has its own sums.
__global__ void __launch_bounds__(kSortThreads)
    sort_pairs_kernel(const Choices choices, int num_items, int item_pairs, ExpertItem* items,
                      std::int32_t* num_used_items, std::int32_t* pairs) {
  using Scan = cub::BlockScan<int, kSortThreads>;
  __shared__ typename Scan::TempStorage pair_storage;
  __shared__ typename Scan::TempStorage item_storage;
  __shared__ int cursors[kMaxLocalExperts];  // counts an expert's pairs, then where its next pair goes
  follow_previous();
  const int thread = static_cast<int>(threadIdx.x);
  for (int expert = thread; expert < choices.num_experts; expert += kSortThreads) cursors[expert] = 0;
  __syncthreads();
  for_each_pair(choices, [&](int, int expert) { atomicAdd(&cursors[expert], 1); });
  __syncthreads();

  int counts[kExpertsPerSortThread];
  int begins[kExpertsPerSortThread];
  int item_begins[kExpertsPerSortThread];
#pragma unroll
  for (int i = 0; i < kExpertsPerSortThread; ++i) {
    const int expert = thread * kExpertsPerSortThread + i;
    counts[i] = expert < choices.num_experts ? cursors[expert] : 0;
    item_begins[i] = (counts[i] + item_pairs - 1) / item_pairs;
  }
  Scan(pair_storage).ExclusiveSum(counts, begins);
  int used_items = 0;
  Scan(item_storage).ExclusiveSum(item_begins, item_begins, used_items);
#pragma unroll
  for (int i = 0; i < kExpertsPerSortThread; ++i) {
    const int expert = thread * kExpertsPerSortThread + i;
    if (expert >= choices.num_experts) continue;
    cursors[expert] = begins[i];
    if (counts[i] == 0) continue;
    const int of_expert = (counts[i] + item_pairs - 1) / item_pairs;
    const int size = (counts[i] + of_expert - 1) / of_expert;
    for (int item = 0; item < of_expert; ++item) {
      const int done = item * size;
      items[item_begins[i] + item] = {expert, begins[i] + done, min(counts[i] - done, size), item_begins[i],
                                      of_expert};
    }
  }
  if (thread == 0) *num_used_items = used_items;
  for (int item = used_items + thread; item < num_items; item += kSortThreads) items[item] = {};
  __syncthreads();
  for_each_pair(choices, [&](int pair, int expert) { pairs[atomicAdd(&cursors[expert], 1)] = pair; });
}

/// out[t, m] += sum over the token's choices of this rank's experts, in their order, of weight * outputs. A
/// thread has kWidth columns; y covers rows.
template <class T, int kWidth>
__global__ void sum_choices_kernel(const Choices choices, const float* outputs, int hidden, T* out,
                                   std::int64_t out_stride, int tokens) {
  follow_previous();
  const int m = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
  if (m >= hidden) return;
  for (int token = static_cast<int>(blockIdx.y); token < tokens; token += static_cast<int>(gridDim.y)) {
    float sums[kWidth] = {};
    bool has_any = false;
    for (int choice = 0; choice < choices.top_k; ++choice) {
      const int pair = token * choices.top_k + choice;
      if (local_expert(choices, pair) < 0) continue;
      has_any = true;
      const float weight = choices.weights[token * choices.weight_stride + choice];
      float values[kWidth];
      load_values<kWidth>(outputs + std::int64_t{pair} * hidden + m, values);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sums[i] = fmaf(weight, values[i], sums[i]);
    }
    if (!has_any) continue;
    T* const to = out + token * out_stride + m;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = from_float<T>(to_float(to[i]) + sums[i]);
  }
}

/// Calls launch(table, dtype, is_aligned) for runs of experts whose projection has the same type.
template <class Launch>
void for_each_table(std::span<const ExpertWeights> experts, WeightView ExpertWeights::*projection,
                    const Launch& launch) {
  for (std::size_t begin = 0; begin < experts.size();) {
    const DType dtype = (experts[begin].*projection).dtype;
    ExpertTable table{};
    table.first = static_cast<int>(begin);
    bool is_aligned = true;
    while (begin < experts.size() && table.count < kExpertsPerLaunch &&
           (experts[begin].*projection).dtype == dtype) {
      const void* data = (experts[begin].*projection).data;
      is_aligned = is_aligned && is_aligned_16(data);
      table.weights[table.count++] = data;
      ++begin;
    }
    launch(table, dtype, is_aligned);
  }
}

/// What the kernels of one call share.
struct ExpertCall {
  Choices choices;
  ExpertBuffers buffers;
  bool is_sorted;
  int num_items;
  int hidden;
  int ffn;
  int num_sms;
  bool is_hopper;
  cudaStream_t stream;

  /// Gate and up: [pairs, F] from `in`, with a row per token or pair.
  template <class T, class Out>
  ExpertProduct<T, Out> gate_up(const TensorView<const T, 2>& in, Out* out) const {
    return product<T, Out>(in.data(), in.stride(0), choices.top_k, out, hidden, ffn);
  }
  /// Down: [pairs, M] from [pairs, F].
  template <class T>
  ExpertProduct<T> down(const T* in) const {
    return product<T, float>(in, ffn, 1, buffers.outputs, ffn, hidden);
  }

 private:
  template <class T, class Out>
  ExpertProduct<T, Out> product(const T* in, std::int64_t in_stride, int pairs_per_row, Out* out, int cols,
                                int width) const {
    return {choices,
            is_sorted ? buffers.items : nullptr,
            buffers.num_used_items,
            buffers.pairs,
            in,
            in_stride,
            pairs_per_row,
            out,
            num_items,
            cols,
            width};
  }
};

/// Blocks of a product's grid: one per item and `features` columns of its width.
template <class Product>
unsigned blocks_of(const Product& product, std::int64_t features) {
  const std::int64_t blocks = ceil_div<std::int64_t>(product.width, features) * product.num_items;
  HELIX_EXPECTS(blocks <= std::numeric_limits<std::int32_t>::max(), ErrorCode::unsupported,
                "expert_ffn: ", product.num_items, " items of ", product.width, " features, ", features,
                " a block, are too many for one launch; give it fewer tokens");
  return static_cast<unsigned>(blocks);
}

/// Dispatches on the type of the weights and on whether 16 bytes may be read at once.
template <bool kIsGateUp, class T>
void launch_dots(const ExpertCall& call, const ExpertProduct<T>& product, const ExpertTable& table,
                 DType dtype, bool is_aligned) {
  dispatch_weight(dtype, [&]<class W>(W*) {
    constexpr int kWidth = 16 / static_cast<int>(sizeof(W));
    constexpr std::int64_t kElements = 16 / static_cast<std::int64_t>(sizeof(T));
    constexpr std::int64_t kFeatures = kDotFeatures<kIsGateUp>;
    const bool is_vector = is_aligned && product.cols % kWidth == 0 && is_aligned_16(product.in) &&
                           product.in_stride % kElements == 0;
    const std::int64_t groups = ceil_div<std::int64_t>(product.width, kFeatures);
    const int splits = choose_splits(groups * product.num_items, product.cols,
                                     kWarp * (is_vector ? kWidth : 1), call.num_sms);
    launch_early(
        is_vector ? expert_dot_kernel<T, W, kIsGateUp, true> : expert_dot_kernel<T, W, kIsGateUp, false>,
        blocks_of(product, kFeatures * (kDotWarps / splits)), kDotThreads, 0, call.stream, call.is_hopper,
        product, splits, table);
  });
}

template <class T, bool kIsGateUp>
void launch_tiles(const ExpertCall& call, const typename ExpertTile<T, kIsGateUp>::Product& product,
                  const ExpertTable& table) {
  using Tile = ExpertTile<T, kIsGateUp>;
  const auto kernel = expert_tile_kernel<T, kIsGateUp>;
  HELIX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kBytes));
  launch_early(kernel, blocks_of(product, Tile::kFeatures), Tile::kThreads, Tile::kBytes, call.stream,
               call.is_hopper, product, table);
}

/// Whether the rows of these products are aligned to 16 bytes, as tensor cores require.
template <class T>
bool has_aligned_rows(const ExpertFfnArgs<T>& args, std::int64_t ffn) {
  constexpr std::int64_t kRowElements = 8;
  return args.in.extent(1) % kRowElements == 0 && ffn % kRowElements == 0 &&
         args.in.stride(0) % kRowElements == 0 && is_aligned_16(args.in.data());
}

/// Whether all weights have the activations' 16-bit type and begin at multiples of 16 bytes. Weights with
/// distances do.
template <class T>
bool fit_tensor_cores(std::span<const ExpertWeights> experts) {
  const auto fits = [](const WeightView& weight) {
    return weight.dtype == kDTypeOf<T> && is_aligned_16(weight.data);
  };
  return std::ranges::all_of(
      experts, [&](const ExpertWeights& expert) { return fits(expert.gate_up) && fits(expert.down); });
}

/// The kernels that multiply the pairs of a call.
enum class Multiplier { dots, tiles, warp_groups };

/// Chooses the kernels. Only the device knows how many pairs this rank's experts get; `num_pairs` is the
/// most. `has_distances`: warp groups can take the weights.
template <class T>
Multiplier choose_multiplier(const ExpertFfnArgs<T>& args, std::int64_t ffn, std::int64_t num_pairs,
                             bool has_distances) {
  if constexpr (std::is_same_v<T, float>) return Multiplier::dots;
  const bool has_many = num_pairs > kDotPairs * static_cast<std::int64_t>(args.local_experts.size());
  if (!(has_many || num_pairs > kUnsortedPairs) || !has_aligned_rows(args, ffn)) return Multiplier::dots;
  const std::int64_t tokens = args.in.extent(0);
  const std::int64_t stride = args.in.stride(0);  // may be negative
  const bool has_offsets = is_map_stride(tokens, stride * static_cast<std::int64_t>(sizeof(T))) &&
                           tokens * stride <= kMaxWarpGroupElements &&
                           num_pairs * ffn <= kMaxWarpGroupElements;
  if (has_distances && has_offsets) return Multiplier::warp_groups;
  return has_many && fit_tensor_cores<T>(args.local_experts) ? Multiplier::tiles : Multiplier::dots;
}

/// Most pairs of an item.
int most_item_pairs(Multiplier multiplier) {
  switch (multiplier) {
    case Multiplier::dots:
      return kMaxDotRows;
    case Multiplier::tiles:
      return kTilePairs;
    case Multiplier::warp_groups:
      return kWarpGroupPairs;
  }
  return 1;
}

template <class T>
void multiply_by_dots(const ExpertFfnArgs<T>& args, const ExpertCall& call) {
  const ExpertProduct<T> gate_up = call.gate_up(args.in, call.buffers.hidden);
  for_each_table(args.local_experts, &ExpertWeights::gate_up,
                 [&](const ExpertTable& table, DType dtype, bool is_aligned) {
                   launch_dots<true>(call, gate_up, table, dtype, is_aligned);
                 });
  const ExpertProduct<float> down = call.down<float>(call.buffers.hidden);
  for_each_table(args.local_experts, &ExpertWeights::down,
                 [&](const ExpertTable& table, DType dtype, bool is_aligned) {
                   launch_dots<false>(call, down, table, dtype, is_aligned);
                 });
}

template <class T>
void multiply_by_tiles(const ExpertFfnArgs<T>& args, const ExpertCall& call) {
  T* const hidden = reinterpret_cast<T*>(call.buffers.hidden);
  const ExpertProduct<T, T> gate_up = call.gate_up(args.in, hidden);
  for_each_table(args.local_experts, &ExpertWeights::gate_up,
                 [&](const ExpertTable& table, DType, bool) { launch_tiles<T, true>(call, gate_up, table); });
  const ExpertProduct<T> down = call.down<T>(hidden);
  for_each_table(args.local_experts, &ExpertWeights::down,
                 [&](const ExpertTable& table, DType, bool) { launch_tiles<T, false>(call, down, table); });
}

/// One product by warp groups. The experts' weights begin at `first` and are `distance` bytes apart.
template <bool kIsGateUp, class T>
void launch_warp_groups(const ExpertCall& call, const ExpertProduct<T, WarpGroupOut<T, kIsGateUp>>& product,
                        const void* first, std::int64_t distance) {
  using Work = WarpGroupExperts<T, kIsGateUp>;
  constexpr int kHalves = kIsGateUp ? 2 : 1;
  const std::int64_t row_bytes = product.cols * std::int64_t{sizeof(T)};
  const CUtensorMap weights = rows_map<5>(
      const_cast<void*>(first), kDTypeOf<T>,
      {product.cols, kSwizzleRows, kHalves, product.width / kSwizzleRows, call.choices.num_experts},
      {row_bytes, row_bytes * product.width, row_bytes * kSwizzleRows, distance},
      {kChunkColumns, kSwizzleRows, kHalves, Work::kWeightRows / kHalves / kSwizzleRows, 1},
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
  const auto kernel = warp_group_experts_kernel<T, kIsGateUp>;
  constexpr int kBytes = static_cast<int>(sizeof(typename Work::Shared));
  HELIX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const unsigned blocks = std::min(blocks_of(product, Work::kFeatures), static_cast<unsigned>(call.num_sms));
  launch_early(kernel, blocks, Work::kThreads, kBytes, call.stream, call.is_hopper, {weights, product});
}

template <class T>
void multiply_by_warp_groups(const ExpertFfnArgs<T>& args, const ExpertDistances& distances,
                             const ExpertCall& call) {
  T* const hidden = reinterpret_cast<T*>(call.buffers.hidden);
  const ExpertWeights& first = args.local_experts.front();
  launch_warp_groups<true, T>(call, call.gate_up(args.in, hidden), first.gate_up.data, distances.gate_up);
  launch_warp_groups<false, T>(call, call.down<T>(hidden), first.down.data, distances.down);
}

template <class T, int kWidth>
void launch_sum(const ExpertFfnArgs<T>& args, const ExpertCall& call) {
  constexpr int kThreads = 256;
  const std::int64_t tokens = args.in.extent(0);
  launch_early(sum_choices_kernel<T, kWidth>,
               dim3(grid_blocks(call.hidden, kThreads * kWidth), row_blocks(tokens)), kThreads, 0,
               call.stream, call.is_hopper, call.choices, call.buffers.outputs, call.hidden, args.out.data(),
               args.out.stride(0), static_cast<int>(tokens));
}

}  // namespace

template <class T>
void Operators<T>::expert_ffn(const ExpertFfnArgs<T>& args, Stream stream) const {
  const std::int64_t tokens = args.in.extent(0);
  const std::int64_t hidden = args.in.extent(1);
  const std::int64_t top_k = args.experts.extent(1);
  const auto num_experts = static_cast<std::int64_t>(args.local_experts.size());
  if (tokens == 0 || hidden == 0 || top_k == 0 || num_experts == 0) return;
  const std::int64_t ffn = args.local_experts.front().down.cols;
  if (ffn == 0) return;
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max() / 2;
  HELIX_EXPECTS(num_experts <= kMaxLocalExperts, ErrorCode::unsupported, "expert_ffn: ", num_experts,
                " experts on this rank; this backend is built for up to ", kMaxLocalExperts);
  HELIX_EXPECTS(tokens * top_k <= kMax && hidden <= kMax && ffn <= kMax, ErrorCode::unsupported,
                "expert_ffn: ", tokens, " tokens of ", top_k, " experts, hidden ", hidden, ", F ", ffn,
                "; built for up to ", kMax, " of each");
  const DeviceScope scope(state_->device);
  const std::int64_t num_pairs = tokens * top_k;
  WorkspaceArena arena(aligned_part(args.workspace));

  Choices choices{};
  choices.experts = args.experts.data();
  choices.expert_stride = args.experts.stride(0);
  choices.weights = args.weights.data();
  choices.weight_stride = args.weights.stride(0);
  choices.first_expert = args.first_expert;
  choices.num_experts = static_cast<int>(num_experts);
  choices.top_k = static_cast<int>(top_k);
  choices.num_pairs = static_cast<int>(num_pairs);
  const ExpertBuffers buffers = carve(tokens, top_k, hidden, ffn, arena);
  std::optional<ExpertDistances> distances;  // for the kernels of compute capability 9.0
  if constexpr (!std::is_same_v<T, float>) {
    if (state_->runs_hopper_kernels()) distances = distances_of(args.local_experts, kDTypeOf<T>);
    if (distances &&
        multiply_few_rows_experts(args, *distances, choices, reinterpret_cast<T*>(buffers.hidden),
                                  state_->num_sms, stream.handle()))
      return;
  }
  const Multiplier multiplier = choose_multiplier(args, ffn, num_pairs, distances.has_value());
  const int item_pairs = most_item_pairs(multiplier);
  const bool is_sorted = multiplier != Multiplier::dots || num_pairs > kUnsortedPairs;
  // For each expert its full items and one partial one, but no more items than pairs.
  const std::int64_t num_items =
      is_sorted ? std::min(num_pairs, num_pairs / item_pairs + num_experts) : num_pairs;
  const ExpertCall call{.choices = choices,
                        .buffers = buffers,
                        .is_sorted = is_sorted,
                        .num_items = static_cast<int>(num_items),
                        .hidden = static_cast<int>(hidden),
                        .ffn = static_cast<int>(ffn),
                        .num_sms = state_->num_sms,
                        .is_hopper = state_->is_hopper,
                        .stream = stream.handle()};
  if (is_sorted)
    launch_early(sort_pairs_kernel, 1, kSortThreads, 0, call.stream, call.is_hopper, choices, call.num_items,
                 item_pairs, call.buffers.items, call.buffers.num_used_items, call.buffers.pairs);
  if constexpr (!std::is_same_v<T, float>) {
    if (multiplier == Multiplier::warp_groups) multiply_by_warp_groups(args, *distances, call);
    if (multiplier == Multiplier::tiles) multiply_by_tiles(args, call);
  }
  if (multiplier == Multiplier::dots) multiply_by_dots(args, call);

  // The outputs are aligned to 16 bytes; out need not be.
  hidden % 4 == 0 ? launch_sum<T, 4>(args, call) : launch_sum<T, 1>(args, call);
}

template <class T>
std::size_t Operators<T>::expert_ffn_workspace_bytes(std::int64_t num_tokens, std::int64_t top_k,
                                                     std::int64_t hidden, std::int64_t expert_ffn) const {
  WorkspaceArena measure;
  carve(num_tokens, top_k, hidden, expert_ffn, measure);
  return measure.used_bytes() + WorkspaceArena::kAlignment;  // for any alignment of the caller's
}

#define HELIX_INSTANTIATE(T)                                                                              \
  template void Operators<T>::expert_ffn(const ExpertFfnArgs<T>&, Stream) const;                          \
  template std::size_t Operators<T>::expert_ffn_workspace_bytes(std::int64_t, std::int64_t, std::int64_t, \
                                                                std::int64_t) const;
HELIX_INSTANTIATE(float)
HELIX_INSTANTIATE(f16)
HELIX_INSTANTIATE(bf16)
#undef HELIX_INSTANTIATE

}  // namespace helix::cuda
