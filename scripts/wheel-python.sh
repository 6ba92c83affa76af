#!/usr/bin/env bash
# Prints the path of a Python interpreter with what python/pyproject.toml requires to build the wheel: hatchling, and
# ziglang, which has a C compiler (400 MB). It is in the user's cache folder (venv.sh). Needs Python 3.11.
set -euo pipefail
cd "$(dirname "$0")/.."
requires=$(python3 -c 'import tomllib; print(*tomllib.load(open("python/pyproject.toml", "rb"))["build-system"]["requires"])')
# shellcheck disable=SC2086 # each requirement is an argument
scripts/venv.sh wheel python3 $requires
