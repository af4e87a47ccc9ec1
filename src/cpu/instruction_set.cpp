// SPDX-License-Identifier: Apache-2.0
// instruction_set(): the name of what the SIMD kernels chose at run time.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/instruction_set.cpp"
#include "cpu/foreach_target.hpp"
// These must come after foreach_target.hpp.
#include <string>

#include <hwy/highway.h>

#include <helix/cpu/backend.hpp>

#include "cpu/amx.hpp"
#include "cpu/linear/task.hpp"

HWY_BEFORE_NAMESPACE();
namespace helix::cpu::HWY_NAMESPACE {
namespace {

const char* name_of_target() {
  return hwy::TargetName(HWY_TARGET);
}

}  // namespace
}  // namespace helix::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace helix::cpu {

HWY_EXPORT(name_of_target);

std::string instruction_set() {
  std::string name = HWY_DYNAMIC_DISPATCH(name_of_target)();
  if (linear::has_bf16_dots()) name += " with bf16 dots";
  if (amx::available()) name += " with AMX";
  return name;
}

}  // namespace helix::cpu
#endif
