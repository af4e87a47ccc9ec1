#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a program for 64-bit Arm in qemu, on one core: emulate_arm64.sh PROGRAM [ARGUMENTS]
#
# One core is needed because qemu on x86 lets a load pass an earlier store even if both are sequentially
# consistent, which Arm does not. With threads on several cores, one test run in 30 to 500 lost a wake-up
# (cpu/stream.cpp) and hung. Threads on one core see each other's stores.
set -euo pipefail

cores=()
IFS=',' read -ra ranges <<<"$(taskset -cp $$ | sed 's/.*: //')"
for range in "${ranges[@]}"; do
  for ((core = ${range%-*}; core <= ${range#*-}; ++core)); do cores+=("$core"); done
done
qemu="$(command -v qemu-aarch64 || command -v qemu-aarch64-static)"
# The loader and the C and C++ libraries come from the cross compiler's packages. Everything else is found at
# its link-time location.
exec taskset -c "${cores[$(($$ % ${#cores[@]}))]}" "$qemu" -L /usr/aarch64-linux-gnu "$@"
