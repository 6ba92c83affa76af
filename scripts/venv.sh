#!/usr/bin/env bash
# Prints the path of a Python interpreter that has the given packages of PyPI: venv.sh NAME PYTHON PACKAGE... It is that of
# the virtual environment NAME in the user's cache folder. If the environment is missing, or has other packages or another
# version of PYTHON, it is made first.
set -euo pipefail
name=$1 base=$2
shift 2
folder=${XDG_CACHE_HOME:-$HOME/.cache}/gohvd/$name
mkdir -p "$folder"
exec {lock}>"$folder.lock"
flock "$lock"
want="$("$base" -V) $*"
if [ "$want" != "$(cat "$folder/versions" 2>/dev/null)" ] || [ ! -x "$folder/bin/python" ]; then
	echo "venv: installing $* in $folder" >&2
	# $base may be a link in a folder that is removed sooner than the environment.
	"$(realpath "$("$base" -c 'import sys; print(sys.executable)')")" -m venv --clear "$folder"
	"$folder/bin/python" -m pip install --quiet --no-cache-dir "$@" >&2
	echo "$want" >"$folder/versions"
fi
echo "$folder/bin/python"
