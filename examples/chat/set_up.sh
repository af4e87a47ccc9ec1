#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Creates in folder $1 the Python environment that text needs, with the packages of requirements.txt, unless
# it exists. Reports why if that fails.
set -euo pipefail

requirements="$(dirname "${BASH_SOURCE[0]}")/requirements.txt"
target="$1"
is_there() { cmp -s "$requirements" "$target/requirements.txt"; }
if is_there; then exit 0; fi
# One process at a time: the others wait and then find the finished environment.
mkdir -p "$(dirname "$target")"
exec {lock}>"$target.lock"
flock "$lock"
if is_there; then exit 0; fi
rm -rf "$target"
if said="$( (python3 -m venv "$target" && "$target/bin/pip" install --quiet --disable-pip-version-check --requirement "$requirements") 2>&1)"; then
  cp "$requirements" "$target/"
else
  rm -rf "$target"
  echo "text needs python3 (3.10 or later) with venv, and tokenizers and jinja2 from PyPI: $(tail -n 1 <<<"$said")" >&2
  exit 1
fi
