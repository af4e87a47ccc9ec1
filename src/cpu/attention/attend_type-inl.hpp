// SPDX-License-Identifier: Apache-2.0
// attend() for one type of KV. A file for each type defines HELIX_KV_TYPE, HELIX_ATTEND (attend_types.hpp)
// and HWY_TARGET_INCLUDE, itself, and includes this: all types in one file took a minute to compile. Included
// once a Highway target, hence without a guard.
#include "cpu/foreach_target.hpp"
// These must come after foreach_target.hpp.
#include <cstdint>

#include <hwy/highway.h>

#include "cpu/attention/attend-inl.hpp"
#include "cpu/attention/attend_types.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {
namespace {

void attend_target(const AttentionTask* tasks, int num_tasks, float* scratch) {
  attend_as<HELIX_KV_TYPE>(tasks, num_tasks, scratch);
}

#if HWY_TARGETS & HWY_AVX2
/// Whether the rows of a task are read where they lie, or multiplied by tiles, rather than packed.
bool avoids_packing(const AttentionTask& task) {
  const std::int64_t rows = task.num_tokens * task.group;
  return has_tiles<HELIX_KV_TYPE>(rows) || is_direct(task, rows);
}

/// Whether this target, of a machine that has AVX2 too, would pack the rows of a task.
bool may_leave_to_avx2(const AttentionTask& task) {
  return HWY_TARGET < HWY_AVX2 && !avoids_packing(task);
}
#endif

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace helix::cpu {

HWY_EXPORT(attend_target);
#if HWY_TARGETS & HWY_AVX2
HWY_EXPORT(may_leave_to_avx2);
#endif

void HELIX_ATTEND(const AttentionTask* tasks, int num_tasks, float* scratch) {
#if HWY_TARGETS & HWY_AVX2
  // Head sizes such as 80 and 112 are whole pairs of vectors of 256 bits, but not of 512. This does not ask
  // hwy::SupportedTargets(), which executes CPUID: in a virtual machine that takes longer than a small task.
  if (HWY_DYNAMIC_DISPATCH(may_leave_to_avx2)(tasks[0]) && N_AVX2::avoids_packing(tasks[0])) {
    return N_AVX2::attend_target(tasks, num_tasks, scratch);
  }
#endif
  HWY_DYNAMIC_DISPATCH(attend_target)(tasks, num_tasks, scratch);
}

}  // namespace helix::cpu
#endif
