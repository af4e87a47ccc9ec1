// SPDX-License-Identifier: Apache-2.0
// The instruction sets that kernels are not compiled for. To be included before <hwy/foreach_target.h>.
#pragma once

// Each instruction set takes seconds to compile, a minute under sanitizers: machines before 2013, which lack
// AVX2, take the portable code. Vectors of SVE have no size at compile time, so the kernels' arrays of
// vectors cannot hold them; 64-bit Arm takes NEON, which all of it has.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
