// SPDX-License-Identifier: Apache-2.0
// helix-bench: Google Benchmark over the primitives, next to the ceilings of the machine, in one binary.
#include <benchmark/benchmark.h>

BENCHMARK_MAIN();
