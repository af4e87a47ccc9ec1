// SPDX-License-Identifier: Apache-2.0
// The smallest program over an installed helix: a topology, and who stores which tokens.
#include <iostream>

#include <helix/kv_layout.hpp>
#include <helix/topology.hpp>

int main() {
  const helix::ModelShape shape{.num_query_heads = 8,
                                .num_kv_heads = 2,
                                .head_dim = 64,
                                .value_dim = 64,
                                .hidden = 256,
                                .ffn = 512,
                                .vocab = 512,
                                .num_layers = 2};
  const helix::Topology topo({.kvp = 2, .tpa = 2}, shape);
  std::cout << topo;
  const helix::KvLayout layout(topo.kvp(), /*chunk=*/16);
  for (int r = 0; r < topo.kvp(); ++r)
    std::cout << "KVP rank " << r << " stores " << layout.length(1000, r) << " of 1000 tokens\n";
}
