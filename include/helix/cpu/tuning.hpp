// SPDX-License-Identifier: Apache-2.0
// Which of several equivalent variants the CPU's kernels use, found by timing them on the work itself.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <helix/export.hpp>

namespace helix::cpu {

/// The variant of one kernel that has several. All of its variants give the same bits.
struct KernelTuning {
  enum class Source {
    preset,    ///< Not timed yet: no call was large enough, or too few were.
    measured,  ///< The fastest variant; this process has timed each several times.
    fixed      ///< The variant that fix_tuning() named.
  };
  std::string kernel;   ///< Name of the kernel, such as "linear.bf16.rows1".
  std::string variant;  ///< Name of the variant in use.
  Source source = Source::preset;
};

/// Every kernel of this program that has several variants, by name. With a static library these are the
/// kernels that the program links.
HELIX_API std::vector<KernelTuning> tuning();

/// Makes kernels use the variants that `text` names from now on: "kernel=variant", several separated by
/// commas. A `kernel` may end in '*' and then stands for all names that begin so. The variant `auto` takes
/// back what was fixed before: the next calls are timed.
/// @throws Error(invalid_argument) with the kernels (as tuning() has them) or variants that exist; nothing is
/// changed then.
HELIX_API void fix_tuning(std::string_view text);

}  // namespace helix::cpu
