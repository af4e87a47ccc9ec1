// SPDX-License-Identifier: Apache-2.0
// The benchmarks that main registers once it knows how many GPUs there are.
#pragma once

namespace helix::bench {

void register_operators();
void register_experts();
void register_exchanges(int num_gpus);
void register_peers(int num_gpus);
void register_decode_layers(int num_gpus);
void register_attention_scaling(int num_gpus);

}  // namespace helix::bench
