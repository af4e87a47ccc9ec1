#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests and measures helix::cuda on the GPUs of this machine.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bench/run_gpu.sh [BUILD [OPTION ...]]
Runs the tests labelled gpu, then helix-bench-cuda with OPTION ... (such as --benchmark_filter=linear), and writes
bench/results/DEVICE-DATE-COMMIT.json (DEVICE-x4 with four GPUs). For 1, 2 or 4 GPUs; cases that need more GPUs are left out. If a test
fails, the benchmarks run all the same, but the script fails.
BUILD is a build folder of this checkout with HELIX_CUDA=ON, build/cuda unless given, and is brought up to date. A folder that was built
elsewhere is used as it is; its results are of commit "unknown".
HELIX_RESULTS names another folder for the results. HELIX_SKIP_TESTS=1 runs only the benchmarks.
TEXT
}

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
  usage
  exit 0
fi

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
build="$(realpath -m "${1:-$root/build/cuda}")"
shift $(($# > 0 ? 1 : 0))
results="${HELIX_RESULTS:-$root/bench/results}"
# A process that dies while it holds NVLink multicast objects can leave the host's GPUs unusable.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"

if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; then
  echo "bench/run_gpu.sh: no GPU: nvidia-smi finds none" >&2
  exit 1
fi
device="$(nvidia-smi --id=0 --query-gpu=name --format=csv,noheader)"
driver="$(nvidia-smi --id=0 --query-gpu=driver_version --format=csv,noheader)"
num_gpus="$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)"

# A folder that was built elsewhere, such as on a machine with a compiler: nothing tells what it was built from.
is_of_this_checkout() {
  grep -qsF "CMAKE_HOME_DIRECTORY:INTERNAL=$root" "$build/CMakeCache.txt" &&
    grep -qsF "CMAKE_CACHEFILE_DIR:INTERNAL=$build" "$build/CMakeCache.txt"
}

commit=unknown
if [[ ! -x "$build/bench/helix-bench-cuda" && ! -f "$build/CMakeCache.txt" ]]; then
  cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DHELIX_CUDA=ON -DHELIX_MPI=OFF
fi
if is_of_this_checkout; then
  cmake --build "$build"
  commit="$(git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)"
  [[ -z "$(git -C "$root" status --porcelain --untracked-files=no 2>/dev/null)" ]] || commit+=-changed
fi
if [[ ! -x "$build/bench/helix-bench-cuda" ]]; then
  echo "bench/run_gpu.sh: $build has no bench/helix-bench-cuda; give a build folder of this checkout with HELIX_CUDA=ON and HELIX_BENCH=ON" >&2
  exit 1
fi
shopt -s nullglob
tests=("$build"/tests/cuda/cuda_*_test)

# CTest stores absolute paths of the tests, so it does not work in a folder that was built elsewhere.
run_tests() {
  if command -v ctest >/dev/null && is_of_this_checkout; then
    ctest --test-dir "$build" -L gpu --output-on-failure --no-tests=error
    return
  fi
  local failed=0
  for test in "${tests[@]}"; do
    echo "== $(basename "$test")"
    (cd "$build/tests/cuda" && "$test") || [[ $? -eq 77 ]] || failed=1  # 77: everything that could run has passed
  done
  return "$failed"
}

status=0
if [[ -z "${HELIX_SKIP_TESTS:-}" ]]; then
  run_tests || status=1
fi

mkdir -p "$results"
name="${device// /-}"
[[ "$num_gpus" -eq 1 ]] || name+="-x$num_gpus"
json="$results/$name-$(date -u +%Y-%m-%d)-$commit.json"
"$build/bench/helix-bench-cuda" "--benchmark_out=$json" --benchmark_out_format=json \
  "--benchmark_context=device=$device,driver=$driver,commit=$commit" "$@" || status=1

echo
python3 "$root/bench/plot.py" --table "$json" || status=1
echo "wrote $json"
[[ "$status" -eq 0 ]] || echo "bench/run_gpu.sh: some tests or benchmarks failed" >&2
exit "$status"
