// SPDX-License-Identifier: Apache-2.0
// attend() over KV of bf16.
#define HELIX_KV_TYPE bf16
#define HELIX_ATTEND attend_bf16

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention/attend_bf16.cpp"
#include "cpu/attention/attend_type-inl.hpp"
