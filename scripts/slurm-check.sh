#!/usr/bin/env bash
# Runs the scripts of deploy/slurm under a real Slurm with two nodes, n1 and n2, which are both this machine. Needs root,
# Debian's slurm-wlm and munge, PyPI, and PYTHON, an interpreter with PyTorch and the module venv.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1-}" != inside ]; then
	# When the namespace ends, no daemon is left. The mounts are not seen outside.
	exec unshare --mount --pid --fork --kill-child --mount-proc "$0" inside
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
address=$(hostname -I | cut -d' ' -f1)
{
	cat /etc/hosts
	echo "${address:-127.0.0.1} n1 n2"
} >"$work/hosts"
mount --bind "$work/hosts" /etc/hosts

chmod 755 "$work"
dd if=/dev/urandom of="$work/key" bs=128 count=1 status=none
chmod 400 "$work/key"
munged --force --socket="$work/munge" --key-file="$work/key" --pid-file="$work/munged.pid" --log-file="$work/munged.log" \
	--seed-file="$work/munged.seed"
cat >"$work/slurm.conf" <<END
ClusterName=check
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=$work/munge
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool-%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd-%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd-%n.log
SlurmctldPort=16817
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=17001 CPUs=16 RealMemory=4000
NodeName=n2 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=17002 CPUs=16 RealMemory=4000
PartitionName=all Nodes=n1,n2 Default=YES
END
export SLURM_CONF=$work/slurm.conf
slurmctld -f "$SLURM_CONF"
for node in n1 n2; do slurmd -f "$SLURM_CONF" -N $node; done

make --no-print-directory wheel WHEELS="$("${GO:-go}" env GOARCH)" DIST="$work/dist"
"$PYTHON" -m venv --system-site-packages "$work/venv"
"$work/venv/bin/pip" install --quiet --no-index "$work"/dist/gohvd-*.whl
awk '/^```$/ {on = 0} on; /^```python$/ {on = 1}' docs/quickstart.md >"$work/train.py"
for script in srun hvdrun; do
	PATH=$work/venv/bin:$PATH OMP_NUM_THREADS=1 HOME=$work timeout 300 \
		sbatch --quiet --wait --output="$work/$script.out" "deploy/slurm/$script.sbatch" "$work/train.py" || true
	cat "$work/$script.out"
	[ "$(grep -c 'rank [0-7] of 8: sum of weights' "$work/$script.out")" = 8 ] || {
		echo "slurm-check: $script.sbatch has not trained on 8 ranks" >&2
		exit 1
	}
done
[ -z "$(find "$work" -maxdepth 1 -name '.gohvd-*')" ] || {
	echo "slurm-check: srun.sbatch has left the job's secret" >&2
	exit 1
}
echo "slurm-check: passed"
