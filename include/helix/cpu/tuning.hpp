// SPDX-License-Identifier: Apache-2.0
// Which of several equal ways the CPU's kernels work in, found by timing them on the work itself.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <helix/export.hpp>

namespace helix::cpu {

/// What is known of one kernel that works in several ways. All of them give the same bits.
struct KernelTuning {
  enum class Source {
    preset,    ///< Nothing was large enough to be timed, or not often enough yet.
    measured,  ///< The fastest of all, each timed several times by this process.
    fixed      ///< As fix_tuning() said.
  };
  std::string kernel;   ///< Name of the kernel, such as "linear.bf16.rows1".
  std::string variant;  ///< The way that it works in.
  Source source = Source::preset;
};

/// Every kernel of this program that works in several ways, in the order of their names: of a static library
/// those that the program links.
HELIX_API std::vector<KernelTuning> tuning();

/// Has kernels work in the ways that `text` names from now on: "kernel=variant", several separated by commas.
/// A `kernel` may end in '*' and then stands for all that begin so. `auto` for a variant takes back what was
/// fixed before: the next calls are timed.
/// @throws Error(invalid_argument) naming the kernels (as tuning() has them) or variants that there are, and
/// then changes nothing.
HELIX_API void fix_tuning(std::string_view text);

}  // namespace helix::cpu
