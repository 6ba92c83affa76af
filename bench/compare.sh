#!/usr/bin/env bash
# Measures gohvd and the other libraries that are installed on this machine, and writes docs/benchmarks.md with a chart.
# These environment variables change what it does:
#
#   ROUNDS=5       the number of rounds; in each round every program runs once
#   NPS="2 4"      the numbers of ranks
#   PEERS="..."    names of programs in bench/peers/run.sh; the default is all that are installed
#   QUICK=1        run a short measurement: 2 rounds, small sizes, short times; the page is written beside the results
#   RESULTS=DIR    the folder for the results; the default is a new folder in the temporary directory
#   PAGE=FILE.md   the page; the default is docs/benchmarks.md
#   BENCH_...      see bench/peers/README.md
set -euo pipefail
cd "$(dirname "$0")/.."

out=${RESULTS:-$(mktemp -d -t gohvd-bench.XXXXXX)}
mkdir -p "$out"
if compgen -G "$out/*-round*.csv" >/dev/null; then
	echo "bench-peers: $out has results already: give RESULTS another folder" >&2
	exit 2
fi
page=${PAGE:-docs/benchmarks.md}
if [ -n "${QUICK:-}" ]; then
	rounds=${ROUNDS:-2} page=${PAGE:-$out/benchmarks.md}
	export BENCH_SMALL_S=${BENCH_SMALL_S:-0.02} BENCH_LARGE_S=${BENCH_LARGE_S:-0.05} BENCH_HARD_S=${BENCH_HARD_S:-0.2}
	export BENCH_MAX_BYTES=${BENCH_MAX_BYTES:-16777216} BENCH_OPS=${BENCH_OPS:-barrier,allreduce,allgather,broadcast,resnet50}
else
	rounds=${ROUNDS:-5}
	export BENCH_SMALL_S=${BENCH_SMALL_S:-0.1} BENCH_LARGE_S=${BENCH_LARGE_S:-0.2} BENCH_HARD_S=${BENCH_HARD_S:-0.6}
fi
nps=${NPS:-2 4}

have() { command -v "$1" >/dev/null; }
missing=()
for tool in unshare ip timeout gcc g++; do
	if ! have "$tool"; then
		echo "bench-peers: $tool is missing" >&2
		exit 2
	fi
done
found=()
offer() { # PEERS PACKAGES TEST...: PEERS are installed if the command TEST succeeds, else PACKAGES are missing
	local peers=$1 packages=$2
	shift 2
	if "$@" >/dev/null 2>&1; then
		found+=($peers)
	else
		missing+=($packages)
	fi
}
mpi() { have "mpirun.$1" && "mpicc.$1" -fsyntax-only -w bench/peers/mpi_bench.c; }
offer "ompi ompi-spin" "openmpi-bin libopenmpi-dev" mpi openmpi
offer "mpich" "mpich libmpich-dev" mpi mpich
offer "gloo" "libgloo-dev" test -e /usr/include/gloo/allreduce.h
offer "torch" "python3-torch" /usr/bin/python3 -c "import torch.distributed"
if [ ${#missing[@]} -gt 0 ]; then
	echo "bench-peers: not here, and left out: ${missing[*]}" >&2
	echo "bench-peers: to have them: apt-get install ${missing[*]}" >&2
fi
read -ra peers <<<"${PEERS:-ours ${found[*]-}}"

built=${PEERS_BUILD:-${TMPDIR:-/tmp}/gohvd-peers}
export PEERS_BUILD=$built
mkdir -p "$built"
go build -o "$built/" ./cmd/hvdrun ./cmd/hvdbench
export HVD_PROGRAMS=$built OURS_CMD=${OURS_CMD:-bench/peers/ours.py}

cores=$(nproc)
version() { dpkg-query -W -f '${Version}' "$1" 2>/dev/null || echo unknown; }
field() { lscpu | sed -n "s/^$1: *//p" | head -1; }
{
	echo "Date: $(date -u +%F)"
	echo "Machine: $(field 'Model name'), $cores cores, L2 $(field "L2 cache"), L3 $(field "L3 cache"), $(free -g | awk '/^Mem/ { print $2 }') GiB"
	echo "System: $(. /etc/os-release && echo "$PRETTY_NAME"), Linux $(uname -r), in a network namespace with TCP ${BENCH_CC:-reno}"
	echo "gohvd: $(git describe --always --dirty 2>/dev/null || echo unknown), $(go version | cut -d' ' -f3)"
	for p in "${peers[@]}"; do
		case $p in
		ompi) echo "Open MPI: $(version openmpi-bin)" ;;
		mpich) echo "MPICH: $(version mpich)" ;;
		gloo) echo "Gloo: $(version libgloo-dev), over TCP on loopback" ;;
		torch) echo "PyTorch: $(version python3-torch), its gloo backend" ;;
		esac
	done
	echo "Seconds for a case: ${BENCH_SMALL_S} for up to 1 MiB and ${BENCH_LARGE_S} for larger sizes; at most ${BENCH_HARD_S}"
} >"$out/about.txt"
echo "make bench-peers ROUNDS=$rounds NPS=\"$nps\"${QUICK:+ QUICK=1}" >"$out/commands.txt"

# A failure is not fatal, because no other result depends on the limits.
[ -n "${QUICK:-}" ] || bench/peers/run.sh limits >"$out/limits.csv" || echo "bench-peers: the limits of this machine were not measured to the end" >&2
for ((round = 1; round <= rounds; round++)); do
	for np in $nps; do
		# Every second round runs the programs in reverse order, so that no program always runs after the same one.
		order=("${peers[@]}")
		if ((round % 2 == 0)); then
			order=()
			for p in "${peers[@]}"; do order=("$p" ${order[@]+"${order[@]}"}); done
		fi
		for p in "${order[@]}"; do
			# A program that spins needs a core for each rank.
			[ "$p" != ompi-spin ] || [ "$np" -le "$cores" ] || continue
			file=$out/$p-np$np-round$round.csv
			start=$SECONDS
			OUT=$file bench/peers/run.sh "$p" "$np" >/dev/null || true # the file contains the failure
			echo "round $round of $rounds, np=$np, $p: $(grep -c '^[a-z]' "$file" || true) rows in $((SECONDS - start)) s" >&2
		done
	done
done
bench/report.py "$out" -o "$page"
sed -n '/^## Ratios/,/^## Times/p' "$page" | sed '$d'
echo "bench-peers: results in $out, page in $page" >&2
