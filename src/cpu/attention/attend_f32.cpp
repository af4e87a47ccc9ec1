// SPDX-License-Identifier: Apache-2.0
// attend() over KV of f32, and of fp8_ds_mla, whose rows are widened to f32 where they are joined. Each type
// has a file of its own, for they take the longest of all to compile.

#include "cpu/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention/attend_f32.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.
#include "cpu/attention/attend-inl.hpp"
#include "cpu/attention/attend_types.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {
namespace {

void attend_target(const AttentionTask* tasks, int num_tasks, float* scratch) {
  attend_as<float>(tasks, num_tasks, scratch);
}

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace helix::cpu {

HWY_EXPORT(attend_target);

void attend_f32(const AttentionTask* tasks, int num_tasks, float* scratch) {
  HWY_DYNAMIC_DISPATCH(attend_target)(tasks, num_tasks, scratch);
}

}  // namespace helix::cpu
#endif
