#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the fuzz targets with clang and runs each on seeds from tests/data and bench/results:
# tests/fuzz/run.sh [SECONDS [TARGET...]]. The defaults are 600 seconds and all targets; one target runs per
# core. After a finding no further target starts, and the input is printed and kept in build/fuzz/corpus.
# Every run uses new inputs unless HELIX_FUZZ_SEED gives a seed.
set -euo pipefail

seconds="${1:-600}"
if [[ ! "$seconds" =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: tests/fuzz/run.sh [SECONDS [TARGET...]]; SECONDS is '$seconds'" >&2
  exit 2
fi
targets=(safetensors model_config generation_config weight_map token_lists request commands hardware bench_results rendezvous)
if [[ $# -gt 1 ]]; then targets=("${@:2}"); fi
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
build="$root/build/fuzz"
launcher=()
if command -v ccache >/dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
cmake -S "$root" -B "$build" --preset fuzz -DHELIX_CUDA=OFF -DHELIX_MPI=OFF "${launcher[@]}"
cmake --build "$build" --target "${targets[@]/%/_fuzz}"
python3 "$root/tests/fuzz/make_seeds.py" "$build/corpus"
cd "$build/corpus"
rm -f -- *-{crash,oom,timeout,leak}-*

# Runs one target; exit code 255 makes xargs start no further target.
fuzz() {
  local target="$1" input
  "$build/tests/fuzz/${target}_fuzz" -max_total_time="$seconds" -dict="$root/tests/fuzz/dictionary.txt" -print_final_stats=1 \
    -seed="${HELIX_FUZZ_SEED:-0}" -artifact_prefix="$target-" "$target" 2>"$target.log" || {
    tail -n 40 "$target.log" >&2
    for input in "$target"-{crash,oom,timeout,leak}-*; do
      if [[ -f "$input" ]]; then echo "$input:" >&2 && base64 "$input" >&2; fi
    done
    exit 255
  }
  echo "$target: $(sed -n 's/^stat::number_of_executed_units: //p' "$target.log") runs without a finding"
}
export -f fuzz
export root build seconds
printf '%s\n' "${targets[@]}" | xargs -P "$(nproc)" -I{} bash -euo pipefail -c 'fuzz {}'
