// SPDX-License-Identifier: Apache-2.0
// What the files that use tile registers share: function attributes, joined halves and a transposition.
#pragma once

#if defined(__x86_64__) && defined(__linux__)

#include <immintrin.h>

// g++ 12 warns about its own header, where intrinsics start from vectors that are undefined on purpose.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

// Applied to single functions only, because the rest of the program must run on older machines.
#define HELIX_AMX __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,amx-tile,amx-bf16"), noinline))
#define HELIX_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"), always_inline)) inline

namespace helix::cpu::amx {

/// A compiler barrier: the compiler does not know that tile loads read memory.
HELIX_AVX512 void barrier() noexcept {
  __asm__ volatile("" ::: "memory");
}

/// Packs the upper halves of two vectors as words: for each 4 lanes the first vector's, then the second's.
HELIX_AVX512 __m512i pack_upper(__m512i first, __m512i second) noexcept {
  return _mm512_packus_epi32(_mm512_srli_epi32(first, 16), _mm512_srli_epi32(second, 16));
}

/// Packs the upper halves of two vectors as 32 words in order.
HELIX_AVX512 __m512i join_upper(__m512i first, __m512i second) noexcept {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), pack_upper(first, second));
}

/// Transposes 16 vectors of 16 lanes.
HELIX_AVX512 void transpose(__m512i* x) noexcept {
  __m512i y[16];
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) {
    y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    x[4 * i] = _mm512_unpacklo_epi64(y[4 * i], y[4 * i + 2]);
    x[4 * i + 1] = _mm512_unpackhi_epi64(y[4 * i], y[4 * i + 2]);
    x[4 * i + 2] = _mm512_unpacklo_epi64(y[4 * i + 1], y[4 * i + 3]);
    x[4 * i + 3] = _mm512_unpackhi_epi64(y[4 * i + 1], y[4 * i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
    y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 4] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    x[i + 12] = _mm512_shuffle_i32x4(y[i + 4], y[i + 12], 0xdd);
  }
}

}  // namespace helix::cpu::amx

#endif
