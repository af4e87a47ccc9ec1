// SPDX-License-Identifier: Apache-2.0
// The instruction sets for which kernels are not compiled. Include this before <hwy/foreach_target.h>.
#pragma once

// Each instruction set takes seconds to compile, or a minute under sanitizers, so machines from before 2013,
// without AVX2, use the portable code. SVE vectors have no size at compile time, so arrays cannot hold them;
// 64-bit Arm uses NEON, which all such machines have.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
