#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up, builds everything and runs the tests on Debian (12 or later) or Ubuntu (24.04 or later), from any
# directory.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: ./test.sh [OPTION ...] [-- CTEST_ARGUMENTS]
  --full           also the tests labelled full, which take long
  --quick          only the tests labelled quick
  --sanitize NAME  asan (with ubsan), ubsan or tsan: the quick tests, built with that sanitizer
  --arm64          the quick tests that hold for 64-bit Arm, cross-compiled and emulated; ends with status 77 if there is
                   no cross compiler, emulator or arm64 package
  --no-mpi         as on a machine without MPI
  --no-cuda        as on a machine without CUDA
Missing packages are installed first (apt-get; sudo only where needed). CUDA is not installed, but used where nvcc and
NCCL are found, unless HELIX_CUDA=OFF is in the environment (ON: fail without them); tests that need more GPUs than there
are count as skipped. CXX, CXXFLAGS, CUDACXX, CUDAARCHS and CMAKE_PREFIX_PATH are honoured.
The last line counts the tests: "N passed, N failed, N skipped".
TEXT
}

refuse() {
  echo "test.sh: $1" >&2
  exit 2
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
preset=cpu
labels=(-LE '^full$')
target=all
parallel="$(nproc)"
full=false
without_mpi=false
without_cuda=false
while [[ $# -gt 0 ]]; do
  case "$1" in
    --full) full=true labels=() ;;
    --quick) labels=(-L '^quick$') target=quick_tests ;;
    --sanitize)
      case "${2:-}" in
        asan | ubsan | tsan) preset="$2" ;;
        *) refuse "--sanitize is '${2:-}'; give asan, ubsan or tsan" ;;
      esac
      labels=(-L '^quick$') target=quick_tests
      shift
      ;;
    --arm64)
      # The quick tests of tests/CMakeLists.txt, without sweeps that take most of the time in an emulator;
      # each of these has a smaller version.
      preset=arm64 target=quick_tests
      slow='layout of every engine|same bits in every variant|splits long sequences|serves MLA rows|every way of reading weights'
      slow+='|^primitives_test:figure 3'  # It times an overlap, which an emulator on one core cannot show.
      slow+='|^decode_layer_test: ?(Batches|Uneven|A mixture|Duplicated|DeepSeek-V2|Window|Biases|Latent attention with biases)'
      slow+='|^decoder_test: ?(products|replayed|steps queued|a decode step|draws|drawn|the KV|synthetic|the exchange|windows)'
      slow+='|^kv_cache_test: ?(random|ledgers)|^backend_contract_test: ?sample .* - (Recording|Threaded)'
      labels=(-L '^quick$' -E "$slow")
      parallel=$((2 * $(nproc)))  # each test runs on only one core
      ;;
    --no-mpi) without_mpi=true ;;
    --no-cuda) without_cuda=true ;;
    --) shift; break ;;
    -h | --help) usage; exit 0 ;;
    *) refuse "$1 is unknown; see ./test.sh --help" ;;
  esac
  shift
done
if $full && [[ "$target" != all ]]; then
  refuse "--full cannot be given with --quick, --sanitize or --arm64, which build the quick tests alone"
fi

build="$root/build/$preset"
[[ "$preset" == cpu ]] && build="$root/build/release"
cmake_options=()
if [[ "$preset" == arm64 ]]; then
  "$root/cmake/install_packages.sh" --arm64
  "$root/cmake/arm64_sysroot.sh" || exit 77
elif $without_mpi; then
  build+="-no-mpi"
  cmake_options+=(-DHELIX_MPI=OFF)
  "$root/cmake/install_packages.sh"
else
  "$root/cmake/install_packages.sh" --tests
fi
# Set every time, because run.sh may have left another choice in the same folder. The sanitizers' presets have
# no CUDA.
if $without_cuda; then
  build+="-no-cuda"
  cmake_options+=(-DHELIX_CUDA=OFF)
elif [[ "$preset" == cpu ]]; then
  cuda="${HELIX_CUDA:-AUTO}"
  cmake_options+=("-DHELIX_CUDA=${cuda^^}")
fi
if command -v ccache >/dev/null; then
  cmake_options+=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  # An environment variable and not an option, because CMake would report an option as unused in a build
  # without CUDA.
  export CMAKE_CUDA_COMPILER_LAUNCHER="${CMAKE_CUDA_COMPILER_LAUNCHER:-ccache}"
fi
# Sets up Python for the tests of text while the rest is built. Without it they are skipped.
set_up=
if [[ "$preset" == cpu ]]; then
  "$root/examples/chat/set_up.sh" "$root/build/chat" &
  set_up=$!
  trap 'kill "$set_up" 2>/dev/null || true' EXIT  # it does not hear Ctrl-C, being in the background
fi
"$root/cmake/forget_other_tools.sh" "$build"
cmake -S "$root" -B "$build" --preset "$preset" "${cmake_options[@]}"
# ptxas mentions only in passing, and with status 0, that it gave up a feature that a kernel relies on:
# setmaxnreg, or overlapping wgmma.
has_slow_kernels() { grep -qs 'Potential Performance Loss' "$build/build.log"; }
# ninja takes what the last build compiled for finished and would print nothing of it.
if has_slow_kernels; then find "$build" -name '*.cu.o' -delete; fi
cmake --build "$build" --target "$target" 2>&1 | tee "$build/build.log"
if has_slow_kernels; then
  echo "test.sh: ptxas made a kernel slow; see its lines in $build/build.log" >&2
  exit 1
fi
[[ -z "$set_up" ]] || wait "$set_up" || true
trap - EXIT

report="$build/tests.xml"
rm -f "$report"
status=0
ctest --test-dir "$build" --output-on-failure --no-tests=error --parallel "$parallel" \
  --output-junit "$report" "${labels[@]}" "$@" || status=$?

# ctest counts both a test that could not start and a test that skipped itself as "notrun"; only the latter
# may count as skipped.
count() { grep -c "$1" "$report" || true; }
passed=0 failed=0 skipped=0
if [[ -f "$report" ]]; then
  passed=$(count '<testcase .*status="run"')
  skipped=$(($(count '<skipped message="SKIP_') + $(count '<testcase .*status="disabled"')))
  failed=$(($(count '<testcase ') - passed - skipped))
fi
[[ $status -eq 0 || $failed -gt 0 ]] || echo "ctest ended with status $status" >&2
echo "$passed passed, $failed failed, $skipped skipped"
exit "$status"
