// SPDX-License-Identifier: Apache-2.0
// The query rows of the kernel over latents of e4m3: how they get into shared memory, and how their results
// leave it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/latent_e4m3_softmax.cuh"
#include "cuda/attention/latent_result.cuh"
#include "cuda/runtime/convert.cuh"
#include "cuda/runtime/math.cuh"

namespace helix::cuda::latent_e4m3 {

/// The block's rows of one query tile. All consumer threads call its functions.
template <class K>
struct QueryRows {
  using T = typename K::T;
  static constexpr int kRows = K::kRows;

  const AttentionParams& p;
  Shared<K>& s;
  const Part& part;
  float kv_scale;

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) % kWarpGroup / kWarp; }
  static __device__ int first_row() { return block_of_item<K::kBlocks>() * kGroupRows; }

  static __device__ int group() { return static_cast<int>(threadIdx.x) / kWarpGroup; }

  /// Loads the rows into shared memory and finds the tokens that they see. Returns the KV tiles that all rows
  /// see whole.
  __device__ __forceinline__ TokenRange begin() {
    group_sync(latent_e4m3::kAllConsumers, kConsumers);  // nobody reads the previous rows any more
    copy_queries();
    find_bounds();
    fence_before_copy();
    group_sync(latent_e4m3::kAllConsumers, kConsumers);
    int low = 0;
    int high = INT32_MAX;
    for (int r = lane(); r < kRows; r += kWarp) {
      low = ::max(low, s.low[r]);
      high = ::min(high, s.high[r]);
    }
    low = ::max(__reduce_max_sync(~0u, low) - part.first_token, 0);
    high = ::max(__reduce_min_sync(~0u, high) - part.first_token, 0);
    return {(low + kLatentTileTokens - 1) / kLatentTileTokens, high / kLatentTileTokens};
  }

  /// Loads the rows as f16. Each is multiplied by the power of two that makes best use of f16's range, and
  /// its columns are in the order in which ldmatrix delivers the keys. Rope columns of bf16 stay bf16.
  __device__ __forceinline__ void copy_queries() const {
    constexpr int kThreadsOfRow = kConsumers / kRows;
    constexpr int kParts = (kLatentColumns + kRopeColumns) / 8;
    constexpr int kThreadParts = (kParts + kThreadsOfRow - 1) / kThreadsOfRow;
    const QueryTile& tile = part.span.query_tile;
    const int r = static_cast<int>(threadIdx.x) / kThreadsOfRow;
    const int first = static_cast<int>(threadIdx.x) % kThreadsOfRow;
    const bool is_row = first_row() + r < tile.num_rows;
    const T* q = static_cast<const T*>(p.q);
    if (is_row)
      q += tile.token(p, first_row() + r) * p.q_token_stride +
           tile.query_head(p, 0, first_row() + r) * p.q_head_stride;
    uint4 parts[kThreadParts];
    float most = 0.0f;
#pragma unroll
    for (int k = 0; k < kThreadParts; ++k) {
      const int c = first + k * kThreadsOfRow;
      parts[k] = is_row && c < kParts ? *reinterpret_cast<const uint4*>(q + c * 8) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int k = 0; k < kThreadParts; ++k) {
      const T* x = reinterpret_cast<const T*>(&parts[k]);
#pragma unroll
      for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(to_float(x[i])));
    }
#pragma unroll
    for (int offset = 1; offset < kThreadsOfRow; offset *= 2)
      most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
    constexpr int kTop = 127 + 13;
    const int exponent = static_cast<int>(__float_as_uint(most) >> 23);  // biased
    const int up = most > 0.0f ? ::max(1, ::min(253, 127 + kTop - exponent)) : 127;
    const float scale = __uint_as_float(static_cast<unsigned>(up) << 23);
#pragma unroll
    for (int k = 0; k < kThreadParts; ++k) {
      const int c = first + k * kThreadsOfRow;
      if (c < kParts) store_part(r, c, reinterpret_cast<const T*>(&parts[k]), scale);
    }
    if (first == 0) {
      const float inverse = __uint_as_float(static_cast<unsigned>(254 - up) << 23);
      const float factor = p.soft_cap > 0.0f ? 1.0f / p.soft_cap : kLog2E;
      s.cap_factor[r] = p.scale * kv_scale * factor * inverse;
      s.row[r] = {p.soft_cap > 0.0f ? 1.0f : s.cap_factor[r], 0.0f};
      s.is_unset[r] = true;
    }
  }
  /// Columns [8 * c, 8 * c + 8) of row `r`.
  __device__ __forceinline__ void store_part(int r, int c, const T* x, float scale) const {
    const unsigned chunk = at(s.queries) + static_cast<unsigned>(c / 8) * K::kQueryChunkBytes;
    const auto row = static_cast<unsigned>(r);
    const auto part_of_chunk = static_cast<unsigned>(c % 8);
    unsigned two[4];
    if (K::kIsMixed && c >= latent::kValueChunks * 8) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        two[i] = pack<bf16>(to_float(x[2 * i]) * scale, to_float(x[2 * i + 1]) * scale);
      store_shared(chunk + swizzled(row, part_of_chunk), uint4{two[0], two[1], two[2], two[3]});
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      two[i] = pack<f16>(to_float(x[2 * i]) * scale, to_float(x[2 * i + 1]) * scale);
      // Of each 16 columns, the first two of every four are stored first, then the other two.
#pragma unroll
    for (unsigned k = 0; k < 2; ++k)
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(chunk + swizzled(row, (part_of_chunk & ~1u) + k) +
                                                            part_of_chunk % 2u * 8u),
                   "r"(two[k]), "r"(two[k + 2])
                   : "memory");
  }

  /// Finds the local tokens that each row sees.
  __device__ __forceinline__ void find_bounds() const {
    const int r = static_cast<int>(threadIdx.x);
    if (r >= kRows) return;
    const TokenRange seen = seen_by_row(p, part.span, first_row() + r);
    s.low[r] = static_cast<int>(seen.begin);
    s.high[r] = static_cast<int>(seen.end);
  }

  // In the epilogue the queries' memory holds the result rows of each group's columns, then for each row
  // every warp's largest value, the place and the RowEnd.
  static constexpr int kWarps = kGroups * kWarpGroup / kWarp;
  static constexpr unsigned kStageRowBytes = kGroupColumns * 2u;
  static constexpr unsigned kStageBytes = kRows * kStageRowBytes;
  static constexpr int kPairBlocks = kPairColumns / 16;
  static_assert(kGroups * kStageBytes +
                    kRows * (kWarps * sizeof(float) + sizeof(std::byte*) + sizeof(latent::RowEnd)) <=
                K::kQueryBytes);
  __device__ std::byte* stage() const {
    return s.queries + group() * kStageBytes;
  }
  __device__ float* row_most() const {
    return reinterpret_cast<float*>(s.queries + kGroups * kStageBytes);
  }
  __device__ std::byte** row_places() const {
    return reinterpret_cast<std::byte**>(row_most() + kWarps * kRows);
  }
  __device__ latent::RowEnd* row_ends() const {
    return reinterpret_cast<latent::RowEnd*>(row_places() + kRows);
  }
  /// Byte offset of 16-byte piece `piece` of row `r` in the stage; a warp's writes go to different banks.
  static __device__ unsigned staged(int r, int piece) {
    return static_cast<unsigned>(r) * kStageRowBytes + static_cast<unsigned>(piece ^ r / 2 % 4 * 2) * 16u;
  }

  /// The RowEnd of row `r`, after all consumers have stored their sums and largest values.
  __device__ __forceinline__ latent::RowEnd find_end(bool is_split, int r) const {
    float total = 0.0f;
    float most = 0.0f;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) {
      total += s.top[k / 4][k % 4][r];
      most = fmaxf(most, row_most()[k * kRows + r]);
    }
    return latent::end_of_row(is_split, total == 0.0f ? -kInfinity : s.row[r].pivot, total, most);
  }

  /// Stores this warp's columns of all rows in the stage.
  __device__ __forceinline__ void stage_rows(bool is_split, const Sums<K>& sums) const {
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      const int r = i / 2 * 8 + lane() % 4 * 2 + i % 2;
      const float factor = row_ends()[r].factor * kv_scale;
#pragma unroll
      for (int block = 0; block < kValueBlocks; ++block) {
        const auto& from = sums[block];
        const int column = block / kPairBlocks * kTileChunkColumns + warp() * kPairColumns +
                           block % kPairBlocks * 16 + lane() / 4 * 2;
        *reinterpret_cast<unsigned*>(stage() + staged(r, column / 8) + column % 8 * 2) =
            latent::pack_result<T>(is_split, from[i / 2 * 4 + i % 2] * factor,
                                   from[i / 2 * 4 + 2 + i % 2] * factor);
      }
    }
  }

  /// Writes the rows: out and lse, or split partials.
  __device__ __forceinline__ void end(const Totals<K>& totals, const Sums<K>& sums) const {
    group_sync(latent_e4m3::kAllConsumers, kConsumers);  // nobody reads queries any more
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {  // query row 8 * (i / 2) + lane % 4 * 2 + i % 2
      float total = totals[i];
      float most = 0.0f;
#pragma unroll
      for (int block = 0; block < kValueBlocks; ++block)
        most = fmaxf(most,
                     fmaxf(fabsf(sums[block][i / 2 * 4 + i % 2]), fabsf(sums[block][i / 2 * 4 + 2 + i % 2])));
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2) {
        total += __shfl_xor_sync(~0u, total, offset);
        most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
      }
      if (lane() < 4) {
        const int r = i / 2 * 8 + lane() * 2 + i % 2;
        s.top[group()][warp()][r] = total;
        row_most()[(group() * (kWarps / kGroups) + warp()) * kRows + r] = most * fabsf(kv_scale);
      }
    }
    group_sync(latent_e4m3::kAllConsumers, kConsumers);
    const bool splits = latent::is_split(part);
    const int row = static_cast<int>(threadIdx.x);
    if (row < kRows) row_ends()[row] = find_end(splits, row);
    group_sync(latent_e4m3::kAllConsumers, kConsumers);
    stage_rows(splits, sums);
    group_sync(kOneGroup + group(), kWarpGroup);
    latent::write_rows<K::kBlocks, kRows>(p, part, row_ends(), row_places(), [&](int r) {
      return *reinterpret_cast<const uint4*>(stage() + staged(r, lane()));
    });
  }
};

}  // namespace helix::cuda::latent_e4m3
