"""Elastic jobs on a Ray cluster (docs/clusters.md).

hvdrun runs beside the program and decides which processes are the ranks (docs/elastic.md). Ray finds the hosts and holds
their resources: on each node an actor has the CPUs and GPUs of its slots, and runs hvdrun's agent, which starts the ranks.
The bytes between hvdrun and an agent are arguments and results of calls of the actor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import pickle
import shlex
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

import ray
import ray._private.state
import ray.cloudpickle
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .. import __version__, _meeting, _programs, _results

__all__ = ["ElasticRayExecutor", "RayHostDiscovery"]

# How long a call of an actor that has started may take, and how long the end of a job may take.
_CALL_SECONDS = 60.0
_END_SECONDS = 30.0
# If Ray has not started the actor of a node after this time, other nodes are tried too, and fewer slots of this one.
_BUSY_SECONDS = 10.0
# hvdrun would run the ranks of a host that has an address of its own host itself. A name with a user is never its own.
_USER = "ray@"
# Removes a folder when the process that holds the other end of the pipe at standard input ends, also if it is killed.
_REMOVE_AT_END = 'exec 3<&0; (cat <&3; exec rm -rf "$0") &'


@dataclasses.dataclass
class Settings:
    """The settings of an elastic executor (``ElasticRayExecutor.create_settings``)."""

    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600
    timeout_s: float = 30
    nics: str = ""
    verbose: bool = False


class RayHostDiscovery:
    """Finds the nodes of the Ray cluster and how many ranks each has room for."""

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1) -> None:
        self._per_slot = {"CPU": cpus_per_slot} | ({"GPU": gpus_per_slot} if use_gpu else {})

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Returns the number of slots by the address of the node, also if other jobs use them."""
        return {address: slots for address, (slots, _, _) in self._nodes().items()}

    def _nodes(self) -> dict[str, tuple[int, int, str]]:
        """Returns the number of slots, how many of them are free, and the node's ID by the address of the node."""

        def slots(resources: dict[str, float]) -> int:
            return min(int(resources.get(kind, 0) // n) for kind, n in self._per_slot.items() if n)

        free = ray._private.state.available_resources_per_node()
        return {
            node["NodeManagerAddress"]: (slots(node["Resources"]), slots(free.get(node["NodeID"], {})), node["NodeID"])
            for node in ray.nodes()
            if node["Alive"] and slots(node["Resources"])
        }


class _Agent:
    """The Ray actor of a node. The calls of its methods run in several threads."""

    def __init__(self, slots: int, cpus_per_slot: int) -> None:
        self._name = f"gohvd's agent for {slots} ranks"
        self._threads = {}
        if os.environ.get("OMP_NUM_THREADS") == str(slots * cpus_per_slot):  # Ray has set it for one process with all CPUs
            self._threads = {"OMP_NUM_THREADS": str(cpus_per_slot)}

    def __repr__(self) -> str:
        return self._name

    def version(self) -> str:
        return __version__

    def start(self, words: Sequence[str], function: bytes) -> None:
        """Starts the agent with the words of its command, for processes that call a pickled function."""
        folder = tempfile.mkdtemp(prefix="gohvd")
        self._remover = subprocess.Popen(["/bin/sh", "-c", _REMOVE_AT_END, folder], stdin=subprocess.PIPE, start_new_session=True)
        self._remover.wait()
        self._folder = pathlib.Path(folder)
        (self._folder / "job").write_bytes(pickle.dumps((os.getcwd(), sys.path, function)))
        process = [sys.executable, _beside("_process.py"), folder]
        env = os.environ | self._threads | {"GOHVD_RAY_PROCESS": f"exec {shlex.join(process)}"}
        self._process = subprocess.Popen(
            [_programs.path_of_hvdrun(), *words], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the agent has ended
            if data:
                self._process.stdin.write(data)
                self._process.stdin.flush()
            else:
                self._process.stdin.close()

    def read(self) -> bytes:
        return self._process.stdout.read1(65536)

    def outcomes(self) -> list[bytes]:
        """Returns what the processes have noted, after the end of the agent."""
        self._process.wait()
        return [path.read_bytes() for path in self._folder.glob("outcome.*") if path.suffix != ".new"]


def _beside(name: str) -> str:
    return str(pathlib.Path(__file__).with_name(name))


@dataclasses.dataclass
class _Host:
    actor: Any
    version: Any
    """The reference to the actor's version of gohvd. It is ready when the actor has started."""
    slots: int
    began: float
    busy: bool = False
    """Whether an agent has been started in the actor."""


class ElasticRayExecutor:
    """Runs a function as an elastic job on a Ray cluster: ranks go on without those that have failed or whose node is
    gone, and with those on new nodes. The function trains in ``hvd.elastic.run``.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1, max_num_proc: int | None = None, reset_limit: int | None = None, elastic_timeout: float = 600,
        timeout_s: float = 30, ssh_identity_file: str | None = None, nics: str | Iterable[str] | None = None,
        min_np: int | None = None, max_np: int | None = None, verbose: bool = False,
    ) -> Settings:  # fmt: skip
        """Returns settings. The training pauses with fewer than min_num_proc ranks, for at most elastic_timeout seconds, and
        has at most max_num_proc ranks. min_np and max_np are older names of the two. The ranks may change reset_limit times.
        Processes must have joined timeout_s seconds after the first; it replaces HOROVOD_GLOO_TIMEOUT_SECONDS of the
        environment. nics are network interfaces, as for HOROVOD_GLOO_IFACE. Nothing uses ssh.
        """
        return Settings(
            min_np or min_num_proc, max_np or max_num_proc, reset_limit, elastic_timeout, timeout_s, joined(nics), verbose
        )

    def __init__(
        self, settings: Settings | None = None, use_gpu: bool = False, cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None, env_vars: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        if gpus_per_slot and not use_gpu:
            raise ValueError(f"got gpus_per_slot {gpus_per_slot}, but use_gpu is False")
        if cpus_per_slot < 1:
            raise ValueError(f"got cpus_per_slot {cpus_per_slot}, want at least 1")
        self._settings = settings or Settings()
        limit = self._settings.max_num_proc
        if self._settings.min_num_proc < 1 or limit is not None and limit < self._settings.min_num_proc:
            raise ValueError(f"got min_num_proc {self._settings.min_num_proc} and max_num_proc {limit}")
        self._gpus = (gpus_per_slot or 1) if use_gpu else 0
        self._cpus = cpus_per_slot
        self._discovery = RayHostDiscovery(use_gpu, cpus_per_slot, gpus_per_slot or 1)
        self._env = dict(env_vars or {})
        self._lock = threading.Lock()  # of the fields below
        self._hosts: dict[str, _Host] = {}
        self._outcomes: list[bytes] = []
        self._trouble = ""  # the newest error of an agent, if none has started since
        self._ended = False
        self._function = b""

    def start(self) -> None:
        """Checks that this program is on a node of the cluster. ``run`` starts the processes."""
        if ray.util.client.ray.is_connected():
            raise RuntimeError(
                "gohvd: the workers cannot reach a driver that uses Ray Client: submit the program with ray job submit, or "
                "make the executor in a remote function with num_cpus=0"
            )

    def run(self, worker_fn: Callable[[], Any]) -> list[Any]:
        """Calls worker_fn at each rank, and returns the results of the ranks at the end of the job, by rank.

        Raises RuntimeError if the job fails, with hvdrun's reason and the traceback of a rank, or if results are missing.
        """
        self.start()
        self._hosts, self._outcomes, self._trouble, self._ended = {}, [], "", False
        self._function = ray.cloudpickle.dumps(worker_fn)
        # Not in TMPDIR: the path of a socket must be short, and hvdrun splits the command of its agent at spaces.
        with tempfile.TemporaryDirectory(prefix="gohvd", dir="/tmp") as folder:
            server = _Server(os.path.join(folder, "socket"), self._serve)
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
            try:
                try:
                    end = self._launch(folder)
                finally:
                    server.wait(_END_SECONDS + _CALL_SECONDS)  # for the end of the agents and the outcomes
            finally:
                with self._lock:
                    self._ended = True
                    for host in self._hosts.values():
                        ray.kill(host.actor)
                server.shutdown()
                server.server_close()
        return self._collect(*end)

    def _launch(self, folder: str) -> tuple[int, str]:
        """Runs hvdrun, and returns its exit status and the last line that it has printed itself before its report."""
        script = os.path.join(folder, "relay")
        with_libraries = ["/usr/bin/env", *_loader_path(os.environ)]
        relay = [*with_libraries, sys.executable, "-I", "-S", _beside("_relay.py"), os.path.join(folder, "socket")]
        pathlib.Path(script).write_text(f'exec {shlex.join(relay)} "$@"\n')
        s = self._settings
        words = [
            "/usr/bin/env", "-u", "LD_LIBRARY_PATH", *_loader_path(self._env),
            _programs.path_of_hvdrun(), "-np", str(s.min_num_proc), "--min-np", str(s.min_num_proc),
            "--elastic-timeout", f"{s.elastic_timeout:g}", "--start-timeout", f"{s.timeout_s:g}",
            "--host-discovery-script", f"/bin/sh {shlex.quote(script)}", "--agent", f"/bin/sh {script} {{host}}",
        ]  # fmt: skip
        if s.max_num_proc is not None:
            words += ["--max-np", str(s.max_num_proc)]
        if s.reset_limit is not None:
            words += ["--reset-limit", str(s.reset_limit)]
        if s.nics:
            words += ["--network-interfaces", s.nics]
        if s.verbose:
            words += ["--verbose"]
        # Other variables of this program would replace those of the nodes.
        own = ("HOROVOD_", "HVD_", "XDG_")
        env = {k: v for k, v in os.environ.items() if k.startswith(own) or k in ("HOME", "USER", "TMPDIR")} | self._env
        words += ["/bin/sh", "-c", 'eval "$GOHVD_RAY_PROCESS"']
        command = [*with_libraries, *_programs.with_parent(words)]
        # The agents of other hosts run in the working directory of hvdrun. It must be there too.
        process = subprocess.Popen(
            command, env=env, cwd="/", start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="backslashreplace",
        )  # fmt: skip
        last = [""]

        def copy(source: IO[str], to: IO[str]) -> None:
            report = False
            with source:
                for line in source:
                    to.write(line)
                    to.flush()
                    report |= line.startswith("-----")
                    if line.startswith("hvdrun: ") and not report:
                        last[0] = line.strip()

        copies = [
            threading.Thread(target=copy, args=streams, name="gohvd.ray", daemon=True)
            for streams in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        ]
        for thread in copies:
            thread.start()
        try:
            status = process.wait()
            for thread in copies:
                thread.join(_END_SECONDS)
            return status, last[0]
        except BaseException:
            _programs.end(process)
            raise

    def _collect(self, status: int, line: str) -> list[Any]:
        found = [pickle.loads(outcome) for outcome in self._outcomes]
        outcomes = [outcome for outcome, _ in found if outcome is not None]
        errors = [error for _, error in found if error is not None]
        traceback = max(errors, key=lambda error: error[:2])[-1] if errors else ""  # of the newest generation
        reasons = [reason for reason in (self._trouble, traceback) if reason]
        if status != 0:
            text = "\n".join([line, *reasons])
            raise RuntimeError(f"gohvd: the elastic job on Ray has failed (exit status {status}): {text}")
        return _results.by_rank(outcomes, "\n".join(reasons) or "processes have ended without one")

    def _serve(self, words: list[str], incoming: Any, outgoing: Any) -> None:
        """Serves a process of _relay.py with its words."""

        def answer(error: str | None) -> None:
            outgoing.write(json.dumps(error).encode() + b"\n")

        if not words:
            try:
                hosts = self._find()
            except Exception as e:
                # hvdrun tells the last line of an error.
                answer(f"asking Ray for its nodes: {type(e).__name__}: {' '.join(str(e).split())}")
                return
            answer(None)
            outgoing.write("".join(f"{_USER}{_bracketed(host)}:{n}\n" for host, n in hosts.items()).encode())
            return
        name = words[0].removeprefix(_USER).strip("[]")
        with self._lock:
            host = self._hosts.get(name)
            if host is None or host.busy:
                answer("the actor on this node has ended" if host is None else "the last agent on this node has not ended")
                return
            host.busy = True
        try:
            try:
                _meeting.check_versions(__version__, [ray.get(host.version, timeout=_CALL_SECONDS)], [name])
                ray.get(host.actor.start.remote(words[2:], self._function), timeout=_CALL_SECONDS)
            except Exception as e:
                self._trouble = str(e)
                answer(self._trouble)
            else:
                self._trouble = ""
                answer(None)
                self._carry(host, name, incoming, outgoing)
        finally:
            with self._lock:
                if self._hosts.get(name) is host:
                    del self._hosts[name]  # the next discovery asks for another actor there
            ray.kill(host.actor)

    def _carry(self, host: _Host, name: str, incoming: Any, outgoing: Any) -> None:
        """Copies between hvdrun and its agent until the agent ends, and then keeps the outcomes of its processes."""

        def send() -> None:
            with contextlib.suppress(ray.exceptions.RayError, OSError):
                data = b"?"
                while data:
                    data = incoming.read1(65536)
                    ray.get(host.actor.write.remote(data), timeout=_CALL_SECONDS)

        threading.Thread(target=send, name="gohvd.ray", daemon=True).start()
        try:
            while data := ray.get(host.actor.read.remote()):
                with contextlib.suppress(OSError):  # hvdrun has given the agent up, and the other thread ends it
                    outgoing.write(data)
            outcomes = ray.get(host.actor.outcomes.remote(), timeout=_CALL_SECONDS)
        except ray.exceptions.RayError as e:
            self._trouble = f"the actor for the ranks on {name} has failed: {e}"
            print(f"gohvd: {self._trouble}", file=sys.stderr)
            return
        with self._lock:
            self._outcomes += outcomes

    def _find(self) -> dict[str, int]:
        """Returns the slots of the nodes whose actors have started, and asks Ray for actors on others."""
        nodes = self._discovery._nodes()
        limit = self._settings.max_num_proc or sum(slots for slots, _, _ in nodes.values())
        now = time.monotonic()
        with self._lock:
            if self._ended:
                return {}
            started, lost, fewer = {}, set(), {}
            for name, host in self._hosts.items():
                if name not in nodes:
                    lost.add(name)
                elif ray.wait([host.version], timeout=0)[0]:
                    try:
                        ray.get(host.version)
                        started[name] = host.slots
                    except ray.exceptions.RayError:
                        lost.add(name)
            have = sum(started.values())
            waiting = {n: h for n, h in self._hosts.items() if n not in started and n not in lost}
            if have >= limit:
                lost |= set(waiting)
            young = {n: h for n, h in waiting.items() if now - h.began < _BUSY_SECONDS}
            for name in set(waiting) - set(young):
                slots, free, _ = nodes[name]
                # If the node had placed the actor, no more than the other slots would be free.
                if slots - waiting[name].slots < free < waiting[name].slots:
                    lost.add(name)
                    fewer[name] = free
            for name in lost:
                ray.kill(self._hosts.pop(name).actor)
            want = limit - have - sum(h.slots for h in young.values())
            for name, (slots, _, node) in nodes.items():
                if name in self._hosts or want <= 0:
                    continue
                slots = min(fewer.get(name, slots), want)
                want -= slots
                actor = ray.remote(_Agent).options(
                    num_cpus=slots * self._cpus, num_gpus=slots * self._gpus, max_concurrency=4,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                ).remote(slots, self._cpus)  # fmt: skip
                self._hosts[name] = _Host(actor, actor.version.remote(), slots, now)
        return started


def joined(nics: str | Iterable[str] | None) -> str:
    """Returns the names of network interfaces as a setting. One string may have one name, or several with commas."""
    return nics if isinstance(nics, str) else ",".join(nics or ())


def _loader_path(env: Mapping[str, str]) -> list[str]:
    """Returns a word for env(1). This interpreter may need the variable, but hvdrun would send it to the nodes."""
    return [f"{name}={value}" for name, value in env.items() if name == "LD_LIBRARY_PATH"]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _Server(socketserver.ThreadingUnixStreamServer):
    """Accepts the connections of _relay.py, and calls a function for each in a thread."""

    daemon_threads = True

    def __init__(self, path: str, serve: Callable[[list[str], Any, Any], None]) -> None:
        super().__init__(path, _Connection)
        self.serve = serve
        self.active = 0
        self.idle = threading.Condition()

    def wait(self, seconds: float) -> None:
        """Waits until no connection is left, for at most so many seconds."""
        with self.idle:
            self.idle.wait_for(lambda: not self.active, seconds)


class _Connection(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        with self.server.idle:
            self.server.active += 1
        try:
            self.server.serve(json.loads(self.rfile.readline()), self.rfile, self.wfile)
        finally:
            with self.server.idle:
                self.server.active -= 1
                self.server.idle.notify_all()
