#!/usr/bin/env bash
# The first minutes on a machine with a GPU, when time on it is short: gpu-first.sh a|b SECONDS.
#
# It needs the checkout with bin/gpu.tgz (make gpu-check-programs), and python3 with a torch for CUDA (PYTHON). Part a has
# the facts and the steps of one rank, part b those of two ranks. The steps that say most come first. Each has a time limit,
# and those for which less than 10 s of SECONDS are left are skipped. When a step ends, it adds a line to OUT/result (OUT is
# /tmp/gpu-first without the variable) and its output to OUT/log. docs/nccl.md says how to read the lines.
set -u
cd "$(dirname "$0")/.."
case ${1-} in a | b) ;; *) sed -n '2,8s/^# //p' "$0" >&2 && exit 2 ;; esac
end=$((SECONDS + ${2:?seconds})) out=${OUT:-/tmp/gpu-first} python=${PYTHON:-python3}
programs=$(mktemp -d)
trap 'rm -rf "$programs"' EXIT
mkdir -p "$out" "$programs/libraries" && tar -xzf "${PROGRAMS:-bin/gpu.tgz}" -C "$programs" || exit 2

# packaged prints the newest file of a library in PyPI's packages of NVIDIA.
packaged() {
	"$python" -c 'import glob, os, sys; print(*sorted((f for d in sys.path for f in glob.glob(d + "/nvidia/*/lib/" + sys.argv[1])), key=os.path.basename)[-1:])' "$1"
}
: "${HVD_NCCL_LIBRARY:=$(packaged 'libnccl.so.2*')}" "${HVD_CUDART_LIBRARY:=$(packaged 'libcudart.so.1?*')}"
ln -s "$HVD_NCCL_LIBRARY" "$programs/libraries/libnccl.so.2"
ln -s "$HVD_CUDART_LIBRARY" "$programs/libraries/libcudart.so.12"
export HVD_NCCL_LIBRARY HVD_CUDART_LIBRARY GOHVD_TEST_STANDINS=$programs/libraries HVD_LIBRARY=$programs/libgohvd.so
export HOROVOD_GPU_OPERATIONS=nccl PYTHONPATH=$PWD/python PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
export NCCL_DEBUG=WARN NCCL_DEBUG_FILE=$programs/nccl.%p programs python

step() { # NAME LIMIT LINES COMMAND...: shows LINES of the output, or 15 if the command fails
	local name=$1 limit=$2 lines=$3 left=$((end - SECONDS)) from=$SECONDS status=0
	shift 3
	if [ $left -lt 10 ]; then
		echo "skipped: $name" | tee -a "$out/result"
		return
	fi
	timeout -k 5 $((limit < left ? limit : left)) "$@" >"$programs/log" 2>&1 </dev/null || status=$?
	{
		echo "=== $name"
		tail -c 300000 "$programs/log"
		tail -qn 20 "$programs"/nccl.[0-9]* 2>/dev/null
	} >>"$out/log"
	rm -f "$programs"/nccl.[0-9]*
	echo "status $status after $((SECONDS - from)) s: $name" | tee -a "$out/result"
	tail -n $((status ? 15 : lines)) "$programs/log"
}

facts() {
	uname -r
	nvidia-smi -q | grep -E 'Driver Version|Compute Mode|MIG Mode|  Current|Fabric|  State' | sort | uniq -c
	df -h /dev/shm | tail -n 1
	"$python" -c 'import torch; from gohvd import _library; print(torch.__version__, _library.gpu_libraries(count_devices=True))'
}
conformance() { # RANKS
	env -u HOROVOD_GPU_OPERATIONS "$programs/conformance.test" -test.run "TestConformanceNCCL/ranks=$1\$" -test.v
}
ranks() { # RANKS COMMAND...
	local n=$1
	shift
	"$programs/hvdrun" -np "$n" --tag-output=false "$@"
}
export -f facts conformance ranks

if [ "$1" = a ]; then
	step "facts" 40 20 bash -c facts
	step "CUDA and NCCL without gohvd" 90 40 "$python" scripts/gpu-probe.py
	# Without settings, gohvd itself finds the GPU and the libraries that torch has loaded.
	step "gohvd.torch without settings, 1 rank" 75 3 env -u HOROVOD_GPU_OPERATIONS -u HVD_NCCL_LIBRARY \
		-u HVD_CUDART_LIBRARY bash -c 'ranks 1 "$python" python/tests/torch_device_ranks.py InPlace'
	step "gohvd.torch with completion on the device, 1 rank" 60 3 env HOROVOD_ENABLE_ASYNC_COMPLETION=1 \
		bash -c 'ranks 1 "$python" python/tests/torch_device_ranks.py InPlace'
	step "all functions that gohvd calls" 40 0 "$programs/nccl.test" -test.run 'TestRealLibraries$' -test.v \
		-nccl "$HVD_NCCL_LIBRARY" -cudart "$HVD_CUDART_LIBRARY"
	step "conformance, 1 rank" 60 2 bash -c 'conformance 1'
	step "Python without torch, 1 rank" 45 3 bash -c 'ranks 1 "$python" python/tests/device_ranks.py Values'
	step "times of gohvd.torch and torch.distributed" 45 12 bash -c 'ranks 1 "$python" python/tests/torch_device_ranks.py Figures'
	step "times of hvdbench" 40 12 bash -c 'ranks 1 "$programs/hvdbench" --gpu --minbytes 8 --maxbytes 256M --stepfactor 32'
else
	step "conformance, 2 ranks" 100 2 bash -c 'conformance 2'
	step "Python without torch, 2 ranks" 50 3 bash -c 'ranks 2 "$python" python/tests/device_ranks.py Values'
	step "gohvd.torch, 2 ranks" 80 3 bash -c 'ranks 2 "$python" python/tests/torch_device_ranks.py InPlace'
	step "gohvd.torch with 2 streams of NCCL, 2 ranks" 60 3 env HOROVOD_NUM_NCCL_STREAMS=2 \
		bash -c 'ranks 2 "$python" python/tests/torch_device_ranks.py InPlace'
	step "a rank is killed (want 137)" 45 15 bash -c 'ranks 2 "$python" python/tests/device_ranks.py Killed'
	step "expandable segments, 2 ranks" 40 3 env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
		bash -c 'ranks 2 "$python" python/tests/torch_device_ranks.py Allocators'
	step "cudaMallocAsync, 2 ranks" 40 3 env PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync \
		bash -c 'ranks 2 "$python" python/tests/torch_device_ranks.py Allocators'
fi
echo
cat "$out/result"
