#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# forget_other_tools.sh BUILD: CMake reads these variables only at the first configuration of a folder. If
# they have changed since, this removes what CMake found with the old values, so that the next configuration
# is a first one again.
set -euo pipefail

build="$1"
tools="$(printf '%s\n' "CXX=${CXX:-}" "CXXFLAGS=${CXXFLAGS:-}" "CUDACXX=${CUDACXX:-}" "CUDAARCHS=${CUDAARCHS:-}" \
  "CMAKE_PREFIX_PATH=${CMAKE_PREFIX_PATH:-}")"
if [[ -f "$build/CMakeCache.txt" && "$tools" != "$(cat "$build/tools.txt" 2>/dev/null || true)" ]]; then
  echo "$build was configured with other CXX, CXXFLAGS, CUDACXX, CUDAARCHS or CMAKE_PREFIX_PATH: it is configured anew" >&2
  rm -rf "$build/CMakeCache.txt" "$build/CMakeFiles" "$build/build.ninja"
fi
mkdir -p "$build"
printf '%s\n' "$tools" >"$build/tools.txt"
