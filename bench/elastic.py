#!/usr/bin/env python3
"""Compares what the death or the hang of a process costs in elastic jobs of gohvd, with torchrun, and with torchft:

    make libgohvd && go build -o bin/ ./cmd/hvdrun
    PATH=$PWD/bin:$PATH PYTHONPATH=python bench/elastic.py [--ranks 4] [--deaths 2] [--hangs 1] [--seed 1]

The interpreter must have PyTorch and torchft (PyPI). Each system trains the same model, in one job, and the same
processes get the same signals in the same order:

    gohvd     hvdrun and gohvd.torch.elastic, with a commit after each step
    torchrun  DistributedDataParallel over gloo, --max-restarts, and a checkpoint in /dev/shm after each step. A step is
              done when rank 0 has written the checkpoint, for which the others wait
    torchft   a lighthouse, and the allreduce of its Manager over gloo. This program starts a process again that has ended.
              The DistributedDataParallel of torchft 0.2.0 ends a process whose allreduce over gloo fails
    ft+gohvd  the same over gohvd's ElasticProcessGroup

In each of them, a rank that does not answer for 5 s counts as failed. A process that is still stopped when the others
have gone on for 20 steps is killed, as its operator would do it. For each kind of fault the table has the median, the
least and the greatest value of

    stop       the seconds from the signal until all ranks have done a step that none had done before
    lost       the seconds in which no new step was done, until all ranks were back for 20 steps: the sum of the pauses
               between new steps that are longer than four usual steps, less a usual step for each
    all back   the seconds until a step with all ranks
    steps      the number of steps that were done again. The step during which the signal came is lost in all systems
    processes  the number of processes that were started before all ranks were back, also if they did no step
"""

import argparse
import collections
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from typing import NamedTuple

SYSTEMS = ["gohvd", "torchrun", "torchft", "ft+gohvd"]
FAULTS = {"SIGKILL": signal.SIGKILL, "SIGKILL to rank 0": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
LIMIT = timedelta(seconds=5)  # the time without an answer after which a rank counts as failed
MOST_SECONDS = 120  # for which this program waits for a system
CALM_STEPS = 20


class Record(NamedTuple):
    """What a process writes after each step. When it starts, it writes one with step 0 and size 0."""

    time: float
    pid: int
    rank: int
    size: int
    step: int


# The programs of the ranks.


def training():
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(1)
    layers = [part for _ in range(3) for part in (torch.nn.Linear(1024, 1024), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(1024, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def forward(model):
    import torch

    return model(torch.randn(32, 1024)).pow(2).mean()


def record(folder, rank, size, step):
    with open(os.path.join(folder, "records"), "a", encoding="utf-8") as file:  # one write, which is not torn
        file.write(f"{time.monotonic()} {os.getpid()} {rank} {size} {step}\n")


def train_gohvd(folder):
    import gohvd.torch as hvd

    hvd.init()
    model, optimizer = training()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state):
        while True:
            optimizer.zero_grad()
            forward(model).backward()
            optimizer.step()
            state.step += 1
            state.commit()
            record(folder, hvd.rank(), hvd.size(), state.step)

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))


def train_torchrun(folder):
    import torch
    import torch.distributed as dist

    # The ranks do not start at the same time, so LIMIT is only for the steps. The names in the store begin with the number
    # of the attempt, because otherwise the ranks of PyTorch 2.15 find the addresses of those before the restart.
    env = os.environ
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore("attempt" + env["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group("gloo", store=store, rank=int(env["RANK"]), world_size=int(env["WORLD_SIZE"]))
    model, optimizer = training()
    checkpoint, step = os.path.join(folder, "checkpoint"), 0
    if os.path.exists(checkpoint):
        step, weights, moments = torch.load(checkpoint)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    model = torch.nn.parallel.DistributedDataParallel(model)
    dist.distributed_c10d._set_pg_timeout(LIMIT)
    while True:
        optimizer.zero_grad()
        forward(model).backward()
        optimizer.step()
        step += 1
        if dist.get_rank() == 0:
            torch.save((step, model.module.state_dict(), optimizer.state_dict()), checkpoint + ".new")
            os.replace(checkpoint + ".new", checkpoint)
        dist.broadcast(torch.zeros(1), 0)
        record(folder, dist.get_rank(), dist.get_world_size(), step)


def train_torchft(folder, gohvd=False):
    import torch.distributed as dist
    import torchft

    if gohvd:
        from gohvd.torch.distributed import ElasticProcessGroup as Group
    else:
        Group = torchft.ProcessGroupGloo

    model, optimizer = training()

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=Group(timeout=LIMIT),
        min_replica_size=2,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        hostname="localhost",
        timeout=timedelta(seconds=30),  # as in torchft's example
    )
    stepper = torchft.Optimizer(manager, optimizer)
    while True:
        before = manager.current_step()
        stepper.zero_grad()
        forward(model).backward()
        for work in [manager.allreduce(parameter.grad) for parameter in model.parameters()]:
            work.wait()
        stepper.step()
        if manager.current_step() > before:
            rank = manager.participating_rank()  # a process that has just got the state has no rank in this step
            record(folder, -1 if rank is None else rank, manager.num_participants(), manager.current_step())


# The jobs.


class Job:
    """A job of a system. Its processes write their records and their output into a folder."""

    def __init__(self, system, ranks, folder):
        self.system, self.ranks, self.folder = system, ranks, folder
        self.output = open(os.path.join(folder, "output"), "ab")
        self.ending, self.started, self.supervisors = False, [], []
        self.known, self.offset = [], 0  # the records that were read, and where the next ones begin
        me = [os.path.abspath(__file__), "rank", system, folder]
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HVD_LIVENESS_SECONDS": str(LIMIT.seconds)}
        if system == "gohvd":
            flags = ["-np", str(ranks), "--min-np", "2", "--blacklist-cooldown-range", "1,1"]
            self.supervise([["hvdrun", *flags, sys.executable, *me]], env, again=False)
        elif system == "torchrun":
            flags = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1000"]
            self.supervise([[sys.executable, "-m", "torch.distributed.run", *flags, *me]], env, again=False)
        else:
            from torchft.coordination import LighthouseServer

            # The limits are those of torchft's example.
            self.lighthouse = LighthouseServer(
                "127.0.0.1:0", min_replicas=2, join_timeout_ms=10000, quorum_tick_ms=100, heartbeat_timeout_ms=LIMIT.seconds * 1000
            )
            port = self.lighthouse.address().rpartition(":")[2]
            env["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
            self.supervise([[sys.executable, *me]] * ranks, env, again=True)

    def supervise(self, commands, env, again):
        for command in commands:
            thread = threading.Thread(target=self.keep_running, args=(command, env, again), daemon=True)
            self.supervisors.append(thread)
            thread.start()

    def keep_running(self, command, env, again):
        while not self.ending:
            process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=self.output, stderr=self.output)
            self.started.append(process)
            process.wait()
            if not again:
                break

    def records(self):
        with contextlib.suppress(FileNotFoundError), open(os.path.join(self.folder, "records"), "rb") as file:
            file.seek(self.offset)
            lines = file.read().split(b"\n")[:-1]
            self.offset += sum(len(line) + 1 for line in lines)
            fields = [line.split() for line in lines]
            self.known += [Record(float(t), int(pid), int(rank), int(size), int(step)) for t, pid, rank, size, step in fields]
        return list(self.known)

    def send_signal(self, pid, number):
        """Sends a signal to a process that has written a record, if it still runs. Another one may have its number now."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if self.folder.encode() in file.read():
                    os.kill(pid, number)

    def wait(self, what, found):
        """Waits until found, which gets the records, returns something that is true. Returns this and the records."""
        limit = time.monotonic() + MOST_SECONDS
        while time.monotonic() < limit:
            records = self.records()
            value = found(records)
            if value:
                return value, records
            if not any(thread.is_alive() for thread in self.supervisors):
                raise RuntimeError(f"{self.system} ended while it should have {what}")
            time.sleep(0.02)
        raise RuntimeError(f"{self.system} has not {what} within {MOST_SECONDS} s")

    def end(self):
        self.ending = True
        for process in list(self.started):
            process.terminate()
        for thread in self.supervisors:
            thread.join(40)
        # What a launcher left behind would disturb the next system.
        for process in self.started:
            process.kill()
        for pid in {r.pid for r in self.records()}:
            self.send_signal(pid, signal.SIGKILL)
        self.output.close()


def whole(records, ranks, since):
    """Returns the first step after the time since that as many processes as there are ranks have done together, or None."""
    members = collections.defaultdict(set)
    for r in records:
        if r.time > since and r.size == ranks:
            members[r.step].add(r.pid)
            if len(members[r.step]) == ranks:
                return r.step
    return None


def inject(job, name, rank, delay):
    """Sends the signal of a fault to a rank, and returns what it has cost."""
    begin = time.monotonic()

    def calm(since):
        def found(records):
            step = whole(records, job.ranks, since)
            return step and whole([r for r in records if r.step >= step + CALM_STEPS], job.ranks, since)

        return found

    _, records = job.wait("trained with all ranks", calm(begin))
    ends = done_times(records, begin)
    usual = statistics.median([b - a for a, b in zip(ends, ends[1:])])
    time.sleep(delay)
    victim = next(r.pid for r in reversed(job.records()) if r.rank == rank)
    fault = time.monotonic()
    job.send_signal(victim, FAULTS[name])
    if FAULTS[name] == signal.SIGSTOP:
        _, records = job.wait(f"gone on after {name}", lambda records: len(done_times(records, fault)) > CALM_STEPS)
        job.send_signal(victim, signal.SIGKILL)
    _, records = job.wait(f"had all ranks again after {name}", calm(fault))
    return cost(records, fault, job.ranks, usual)


def cost(records, fault, ranks, usual):
    """Returns what a fault has cost. fault is its time, and usual the seconds of a step."""
    before = max(r.step for r in records if r.time <= fault)
    old = {r.pid for r in records if r.time <= fault}
    late = [r for r in records if r.time > fault]
    new = min(r.step for r in late if r.step > before)  # not the next one if its checkpoint was written but no record
    back = whole(late, ranks, fault)
    pauses, last = [], fault
    for end in done_times(records, fault):
        if end - last > 4 * usual:
            pauses.append(end - last - usual)
        last = end
    counts = collections.Counter((r.pid, r.step) for r in records)
    return {
        "stop": max(r.time for r in late if r.step == new) - fault,
        "lost": sum(pauses),
        "all back": max(r.time for r in late if r.step == back) - fault,
        "steps": len({r.step for r in late if 0 < r.step <= before and (r.pid not in old or counts[r.pid, r.step] > 1)}),
        "processes": len({r.pid for r in late} - old),
        "usual": usual,
    }


def done_times(records, since):
    """Returns when the steps that were new after a time were done by the last rank, in order."""
    before = max([r.step for r in records if r.time <= since], default=0)
    ends = {}
    for r in records:
        if r.step > before:
            ends[r.step] = max(r.time, ends.get(r.step, 0.0))
    return sorted(ends.values())


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no processes are left behind
    parser = argparse.ArgumentParser(description="Compare what faults cost in elastic jobs.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--deaths", type=int, default=2, help="how often rank 0 and how often another rank dies")
    parser.add_argument("--hangs", type=int, default=1, help="how often a rank is stopped")
    parser.add_argument("--seed", type=int, default=1, help="seed of the order and the times of the faults")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    o = parser.parse_args()
    import torch

    results = {}
    print(f"torch {torch.__version__}, {o.ranks} ranks, seed {o.seed}: median (least to greatest)")
    for system in o.systems:
        choose = random.Random(o.seed)
        faults = ["SIGKILL", "SIGKILL to rank 0"] * o.deaths + ["SIGSTOP"] * o.hangs
        choose.shuffle(faults)
        with tempfile.TemporaryDirectory(prefix="gohvd-elastic-", dir="/dev/shm") as folder:
            job, failure = Job(system, o.ranks, folder), ""
            try:
                for name in faults:
                    rank = 0 if name.endswith("0") else choose.randrange(1, o.ranks)
                    results.setdefault((name, system), []).append(inject(job, name, rank, choose.random()))
            except RuntimeError as e:
                failure = str(e)
            finally:
                job.end()
            if failure:
                with open(os.path.join(folder, "output"), encoding="utf-8", errors="replace") as file:
                    sys.stderr.write(file.read()[-5000:])
                print(f"{system}: {failure}", flush=True)
    columns = ["stop", "lost", "all back", "steps", "processes", "usual"]
    print(f"{'':20}{'':10}{'n':>3}" + "".join(f"{column:>26}" for column in columns))
    for name in FAULTS:
        for system in o.systems:
            costs = results.get((name, system), [])
            cells = []
            for column in columns if costs else []:
                values, digits = [cost[column] for cost in costs], 0 if column in ("steps", "processes") else 3
                cells.append(f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})")
            print(f"{name:20}{system:10}{len(costs):3}" + "".join(f"{cell:>26}" for cell in cells))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        record(sys.argv[3], -1, 0, 0)
        if sys.argv[2] == "ft+gohvd":
            train_torchft(sys.argv[3], gohvd=True)
        else:
            globals()["train_" + sys.argv[2]](sys.argv[3])
    else:
        main()
