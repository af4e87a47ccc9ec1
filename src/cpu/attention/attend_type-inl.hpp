// SPDX-License-Identifier: Apache-2.0
// attend() for one type of KV. A file for each type defines HELIX_KV_TYPE, HELIX_ATTEND (attend_types.hpp)
// and HWY_TARGET_INCLUDE, itself, and includes this: all types in one file took a minute to compile. Included
// once a Highway target, hence without a guard.
#include "cpu/foreach_target.hpp"
// These must come after foreach_target.hpp.
#include "cpu/attention/attend-inl.hpp"
#include "cpu/attention/attend_types.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {
namespace {

void attend_target(const AttentionTask* tasks, int num_tasks, float* scratch) {
  attend_as<HELIX_KV_TYPE>(tasks, num_tasks, scratch);
}

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace helix::cpu {

HWY_EXPORT(attend_target);

void HELIX_ATTEND(const AttentionTask* tasks, int num_tasks, float* scratch) {
  HWY_DYNAMIC_DISPATCH(attend_target)(tasks, num_tasks, scratch);
}

}  // namespace helix::cpu
#endif
