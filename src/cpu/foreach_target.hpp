// SPDX-License-Identifier: Apache-2.0
// <hwy/foreach_target.h> for the instruction sets that kernels are compiled for. Include this in its place,
// after HWY_TARGET_INCLUDE and before other headers of Highway.
#pragma once

#ifdef HWY_DISABLED_TARGETS
#error "Highway has chosen the instruction sets already: include cpu/foreach_target.hpp before its headers"
#endif

// Each instruction set takes seconds to compile, or a minute under sanitizers, so machines from before 2013,
// without AVX2, use the portable code. SVE vectors have no size at compile time, so arrays cannot hold them;
// 64-bit Arm uses NEON, which all such machines have.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)

#include <hwy/foreach_target.h>
