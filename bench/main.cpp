// SPDX-License-Identifier: Apache-2.0
// helix-bench: Google Benchmark over the primitives, next to the ceilings of the machine, in one binary; or
// over the caller's cases of attention.
#include <iostream>
#include <vector>

#include <benchmark/benchmark.h>

#include <helix/error.hpp>

#include "attention_case.hpp"
#include "partial_attention_bench.hpp"

int main(int argc, char** argv) {
  std::vector<helix::bench::AttentionCase> cases;
  try {
    cases = helix::bench::take_cases(argc, argv);
    if (!cases.empty()) {
      benchmark::ClearRegisteredBenchmarks();
      helix::bench::register_attention(cases);
    }
  } catch (const helix::Error& error) {
    std::cerr << "helix-bench: --case: " << error.what() << '\n';
    return 1;
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
