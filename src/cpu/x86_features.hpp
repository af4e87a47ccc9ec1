// SPDX-License-Identifier: Apache-2.0
// Detects the CPU, and whether kernels for optional x86 instructions can be used.
#pragma once

#if defined(__x86_64__) && defined(__linux__)

#include <cstdlib>
#include <cstring>

#include <cpuid.h>

namespace helix::cpu {

/// Whether the environment variable `variable` is "0".
inline bool is_switched_off(const char* variable) noexcept {
  const char* setting = std::getenv(variable);
  return setting != nullptr && std::strcmp(setting, "0") == 0;
}

/// Registers of a CPUID leaf; zeros if the leaf does not exist.
struct CpuId {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;

  CpuId(unsigned leaf, unsigned subleaf) noexcept {
    if (__get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx) == 0) eax = ebx = ecx = edx = 0;
  }
};

/// Family of an AMD CPU (0x19: Zen 3 and 4, 0x1a: Zen 5); 0 for others.
inline unsigned amd_family() noexcept {
  const CpuId vendor(0, 0);
  if (vendor.ebx != signature_AMD_ebx || vendor.ecx != signature_AMD_ecx || vendor.edx != signature_AMD_edx)
    return 0;
  const unsigned model = CpuId(1, 0).eax;
  const unsigned family = model >> 8 & 0xf;
  return family == 0xf ? family + (model >> 20 & 0xff) : family;
}

/// Whether the CPU and the system support AVX-512 with its byte, word and vector-length extensions.
inline bool has_avx512() noexcept {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

}  // namespace helix::cpu

#endif
