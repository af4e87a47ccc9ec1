// SPDX-License-Identifier: Apache-2.0
// attend() over KV of f16.
#define HELIX_KV_TYPE f16
#define HELIX_ATTEND attend_f16

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention/attend_f16.cpp"
#include "cpu/attention/attend_type-inl.hpp"
