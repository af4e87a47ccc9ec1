#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a program for 64-bit Arm in qemu, on one core: emulate_arm64.sh PROGRAM [ARGUMENTS]
#
# qemu on x86 lets a load pass a store before it even where both are sequentially consistent, which Arm does not: with threads on
# several cores one run of a test in 30 to 500 lost a wake-up (cpu/stream.cpp) and hung. Threads on one core see each other's stores.
set -euo pipefail

cores=()
IFS=',' read -ra ranges <<<"$(taskset -cp $$ | sed 's/.*: //')"
for range in "${ranges[@]}"; do
  for ((core = ${range%-*}; core <= ${range#*-}; ++core)); do cores+=("$core"); done
done
qemu="$(command -v qemu-aarch64 || command -v qemu-aarch64-static)"
# The loader and the C and C++ libraries are those of the cross compiler's packages; the rest is found where it was linked.
exec taskset -c "${cores[$(($$ % ${#cores[@]}))]}" "$qemu" -L /usr/aarch64-linux-gnu "$@"
