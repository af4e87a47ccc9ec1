#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the missing Debian or Ubuntu packages that a build needs. If none is missing, it does nothing and
# works offline.
#
# usage: cmake/install_packages.sh [--tests | --arm64 | --chat]
#   --tests adds what only the tests use (MPI, doxygen, Python), --arm64 a cross compiler and an emulator; --chat Python
set -euo pipefail

packages=(g++ cmake ninja-build libhwy-dev libfmt-dev catch2 libbenchmark-dev nlohmann-json3-dev libcli11-dev)
optional=()
# Debian packages venv separately from Python; other Pythons include it.
has_venv() { python3 -c 'import ensurepip, venv' 2>/dev/null; }
if [[ "${1:-}" == "--tests" ]]; then
  # Without these packages only the tests of MPI, of the reference and in Python are left out.
  optional=(libopenmpi-dev openmpi-bin)
  command -v doxygen >/dev/null || optional+=(doxygen)
  has_venv || optional+=(python3 python3-venv)
elif [[ "${1:-}" == "--chat" ]]; then
  has_venv || optional=(python3 python3-venv)  # only text needs these
elif [[ "${1:-}" == "--arm64" ]]; then
  command -v aarch64-linux-gnu-g++ >/dev/null || optional+=(g++-aarch64-linux-gnu)
  command -v qemu-aarch64 >/dev/null || command -v qemu-aarch64-static >/dev/null || optional+=(qemu-user)
fi

# Echoes the names among "$@" that are not installed.
missing_of() {
  local name
  for name in "$@"; do
    [[ "$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null)" == "installed" ]] || echo "$name"
  done
}

install() {
  local as_root=()
  if [[ "$(id -u)" != 0 ]]; then
    command -v sudo >/dev/null || { echo "cannot install: neither root nor sudo" >&2; return 1; }
    as_root=(sudo)
  fi
  # The package lists may be absent (containers) or stale, so refresh them. A broken third-party source must
  # not stop the installation.
  "${as_root[@]}" apt-get update -q || true
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@"
}

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "not a Debian or Ubuntu system; assuming that the equivalents of these are installed: ${packages[*]}" >&2
  exit 0
fi

mapfile -t missing < <(missing_of "${packages[@]}" "${optional[@]}")
[[ ${#missing[@]} -gt 0 ]] || exit 0

echo "installing: ${missing[*]}" >&2
if ! install "${missing[@]}" >&2; then
  # apt-get installs all packages or none, and optional packages must not prevent the others.
  mapfile -t required < <(missing_of "${packages[@]}")
  if [[ ${#required[@]} -gt 0 && ${#required[@]} -lt ${#missing[@]} ]]; then
    install "${required[@]}" >&2 || true
  fi
  # A missing package is not fatal here, because a package built from source may replace it. CMake reports
  # what is really missing.
  mapfile -t missing < <(missing_of "${packages[@]}" "${optional[@]}")
  [[ ${#missing[@]} -eq 0 ]] || echo "could not install: ${missing[*]}; going on without" >&2
fi
