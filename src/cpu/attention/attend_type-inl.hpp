// SPDX-License-Identifier: Apache-2.0
// attend() for one type of KV. A file for each type defines HELIX_KV_TYPE, HELIX_ATTEND (attend_types.hpp)
// and HWY_TARGET_INCLUDE, itself, and includes this: all types in one file took a minute to compile. Included
// once a Highway target, hence without a guard.
#include "cpu/foreach_target.hpp"
// These must come after foreach_target.hpp.
#include <cstdint>
#include <type_traits>

#include <hwy/highway.h>

#include "cpu/amx.hpp"
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

#if HWY_TARGETS & HWY_AVX2
namespace {

/// Whether vectors of 256 bits read rows where they lie that those of 512 bits would pack: head sizes such as
/// 80 and 112, of whole pairs of the former alone. Tile registers pad them too, at less cost.
bool prefers_256_bits(const AttentionTask& task) {
  constexpr std::int64_t kPair256 = 16;  // floats
  constexpr std::int64_t kPair512 = 32;
  const std::int64_t rows = task.num_tokens * task.group;
  const auto are_multiples = [&](std::int64_t pair) {
    return task.head_dim % pair == 0 && task.value_dim % pair == 0;
  };
  if (std::is_same_v<HELIX_KV_TYPE, bf16> && rows > amx::kHalfRows && amx::available()) return false;
  return !are_multiples(kPair512) && are_multiples(kPair256) && rows <= kDirectRows &&
         task.has_constant_distance() && (hwy::SupportedTargets() & HWY_AVX2) != 0;
}

}  // namespace
#endif

void HELIX_ATTEND(const AttentionTask* tasks, int num_tasks, float* scratch) {
#if HWY_TARGETS & HWY_AVX2
  if (prefers_256_bits(tasks[0])) return N_AVX2::attend_target(tasks, num_tasks, scratch);
#endif
  HWY_DYNAMIC_DISPATCH(attend_target)(tasks, num_tasks, scratch);
}

}  // namespace helix::cpu
#endif
