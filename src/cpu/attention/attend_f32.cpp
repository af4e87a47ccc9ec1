// SPDX-License-Identifier: Apache-2.0
// attend() over KV of f32, and of fp8_ds_mla, whose rows are widened to f32 where they are joined.
#define HELIX_KV_TYPE float
#define HELIX_ATTEND attend_f32

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention/attend_f32.cpp"
#include "cpu/attention/attend_type-inl.hpp"
