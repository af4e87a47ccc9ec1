// SPDX-License-Identifier: Apache-2.0
// The matrix product of a warp group (compute capability 9.0, code for sm_90a): 64 rows times N columns, 16
// of the summed dimension per instruction, f32 sums in registers. wgmma.cuh describes the operands. PTX ISA,
// "Asynchronous warpgroup-level matrix instructions".
#pragma once

#include <cstdint>
#include <type_traits>

#include <helix/dtype.hpp>

namespace helix::cuda {

#define HELIX_SUMS_16 "{%0,%1,%2,%3,%4,%5,%6,%7}"
#define HELIX_SUMS_32 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define HELIX_SUMS_64                                                                               \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
  "%26,%27,%28,%29,%30,%31}"
#define HELIX_SUMS_80                                                                                        \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%" \
  "28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39}"
#define HELIX_SUMS_96                                                                               \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25," \
  "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}"
#define HELIX_SUMS_112                                                                                       \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%" \
  "28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%" \
  "54,%55}"
#define HELIX_SUMS_128                                                                               \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"  \
  "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49," \
  "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
#define HELIX_SUMS_160                                                                                       \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%" \
  "28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%" \
  "54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79}"
#define HELIX_SUMS_192                                                                                       \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%" \
  "28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%" \
  "54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%" \
  "80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95}"
#define HELIX_SUMS_256                                                                               \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"  \
  "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49," \
  "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73," \
  "%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97," \
  "%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,"    \
  "%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}"
#define HELIX_SUM_8(d, i)                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define HELIX_SUM_32(d, i) \
  HELIX_SUM_8(d, i), HELIX_SUM_8(d, i + 8), HELIX_SUM_8(d, i + 16), HELIX_SUM_8(d, i + 24)
#define HELIX_OUT_16(d) HELIX_SUM_8(d, 0)
#define HELIX_OUT_32(d) HELIX_SUM_8(d, 0), HELIX_SUM_8(d, 8)
#define HELIX_OUT_64(d) HELIX_SUM_32(d, 0)
#define HELIX_OUT_80(d) HELIX_SUM_32(d, 0), HELIX_SUM_8(d, 32)
#define HELIX_OUT_96(d) HELIX_SUM_32(d, 0), HELIX_SUM_8(d, 32), HELIX_SUM_8(d, 40)
#define HELIX_OUT_112(d) HELIX_SUM_32(d, 0), HELIX_SUM_8(d, 32), HELIX_SUM_8(d, 40), HELIX_SUM_8(d, 48)
#define HELIX_OUT_128(d) HELIX_SUM_32(d, 0), HELIX_SUM_32(d, 32)
#define HELIX_OUT_160(d) HELIX_SUM_32(d, 0), HELIX_SUM_32(d, 32), HELIX_SUM_8(d, 64), HELIX_SUM_8(d, 72)
#define HELIX_OUT_192(d) HELIX_SUM_32(d, 0), HELIX_SUM_32(d, 32), HELIX_SUM_32(d, 64)
#define HELIX_OUT_256(d) HELIX_SUM_32(d, 0), HELIX_SUM_32(d, 32), HELIX_SUM_32(d, 64), HELIX_SUM_32(d, 96)

/// One instruction with both operands in shared memory. a_at, b_at and adds_at are operand numbers after the
/// sums.
#define HELIX_PRODUCT_SHARED(n, type, transposed, a_at, b_at, adds_at)                            \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" adds_at                                 \
               ", 0;\n"                                                                           \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " " HELIX_SUMS_##n \
               ", %" a_at ", %" b_at ", adds, 1, 1, 0, " transposed ";\n}\n"                      \
               : HELIX_OUT_##n(d)                                                                 \
               : "l"(a), "l"(b), "r"(adds))
/// One instruction with `a` in registers.
#define HELIX_PRODUCT_REGISTERS(n, type, transposed, a0_at, a1_at, a2_at, a3_at, b_at, adds_at)         \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" adds_at                                       \
               ", 0;\n"                                                                                 \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " " HELIX_SUMS_##n       \
               ", {%" a0_at ", %" a1_at ", %" a2_at ", %" a3_at "}, %" b_at ", adds, 1, 1, " transposed \
               ";\n}\n"                                                                                 \
               : HELIX_OUT_##n(d)                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds))

/// Selects the instruction for this type and orientation and passes it to `product`. The remaining arguments
/// are the numbers of the operands after the sums.
#define HELIX_PRODUCTS(product, n, ...)                                          \
  do {                                                                           \
    if constexpr (kIsBf16 && !kTransposed) product(n, "bf16", "0", __VA_ARGS__); \
    if constexpr (kIsBf16 && kTransposed) product(n, "bf16", "1", __VA_ARGS__);  \
    if constexpr (!kIsBf16 && !kTransposed) product(n, "f16", "0", __VA_ARGS__); \
    if constexpr (!kIsBf16 && kTransposed) product(n, "f16", "1", __VA_ARGS__);  \
  } while (false)

/// d = a b, or d += a b if `adds`: one instruction. `a` is a rows_operand(); `b` is one too, or a
/// columns_operand() if kTransposed. A thread's d[4 * j + 2 * h + i] is row 16 * warp + lane / 4 + 8 * h,
/// column 8 * j + lane % 4 * 2 + i.
template <class T, int kColumns, bool kTransposed>
__device__ __forceinline__ void product(float (&d)[kColumns / 2], std::uint64_t a, std::uint64_t b,
                                        int adds) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kIsBf16 = std::is_same_v<T, bf16>;
  static_assert(kIsBf16 || std::is_same_v<T, f16>);
  static_assert(kColumns == 64 || kColumns == 96 || kColumns == 128 || kColumns == 160 || kColumns == 192 ||
                kColumns == 256);
  if constexpr (kColumns == 64) HELIX_PRODUCTS(HELIX_PRODUCT_SHARED, 64, "32", "33", "34");
  if constexpr (kColumns == 96) HELIX_PRODUCTS(HELIX_PRODUCT_SHARED, 96, "48", "49", "50");
  if constexpr (kColumns == 128) HELIX_PRODUCTS(HELIX_PRODUCT_SHARED, 128, "64", "65", "66");
  if constexpr (kColumns == 160) HELIX_PRODUCTS(HELIX_PRODUCT_SHARED, 160, "80", "81", "82");
  if constexpr (kColumns == 192) HELIX_PRODUCTS(HELIX_PRODUCT_SHARED, 192, "96", "97", "98");
  if constexpr (kColumns == 256) HELIX_PRODUCTS(HELIX_PRODUCT_SHARED, 256, "128", "129", "130");
#endif
}

/// As above, with `a` in registers. For rows g and g + 8 (g = 16 * warp + lane / 4), a[0] and a[1] hold
/// columns lane % 4 * 2 and the next; a[2] and a[3] hold the columns 8 further.
template <class T, int kColumns, bool kTransposed>
__device__ __forceinline__ void product(float (&d)[kColumns / 2], const unsigned (&a)[4], std::uint64_t b,
                                        int adds) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kIsBf16 = std::is_same_v<T, bf16>;
  static_assert(kIsBf16 || std::is_same_v<T, f16>);
  static_assert(kColumns == 16 || kColumns == 32 || kColumns == 64 || kColumns == 80 || kColumns == 96 ||
                kColumns == 112 || kColumns == 128 || kColumns == 256);
  if constexpr (kColumns == 16) HELIX_PRODUCTS(HELIX_PRODUCT_REGISTERS, 16, "8", "9", "10", "11", "12", "13");
  if constexpr (kColumns == 32)
    HELIX_PRODUCTS(HELIX_PRODUCT_REGISTERS, 32, "16", "17", "18", "19", "20", "21");
  if constexpr (kColumns == 64)
    HELIX_PRODUCTS(HELIX_PRODUCT_REGISTERS, 64, "32", "33", "34", "35", "36", "37");
  if constexpr (kColumns == 80)
    HELIX_PRODUCTS(HELIX_PRODUCT_REGISTERS, 80, "40", "41", "42", "43", "44", "45");
  if constexpr (kColumns == 96)
    HELIX_PRODUCTS(HELIX_PRODUCT_REGISTERS, 96, "48", "49", "50", "51", "52", "53");
  if constexpr (kColumns == 112)
    HELIX_PRODUCTS(HELIX_PRODUCT_REGISTERS, 112, "56", "57", "58", "59", "60", "61");
  if constexpr (kColumns == 128)
    HELIX_PRODUCTS(HELIX_PRODUCT_REGISTERS, 128, "64", "65", "66", "67", "68", "69");
  if constexpr (kColumns == 256)
    HELIX_PRODUCTS(HELIX_PRODUCT_REGISTERS, 256, "128", "129", "130", "131", "132", "133");
#endif
}

#undef HELIX_PRODUCTS
#undef HELIX_PRODUCT_REGISTERS
#undef HELIX_PRODUCT_SHARED
#undef HELIX_OUT_256
#undef HELIX_OUT_192
#undef HELIX_OUT_160
#undef HELIX_OUT_128
#undef HELIX_OUT_112
#undef HELIX_OUT_96
#undef HELIX_OUT_80
#undef HELIX_OUT_64
#undef HELIX_OUT_32
#undef HELIX_OUT_16
#undef HELIX_SUM_32
#undef HELIX_SUM_8
#undef HELIX_SUMS_256
#undef HELIX_SUMS_192
#undef HELIX_SUMS_160
#undef HELIX_SUMS_128
#undef HELIX_SUMS_112
#undef HELIX_SUMS_96
#undef HELIX_SUMS_80
#undef HELIX_SUMS_64
#undef HELIX_SUMS_32
#undef HELIX_SUMS_16

}  // namespace helix::cuda
