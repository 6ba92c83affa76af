#!/usr/bin/env bash
# Checks gohvd on a machine with one CUDA device: gpu-check.sh [--stand-ins] [--out FILE] [--programs DIR].
#
# It needs no network, no Go and no C compiler, but the programs of make gpu-check-programs, python3 (PYTHON), and NCCL
# and the CUDA runtime: the files in HVD_NCCL_LIBRARY and HVD_CUDART_LIBRARY, or those in packages of this Python, or
# those that the dynamic loader finds. Each step has a time limit and prints a line with PASS, FAIL or SKIP. FILE gets the
# results as Markdown. The status is 1 if a step fails.
# With --stand-ins it checks itself, with the stand-ins for the libraries (internal/testcuda) and one device that does not
# exist. docs/nccl.md describes the steps.
set -euo pipefail
cd "$(dirname "$0")/.."

programs=bin/gpu-check out=bin/gpu-check/result.md stand_ins=
while [ $# -gt 0 ]; do
	case $1 in
	--stand-ins) stand_ins=1 ;;
	--out) out=$2 && shift ;;
	--programs) programs=$2 && shift ;;
	*) sed -n '2,10s/^# //p' "$0" >&2 && exit 2 ;;
	esac
	shift
done
programs=$(cd "$programs" && pwd) || { echo "no programs: run make gpu-check-programs" >&2 && exit 2; }
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

export HVD_SIDECAR_BINARY=$programs/hvdd PYTHONPATH=$PWD/python PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
export HOROVOD_GPU_OPERATIONS=nccl
largest=256M
if [ "$stand_ins" ]; then
	largest=256K
	export HVD_NCCL_LIBRARY=$programs/standins/libnccl.so.2 HVD_CUDART_LIBRARY=$programs/standins/libcudart.so.12
	export LD_LIBRARY_PATH=$programs/standins STANDIN_CUDA_DEVICES=1 STANDIN_CUDA_DELAY_US=1000
	export STANDIN_NCCL_FOLDER=$work
fi

failures=0
result() { # STATUS NAME DETAIL
	echo "$1 $2: $3"
	echo "| $2 | $1 | $3 |" >>"$work/rows"
	if [ "$1" = FAIL ]; then failures=$((failures + 1)); fi
}

# step NAME SECONDS COMMAND... runs a command with a time limit. Its output is in $work/log.
step() {
	local name=$1 seconds=$2 status=0
	shift 2
	timeout -k 10 "$seconds" bash -c '"$@"' step "$@" >"$work/log" 2>&1 || status=$?
	if [ $status = 0 ]; then
		local detail
		detail=$(grep -oE 'Ran [0-9]+ tests?|[0-9]+ cases' "$work/log" | sort -u | paste -sd, | sed 's/,/, /g') || true
		result PASS "$name" "${detail:-done}"
	else
		tail -n 40 "$work/log" | sed 's/^/    /'
		if [ $status = 124 ]; then status="it ran longer than $seconds s"; else status="exit status $status"; fi
		result FAIL "$name" "$status: $(grep -m 1 -E 'FAIL|[Ee]rror|violation|panic' "$work/log" | tr '|' '/' | cut -c 1-200)"
	fi
}

job() { # RANKS COMMAND...
	local ranks=$1
	shift
	"$programs/hvdrun" -np "$ranks" "$@"
}

# killed succeeds if the job ends as one whose last rank was killed, and the other rank has passed its test.
killed() {
	local status=0
	job 2 "$python" python/tests/device_ranks.py Killed || status=$?
	echo "hvdrun returned $status"
	[ $status = 137 ] && grep -q '^\[0\]<stderr>:OK$' "$work/log"
}

# figures NAME COMMAND... runs a command that prints a table of times of one rank, and keeps the table.
figures() {
	local name=$1
	shift
	step "$name" 300 "$programs/hvdrun" -np 1 --tag-output=false "$@"
	{ echo && echo "$name:" && echo && grep -E '^(#| +[0-9])' "$work/log" | sed 's/^/    /; s/ *$//'; } >>"$work/figures" || true
}
export -f job killed
export programs python work

# packaged prints the newest file of a library in PyPI's packages of NVIDIA, which torch brings, if there is one.
packaged() { # PATTERN
	"$python" -c 'import glob, os, sys; print(*sorted((f for d in sys.path for f in glob.glob(d + "/nvidia/*/lib/" + sys.argv[1])), key=os.path.basename)[-1:])' "$1"
}
: "${HVD_NCCL_LIBRARY:=$(packaged 'libnccl.so.2*')}" "${HVD_CUDART_LIBRARY:=$(packaged 'libcudart.so.1?*')}"
export HVD_NCCL_LIBRARY HVD_CUDART_LIBRARY

# Which libraries are found.
HVD_LIBRARY=$programs/libgohvd.so "$python" -c 'import json; from gohvd import _library
print(json.dumps(_library.gpu_libraries(count_devices=True)))' >"$work/found" 2>"$work/log" || true
found() { # EXPRESSION of the object f
	"$python" -c "import json, sys; f = json.load(open(sys.argv[1])); print($1)" "$work/found" 2>>"$work/log" || true
}
if [ "$(found 'not f["nccl"]["error"] + f["cuda"]["error"] and f["devices"] > 0')" = True ]; then
	result PASS libraries "$(found '"NCCL %s (%s), CUDA runtime %s (%s), driver for CUDA %s, %d device(s)" % (f["nccl"]["version"], f["nccl"]["file"].rpartition("/")[2], f["cuda"]["version"], f["cuda"]["file"].rpartition("/")[2], f["driver"], f["devices"])')"
	HVD_NCCL_LIBRARY=$(found 'f["nccl"]["file"]') HVD_CUDART_LIBRARY=$(found 'f["cuda"]["file"]')
else
	result FAIL libraries "$(found '"; ".join(filter(None, (f["nccl"]["error"], f["cuda"]["error"]))) or "%d devices" % f["devices"]')$(tail -n 1 "$work/log")"
	exit 1
fi
gpu="a stand-in" driver=none
if [ ! "$stand_ins" ]; then
	gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sort | uniq -c | sed 's/^ *//' | paste -sd, -) || true
	driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || true
fi

# The Go tests look for the libraries in a folder, under fixed names.
mkdir "$work/libraries"
ln -s "$HVD_NCCL_LIBRARY" "$work/libraries/libnccl.so.2"
ln -s "$HVD_CUDART_LIBRARY" "$work/libraries/libcudart.so.12"
export GOHVD_TEST_STANDINS=$work/libraries

step "all functions that gohvd calls" 60 "$programs/nccl.test" -test.run 'TestRealLibraries$' -test.v \
	-nccl "$HVD_NCCL_LIBRARY" -cudart "$HVD_CUDART_LIBRARY"
for ranks in 1 2 4; do
	step "conformance, $ranks rank(s) on the device" 600 env -u HOROVOD_GPU_OPERATIONS "$programs/conformance.test" \
		-test.run "TestConformanceNCCL/ranks=$ranks\$" -test.v
done
for ranks in 1 2; do
	step "Python without torch, $ranks rank(s)" 120 job "$ranks" "$python" python/tests/device_ranks.py Values
done
values=("$programs/hvdrun" -np 2 "$python" python/tests/device_ranks.py Values)
step "Python without torch, default operations" 120 env -u HOROVOD_GPU_OPERATIONS "${values[@]}"
step "Python without torch, completion on the device" 120 env HOROVOD_ENABLE_ASYNC_COMPLETION=1 "${values[@]}"
step "Python without torch, 2 streams of NCCL" 120 env HOROVOD_NUM_NCCL_STREAMS=2 "${values[@]}"
step "a rank is killed" 120 killed

if reason=$("$python" -c 'import torch; assert torch.cuda.is_available(), "torch %s finds no CUDA device" % torch.__version__' 2>&1); then
	torch=$("$python" -c 'import torch; print(torch.__version__)')
	for ranks in 1 2; do
		step "gohvd.torch in place, $ranks rank(s)" 300 job "$ranks" "$python" python/tests/torch_device_ranks.py InPlace
	done
	# Without settings, gohvd itself finds the GPU and the libraries that torch has loaded.
	step "gohvd.torch without settings" 300 env -u HOROVOD_GPU_OPERATIONS -u HVD_NCCL_LIBRARY -u HVD_CUDART_LIBRARY \
		"$programs/hvdrun" -np 2 "$python" python/tests/torch_device_ranks.py InPlace
	for allocator in expandable_segments:True backend:cudaMallocAsync; do
		step "gohvd.torch with the allocator $allocator" 120 env PYTORCH_CUDA_ALLOC_CONF="$allocator" \
			"$programs/hvdrun" -np 2 "$python" python/tests/torch_device_ranks.py Allocators
	done
else
	torch=none
	result SKIP "gohvd.torch" "$(echo "$reason" | tail -n 1)"
fi

figures "hvdbench --gpu" "$programs/hvdbench" --gpu --minbytes 8 --maxbytes "$largest" --stepfactor 32
if [ "$torch" != none ]; then
	figures "gohvd.torch beside torch.distributed" "$python" python/tests/torch_device_ranks.py Figures
fi

mkdir -p "$(dirname "$out")"
{
	echo "GPU: $gpu; driver: $driver; torch: $torch; Linux $(uname -r) on $(uname -m); $(date -u +%Y-%m-%d)"
	echo
	echo "| step | result | detail |"
	echo "|---|---|---|"
	cat "$work/rows"
	echo
	echo "All times are of one rank. Ranks that share a device take turns on it, so their times say nothing about speed."
	cat "$work/figures"
} >"$out"
echo "$failures step(s) failed; the results are in $out"
[ $failures = 0 ]
