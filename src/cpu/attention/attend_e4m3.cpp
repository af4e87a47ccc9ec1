// SPDX-License-Identifier: Apache-2.0
// attend() over KV of e4m3.
#define HELIX_KV_TYPE fp8_e4m3
#define HELIX_ATTEND attend_e4m3

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention/attend_e4m3.cpp"
#include "cpu/attention/attend_type-inl.hpp"
