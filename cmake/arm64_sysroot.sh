#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Unpacks the arm64 builds of the libraries that Helix needs into build/arm64/sysroot. The system does not
# change: no architecture is added and nothing is installed. Needs no root, and no network once it is done. If
# these libraries, the cross compiler or the emulator cannot be had, it reports in one line what is missing
# and exits with status 1.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
arm64="$root/build/arm64"
packages=(libhwy-dev libfmt-dev catch2 nlohmann-json3-dev libcli11-dev)

missing() {
  echo "no arm64 tests here: $1" >&2
  exit 1
}

command -v aarch64-linux-gnu-g++ >/dev/null || missing "there is no aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)"
command -v qemu-aarch64 >/dev/null || command -v qemu-aarch64-static >/dev/null ||
  missing "there is no qemu-aarch64 (Debian: qemu-user)"
[[ ! -f "$arm64/sysroot/complete" ]] || exit 0
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
  missing "the arm64 libraries come as Debian packages, for which there is no apt-get here"

# Calls apt-get with its own package lists and cache.
rm -rf "$arm64/packages" "$arm64/sysroot"
mkdir -p "$arm64/packages/lists/partial" "$arm64/packages/cache/archives/partial" "$arm64/sysroot"
apt() {
  (cd "$arm64/packages" && apt-get -q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root \
    -o Dir::State::Lists="$arm64/packages/lists" -o Dir::Cache="$arm64/packages/cache" -o Acquire::Languages=none "$@") >&2
}

apt update || true  # a broken foreign source does not stop us; missing packages do
apt download "${packages[@]}" || missing "apt-get cannot download the arm64 builds of ${packages[*]}"
# The package names of the shared libraries contain versions, as in libfmt9.
mapfile -t shared < <(for package in "$arm64"/packages/lib{hwy,fmt}-dev_*.deb; do
  dpkg-deb --field "$package" Depends
done | grep --only-matching --extended-regexp 'lib(hwy|fmt)[^ ,]*')
apt download "${shared[@]}" || missing "apt-get cannot download the arm64 builds of ${shared[*]}"
for package in "$arm64"/packages/*.deb; do
  dpkg-deb --extract "$package" "$arm64/sysroot"
done
rm -rf "$arm64/packages/lists" "$arm64/packages/cache"
touch "$arm64/sysroot/complete"
