// SPDX-License-Identifier: Apache-2.0
// The benchmarks that main registers once it knows how many GPUs there are.
#pragma once

#include <vector>

#include "attention_case.hpp"

namespace helix::bench {

/// Attention over cases of the caller's.
void register_attention(const std::vector<AttentionCase>& cases);
/// Attention over the cases of this program.
void register_attention();
void register_operators();
void register_experts();
void register_exchanges(int num_gpus);
void register_peers(int num_gpus);
void register_decode_layers(int num_gpus);
void register_attention_scaling(int num_gpus);

}  // namespace helix::bench
