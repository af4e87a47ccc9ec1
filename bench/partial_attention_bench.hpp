// SPDX-License-Identifier: Apache-2.0
// The benchmark of partial_attention on the CPU over cases of the caller's.
#pragma once

#include <vector>

#include "attention_case.hpp"

namespace helix::bench {

/// Registers the cases, each with one thread and with one a core.
/// @throws Error(invalid_argument) if a case is for GPUs.
void register_attention(const std::vector<AttentionCase>& cases);

}  // namespace helix::bench
