#!/usr/bin/env bash
# Measures an allreduce between hosts over slow links: on two levels, on one level, and on one level if the ranks
# alternate between the hosts. On one level, large tensors of 32-bit floats are reduced in a ring. The hosts are
# network namespaces of this machine, and tc limits each direction of each host's link. Needs root, iproute2,
# util-linux and python3. These environment variables change what it does:
#
#   ROUNDS=5                   the number of rounds; in each round every case runs once
#   LAYOUTS="2+2 3+1 2+2+2"    the ranks on each host
#   RATE=1gbit                 the rate of each link in each direction
#   BYTES=16M, TYPE=float      size and element type of the tensor
#   ITERS=20                   the number of timed allreduces of a case and round
#   RAW=                       if set, only the backend is measured, without negotiation
#
# For each state of the cores (bench/cores.py), it prints a line for each layout and case: the median time in ms, the
# range over the rounds, the median and the range of the ratios to one level in the same round, and the bytes that leave
# the first host for each byte of the tensor.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${ROUNDS:-5} layouts=${LAYOUTS:-2+2 3+1 2+2+2} rate=${RATE:-1gbit} iters=${ITERS:-20}

if [ -z "${HOSTS_DIR:-}" ]; then
	HOSTS_DIR=$(mktemp -d -t gohvd-hosts.XXXXXX)
	trap 'rm -rf "$HOSTS_DIR"' EXIT
	${GO:-go} build -o "$HOSTS_DIR/" ./cmd/hvdbench
	head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n' >"$HOSTS_DIR/secret"
	chmod 600 "$HOSTS_DIR/secret"
	# The namespaces disappear with the namespaces of this process.
	HOSTS_DIR=$HOSTS_DIR unshare --net --mount --propagation private bench/hosts.sh
	exit
fi

mkdir -p /run/netns
mount -t tmpfs none /run/netns
ip link add br0 up type bridge
hosts=0
host() { # makes host number $1
	ip netns add "h$1"
	ip link add "port$1" up master br0 type veth peer name eth0 netns "h$1"
	ip -n "h$1" address add "10.77.0.$((1 + $1))/24" dev eth0
	ip -n "h$1" link set lo up
	ip -n "h$1" link set eth0 up
	for dev in "-n h$1 qdisc add dev eth0" "qdisc add dev port$1"; do
		tc $dev root tbf rate "$rate" burst 128kb latency 20ms
	done
}
sent() { ip netns exec h0 cat /sys/class/net/eth0/statistics/tx_bytes; }

job() { # NAME PLACES VARIABLE...: runs hvdbench with a rank on each of the given hosts
	local name=$1 places=($2) rank=0 pids=() before
	shift 2
	before=$(sent)
	for place in "${places[@]}"; do
		ip netns exec "h$place" env "$@" RANK=$rank WORLD_SIZE=${#places[@]} MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 \
			HVD_HOSTID="h$place" HVD_SECRET_FILE="$HOSTS_DIR/secret" "$HOSTS_DIR/hvdbench" allreduce -b "${BYTES:-16M}" \
			-e "${BYTES:-16M}" -d "${TYPE:-float}" -n "$iters" -c 0 --out-of-place=false ${RAW:+--raw} --format csv \
			>"$HOSTS_DIR/out$rank" &
		pids+=($!)
		rank=$((rank + 1))
	done
	for pid in "${pids[@]}"; do wait "$pid"; done
	{
		grep ^collective, "$HOSTS_DIR/out0" | sed 's/^/round,layout,case,sent,/'
		echo "$round,$layout,$name,$(($(sent) - before)),$(grep ^allreduce, "$HOSTS_DIR/out0")"
		HVD_PROGRAMS=$HOSTS_DIR bench/cores.py
	} >>"$HOSTS_DIR/results"
}
HVD_PROGRAMS=$HOSTS_DIR bench/cores.py >"$HOSTS_DIR/results"

for round in $(seq "$rounds"); do
	for layout in $layouts; do
		places=() turns=() n=0
		for ranks in ${layout//+/ }; do
			[ "$n" -lt "$hosts" ] || { host "$n" && hosts=$((n + 1)); }
			for ((i = 0; i < ranks; i++)); do places+=("$n") turns+=("$i.$n"); done
			n=$((n + 1))
		done
		# In this order the ranks of a host are as far from each other as possible.
		alternating=$(printf '%s\n' "${turns[@]}" | sort -n | cut -d. -f2 | tr '\n' ' ')
		job two-levels "${places[*]}" HOROVOD_HIERARCHICAL_ALLREDUCE=1
		job one-level "${places[*]}" HOROVOD_HIERARCHICAL_ALLREDUCE=0
		job alternating "$alternating" HOROVOD_HIERARCHICAL_ALLREDUCE=0
		echo "round $round of $rounds: $layout" >&2
	done
done
bench/hosts.py "$HOSTS_DIR/results" "$iters"
