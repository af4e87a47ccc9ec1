// SPDX-License-Identifier: Apache-2.0
// Operators::expert_ffn: this rank's chosen experts, in four steps: sort the (token, choice) pairs by expert,
// gate and up with SwiGLU, down, and the weighted sum of each token.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cub/block/block_scan.cuh>
#include <limits>
#include <span>
#include <type_traits>

#include <helix/cuda/backend.hpp>
#include <helix/error.hpp>
#include <helix/workspace.hpp>

#include "cuda/linear/dot_rows.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/operators_state.hpp"
#include "cuda/runtime/warp.cuh"
#include "cuda/runtime/weight_type.hpp"
#include "cuda/runtime/workspace.hpp"

namespace helix::cuda {
namespace {

constexpr std::int64_t kMaxLocalExperts = 4096;  // of one rank; four a thread that sorts
constexpr int kSortThreads = 1024;
constexpr int kExpertsPerSortThread = static_cast<int>(kMaxLocalExperts) / kSortThreads;
constexpr int kExpertsPerLaunch = 384;  // their pointers fit the 4 KiB of kernel parameters

/// Up to kMaxDotRows pairs of one expert, which share one read of its weights. count 0: nothing to do.
struct ExpertItem {
  std::int32_t expert;  // of local_experts
  std::int32_t begin;   // in ExpertBuffers::pairs
  std::int32_t count;
};

/// Scratch. A pair is token * top_k + choice.
struct ExpertBuffers {
  ExpertItem* items;    // [tokens * top_k]
  std::int32_t* pairs;  // [tokens * top_k], of this rank's experts, by expert
  float* hidden;        // [tokens * top_k, F], after SwiGLU
  float* outputs;       // [tokens * top_k, M]
};

ExpertBuffers carve(std::int64_t pairs, std::int64_t hidden, std::int64_t ffn, WorkspaceArena& arena) {
  ExpertBuffers buffers{};
  buffers.items = arena.take<ExpertItem, 1>({pairs}).data();
  buffers.pairs = arena.take<std::int32_t, 1>({pairs}).data();
  buffers.hidden = arena.take<float, 2>({pairs, ffn}).data();
  buffers.outputs = arena.take<float, 2>({pairs, hidden}).data();
  return buffers;
}

/// The tokens' choices as the kernels read them.
struct Choices {
  const std::int32_t* experts;
  std::int64_t expert_stride;  // between tokens
  const float* weights;
  std::int64_t weight_stride;
  std::int64_t first_expert;
  int num_experts;  // of this rank
  int top_k;
  int num_pairs;
};

/// Expert of a pair, of local_experts; -1: another rank's.
__device__ __forceinline__ int local_expert(const Choices& choices, int pair) {
  const int token = pair / choices.top_k;
  const std::int64_t id = choices.experts[token * choices.expert_stride + pair % choices.top_k];
  const std::int64_t local = id - choices.first_expert;
  return local >= 0 && local < choices.num_experts ? static_cast<int>(local) : -1;
}

/// One block: counting sort of the pairs by expert, cut into `num_items` items; those left over get count 0.
/// The order of an expert's pairs is not fixed; no result depends on it, for a pair has its own sums.
__global__ void __launch_bounds__(kSortThreads)
    sort_pairs_kernel(const Choices choices, int num_items, ExpertItem* items, std::int32_t* pairs) {
  using Scan = cub::BlockScan<int, kSortThreads>;
  __shared__ typename Scan::TempStorage pair_storage;
  __shared__ typename Scan::TempStorage item_storage;
  __shared__ int cursors[kMaxLocalExperts];  // an expert's pairs, then where the next of them goes
  const int thread = static_cast<int>(threadIdx.x);
  for (int expert = thread; expert < choices.num_experts; expert += kSortThreads) cursors[expert] = 0;
  __syncthreads();
  for (int pair = thread; pair < choices.num_pairs; pair += kSortThreads) {
    if (const int expert = local_expert(choices, pair); expert >= 0) atomicAdd(&cursors[expert], 1);
  }
  __syncthreads();

  int counts[kExpertsPerSortThread];
  int begins[kExpertsPerSortThread];
  int item_begins[kExpertsPerSortThread];
#pragma unroll
  for (int i = 0; i < kExpertsPerSortThread; ++i) {
    const int expert = thread * kExpertsPerSortThread + i;
    counts[i] = expert < choices.num_experts ? cursors[expert] : 0;
    item_begins[i] = (counts[i] + kMaxDotRows - 1) / kMaxDotRows;
  }
  Scan(pair_storage).ExclusiveSum(counts, begins);
  int used_items = 0;
  Scan(item_storage).ExclusiveSum(item_begins, item_begins, used_items);
#pragma unroll
  for (int i = 0; i < kExpertsPerSortThread; ++i) {
    const int expert = thread * kExpertsPerSortThread + i;
    if (expert >= choices.num_experts) continue;
    cursors[expert] = begins[i];
    for (int done = 0; done < counts[i]; done += kMaxDotRows)
      items[item_begins[i] + done / kMaxDotRows] = {expert, begins[i] + done,
                                                    min(counts[i] - done, kMaxDotRows)};
  }
  for (int item = used_items + thread; item < num_items; item += kSortThreads) items[item] = {0, 0, 0};
  __syncthreads();
  for (int pair = thread; pair < choices.num_pairs; pair += kSortThreads) {
    if (const int expert = local_expert(choices, pair); expert >= 0)
      pairs[atomicAdd(&cursors[expert], 1)] = pair;
  }
}

/// One projection of consecutive experts, by value in the kernel's parameters.
struct ExpertTable {
  int first;
  int count;
  const void* weights[kExpertsPerLaunch];
};

/// What both projections read and write. Grid: num_items blocks for each block of weight rows, so that the
/// items of one expert, which lie side by side, read its weights from L2 together.
template <class T>
struct ExpertProduct {
  const ExpertItem* items;
  const std::int32_t* pairs;
  const T* in;
  std::int64_t in_stride;
  int pairs_per_row;  // rows of `in` are tokens (top_k) or pairs (1)
  float* out;
  int num_items;
  int cols;
  int width;   // columns of out
  int splits;  // warps that share the columns of a group of weight rows
};

/// What a block multiplies: an item, and some groups of weight rows.
struct ItemPart {
  ExpertItem item;
  const void* weights = nullptr;  // of its expert
  bool is_empty;                  // no pairs, or an expert of another launch
  int warp;
  int groups;  // of this block
  int first_group;

  template <class T>
  __device__ __forceinline__ ItemPart(const ExpertProduct<T>& p, const ExpertTable& table)
      : item(p.items[blockIdx.x % p.num_items]),
        warp(static_cast<int>(threadIdx.x) / kWarp),
        groups(kDotWarps / p.splits),
        first_group(static_cast<int>(blockIdx.x / p.num_items) * groups) {
    const int index = item.expert - table.first;
    is_empty = item.count == 0 || index < 0 || index >= table.count;
    if (!is_empty) weights = table.weights[index];
  }

  __device__ __forceinline__ int group_of_warp(int splits) const { return first_group + warp / splits; }
};

/// Calls body with kRows as a std::integral_constant: 1, 2, 4 or kMaxDotRows, the least that `count` fits.
template <class Body>
__device__ __forceinline__ void with_row_count(int count, const Body& body) {
  if (count == 1) {
    body(std::integral_constant<int, 1>{});
  } else if (count == 2) {
    body(std::integral_constant<int, 2>{});
  } else if (count <= 4) {
    body(std::integral_constant<int, 4>{});
  } else {
    body(std::integral_constant<int, kMaxDotRows>{});
  }
}

/// Rows of `in` of an item's pairs; past its end the last one again, whose sums are not stored.
template <int kRows, class T>
__device__ __forceinline__ void find_rows(const ExpertProduct<T>& p, const ExpertItem& item,
                                          const T* (&rows)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int pair = p.pairs[item.begin + min(r, item.count - 1)];
    rows[r] = p.in + pair / p.pairs_per_row * p.in_stride;
  }
}

/// hidden[pair, f] = silu(gate) * up with gate = in . weight[f], up = in . weight[width + f]. A group is two
/// f.
template <class T, class W, bool kVector>
__global__ void __launch_bounds__(kDotThreads, 2)
    gate_up_kernel(const ExpertProduct<T> p, const __grid_constant__ ExpertTable table) {
  constexpr int kWidth = kVector ? 16 / static_cast<int>(sizeof(W)) : 1;
  constexpr int kFeatures = kDotOutputs / 2;
  __shared__ float partial[kDotWarps][kMaxDotRows * kDotOutputs];
  const ItemPart part(p, table);
  if (part.is_empty) return;
  const ExpertItem& item = part.item;
  const int first = part.group_of_warp(p.splits) * kFeatures;
  const W* weights[kDotOutputs];  // gate of two features, then up
#pragma unroll
  for (int o = 0; o < kDotOutputs; ++o) {
    const int feature = min(first + o % kFeatures, p.width - 1);
    const std::int64_t row = o < kFeatures ? feature : std::int64_t{p.width} + feature;
    weights[o] = static_cast<const W*>(part.weights) + row * p.cols;
  }
  with_row_count(item.count, [&]<int kRows>(std::integral_constant<int, kRows>) {
    const T* rows[kRows];
    find_rows(p, item, rows);
    dot_rows<kWidth>(weights, rows, p.cols, part.warp % p.splits, p.splits, partial[part.warp]);
  });

  __syncthreads();
  const int sums = item.count * kFeatures;
  for (int i = static_cast<int>(threadIdx.x); i < part.groups * sums; i += kDotThreads) {
    const int group = i / sums;
    const int row = i % sums / kFeatures;
    const int o = i % kFeatures;
    const int feature = (part.first_group + group) * kFeatures + o;
    if (feature >= p.width) continue;
    float gate = 0.0f;
    float up = 0.0f;
    for (int split = 0; split < p.splits; ++split) {
      const float* from = partial[group * p.splits + split] + row * kDotOutputs + o;
      gate += from[0];
      up += from[kFeatures];
    }
    const std::int64_t pair = p.pairs[item.begin + row];
    p.out[pair * p.width + feature] = swiglu(gate, up);
  }
}

/// outputs[pair, m] = hidden[pair] . weight[m]. A group is kDotOutputs rows m.
template <class W, bool kVector>
__global__ void __launch_bounds__(kDotThreads, 2)
    down_kernel(const ExpertProduct<float> p, const __grid_constant__ ExpertTable table) {
  constexpr int kWidth = kVector ? 16 / static_cast<int>(sizeof(W)) : 1;
  __shared__ float partial[kDotWarps][kMaxDotRows * kDotOutputs];
  const ItemPart part(p, table);
  if (part.is_empty) return;
  const ExpertItem& item = part.item;
  const int first = part.group_of_warp(p.splits) * kDotOutputs;
  const W* weights[kDotOutputs];
#pragma unroll
  for (int o = 0; o < kDotOutputs; ++o)
    weights[o] =
        static_cast<const W*>(part.weights) + static_cast<std::int64_t>(min(first + o, p.width - 1)) * p.cols;
  with_row_count(item.count, [&]<int kRows>(std::integral_constant<int, kRows>) {
    const float* rows[kRows];
    find_rows(p, item, rows);
    dot_rows<kWidth>(weights, rows, p.cols, part.warp % p.splits, p.splits, partial[part.warp]);
  });

  __syncthreads();
  const int sums = item.count * kDotOutputs;
  for (int i = static_cast<int>(threadIdx.x); i < part.groups * sums; i += kDotThreads) {
    const int group = i / sums;
    const int row = i % sums / kDotOutputs;
    const int o = i % kDotOutputs;
    const int m = (part.first_group + group) * kDotOutputs + o;
    if (m >= p.width) continue;
    float sum = 0.0f;
    for (int split = 0; split < p.splits; ++split)
      sum += partial[group * p.splits + split][row * kDotOutputs + o];
    const std::int64_t pair = p.pairs[item.begin + row];
    p.out[pair * p.width + m] = sum;
  }
}

/// out[t, m] += sum over the token's choices of this rank's experts, in their order, of weight * outputs. A
/// thread an element.
template <class T>
__global__ void sum_choices_kernel(const Choices choices, const float* outputs, int hidden, T* out,
                                   std::int64_t out_stride, std::int64_t count) {
  const std::int64_t index = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= count) return;
  const auto token = static_cast<int>(index / hidden);
  const auto m = static_cast<int>(index % hidden);
  float sum = 0.0f;
  bool has_any = false;
  for (int choice = 0; choice < choices.top_k; ++choice) {
    const int pair = token * choices.top_k + choice;
    if (local_expert(choices, pair) < 0) continue;
    has_any = true;
    sum = fmaf(choices.weights[token * choices.weight_stride + choice],
               outputs[std::int64_t{pair} * hidden + m], sum);
  }
  if (!has_any) return;
  T& target = out[token * out_stride + m];
  target = from_float<T>(to_float(target) + sum);
}

/// Calls launch(table, dtype, is_aligned) for runs of experts whose projection has one type.
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

/// Launches the kernel for the type of the weights and for whether 16 bytes may be read at once:
/// kernel_of(W*, std::bool_constant<kVector>). `features` weight rows make a group.
template <class T, class KernelOf>
void launch_product(ExpertProduct<T> product, const ExpertTable& table, DType dtype, bool is_aligned,
                    int features, int num_sms, cudaStream_t stream, const KernelOf& kernel_of) {
  const auto launch = [&]<class W>(W* type) {
    constexpr int kWidth = 16 / static_cast<int>(sizeof(W));
    constexpr std::int64_t kElements = 16 / static_cast<std::int64_t>(sizeof(T));
    const bool is_vector = is_aligned && product.cols % kWidth == 0 && is_aligned_16(product.in) &&
                           product.in_stride % kElements == 0;
    const std::int64_t groups = ceil_div<std::int64_t>(product.width, features);
    product.splits =
        choose_splits(groups * product.num_items, product.cols, kWarp * (is_vector ? kWidth : 1), num_sms);
    const std::int64_t groups_of_block = kDotWarps / product.splits;
    const std::int64_t blocks = ceil_div(groups, groups_of_block) * product.num_items;
    HELIX_EXPECTS(blocks <= std::numeric_limits<std::int32_t>::max(), ErrorCode::unsupported,
                  "expert_ffn: ", product.num_items, " items of ", groups,
                  " groups of features are too many for one launch; give it fewer tokens");
    const auto kernel = is_vector ? kernel_of(type, std::true_type{}) : kernel_of(type, std::false_type{});
    kernel<<<static_cast<unsigned>(blocks), kDotThreads, 0, stream>>>(product, table);
    HELIX_CHECK_LAUNCH();
  };
  dispatch_weight(dtype, launch);
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
  const ExpertBuffers buffers = carve(num_pairs, hidden, ffn, arena);
  const int num_sms = state_->num_sms;

  Choices choices{};
  choices.experts = args.experts.data();
  choices.expert_stride = args.experts.stride(0);
  choices.weights = args.weights.data();
  choices.weight_stride = args.weights.stride(0);
  choices.first_expert = args.first_expert;
  choices.num_experts = static_cast<int>(num_experts);
  choices.top_k = static_cast<int>(top_k);
  choices.num_pairs = static_cast<int>(num_pairs);
  // Full items and one that is not for each expert, but no more than pairs.
  const auto num_items = static_cast<int>(std::min(num_pairs, num_pairs / kMaxDotRows + num_experts));
  sort_pairs_kernel<<<1, kSortThreads, 0, stream.handle()>>>(choices, num_items, buffers.items,
                                                             buffers.pairs);
  HELIX_CHECK_LAUNCH();

  for_each_table(args.local_experts, &ExpertWeights::gate_up,
                 [&](const ExpertTable& table, DType dtype, bool is_aligned) {
                   const ExpertProduct<T> product{buffers.items,
                                                  buffers.pairs,
                                                  args.in.data(),
                                                  args.in.stride(0),
                                                  static_cast<int>(top_k),
                                                  buffers.hidden,
                                                  num_items,
                                                  static_cast<int>(hidden),
                                                  static_cast<int>(ffn),
                                                  1};
                   launch_product(product, table, dtype, is_aligned, kDotOutputs / 2, num_sms,
                                  stream.handle(),
                                  []<class W, bool kVector>(W*, std::bool_constant<kVector>) {
                                    return gate_up_kernel<T, W, kVector>;
                                  });
                 });
  for_each_table(
      args.local_experts, &ExpertWeights::down, [&](const ExpertTable& table, DType dtype, bool is_aligned) {
        const ExpertProduct<float> product{
            buffers.items, buffers.pairs,         buffers.hidden,           ffn, 1, buffers.outputs,
            num_items,     static_cast<int>(ffn), static_cast<int>(hidden), 1};
        launch_product(
            product, table, dtype, is_aligned, kDotOutputs, num_sms, stream.handle(),
            []<class W, bool kVector>(W*, std::bool_constant<kVector>) { return down_kernel<W, kVector>; });
      });

  constexpr int kThreads = 256;
  const std::int64_t count = tokens * hidden;
  sum_choices_kernel<T><<<grid_blocks(count, kThreads), kThreads, 0, stream.handle()>>>(
      choices, buffers.outputs, static_cast<int>(hidden), args.out.data(), args.out.stride(0), count);
  HELIX_CHECK_LAUNCH();
}

template <class T>
std::size_t Operators<T>::expert_ffn_workspace_bytes(std::int64_t num_tokens, std::int64_t top_k,
                                                     std::int64_t hidden, std::int64_t expert_ffn) const {
  WorkspaceArena measure;
  carve(num_tokens * top_k, hidden, expert_ffn, measure);
  return measure.used_bytes() + WorkspaceArena::kAlignment;  // whatever the alignment of the caller's
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
