// SPDX-License-Identifier: Apache-2.0
// The running softmax of the tensor-core kernel: the tokens that a row sees, the step from scores to weights,
// and a warp's running results.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/attention/params.cuh"
#include "cuda/attention/tensor_products.cuh"
#include "cuda/attention/weights.cuh"
#include "cuda/runtime/math.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// The running softmax of a lane's rows in kMTiles m16 tiles, kStepTokens tokens at a time.
template <class KV, int kDim, int kValueDim, int kMTiles, int kStepTokens>
struct TensorSoftmax {
  using Products = TensorProducts<KV, kDim, kValueDim, kMTiles, kStepTokens>;
  using Scores = typename Products::Scores;
  using Weights = typename Products::Weights;
  using T = typename Products::T;
  static constexpr bool kIsFp8 = Products::kIsFp8;
  static constexpr int kNTiles = kStepTokens / 8;

  /// Local tokens that each of this lane's query rows sees, and those that all of them see.
  struct Bounds {
    int low[kMTiles][2];
    int high[kMTiles][2];
    TokenRange inner{0, INT64_MAX};
  };

  /// This lane's part of its warp's running results of each query row: sums of values, max (base 2, less
  /// kHeadroom), sum of weights.
  struct Found {
    typename Products::Sums acc;
    float max[kMTiles][2];
    float sum[kMTiles][2];
  };

  /// Scales of the e4m3 keys and values of a KV head.
  struct KvScales {
    float k = 1.0f;
    float v = 1.0f;
  };

  /// Factors from products to scores for each of this lane's query rows.
  struct RowFactors {
    float of[kMTiles][2];
  };

  /// The scales of KV head `head`.
  static __device__ __forceinline__ KvScales read_scales(const AttentionParams& p, int head) {
    KvScales scales;
    if constexpr (kIsFp8) {
      if (p.k_scale != nullptr) scales.k = p.k_scale[head];
      if (p.v_scale != nullptr) scales.v = p.v_scale[head];
    }
    return scales;
  }

  /// `query_factors`: RowScale::inverse() of each query row, with e4m3.
  static __device__ __forceinline__ RowFactors row_factors(const AttentionParams& p,
                                                           const float* query_factors, float k_scale) {
    const int g = static_cast<int>(threadIdx.x) % kWarp / 4;
    RowFactors factors;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factors.of[m][half] = p.scale;
        if constexpr (kIsFp8)
          factors.of[m][half] = score_factor(p.scale * k_scale * query_factors[m * kMmaRows + half * 8 + g]);
      }
    }
    return factors;
  }

  static __device__ __forceinline__ Bounds bounds_of(const AttentionParams& p, const QueryTile& query_tile,
                                                     TokenRange all) {
    const int g = static_cast<int>(threadIdx.x) % kWarp / 4;
    const bool is_one_token = query_tile.token(p, 0) == query_tile.token(p, query_tile.num_rows - 1);
    Bounds bounds;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * kMmaRows + half * 8 + g;
        TokenRange seen{0, 0};
        if (row < query_tile.num_rows)
          seen = is_one_token ? all : visible<true>(p, p.positions[query_tile.token(p, row)]);
        bounds.low[m][half] = static_cast<int>(seen.begin);
        bounds.high[m][half] = static_cast<int>(seen.end);
        if (row < query_tile.num_rows) {
          bounds.inner.begin = ::max(bounds.inner.begin, seen.begin);
          bounds.inner.end = ::min(bounds.inner.end, seen.end);
        }
      }
    }
    return bounds;
  }

  static __device__ __forceinline__ Found nothing() {
    Found found;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int i = 0; i < kValueDim / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) found.acc[m][i][j] = 0.0f;
      }
      found.max[m][0] = found.max[m][1] = -kInfinity;
      found.sum[m][0] = found.sum[m][1] = 0.0f;
    }
    return found;
  }

  /// One step of the running softmax: turns scores into weights, and rescales the earlier results to the new
  /// max.
  static __device__ __forceinline__ void weigh(const Scores& scores, const RowFactors& exponents,
                                               Found& found, Weights& weights) {
    bool shrinks = false;
    float shrink[kMTiles][2];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = exponents.of[m][half];
        float top = -kInfinity;
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
          top = fmaxf(top, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        top = fmaxf(pivot_of<T>(top, factor), found.max[m][half]);
        const float pivot = top == -kInfinity ? 0.0f : top;
        shrink[m][half] = fast_exp2(found.max[m][half] - pivot);
        shrinks |= found.max[m][half] != top;
        found.max[m][half] = top;
        float added = 0.0f;
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
          const float x = fast_exp2(fmaf(scores[m][n][2 * half], factor, -pivot));
          const float y = fast_exp2(fmaf(scores[m][n][2 * half + 1], factor, -pivot));
          added += x + y;
          weights[m][n][half] = pack<T>(x, y);
        }
        found.sum[m][half] = fmaf(found.sum[m][half], shrink[m][half], added);
      }
    }
    if (__any_sync(~0u, shrinks)) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int i = 0; i < kValueDim / 8; ++i) {
          found.acc[m][i][0] *= shrink[m][0];
          found.acc[m][i][1] *= shrink[m][0];
          found.acc[m][i][2] *= shrink[m][1];
          found.acc[m][i][3] *= shrink[m][1];
        }
      }
    }
  }

  static __device__ void cap_scores(Scores& scores, const RowFactors& factors, float cap) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      const float inner[2] = {factors.of[m][0] / cap, factors.of[m][1] / cap};
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[m][n][j] = cap * fast_tanh(scores[m][n][j] * inner[j / 2]);
      }
    }
  }

  /// Sets the scores of tokens that a row does not see to -inf.
  static __device__ void mask_scores(Scores& scores, int token, const Bounds& bounds) {
    const int kq = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = token + n * 8 + kq * 2 + j % 2;
          if (at < bounds.low[m][j / 2] || at >= bounds.high[m][j / 2]) scores[m][n][j] = -kInfinity;
        }
      }
    }
  }
};

}  // namespace helix::cuda
