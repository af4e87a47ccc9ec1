#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up, builds and runs Helix on Debian (12 or later) or Ubuntu (24.04 or later), from any directory.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: ./run.sh                     complete prompts with both bundled models, on one rank and on several, and compare
       ./run.sh chat --model DIR [TEXT]
                                    text in and text out, one answer or a conversation; more options: ./run.sh chat --help
       ./run.sh decode ARGUMENTS    helix-decode; ARGUMENTS as in ./run.sh decode --help, paths relative to where you are;
                                    on GPUs where the CUDA backend is built (see below) and sees some, else on the CPU
       ./run.sh plan [ARGUMENTS]    helix-plan: layouts, memory and step times before there are GPUs; ARGUMENTS as in
                                    ./run.sh plan --help; without any, Llama-3.1-405B at 1M tokens on a GB200 rack
       ./run.sh bench [FILTER] [ARGUMENTS]
                                    helix-bench; FILTER is a regular expression on benchmark names, ARGUMENTS are
                                    Google Benchmark's or --case=NAME: attention over a shape of your own
Missing packages are installed first (apt-get; sudo only where needed); text takes two more from PyPI, into build/chat.
CUDA is not installed. Its kernels, which take minutes to compile, are built if a GPU is visible and nvcc and NCCL are
found, or as HELIX_CUDA=ON, OFF or AUTO in the environment says. CXX, CXXFLAGS, CUDACXX, CUDAARCHS and CMAKE_PREFIX_PATH
are honoured.
TEXT
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
build="$root/build/release"
chat="$root/build/chat"

# Whether a GPU can be used: nvidia-smi lists one or, in a container without nvidia-smi, its device file
# exists.
gpu_is_visible() {
  [[ -e /dev/nvidia0 ]] || nvidia-smi -L 2>/dev/null | grep -q '^GPU'
}

# The value of HELIX_CUDA in the last configuration of $build; empty if there was none.
configured_cuda() {
  sed -n 's/^HELIX_CUDA:[A-Z]*=//p' "$build/CMakeCache.txt" 2>/dev/null || true
}

# Chooses what to build: what the environment says, or else what the machine has now. Without a GPU it keeps
# the last choice, because test.sh may have compiled the kernels already.
choose_cuda() {
  local last
  last="$(configured_cuda)"
  if [[ -n "${HELIX_CUDA:-}" ]]; then
    echo "${HELIX_CUDA^^}"  # CMake takes either case
  elif gpu_is_visible; then
    echo AUTO
  else
    echo "${last:-OFF}"
  fi
}

# Whether the last configuration looked for nvcc and found none, and there is one now.
has_new_nvcc() {
  [[ "$(configured_cuda)" == AUTO ]] && ! grep -q '^CMAKE_CUDA_COMPILER:[A-Z]*=/' "$build/CMakeCache.txt" \
    && command -v nvcc >/dev/null
}

# Builds target $1 and its dependencies. Configures only if that was never done, the presets have changed,
# another CUDA setting is asked for, or nvcc has come; ninja sees all other changes.
build_target() {
  local cuda
  cuda="$(choose_cuda)"
  "$root/cmake/forget_other_tools.sh" "$build"
  if [[ ! -f "$build/build.ninja" || "$root/CMakePresets.json" -nt "$build/build.ninja" || "$cuda" != "$(configured_cuda)" ]] || has_new_nvcc; then
    local options=("-DHELIX_CUDA=$cuda")
    if command -v ccache >/dev/null; then
      options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
      # An environment variable and not an option, because CMake would report an option as unused on a machine
      # without CUDA.
      export CMAKE_CUDA_COMPILER_LAUNCHER="${CMAKE_CUDA_COMPILER_LAUNCHER:-ccache}"
    fi
    cmake -S "$root" --preset cpu "${options[@]}" >&2
  fi
  # Standard output belongs to the program that is being built.
  cmake --build "$build" --target "$1" >&2
}

# Runs helix-decode with "$@" and shows the command first.
decode() {
  printf '\n$ ./run.sh decode'
  printf ' %s' "$@"
  printf '\n'
  "$build/examples/decode/helix-decode" "$@"
}

# Builds helix-decode and, beside it, sets up Python for text: `text` is then yes or no.
build_with_text() {
  "$root/cmake/install_packages.sh" --chat
  "$root/examples/chat/set_up.sh" "$chat" &
  set_up=$!
  trap 'kill "$set_up" 2>/dev/null || true' EXIT  # it does not hear Ctrl-C, being in the background
  build_target helix-decode
  text=yes
  wait "$set_up" || text=no
  trap - EXIT
}

demonstrate() {
  build_with_text
  if [[ $text == yes ]]; then
    "$chat/bin/python" "$root/examples/chat/demonstrate.py" "$build/examples/decode/helix-decode" "$root/tests/data"
  else
    echo "going on with token ids instead of text" >&2
    demonstrate_ids
  fi
}

# The part of the demonstration that needs no Python.
demonstrate_ids() {
  local llama="$root/tests/data/llama-tiny" deepseek="$root/tests/data/deepseek-tiny"
  local llama_prompt="383,198,141,403,308,327,382,134,244,223,197,162,480,442,95,62,497,125,404,283"
  local deepseek_prompt="168,404,243,335,71,53,72,284,131,281,172,393,177,131,362,117,19,115,29,272"
  local tokens=(--max-new-tokens 16 --activation f32 --kv-dtype f32)
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

# Reports in one line that $1 is not a command, and which one was meant: each command begins with another
# letter.
refuse() {
  local meant="give chat, decode, plan or bench."
  case "$1" in
    -*) meant="did you mean decode $1?" ;;
    [cC]*) meant="did you mean chat?" ;;
    [dD]*) meant="did you mean decode?" ;;
    [pP]*) meant="did you mean plan?" ;;
    [bB]*) meant="did you mean bench?" ;;
  esac
  echo "run.sh: '$1' is no command; $meant See ./run.sh --help" >&2
  exit 2
}

case "${1:-}" in
  "")
    demonstrate
    ;;
  chat)
    shift
    build_with_text
    [[ $text == yes ]] || exit 1
    exec "$chat/bin/python" "$root/examples/chat/chat.py" --decoder "$build/examples/decode/helix-decode" "$@"
    ;;
  decode)
    shift
    "$root/cmake/install_packages.sh"
    build_target helix-decode
    exec "$build/examples/decode/helix-decode" "$@"
    ;;
  plan)
    shift
    "$root/cmake/install_packages.sh"
    build_target helix-plan
    if [[ $# -eq 0 ]]; then
      demonstrate_planner
    else
      exec "$build/examples/plan/helix-plan" "$@"
    fi
    ;;
  bench)
    shift
    "$root/cmake/install_packages.sh"
    build_target helix-bench
    filter=.
    if [[ $# -gt 0 && "$1" != --* ]]; then
      filter="$1"
      shift
    fi
    exec "$build/bench/helix-bench" "--benchmark_filter=$filter" "$@"
    ;;
  -h | --help)
    usage
    ;;
  *)
    refuse "$1"
    ;;
esac
