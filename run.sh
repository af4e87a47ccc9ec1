#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up, builds and runs Helix on a Debian or Ubuntu machine, from any directory.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: ./run.sh                     decode with both bundled checkpoints, on one rank and on several, and compare
       ./run.sh decode ARGUMENTS    helix-decode; ARGUMENTS as in ./run.sh decode --help, paths relative to where you are;
                                    --device cuda decodes on GPUs, if there was a CUDA compiler to build with
       ./run.sh plan [ARGUMENTS]    helix-plan: layouts, memory and step times before there are GPUs; ARGUMENTS as in
                                    ./run.sh plan --help; without any, Llama-3.1-405B at 1M tokens on a GB200 rack
       ./run.sh bench [FILTER ...]  helix-bench; FILTER is a regular expression on benchmark names
Missing packages are installed first (apt-get; sudo only where needed). CUDA is not installed, but used where nvcc and
NCCL are found. CXX, CXXFLAGS, CUDACXX and CMAKE_PREFIX_PATH are honoured.
TEXT
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
build="$root/build/release"

# Builds target $1 and what it needs. Configures only if that was never done or the presets changed: the rest ninja sees.
build_target() {
  "$root/cmake/install_packages.sh"
  if [[ ! -f "$build/build.ninja" || "$root/CMakePresets.json" -nt "$build/build.ninja" ]]; then
    local launcher=()
    if command -v ccache >/dev/null; then
      launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
      # Not an option, which CMake would call unused on a machine without CUDA.
      export CMAKE_CUDA_COMPILER_LAUNCHER="${CMAKE_CUDA_COMPILER_LAUNCHER:-ccache}"
    fi
    cmake -S "$root" --preset cpu "${launcher[@]}" >&2
  fi
  # Standard output belongs to the program that is built here.
  cmake --build "$build" --target "$1" >&2
}

# Runs helix-decode with "$@", the command shown first.
decode() {
  printf '\n$ ./run.sh decode'
  printf ' %s' "$@"
  printf '\n'
  "$build/examples/decode/helix-decode" "$@"
}

demonstrate() {
  local llama="$root/tests/data/llama-tiny" deepseek="$root/tests/data/deepseek-tiny"
  local llama_prompt="383,198,141,403,308,327,382,134,244,223,197,162,480,442,95,62,497,125,404,283"
  local deepseek_prompt="168,404,243,335,71,53,72,284,131,281,172,393,177,131,362,117,19,115,29,272"
  local tokens=(--max-new-tokens 16)
  decode --model "$llama" --prompt-ids "$llama_prompt" "${tokens[@]}"
  decode --model "$llama" --prompt-ids "$llama_prompt" "${tokens[@]}" --kvp 2 --tpa 2 --verify
  decode --model "$deepseek" --prompt-ids "$deepseek_prompt" "${tokens[@]}"
  decode --model "$deepseek" --prompt-ids "$deepseek_prompt" "${tokens[@]}" --kvp 4 --verify
}

demonstrate_planner() {
  local question=(--model llama-3.1-405b --hardware gb200 --gpus 64 --context 1000000 --weight-dtype fp4 --kv-dtype fp4
                  --ttl-ms 3)
  printf '$ ./run.sh plan'
  printf ' %s' "${question[@]}"
  printf '\n'
  "$build/examples/plan/helix-plan" "${question[@]}"
}

case "${1:-}" in
  "")
    build_target helix-decode
    demonstrate
    ;;
  decode)
    shift
    build_target helix-decode
    exec "$build/examples/decode/helix-decode" "$@"
    ;;
  plan)
    shift
    build_target helix-plan
    if [[ $# -eq 0 ]]; then
      demonstrate_planner
    else
      exec "$build/examples/plan/helix-plan" "$@"
    fi
    ;;
  bench)
    shift
    build_target helix-bench
    filter="${1:-.}"
    exec "$build/bench/helix-bench" "--benchmark_filter=$filter" "${@:2}"
    ;;
  -h | --help)
    usage
    ;;
  *)
    usage >&2
    exit 2
    ;;
esac
