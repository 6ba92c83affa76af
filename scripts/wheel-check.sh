#!/usr/bin/env bash
# Builds the wheels for this machine, follows docs/quickstart.md word for word with them, runs Horovod's commands and
# programs in C, and removes everything again. With --twice it only compares the wheels with those of the checkout. PYTHON
# is an interpreter with PyTorch and the module venv. hatchling, ziglang and auditwheel are from PyPI. The programs in C
# need gcc and pkg-config.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
	echo "wheel-check: $*" >&2
	exit 1
}
unset MAKEFLAGS # from the make that runs this script: make wheel cannot use the job server of make -j
# make wheel makes only the wheels of this machine, to save time.
WHEELS=$("${GO:-go}" env GOARCH)
export WHEELS
mkdir "$work/bin"
ln -s "$PYTHON" "$work/bin/python3"

# A copy of the checkout in another folder, with other times and modes.
copy=$work/copy
mkdir "$copy"
git ls-files -z --cached --others --exclude-standard | xargs -0 sh -c 'ls -d "$@" 2>/dev/null || true' sh |
	tar -c -T - | tar -x -m -C "$copy"
chmod -R go-rwx "$copy"
if [ "${1-}" = --twice ]; then
	PATH=$work/bin:$PATH make --no-print-directory wheel DIST="$work/first"
	(umask 077 && cd "$copy" && PATH=$work/bin:$PATH TZ=Asia/Tokyo make --no-print-directory wheel)
	diff -r "$work/first" "$copy/dist" || fail "two builds differ"
	exit
fi

# The commands of the page's blocks in sh, with its program as train.py.
block() { awk -v open="^\`\`\`$1\$" '$0 ~ /^```$/ {on = 0} on; $0 ~ open {on = 1}'; }
block python <docs/quickstart.md >"$copy/train.py"
(
	cd "$copy"
	umask 077
	export PATH=$work/bin:$PATH TZ=Asia/Tokyo OMP_NUM_THREADS=1
	bash -eux <(block sh <docs/quickstart.md)
) | tee "$work/out"
"$(PATH=$work/bin:$PATH scripts/venv.sh auditwheel python3 auditwheel==6.8.2)" scripts/wheel-files.py "$copy/dist"
for rank in 0 1; do
	grep -q "^\[$rank\]<stdout>:rank $rank of 2: sum of weights \(7.99\|8.00\)" "$work/out" || fail "rank $rank has not trained"
done
grep -q '^rank 0 of 1: sum of weights' "$work/out" || fail "the program has not run without hvdrun"

# From here on, the commands of the environment are the only programs that can be found: no Go and no compiler.
venv=$copy/venv
alone() { env -i PATH="$venv/bin" HOME="$work" OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 "$@"; }
pip() { "$venv/bin/python3" -m pip --quiet --no-cache-dir "$@"; }
version=$(alone python3 -c 'import gohvd; print(gohvd.__version__)')
for program in hvdrun hvdbench hvdd; do
	[ "$(alone "$program" --version)" = "$program version v$version" ] || fail "$program has another version than gohvd $version"
done
alone hvdrun -np 2 --tag-output=false hvdbench -b 8 -e 1K -f 128 | tee "$work/out"
grep -q 'Out of bounds values : 0 OK' "$work/out" || fail "hvdbench"
alone python3 -m gohvd.doctor --json >"$work/doctor" || true # it may find problems of this machine
grep -q "\"text\": \"$version at $venv/" "$work/doctor" || fail "doctor has not found the package: $(cat "$work/doctor")"
grep -q "\"text\": \"v$version at $venv/.*/gohvd/lib/libgohvd.so\"" "$work/doctor" || fail "doctor has not found libgohvd: $(cat "$work/doctor")"
[ "$(alone python3 -c 'import gohvd._library as l; print(l.gpu_libraries(count_devices=False)["built"])')" = True ] ||
	fail "libgohvd was built without NCCL"

# Programs in C, with the library of the wheel and with that of the archive.
block c <docs/c-api.md >"$work/program.c"
mkdir "$work/archive"
tar -x -f "$copy"/dist/gohvd-*.tar.gz -C "$work/archive" --strip-components=1
in_c() { # DIRECTORY FLAG...
	gcc -std=c99 -o "$work/program" "$work/program.c" "${@:2}"
	alone "$1/hvdrun" -np 2 --tag-output=false "$work/program" | tee "$work/out"
	grep -q '^rank 1 of 2: 2' "$work/out" || fail "the program in C with ${*:2}"
}
eval "in_c '$venv/bin' $(alone python3 -m gohvd --cflags --libs)"
eval "in_c '$work/archive/bin' $(PKG_CONFIG_PATH=$work/archive/lib/pkgconfig pkg-config --cflags --libs gohvd)"
mv "$work/archive" "$work/moved" # with a sidecar, which the library finds in the folder beside its own
env -i LD_LIBRARY_PATH="$work/moved/lib" HVD_SIDECAR=spawn "$work/program" | tee "$work/out"
grep -q '^rank 0 of 1: 1' "$work/out" || fail "the program in C with a sidecar"
"${GO:-go}" test -count 1 -run 'Glibc|StaticTLS|Header' ./cmd/libgohvd -args -library "$work/moved/lib/libgohvd.so"

# The extra for Horovod. Its command runs a program that is written for Horovod.
[ ! -e "$venv/bin/horovodrun" ] || fail "gohvd without the extra has horovodrun"
pip install --no-index --find-links "$copy/dist" 'gohvd[horovod]'
sed 's/gohvd\.torch/horovod.torch/' "$copy/train.py" >"$work/horovod_train.py"
alone horovodrun -np 2 -H localhost:2 python3 "$work/horovod_train.py" | tee "$work/out"
grep -q '^\[1\]<stdout>:rank 1 of 2: sum of weights' "$work/out" || fail "horovodrun"
alone python3 -c 'import horovod; assert horovod.run(int, ("3",), num_proc=2) == [3, 3]' || fail "horovod.run"

# Nothing is left.
pip uninstall --yes gohvd gohvd-horovod
left=$(find "$venv" -iname '*gohvd*' -o -iname '*horovod*' -o -name 'hvd*')
[ -z "$left" ] || fail "uninstalling has left $left"
echo "wheel-check: passed"
