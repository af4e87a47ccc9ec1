// SPDX-License-Identifier: Apache-2.0
// The two products of the tensor-core attention kernel: queries by the keys of a KV tile, and weights by its
// values.
//
// Both are m16n8k16 with the queries as rows. Fragments are loaded straight from unswizzled rows. The order
// of the summed dimension is free as long as both operands agree, so a lane takes up to 16 contiguous bytes
// of a key where the instruction names scattered columns. Of V it pairs two tokens' elements in registers.
// Head sizes are any multiple of 16: the columns left over by the widest pieces are read in pieces of a half,
// a quarter or an eighth of the size.
//
// e4m3 is widened exactly to f16 on its way into a fragment: 64 elements of K cost a lane 32 conversions. 64
// elements of V also cost 16 byte permutations, where 16-bit V takes 32.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "cuda/attention/tensor_pieces.cuh"
#include "cuda/attention/tensor_queries.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/warp.cuh"

namespace helix::cuda {

/// The products for KV tiles of type KV. `kTokens` tokens are multiplied in one step. Rows of K and V lie one
/// after another, queries as in QueryPlaces.
template <class KV, int kDim, int kValueDim, int kMTiles, int kTokens>
struct TensorProducts {
  using T = MultipliedAs<KV>;
  using Places = QueryPlaces<KV, kDim>;
  static constexpr bool kIsFp8 = sizeof(KV) == 1;
  static constexpr int kNTiles = kTokens / 8;
  static constexpr int kKeyBytes = kDim * static_cast<int>(sizeof(KV));
  static constexpr int kValueBytes = kValueDim * static_cast<int>(sizeof(KV));
  static_assert(kDim % 16 == 0 && kValueDim % 16 == 0 && kTokens % 16 == 0);

  using Scores = float[kMTiles][kNTiles][4];
  using Weights = unsigned[kMTiles][kNTiles][2];  // pairs of tokens, of rows g and g + 8
  using Sums = float[kMTiles][kValueDim / 8][4];

  /// scores = queries keys^T of kTokens keys.
  static __device__ __forceinline__ void multiply_keys(const T* queries, const std::byte* keys,
                                                       Scores& scores) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[m][n][j] = 0.0f;
      }
    }
    multiply_key_columns<0>(queries, keys, scores);
  }

  /// sums += weights values of kTokens values.
  static __device__ __forceinline__ void add_values(const std::byte* values, const Weights& weights,
                                                    Sums& sums) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int g = lane / 4;   // column of the values
    const int kq = lane % 4;  // quarter of the summed dimension
#pragma unroll
    for (int block = 0; block < kTokens / 16; ++block) {
      const std::byte* row = values + (block * 16 + kq * 2) * kValueBytes;
      for_each_part(
          [&](auto part) { multiply_values(load_values(row, g, part), part, block, weights, sums); },
          [&](auto even, auto odd) {
            // Rows of different lanes may begin in the same bank, so half of the lanes read the other part
            // first.
            const bool is_odd = kq % 2 != 0;
            const auto x = load_values<decltype(even)>(row, is_odd ? odd.column_of(g) : even.column_of(g));
            const auto y = load_values<decltype(even)>(row, is_odd ? even.column_of(g) : odd.column_of(g));
            multiply_values(select(is_odd, y, x), even, block, weights, sums);
            multiply_values(select(is_odd, x, y), odd, block, weights, sums);
          });
    }
  }

  /// Calls one(part) or two(part, part) with the ValueParts of a row, in order.
  template <int kFirst = 0, class One, class Two>
  static __device__ __forceinline__ void for_each_part(const One& one, const Two& two) {
    constexpr int kLeft = kValueDim - kFirst;
    if constexpr (kLeft >= 16 * kWidest) {
      two(ValuePart<kFirst, kWidest, false>(), ValuePart<kFirst + 8 * kWidest, kWidest, true>());
      for_each_part<kFirst + 16 * kWidest>(one, two);
    } else if constexpr (kLeft > 0) {
      constexpr int kWide = std::min(kWidest, static_cast<int>(std::bit_floor(unsigned{kLeft / 8})));
      one(ValuePart<kFirst, kWide, false>());
      for_each_part<kFirst + 8 * kWide>(one, two);
    }
  }

 private:
  /// Columns of a value that a lane reads at a time: 16 bytes, but only 8 of a row of 128 bytes, which is
  /// then two parts that lanes of different rows can read in turn.
  static constexpr int kWidest = kIsFp8 && kValueDim >= 256 ? 16 : 8;

  /// Adds the products of columns from kColumn on.
  template <int kColumn>
  static __device__ __forceinline__ void multiply_key_columns(const T* queries, const std::byte* keys,
                                                              Scores& scores) {
    if constexpr (kColumn < kDim) {
      constexpr int kWide = Places::wide_at(kColumn);
      const int lane = static_cast<int>(threadIdx.x) % kWarp;
      const int g = lane / 4;   // row of the queries, token of the keys
      const int kq = lane % 4;  // quarter of the summed dimension
      const int column = kColumn + kq * kWide;
      unsigned q[kMTiles][kWide / 4][4];  // query fragments of each instruction
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) load_queries<kColumn, kWide>(queries, m, q[m]);
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        unsigned k[kWide / 2];
        load_key<kWide>(keys + (n * 8 + g) * kKeyBytes + column * static_cast<int>(sizeof(KV)), k);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
          for (int i = 0; i < kWide / 4; ++i)
            multiply<T>(scores[m][n], q[m][i][0], q[m][i][1], q[m][i][2], q[m][i][3], k[2 * i], k[2 * i + 1]);
        }
      }
      multiply_key_columns<kColumn + 4 * kWide>(queries, keys, scores);
    }
  }

  /// Loads the fragments of m16 tile `m` for the products of 4 kWide columns from kColumn on.
  template <int kColumn, int kWide>
  static __device__ __forceinline__ void load_queries(const T* queries, int m, unsigned (&to)[kWide / 4][4]) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    if constexpr (Places::kAreFragments) {
#pragma unroll
      for (int i = 0; i < kWide / 4; ++i)
        load_words<16>(
            reinterpret_cast<const std::byte*>(queries + Places::fragment(m, kColumn / 16 + i, lane)), to[i]);
    } else {
      unsigned rows[2][kWide / 2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const T* row = queries + (m * kMmaRows + half * 8 + lane / 4) * Places::kRowStride;
        load_words<kWide * 2>(reinterpret_cast<const std::byte*>(row + kColumn + lane % 4 * kWide),
                              rows[half]);
      }
#pragma unroll
      for (int i = 0; i < kWide / 4; ++i) {
        to[i][0] = rows[0][2 * i];
        to[i][1] = rows[1][2 * i];
        to[i][2] = rows[0][2 * i + 1];
        to[i][3] = rows[1][2 * i + 1];
      }
    }
  }

  /// Loads kWide columns of a key as pairs of T.
  template <int kWide>
  static __device__ __forceinline__ void load_key(const std::byte* from, unsigned (&to)[kWide / 2]) {
    if constexpr (kIsFp8) {
      unsigned words[kWide / 4];
      load_words<kWide>(from, words);
#pragma unroll
      for (int i = 0; i < kWide / 4; ++i) widen(words[i], to[2 * i], to[2 * i + 1]);
    } else {
      load_words<kWide * 2>(from, to);
    }
  }

  /// Columns of the four tokens that a lane gives to one instruction, as they are stored.
  template <int kWide>
  struct Values {
    static constexpr int kWords = (kWide * static_cast<int>(sizeof(KV)) + 3) / 4;
    unsigned words[4][kWords];
  };

  template <class Part>
  static __device__ __forceinline__ Values<Part::kWide> load_values(const std::byte* row, int column) {
    constexpr int kTokens4[4] = {0, 1, 8, 9};
    Values<Part::kWide> values;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      load_words<Part::kWide* static_cast<int>(sizeof(KV))>(
          row + kTokens4[i] * kValueBytes + column * static_cast<int>(sizeof(KV)), values.words[i]);
    return values;
  }
  template <class Part>
  static __device__ __forceinline__ Values<Part::kWide> load_values(const std::byte* row, int g, Part part) {
    return load_values<Part>(row, part.column_of(g));
  }

  template <int kWide>
  static __device__ __forceinline__ Values<kWide> select(bool condition, const Values<kWide>& x,
                                                         const Values<kWide>& y) {
    Values<kWide> values;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < Values<kWide>::kWords; ++j)
        values.words[i][j] = condition ? x.words[i][j] : y.words[i][j];
    }
    return values;
  }

  /// sums += weights values for 16 tokens and the columns of `part`.
  template <class Part>
  static __device__ __forceinline__ void multiply_values(const Values<Part::kWide>& v, Part, int block,
                                                         const Weights& weights, Sums& sums) {
    const auto multiply_column = [&](int e, unsigned b0, unsigned b1) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        multiply<T>(sums[m][Part::kTile + e], weights[m][2 * block][0], weights[m][2 * block][1],
                    weights[m][2 * block + 1][0], weights[m][2 * block + 1][1], b0, b1);
      }
    };
    if constexpr (kIsFp8) {
#pragma unroll
      for (int e = 0; e < Part::kWide; e += 2) {
        const unsigned columns = e % 4 == 0 ? 0x5140u : 0x7362u;  // two, of both tokens
        unsigned b0[2];
        unsigned b1[2];
        widen(__byte_perm(v.words[0][e / 4], v.words[1][e / 4], columns), b0[0], b0[1]);
        widen(__byte_perm(v.words[2][e / 4], v.words[3][e / 4], columns), b1[0], b1[1]);
        multiply_column(e, b0[0], b1[0]);
        multiply_column(e + 1, b0[1], b1[1]);
      }
    } else {
#pragma unroll
      for (int e = 0; e < Part::kWide; ++e) {
        const unsigned halves = e % 2 == 0 ? 0x5410u : 0x7632u;  // both tokens' lower or upper ones
        multiply_column(e, __byte_perm(v.words[0][e / 2], v.words[1][e / 2], halves),
                        __byte_perm(v.words[2][e / 2], v.words[3][e / 2], halves));
      }
    }
  }
};

}  // namespace helix::cuda
