#!/usr/bin/env bash
# Starts a Slurm cluster with the nodes n1 and n2, which are both this machine, and runs a command that can use it:
#
#   scripts/slurm-cluster.sh COMMAND [ARGS...]
#
# The cluster is in namespaces of its own, with a network that only it can reach, and ends with the command. SLURM_CONF
# names its configuration. Needs root, and Debian's slurmctld, slurmd, slurm-client and munge.
#
# With SLURM_TASK_PLUGIN=task/cgroup,task/affinity, Slurm limits the processors and the memory of jobs by cgroups, if the
# machine lets it.
set -euo pipefail

if [ "${1-}" != --inside ]; then
	# When the namespace ends, no daemon is left. The mounts are not seen outside.
	exec unshare --mount --pid --net --fork --kill-child --mount-proc "$0" --inside "$@"
fi
shift
work=$(mktemp -d)
end() {
	# Only the processes of this namespace are seen here. The cgroups of the jobs are outside of the namespaces.
	kill $(pgrep '^slurm[cds]') || true
	for _ in $(seq 100); do
		pgrep '^slurm[cds]' >"$work/left" || break
		sleep 0.1
	done
	[ -z "${SLURM_TASK_PLUGIN-}" ] || find /sys/fs/cgroup -depth -type d -path '*/slurm_n[12]*' -exec rmdir {} + || true
	rm -rf "$work"
}
trap end EXIT
chmod 755 "$work"
ip link set lo up
ip link add slurm0 type veth peer name slurm1
ip address add 192.0.2.1/24 dev slurm0
ip link set slurm0 up
ip link set slurm1 up
ip route add default dev slurm0
{
	echo "127.0.0.1 localhost"
	echo "192.0.2.1 $(hostname) n1 n2"
} >"$work/hosts"
mount --bind "$work/hosts" /etc/hosts

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
TmpFS=$work/tmp-%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd-%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd-%n.log
SlurmctldPort=16817
ProctrackType=proctrack/linuxproc
TaskPlugin=${SLURM_TASK_PLUGIN-task/none}
MpiDefault=none
SelectType=select/cons_tres
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
MinJobAge=600
KillWait=5
NodeName=n1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=17001 CPUs=16 RealMemory=4000 Gres=gpu:2
NodeName=n2 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=17002 CPUs=16 RealMemory=4000 Gres=gpu:2
PartitionName=all Nodes=n1,n2 Default=YES
END
printf 'ConstrainCores=yes\nConstrainRAMSpace=yes\n' >"$work/cgroup.conf" # for task/cgroup
touch "$work/gpu0" "$work/gpu1" # in place of devices
echo "Name=gpu File=$work/gpu[0-1]" >"$work/gres.conf"
export SLURM_CONF=$work/slurm.conf
slurmctld -f "$SLURM_CONF"
mkdir "$work"/tmp-n1 "$work"/tmp-n2
for node in n1 n2; do slurmd -f "$SLURM_CONF" -N $node; done
end=$((SECONDS + 60))
until [ "$(sinfo --noheader --responding --states=idle --format=%D 2>"$work/sinfo")" = 2 ]; do
	[ $SECONDS -lt $end ] || {
		cat "$work"/sinfo "$work"/slurm*.log >&2
		echo "slurm-cluster: the nodes are not idle after 60 s" >&2
		exit 1
	}
	sleep 0.1
done
"$@"
