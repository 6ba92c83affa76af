#!/usr/bin/env python3
"""Checks the manifests of deploy/kubernetes by the schemas of Kubernetes and of the operators, and runs the commands of their
pods: kubernetes-check.py SCHEMA...

Each SCHEMA is the API of Kubernetes (swagger.json) or the definition of a resource of an operator. The control plane and the
operators are not run: this script gives the pods what these give them by their documentation. It runs the command of a pod in
namespaces with an address, a host name, and the variables and the secret of the manifest, and resolves the names of headless
services. Everything is in namespaces that end with the script. Needs root, yaml, Debian's openssh-server, $HVD_RUN and
$HVD_LIBRARY, and for the pods an interpreter with numpy and torch in $PYTHON (make kubernetes).
"""

from __future__ import annotations

import copy
import json
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import yaml

MANIFESTS = pathlib.Path(__file__).resolve().parent.parent / "deploy" / "kubernetes"
LIMIT_SECONDS = 600.0  # of a busy machine
# How much later than the others a pod starts. Without a setting, ranks wait 30 s for each other.
LATE_SECONDS = 33.0

# The program of the pods, in place of examples/pytorch_digits.py. It prints a line before it waits for the other ranks, and
# when the ranks have met. If pods have several ranks, it prints how much each pod sends for an allreduce. It ends when the
# file end is there.
PROGRAM = """
import os
import numpy as np
import cluster_jobs
import gohvd.numpy as hvd
print("waits", flush=True)
hvd.init()
total = hvd.allreduce(np.array([float(hvd.rank())]), op=hvd.Sum, name="first")[0]
print(f"rank {hvd.rank()} of {hvd.size()}: sum {total:g}", flush=True)
if hvd.local_size() > 1:
    print(f"sent {cluster_jobs.sum_of_ranks()[1] / (4 * cluster_jobs.ELEMENTS):.1f} times the elements", flush=True)
while not hvd.allreduce(np.array([os.path.exists("/opt/gohvd/end")], np.int32), op=hvd.Max, name="end")[0]:
    pass
"""

# The start of a pod in its namespaces. $1 is the new root folder, $2 the file with the names, $3 the folder /opt/gohvd, $4 the
# folder with the secret, which is mounted at /secret, and $5 has what the MPI operator mounts. The home of root is another
# folder, because the one of this machine may have no .ssh.
START = """
set -e
read go
hostname "$HOSTNAME"
root=$1 hosts=$2 opt=$3 secret=$4 mpi=$5
shift 5
mount -t tmpfs tmpfs "$root"
for path in /*; do
	if [ -L "$path" ]; then
		cp -P "$path" "$root/"
	elif [ "$path" = /etc ]; then
		cp -a /etc "$root/"
	elif [ -d "$path" ]; then
		mkdir "$root$path"
		mount --rbind "$path" "$root$path"
	fi
done
mount --bind "$hosts" "$root/etc/hosts"
mount -t tmpfs tmpfs "$root/opt"
mount -t tmpfs tmpfs "$root/run"
mkdir "$root/opt/gohvd" "$root/secret" "$root/run/sshd" "$root/home-of-root"
sed -i 's#^\\(root:.*\\):/root:#\\1:/home-of-root:#' "$root/etc/passwd"
cp -a "$mpi/ssh" "$root/home-of-root/.ssh"
cp -a "$mpi/etc" "$root/etc/mpi"
ssh-keygen -q -A -f "$root"
echo 'StrictModes no' >>"$root/etc/ssh/sshd_config"
printf 'Host *\\nStrictHostKeyChecking no\\nUserKnownHostsFile /dev/null\\nLogLevel ERROR\\n' >"$root/etc/ssh/ssh_config"
mount --bind "$opt" "$root/opt/gohvd"
mount --bind "$secret" "$root/secret"
exec chroot "$root" "$@"
"""


def manifest(name: str) -> list[Any]:
    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Schemas:
    """The schemas of the kinds of objects, by apiVersion and kind."""

    def __init__(self, paths: list[str]) -> None:
        self.kinds: dict[tuple[str, str], Any] = {}
        self.shared: dict[str, Any] = {}
        for path in map(pathlib.Path, paths):
            if path.suffix == ".json":
                self.shared = json.loads(path.read_text())["definitions"]
                for schema in self.shared.values():
                    for k in schema.get("x-kubernetes-group-version-kind", ()):
                        self.kinds[f"{k['group']}/{k['version']}".lstrip("/"), k["kind"]] = schema
                continue
            spec = yaml.safe_load(path.read_text())["spec"]
            for version in spec["versions"]:
                kind = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                self.kinds[kind] = version["schema"]["openAPIV3Schema"]

    def check(self, o: Any) -> None:
        """Raises ValueError unless an object has only the fields of its kind, and all that it must have."""
        self._check(o, self.kinds[o["apiVersion"], o["kind"]], o["kind"], set(o) - {"metadata"})

    def _check(self, o: Any, schema: Any, path: str, only: set[str] | None = None) -> None:
        schema = self.shared[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        if schema.get("x-kubernetes-int-or-string") or schema.get("format") == "int-or-string":
            kinds: Any = (int, str)
        elif schema.get("x-kubernetes-preserve-unknown-fields") or "type" not in schema:
            return
        else:
            kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}[schema["type"]]
        if path.endswith("Quantity") or schema.get("description", "").startswith("Quantity is"):
            kinds = (int, str)
        if not isinstance(o, kinds):
            raise ValueError(f"{path} is {o!r}, want {schema.get('type', 'an integer or a string')}")
        if "enum" in schema and o not in schema["enum"]:
            raise ValueError(f"{path} is {o!r}, want one of {schema['enum']}")
        if isinstance(o, list):
            for i, item in enumerate(o):
                self._check(item, schema["items"], f"{path}[{i}]")
        if isinstance(o, dict):
            fields, others = schema.get("properties", {}), schema.get("additionalProperties")
            missing = set(schema.get("required", ())) - set(o)
            if missing or others is None and set(o) - set(fields):
                raise ValueError(f"{path} has fields {sorted(o)}, lacks {sorted(missing)}, want some of {sorted(fields)}")
            for name, value in o.items():
                if only is None or name in only:
                    self._check(value, fields.get(name, others), f"{path}.{name}")


Pod = tuple[str, int]  # the name of the manifest and the number of the pod


class Pods:
    """The pods of some jobs, and the names of its services."""

    def __init__(self, work: pathlib.Path) -> None:
        self.work, self.hosts, self.program, self.secret = work, work / "hosts", work / "program", work / "secret"
        for folder in work / "root", self.program, self.secret:
            folder.mkdir()
        (self.program / "pytorch_digits.py").write_text(PROGRAM)
        (self.secret / "job").write_text(secrets.token_hex(32))
        (self.secret / "job").chmod(0o400)
        self.hosts.write_text("")
        self.mpi = work / "mpi"
        (self.mpi / "ssh").mkdir(parents=True)
        (self.mpi / "etc").mkdir()
        key = self.mpi / "ssh" / "id_rsa"
        subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", str(key)], check=True)
        key.with_name("authorized_keys").write_bytes(key.with_suffix(".pub").read_bytes())
        (work / "hvdrun").symlink_to(os.environ["HVD_RUN"])
        for name, command in ("python3", ""), ("torchrun", "-m torch.distributed.run"):  # of the image
            (work / name).write_text(f'#!/bin/sh\nexec {os.environ["PYTHON"]} {command} "$@"\n')
            (work / name).chmod(0o755)
        self.names: dict[str, str] = {}  # the address of each name
        self.count = 1
        self.running: dict[Pod, subprocess.Popen[str]] = {}
        ip("link", "set", "lo", "up")
        ip("link", "add", "br0", "type", "bridge")
        ip("link", "set", "br0", "up")

    def start(self, pod: Pod, spec: Any, host: str, domain: str, variables: dict[str, str]) -> None:
        """Starts a pod. variables are what the operator adds to the environment."""
        c = spec["containers"][0]
        self.count += 1
        address, link = f"192.0.2.{self.count}", f"pod{self.count}"
        env = {"PATH": f"{self.work}:/usr/bin:/bin:/usr/sbin:/sbin", "HOSTNAME": host, "OMP_NUM_THREADS": "1"}
        env |= {n: os.environ[n] for n in ("PYTHONPATH", "HVD_LIBRARY")}  # the image has the packages
        for e in c.get("env", ()):
            env[e["name"]] = e["value"] if "value" in e else (self.secret / e["valueFrom"]["secretKeyRef"]["key"]).read_text()
        folders = self.work / "root", self.hosts, self.program, self.secret, self.mpi
        # Unless the pod shares its PID namespace, the first program of the container is process 1.
        first = [] if spec.get("shareProcessNamespace") else ["--pid", "--fork", "--kill-child", "--mount-proc"]
        unshare = ["unshare", "--net", "--uts", "--mount", *first]
        with open(self._path(pod), "a") as log:
            process = subprocess.Popen(
                [*unshare, "sh", "-c", START, "sh", *map(str, folders), *c["command"]],
                env=env | variables, text=True, stdin=subprocess.PIPE, stdout=log, stderr=log,
            )  # fmt: skip
        self.running[pod] = process
        mine = os.readlink("/proc/self/ns/net")
        wait_for("namespace", lambda: os.readlink(f"/proc/{process.pid}/ns/net") != mine)
        ip("link", "add", link, "master", "br0", "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
        ip("link", "set", link, "up")
        for words in f"address add {address}/24 dev eth0", "link set eth0 up", "link set lo up":
            subprocess.run(["nsenter", "--net", "--target", str(process.pid), "ip", *words.split()], check=True)
        self.names[f"{host}.{domain}" if domain else host] = address
        lines = ["127.0.0.1 localhost", *(f"{a} {n}" for n, a in self.names.items())]
        self.hosts.write_text("\n".join(lines) + "\n")
        process.stdin.write("go\n")
        process.stdin.close()

    def _path(self, pod: Pod) -> pathlib.Path:
        return self.work / f"pod-{pod[0]}-{pod[1]}"

    def log(self, pod: Pod) -> str:
        return self._path(pod).read_text()

    def logs(self, name: str) -> str:
        """Returns the logs of all pods of a manifest."""
        return "".join(self.log(pod) for pod in self.running if pod[0] == name)

    def send(self, pod: Pod, number: signal.Signals) -> None:
        """Sends a signal to the first program of a pod, as Kubernetes does."""
        pid = self.running[pod].pid
        if os.readlink(f"/proc/{pid}/ns/pid") != os.readlink(f"/proc/{pid}/ns/pid_for_children"):
            # The process is unshare, which has started the program in a new PID namespace.
            pid = int(subprocess.run(["pgrep", "-P", str(pid)], check=True, capture_output=True, text=True).stdout)
        os.kill(pid, number)

    def wait(self, what: str, condition: Any) -> None:
        """Waits for a condition. It is an error if a pod fails before."""

        def holds() -> bool:
            failed = [pod for pod, process in self.running.items() if process.poll()]
            if failed:
                raise RuntimeError(f"a pod of {failed[0][0]} has failed:\n{self.log(failed[0])}")
            return condition()

        try:
            wait_for(what, holds)
        except TimeoutError:
            print("".join(map(self.log, self.running)), file=sys.stderr)
            raise

    def meet(self, rounds: int = 1, ranks: int = 0) -> None:
        """Waits until the ranks of each manifest, by default one in each pod, have met, for the last of some rounds."""

        def met(name: str) -> bool:
            logs, size = self.logs(name), ranks or sum(pod[0] == name for pod in self.running)
            total = size * (size - 1) // 2
            return all(logs.count(f"rank {rank} of {size}: sum {total}\n") == rounds for rank in range(size))

        self.wait("the ranks to meet", lambda: all(met(name) for name in {pod[0] for pod in self.running}))

    def end(self, want: Callable[[Pod], Sequence[int]]) -> None:
        """Waits until all pods have ended. Each must have one of the statuses that want returns for it."""
        for pod, process in self.running.items():
            if process.wait(LIMIT_SECONDS) not in want(pod):
                raise RuntimeError(f"{pod} has status {process.returncode}, want {want(pod)}:\n" + self.logs(pod[0]))

    def finish(self) -> None:
        """Makes the programs end, and forgets the pods."""
        (self.program / "end").touch()
        self.end(lambda _: [0])
        self.clear()

    def clear(self) -> None:
        (self.program / "end").unlink(missing_ok=True)
        for path in self.work.glob("pod-*"):
            path.unlink()
        self.running, self.names = {}, {}


def wait_for(what: str, condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"kubernetes-check: waited {LIMIT_SECONDS:g} s for {what}")
        time.sleep(0.1)


def say(text: str) -> None:
    print("kubernetes-check: " + text, flush=True)


def check_schemas(schemas: Schemas) -> None:
    for path in sorted(MANIFESTS.glob("*.yaml")):
        for o in manifest(path.name):
            schemas.check(o)
            bad = copy.deepcopy(o)
            bad["spec"]["unknownField"] = 1
            try:
                schemas.check(bad)
            except ValueError:
                say(f"{path.name}: a correct {o['kind']} of {o['apiVersion']}")
            else:
                raise AssertionError(f"{path.name}: the schema of {o['kind']} allows any field")


def jobs() -> dict[str, list[tuple[Any, str, str, dict[str, str]]]]:
    """Returns how Pods.start starts the pods of each manifest, in the order of the ranks. The one with hvdrun is left out."""
    job = manifest("indexed-job.yaml")[1]["spec"]
    spec = job["template"]["spec"]
    indexed = [
        (spec, f"train-{i}", spec["subdomain"], {"JOB_COMPLETION_INDEX": str(i)}) for i in range(job["completions"])
    ]

    job = manifest("jobset.yaml")[0]["spec"]["replicatedJobs"][0]
    spec = job["template"]["spec"]["template"]["spec"]
    jobset = [
        (spec, f"train-{job['name']}-0-{i}", "train", {"JOB_COMPLETION_INDEX": str(i)})
        for i in range(job["template"]["spec"]["completions"])
    ]

    replicas = manifest("pytorchjob.yaml")[0]["spec"]["pytorchReplicaSpecs"]
    names = ["train-master-0", *(f"train-worker-{i}" for i in range(replicas["Worker"]["replicas"]))]
    pytorch = []
    for i, name in enumerate(names):
        variables = {"RANK": str(i), "WORLD_SIZE": str(len(names)), "MASTER_ADDR": names[0], "MASTER_PORT": "23456"}
        pytorch.append((replicas["Worker" if i else "Master"]["template"]["spec"], name, "", variables))

    group = manifest("leaderworkerset.yaml")[0]["spec"]["leaderWorkerTemplate"]
    leader = []
    for i in range(group["size"]):
        variables = {
            "LWS_LEADER_ADDRESS": "train-0.train.default", "LWS_GROUP_SIZE": str(group["size"]), "LWS_WORKER_INDEX": str(i)
        }  # fmt: skip
        leader.append((group["workerTemplate"]["spec"], f"train-0-{i}" if i else "train-0", "train.default", variables))

    trainer = manifest("trainjob.yaml")[0]["spec"]["trainer"]
    train = []
    for i in range(trainer["numNodes"]):
        variables = {
            "PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(i), "PET_MASTER_ADDR": "train-node-0-0.train", "PET_MASTER_PORT": "29400",
        }  # fmt: skip
        train.append(({"containers": [trainer]}, f"train-node-0-{i}", "train", variables))

    return {
        "indexed-job.yaml": indexed, "jobset.yaml": jobset, "pytorchjob.yaml": pytorch, "leaderworkerset.yaml": leader,
        "trainjob.yaml": train,
    }  # fmt: skip


def late_pod(pods: Pods) -> None:
    """Runs a job of each manifest, whose last pod starts later than the others."""
    all_jobs = jobs()
    for name, job in all_jobs.items():
        for i, pod in enumerate(job[:-1]):
            pods.start((name, i), *pod)
    # The launcher of trainjob.yaml, torchrun, starts the ranks of all pods at the same time.
    waiting = [pod for pod in pods.running if pod[0] != "trainjob.yaml"]
    pods.wait("the ranks to wait", lambda: all("waits\n" in pods.log(pod) for pod in waiting))
    time.sleep(LATE_SECONDS)
    for name, job in all_jobs.items():
        pods.start((name, len(job) - 1), *job[-1])
    pods.meet()
    pods.finish()
    for name in all_jobs:
        say(f"{name}: all ranks have met and ended, although a pod has started {LATE_SECONDS:g} s later")


def lost_pod(pods: Pods) -> None:
    """Ends a pod of each job. Then the pods start again at other addresses, if the manifest says so."""
    ranks = jobs()

    def start(name: str) -> None:
        for i, pod in enumerate(ranks[name]):
            pods.start((name, i), *pod)

    for number in signal.SIGKILL, signal.SIGTERM:  # SIGTERM is for a pod that is preempted or evicted

        def statuses(pod: Pod) -> list[int]:
            # torchrun has a handler for SIGTERM, and unshare, which has started it, may end with 1 after its SIGKILL.
            return [1] if pod[1] != 2 else [1, -number] if pod[0] == "trainjob.yaml" else [-number]

        for name in ranks:
            start(name)
        pods.meet()
        for name in ranks:
            pods.send((name, 2), number)
        pods.end(statuses)
        for pod in pods.running:
            assert pod[1] == 2 or "rank 2 failed" in pods.log(pod), pods.log(pod)
        for name in ranks:
            say(f"{name}: after {number.name} to a pod, the other ranks fail and name its rank")
        if number == signal.SIGKILL:
            pods.clear()

    before, pods.running = dict(pods.names), {}
    again = [name for name in ranks if name != "pytorchjob.yaml"]  # indexed-job.yaml with a backoffLimit
    for name in again:
        start(name)
    assert pods.names["train-0.train"] != before["train-0.train"]
    pods.meet(2)
    pods.finish()
    for name in again:
        say(f"{name}: the ranks of pods that come back at other addresses have met")


def mpi_job(pods: Pods) -> None:
    spec = manifest("mpijob.yaml")[0]["spec"]
    slots, workers = spec["slotsPerWorker"], spec["mpiReplicaSpecs"]["Worker"]
    names = [f"train-worker-{i}" for i in range(workers["replicas"])]
    lines = [f"{name}.train.default.svc slots={slots}\n" for name in names]
    (pods.mpi / "etc" / "hostfile").write_text("".join(lines))
    launcher = "mpijob.yaml", len(names)

    def start_launcher() -> None:
        pods.start(launcher, spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"], "train-launcher", "", {})

    def start_workers() -> None:
        for i, name in enumerate(names):
            pods.start(("mpijob.yaml", i), workers["template"]["spec"], name, "train.default.svc", {})

    order = [start_launcher, start_workers]
    if spec.get("launcherCreationPolicy") == "WaitForWorkersReady":
        order.reverse()
    for lost in None, signal.SIGKILL, signal.SIGTERM:
        order[0]()
        time.sleep(3)  # it may last much longer until the other pods have started
        order[1]()
        pods.meet(ranks=slots * len(names))
        if lost is None:
            (pods.program / "end").touch()
        else:
            pods.send(("mpijob.yaml", 1), lost)
        status, log = pods.running[launcher].wait(LIMIT_SECONDS), pods.log(launcher)
        for process in pods.running.values():  # as cleanPodPolicy says
            process.kill()
            process.wait()
        if lost is None:
            # Each pod sends all elements once, and headers. If its ranks did not share memory, they would send three times as much.
            assert status == 0 and len(re.findall(r"sent 1\.[0-2] times the elements", log)) == slots * len(names), log
            say("mpijob.yaml: all ranks have met and ended, and those of a pod share memory")
        else:
            assert status != 0 and names[1] in log, log
            say(f"mpijob.yaml: after {lost.name} to a pod, the job fails, and hvdrun names the pod")
        pods.clear()


def main(schemas: list[str]) -> None:
    check_schemas(Schemas(schemas))
    with tempfile.TemporaryDirectory() as folder:
        pods = Pods(pathlib.Path(folder))
        late_pod(pods)
        lost_pod(pods)
        mpi_job(pods)
    say("passed")


if __name__ == "__main__":
    if sys.argv[1] != "--inside":
        inside = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        os.execvp("unshare", [*inside, sys.executable, __file__, "--inside", *sys.argv[1:]])
    main(sys.argv[2:])
