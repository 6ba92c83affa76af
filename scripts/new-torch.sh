#!/usr/bin/env bash
# Prints the path of a Python interpreter with PyTorch 2. It is that of a virtual environment in the user's cache
# folder. If the environment is missing or has other versions, it is made first: from PyPI, in about a minute, 5.4 GB.
# The tests of gohvd.torch.distributed need it, because Debian's PyTorch is older than 2.1. More than half of it are CUDA
# packages. PyPI's PyTorch cannot be imported without them.
set -euo pipefail

# The versions are fixed, so that a release of PyTorch does not break CI. Once make test-torch2 passes with newer ones,
# these can be raised.
packages=(torch==2.15.0 numpy==2.4.6)
base=/usr/bin/python3

folder=${XDG_CACHE_HOME:-$HOME/.cache}/gohvd/torch
mkdir -p "$folder"
exec {lock}>"$folder.lock"
flock "$lock"
want="$("$base" -V) ${packages[*]}"
if [ "$want" != "$(cat "$folder/versions" 2>/dev/null)" ]; then
	echo "new-torch: installing ${packages[*]} in $folder" >&2
	"$base" -m venv --clear "$folder"
	"$folder/bin/python" -m pip install --quiet --no-cache-dir "${packages[@]}" >&2
	echo "$want" >"$folder/versions"
fi
echo "$folder/bin/python"
