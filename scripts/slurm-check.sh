#!/usr/bin/env bash
# Runs the scripts of deploy/slurm, signals before a time limit, requeues and limits of cgroups under a real Slurm with two
# nodes (scripts/slurm-cluster.sh). Needs root, Debian's slurm-wlm and munge, PyPI, and PYTHON, an interpreter with PyTorch
# and the module venv. TestSlurm in internal/e2e has the checks that need less.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
	echo "slurm-check: $*" >&2
	exit 1
}

# Runs a batch script with further arguments of sbatch, and prints its output, which is also in the file out.
batch() {
	local script=$1
	shift
	(cd "$work" && timeout 300 sbatch --quiet --wait --output=out "$@" "$script" ${args-}) || true
	cat "$work/out"
}

# Writes a batch script to the file job.
job() {
	{
		echo '#!/bin/bash'
		cat
	} >"$work/job"
}

if [ "${1-}" = limits ]; then # in a cluster with the plugin for limits
	work=$2
	job <<'END'
hvdrun doctor | grep -E '  cgroup '
hvdrun -np 2 --bind-to core true
END
	batch job --nodes=1 --ntasks=1 --cpus-per-task=1 --mem=300
	error=$(grep -hi 'error.*cgroup' "$(dirname "$SLURM_CONF")"/slurmd-*.log | tail -n 1) || true
	[ -z "$error" ] || {
		echo "slurm-check: limits of cgroups are not checked, because this machine does not have them: $error" >&2
		exit 0
	}
	grep -q ' of 300 MiB ' "$work/out" || fail "hvdrun doctor does not see the memory limit of the job"
	grep -q 'got 2 ranks on this host, but they may use only 1 core' "$work/out" || fail "hvdrun has ignored the cores of the job"
	exit 0
fi

if [ "${1-}" = jobs ]; then # in a cluster
	work=$2
	for script in srun hvdrun; do
		args=$work/train.py batch "$PWD/deploy/slurm/$script.sbatch"
		[ "$(grep -c 'rank [0-7] of 8: sum of weights' "$work/out")" = 8 ] || fail "$script.sbatch has not trained on 8 ranks"
	done
	[ -z "$(find "$work" -maxdepth 1 -name '.gohvd-*')" ] || fail "srun.sbatch has left the job's secret"

	(umask 077 && head -c 32 /dev/urandom | base64 >"$work/secret")
	export HVD_SECRET_FILE=$work/secret
	cat >"$work/share.py" <<END
import sys
sys.path.append("$PWD/python/tests")
from cluster_jobs import ELEMENTS, sum_of_ranks
total, sent = sum_of_ranks()
print(f"sum {total:g}, sent {sent / (4 * ELEMENTS):.1f} times the elements", flush=True)
END
	for launcher in srun hvdrun; do
		# Both nodes are this machine. Without HVD_HOSTID, all ranks under srun would share memory.
		job <<<"exec $launcher sh -c 'HVD_HOSTID=\${HOROVOD_HOSTNAME-\$SLURMD_NODENAME} exec python3 $work/share.py'"
		batch job --nodes=2 --ntasks-per-node=2
		# Each node sends all elements once, both over loopback. Without shared memory, it would be six times.
		[ "$(grep -cE 'sum 6, sent 2\.[0-4] times' "$work/out")" = 4 ] || fail "$launcher: the ranks of a node do not share memory"
	done

	cat >"$work/until.py" <<'END'
import signal

stop = []
signal.signal(signal.SIGUSR1, lambda *_: stop.append(True))  # before the imports, which may take long

import gohvd.torch as hvd
import torch

hvd.init()
while not hvd.allreduce(torch.tensor(float(len(stop))), name="stop", op=hvd.Max):
    pass
print("rank", hvd.rank(), "has saved its state", flush=True)
END
	for way in "srun USR1@30 exec srun python3" "hvdrun B:USR1@30 exec hvdrun python3"; do
		read -r name signal command <<<"$way"
		job <<<"$command $work/until.py"
		batch job --nodes=2 --ntasks-per-node=2 --time=2 --signal="$signal"
		[ "$(grep -c 'has saved its state' "$work/out")" = 4 ] || fail "$name: not all ranks have got the signal before the time limit"
	done

	for command in "srun python3" "hvdrun python3"; do
		job <<END
[ -n "\${SLURM_RESTART_COUNT-}" ] || {
	$command $work/until.py & # until the job is requeued
	sleep 10
	scontrol requeue \$SLURM_JOB_ID
	wait
}
exec $command $work/train.py
END
		batch job --nodes=2 --ntasks-per-node=2 --requeue --open-mode=append
		[ "$(grep -c 'rank [0-3] of 4: sum of weights' "$work/out")" = 4 ] || fail "$command: the job has not trained after the requeue"
		rm "$work/out"
	done
	exit 0
fi

work=$(mktemp -d)
chmod 755 "$work"
trap 'rm -rf "$work"' EXIT
make --no-print-directory wheel WHEELS="$("${GO:-go}" env GOARCH)" DIST="$work/dist"
"$PYTHON" -m venv --system-site-packages "$work/venv"
"$work/venv/bin/pip" install --quiet --no-index "$work"/dist/gohvd-*.whl
awk '/^```$/ {on = 0} on; /^```python$/ {on = 1}' docs/quickstart.md >"$work/train.py"
export PATH=$work/venv/bin:$PATH OMP_NUM_THREADS=1 HOME=$work
scripts/slurm-cluster.sh "$0" jobs "$work"
SLURM_TASK_PLUGIN=task/cgroup,task/affinity scripts/slurm-cluster.sh "$0" limits "$work"
echo "slurm-check: passed"
