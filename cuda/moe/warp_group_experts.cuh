// SPDX-License-Identifier: Apache-2.0
// Products of experts by warp groups, for activations and weights of one 16-bit type (compute capability
// 9.0): 256 weight rows of an expert times up to 192 of its pairs.
//
// As in expert_tiles.cuh, weight rows are the rows of the product and pairs its columns. One block per SM
// takes tile after tile, and its ring of stages continues across tiles: one producer warp copies weights,
// three copy the pairs' rows, and two consumer warp groups multiply. A pair's sums do not depend on the other
// pairs of its item.
//
// Weights come 128 bytes of a row at a time, so L2 promotes requests to 256: 32 experts of 7168 x 2048, 512
// and 64 pairs in all, take 962 and 892 us, without it 1023 and 946. They may stay in L2 for the other items
// of the expert: 8192 pairs take 1632 us, and 1913 with evict-first (H100).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/moe/expert_items.cuh"
#include "cuda/runtime/async_copy.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/tensor_map.cuh"
#include "cuda/runtime/warp.cuh"
#include "cuda/runtime/warp_groups.cuh"
#include "cuda/runtime/wgmma.cuh"
#include "cuda/runtime/wgmma_product.cuh"

namespace helix::cuda {

/// Most pairs of an item for warp groups.
inline constexpr int kWarpGroupPairs = 192;

/// Most elements of a product's rows that a thread's 32-bit offsets reach; row strides are not negative.
inline constexpr std::int64_t kMaxWarpGroupElements = std::int64_t{8} << 32;

/// The type of results: T for gate and up; f32 for down, until choices are summed.
template <class T, bool kIsGateUp>
using WarpGroupOut = std::conditional_t<kIsGateUp, T, float>;

/// Kernel parameters.
template <class T, bool kIsGateUp>
struct WarpGroupParams {
  CUtensorMap weights;  ///< Columns, rows of eight, gate and up (of down one), eights, experts.
  ExpertProduct<T, WarpGroupOut<T, kIsGateUp>> product;
};

/// One product: out[pair, f] = silu(gate) * up of width features f, or in . weight[f].
template <class T, bool kIsGateUp>
struct WarpGroupExperts {
  using Params = WarpGroupParams<T, kIsGateUp>;
  using Out = WarpGroupOut<T, kIsGateUp>;
  static constexpr int kGroups = 2;  // consumer warp groups
  static constexpr int kThreads = (1 + kGroups) * kWarpGroup;
  static constexpr int kRowTiles = 2;  // tiles of 64 weight rows per group
  static constexpr int kWeightRows = kGroups * kRowTiles * kGroupRows;
  /// The gate and up rows of a feature are eight rows apart, so that one thread has both sums.
  static constexpr int kTileFeatures = kIsGateUp ? 8 : 16;  // features in 16 weight rows
  static constexpr int kFeatures = kTileFeatures * (kWeightRows / 16);
  static constexpr int kStages = 4;
  static constexpr unsigned kRowBytes = kChunkColumns * 2;
  static constexpr unsigned kWeightBytes = kWeightRows * kRowBytes;
  static constexpr unsigned kStageBytes = kWeightBytes + kWarpGroupPairs * kRowBytes;
  /// Each thread that copies pairs' rows has one 16-byte part of every kCopyRows-th row.
  static constexpr int kRowThreads = kWarpGroup - kWarp;
  static constexpr int kParts = static_cast<int>(kRowBytes) / 16;
  static constexpr int kPartElements = 8;
  static constexpr int kCopyRows = kRowThreads / kParts;
  static constexpr int kRowCopies = kWarpGroupPairs / kCopyRows;
  static constexpr int kLag = 2;  // steps from requesting rows to checking for them
  static constexpr int kCopyRegisters = 40;
  static constexpr int kProductRegisters = 232;
  static_assert(kRowCopies * kCopyRows == kWarpGroupPairs);

  struct Shared {
    unsigned char stages[kStages][kStageBytes];
    RingBarriers<kStages> ring;
  };
  using Place = RingPlace<kStages>;

  /// The features of an item from `first` on.
  struct Tile {
    int expert;
    int begin;
    int count;
    int first;
  };

  /// The block's tiles. Those of an expert follow each other, and among them those of the same weights, so
  /// that weights and pairs' rows come from memory once.
  class Walk {
   public:
    __device__ explicit Walk(const Params& params)
        : items_(params.product.items),
          parts_((params.product.width + kFeatures - 1) / kFeatures),
          num_tiles_(warp_uniform(*params.product.num_used_items) * parts_),
          tile_(static_cast<int>(blockIdx.x)) {}

    __device__ __forceinline__ bool next(Tile& tile) {
      if (tile_ >= num_tiles_) return false;
      const ExpertItem& some = items_[tile_ / parts_];  // any item of the tile's expert
      const int at = tile_ - some.first_item * parts_;
      const ExpertItem& item = items_[some.first_item + at % some.num_items];
      tile = {warp_uniform(item.expert), warp_uniform(item.begin), warp_uniform(item.count),
              warp_uniform(at / some.num_items) * kFeatures};
      tile_ += static_cast<int>(gridDim.x);
      return true;
    }

   private:
    const ExpertItem* items_;
    int parts_;
    int num_tiles_;
    int tile_;
  };

  const Params& params;
  Shared& shared;

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ __forceinline__ int steps() const {
    return (params.product.cols + kChunkColumns - 1) / kChunkColumns;
  }
  __device__ __forceinline__ unsigned stage(const Place& place) const {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared.stages[0])) +
           static_cast<unsigned>(place.stage()) * kStageBytes;
  }

  /// The weights' producer, one warp.
  __device__ void copy_weights() const {
    Walk walk(params);
    Place place(shared.ring);
    Tile tile;
    while (walk.next(tile)) {
      for (int step = 0; step < steps(); ++step, place.advance()) {
        place.wait_empty();
        if (lane() != 0) continue;
        barrier_expect(place.full(), kWeightBytes);
        copy_box(stage(place), params.weights, step * kChunkColumns, 0, 0, tile.first / kSwizzleRows,
                 tile.expert, place.full());
      }
    }
  }

  /// The rows' producer; `thread` of kRowThreads. Consumers are told of plain copies once these have arrived
  /// and are fenced, kLag steps after the request.
  __device__ void copy_rows(int thread) const {
    const auto& p = params.product;
    const int part = thread % kParts;
    const int row = thread / kParts;
    // Shared-memory offsets of the thread's even and odd rows, which are an odd multiple of four rows apart.
    static_assert(kCopyRows % kSwizzleRows == kSwizzleRows / 2);
    const unsigned even = kWeightBytes + swizzled(static_cast<unsigned>(row), static_cast<unsigned>(part));
    const unsigned odd = even ^ kSwizzleRows / 2 * 16;
    Walk walk(params);
    Place place(shared.ring);
    Place arriving(shared.ring);
    int untold = 0;  // steps requested but not announced
    const auto tell = [&] {
      fence_before_copy();
      barrier_arrive(arriving.full());
      arriving.advance();
      --untold;
    };
    Tile tile;
    while (walk.next(tile)) {
      unsigned from[kRowCopies];  // offsets of its rows in parts: see kMaxWarpGroupElements
#pragma unroll
      for (int i = 0; i < kRowCopies; ++i) {
        const int pair = min(row + i * kCopyRows, tile.count - 1);
        from[i] = static_cast<unsigned>(p.pairs[tile.begin + pair] / p.pairs_per_row) *
                      static_cast<unsigned>(p.in_stride / kPartElements) +
                  static_cast<unsigned>(part);
      }
      for (int step = 0; step < steps(); ++step, place.advance()) {
        const bool is_column = step * kChunkColumns + part * kPartElements < p.cols;
        const T* const column = is_column ? p.in + step * kChunkColumns : p.in;
        place.wait_empty();
#pragma unroll
        for (int i = 0; i < kRowCopies; ++i) {
          if (i * kCopyRows >= tile.count) break;
          copy_chunk_or_zeros(
              stage(place) + (i % 2 == 0 ? even : odd) + static_cast<unsigned>(i * kCopyRows) * kRowBytes,
              column + std::uint64_t{from[i]} * kPartElements, is_column);
        }
        commit_copies();
        if (++untold > kLag) {
          wait_for_copies<kLag>();
          tell();
        }
      }
    }
    wait_for_all_copies();
    while (untold > 0) tell();
  }

  /// A thread's sums. Element 4 * j + 2 * h + i is row lane / 4 + 8 * h of its warp's 16 rows of a row tile,
  /// pair 8 * j + lane % 4 * 2 + i.
  using Sums = float[kRowTiles][kWarpGroupPairs / 2];

  /// Computes the tile's sums over all columns, for the first `kColumns` pairs.
  template <int kColumns>
  __device__ __forceinline__ void multiply(int group, Place& place, Sums& sums) const {
    const auto release = [&](const Place& done) { barrier_arrive_if(lane() == 0, done.empty()); };
    Place before = place;
    const int all = steps();
#pragma unroll 1
    for (int step = 0; step < all; ++step) {
      place.wait_full();
      const unsigned from = stage(place);
      const unsigned rows = from + static_cast<unsigned>(group * kRowTiles * kGroupRows) * kRowBytes;
      products_fence();
#pragma unroll
      for (unsigned k = 0; k < kChunkColumns / kProductDepth; ++k) {
#pragma unroll
        for (unsigned m = 0; m < kRowTiles; ++m)
          product<T, kColumns, false>(reinterpret_cast<float(&)[kColumns / 2]>(sums[m]),
                                      rows_operand(rows + m * kGroupRows * kRowBytes + k * 32),
                                      rows_operand(from + kWeightBytes + k * 32), step > 0 || k > 0);
      }
      products_commit();
      products_wait<1>();
      if (step > 0) {
        release(before);
        before.advance();
      }
      place.advance();
    }
    products_wait<0>();
    release(before);
    pin(sums[0]);
    pin(sums[1]);
  }

  static constexpr int kPairsPerLane = kWarpGroupPairs / kWarp;

  /// Stores the tile's sums; lane l holds pairs l, l + 32, ... of the item.
  __device__ __forceinline__ void store(int group, int warp, const Tile& tile,
                                        const int (&pairs)[kPairsPerLane], const Sums& sums) const {
    const auto& p = params.product;
#pragma unroll
    for (int j = 0; j < kWarpGroupPairs / 8; ++j) {
      if (8 * j >= tile.count) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int of_eight = lane() % 4 * 2 + i;
        const int pair = __shfl_sync(~0u, pairs[j / 4], j % 4 * 8 + of_eight);
        if (8 * j + of_eight >= tile.count) continue;
        Out* const to = p.out + std::int64_t{pair} * p.width;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          const int feature = tile.first + ((group * kRowTiles + m) * 4 + warp) * kTileFeatures + lane() / 4;
          const float low = sums[m][4 * j + i];
          const float high = sums[m][4 * j + 2 + i];
          if constexpr (kIsGateUp) {
            if (feature < p.width) to[feature] = from_float<T>(swiglu(low, high));
          } else {
            if (feature < p.width) to[feature] = low;
            if (feature + 8 < p.width) to[feature + 8] = high;
          }
        }
      }
    }
  }

  /// The consumers; called by their warp groups.
  __device__ void multiply_tiles(int group) const {
    const int warp = warp_uniform(static_cast<int>(threadIdx.x) / kWarp) % 4;
    Walk walk(params);
    Place place(shared.ring);
    Tile tile;
    while (walk.next(tile)) {
      int pairs[kPairsPerLane];  // loaded while the products run
#pragma unroll
      for (int i = 0; i < kPairsPerLane; ++i)
        pairs[i] = params.product.pairs[tile.begin + min(i * kWarp + lane(), tile.count - 1)];
      Sums sums;
      if (tile.count <= 64) {
        multiply<64>(group, place, sums);
      } else if (tile.count <= 96) {
        multiply<96>(group, place, sums);
      } else if (tile.count <= 128) {
        multiply<128>(group, place, sums);
      } else if (tile.count <= 160) {
        multiply<160>(group, place, sums);
      } else {
        multiply<kWarpGroupPairs>(group, place, sums);
      }
      store(group, warp, tile, pairs, sums);
    }
  }
};

/// Grid: one block per SM. Columns and width are multiples of 8; rows are aligned to 16 bytes.
template <class T, bool kIsGateUp>
__global__ void __launch_bounds__(WarpGroupExperts<T, kIsGateUp>::kThreads, 1)
    warp_group_experts_kernel(const __grid_constant__ WarpGroupParams<T, kIsGateUp> params) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  using Work = WarpGroupExperts<T, kIsGateUp>;
  extern __shared__ __align__(1024) unsigned char warp_group_memory[];
  auto& shared = *reinterpret_cast<typename Work::Shared*>(warp_group_memory);
  if (threadIdx.x == 0) {
    shared.ring.init(1 + Work::kRowThreads, Work::kGroups * kWarpGroup / kWarp);
    fence_barrier_init();
  }
  follow_previous();
  __syncthreads();
  const Work work{params, shared};
  const int group = warp_uniform(static_cast<int>(threadIdx.x) / kWarpGroup);
  if (group == 0) {
    give_registers<Work::kCopyRegisters>();
    if (threadIdx.x < kWarp) {
      work.copy_weights();
    } else {
      work.copy_rows(static_cast<int>(threadIdx.x) - kWarp);
    }
  } else {
    take_registers<Work::kProductRegisters>();
    work.multiply_tiles(group - 1);
  }
#endif
}

}  // namespace helix::cuda
