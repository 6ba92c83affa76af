#!/usr/bin/env bash
# run.sh NAME [np]: builds a program if necessary, runs it with np ranks (default 2) and prints its rows. If OUT=FILE is
# set, it also appends the rows to FILE. See README.md.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
name=${1:?usage: run.sh NAME [np]}
np=${2:-2}
built=${PEERS_BUILD:-${TMPDIR:-/tmp}/gohvd-peers}
congestion=${BENCH_CC:-reno}
mkdir -p "$built"

# The program runs in a new network namespace, which has only loopback, and the congestion control of an ordinary host.
if [ "$congestion" != host ]; then
	if [ -z "${IN_NETNS:-}" ]; then
		as_root=()
		[ "$(id -u)" = 0 ] || as_root=(--map-root-user)
		exec env IN_NETNS=1 unshare --net ${as_root[@]+"${as_root[@]}"} "$0" "$@"
	fi
	ip link set lo up
	echo "$congestion" >/proc/sys/net/ipv4/tcp_congestion_control
fi

scratch=$(mktemp -d -t gohvd-peers.XXXXXX)
trap 'rm -rf "$scratch"' EXIT
export BENCH_NP=$np BENCH_PEER=$name BENCH_SHAPES=$here/../../cmd/hvdbench/shapes BENCH_STORE=$scratch
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo

older() { # TARGET SOURCE...: succeeds if TARGET is missing or older than one of the sources
	local target=$1 source
	shift
	for source; do
		[ "$target" -nt "$source" ] || return 0
	done
	return 1
}
build_mpi() {
	older "$built/mpi_$1" "$here/mpi_bench.c" "$here/bench.h" || return 0
	"mpicc.$1" -O3 -march=native -w "$here/mpi_bench.c" -o "$built/mpi_$1" >&2
}
build_gloo() {
	older "$built/gloo_bench" "$here/gloo_bench.cc" "$here/bench.h" || return 0
	g++ -O3 -march=native -std=c++17 -w "$here/gloo_bench.cc" -o "$built/gloo_bench" -lgloo -lpthread >&2
}
each_rank() { # COMMAND...: runs the command once for each rank, with the number of the rank in BENCH_RANK
	local pids=() r status=0
	for ((r = 0; r < np; r++)); do
		BENCH_RANK=$r "$@" &
		pids+=($!)
	done
	for r in "${pids[@]}"; do wait "$r" || status=$?; done
	return $status
}
ompi() { mpirun.openmpi --allow-run-as-root --oversubscribe -np "$np" "$@"; }

program() {
	case $name in
	limits | limits-reads)
		if older "$built/limits" "$here/limits.c" "$here/bench.h"; then
			gcc -O3 -march=native -w "$here/limits.c" -o "$built/limits" -lpthread >&2
		fi
		"$built/limits" "${name#limits}"
		;;
	ompi)
		build_mpi openmpi
		ompi --mca mpi_yield_when_idle 1 "$built/mpi_openmpi"
		;;
	ompi-spin)
		build_mpi openmpi
		mpirun.openmpi --allow-run-as-root -np "$np" --mca mpi_yield_when_idle 0 "$built/mpi_openmpi"
		;;
	ompi-tcp)
		build_mpi openmpi
		ompi --mca mpi_yield_when_idle 1 --mca btl tcp,self --mca btl_tcp_if_include lo "$built/mpi_openmpi"
		;;
	mpich)
		build_mpi mpich
		mpirun.mpich -launcher fork -np "$np" "$built/mpi_mpich"
		;;
	gloo)
		build_gloo
		each_rank "$built/gloo_bench"
		;;
	torch) each_rank /usr/bin/python3 "$here/torch_bench.py" torch ;;
	horovod) # importable from HVD_SITE
		export PYTHONPATH=${HVD_SITE:-}
		ompi --bind-to none --mca pml ob1 --mca mpi_yield_when_idle 1 /usr/bin/python3 "$here/torch_bench.py" horovod
		;;
	ours*) eval "${OURS_CMD:?the command that starts our ranks; it finds BENCH_ variables in its environment}" ;;
	*)
		echo "run.sh: no program $name" >&2
		return 2
		;;
	esac
}
export -f program build_mpi build_gloo older each_rank ompi
export here name np built

# This prints the state of the cores, also from a rank that is bound to one of them.
export BENCH_CORES="taskset -c $(taskset -cp $$ | sed 's/.*: //') '$here/../cores.py'"
cores() { sh -c "$BENCH_CORES" | tee -a "${OUT:-/dev/null}"; }

cores
limit=${BENCH_TIMEOUT:-600}
rows='^(#|[A-Za-z0-9._-]+,|memcpy|copy|add|TCP|Unix|futex|eventfd|spin|sched|process)'
set +e
timeout -k 5 "$limit" bash -eu -c program 2>"$scratch/stderr" | grep --line-buffered -E "$rows" | tee -a "${OUT:-/dev/null}"
status=${PIPESTATUS[0]}
set -e
if [ "$status" != 0 ]; then
	echo "# FAILED,$name,$np,status $status (124 is more than $limit s)" | tee -a "${OUT:-/dev/null}"
	tail -5 "$scratch/stderr" >&2
fi
cores
exit "$status"
