#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Creates in folder $1 the Python environment that text needs, with the packages of requirements.txt, unless
# it exists. Reports why if that fails. pip ends with this script.
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
# In the background, since the shell takes signals only after a command that it runs in the foreground, and
# with job control, which makes a process group of all that the command starts.
set -m
(python3 -m venv "$target" && "$target/bin/pip" install --quiet --disable-pip-version-check --requirement "$requirements") \
  >"$target.log" 2>&1 </dev/null &
installation=$!
set +m
trap 'kill -- "-$installation" 2>/dev/null || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
status=0
wait "$installation" || status=$?
trap - EXIT INT TERM
if [[ $status -eq 0 ]]; then
  cp "$requirements" "$target/"
else
  rm -rf "$target"
  echo "text needs python3 (3.10 or later) with venv, and tokenizers and jinja2 from PyPI: $(tail -n 1 "$target.log")" >&2
  exit 1
fi
