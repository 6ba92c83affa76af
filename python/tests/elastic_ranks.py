"""Programs for jobs whose ranks change (internal/pythontest/elastic_test.go): ``elastic_ranks.py NAME ARGUMENT...``.

Each prints what the test looks for. The first process at a slot is the one whose HVD_MEMBER ends with /1.
"""

from __future__ import annotations

import collections
import copy
import gc
import hashlib
import os
import pathlib
import random
import signal
import statistics
import sys
import threading
import time
import weakref

import torch

import gohvd.torch as hvd
from gohvd import elastic
from gohvd._engine import operation
from gohvd._library import ALLREDUCE
from gohvd.torch import mpi_ops

FIRST = os.environ["HVD_MEMBER"].endswith("/1")
LIMIT_SECONDS = 600  # a wait for the launcher fails after this time


def say(*words: object) -> None:
    print(*words, flush=True)


def make() -> dict:
    """Returns a model, an optimizer and a scheduler, by the names of the arguments of a state."""
    torch.manual_seed(random.randrange(1 << 30))
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.99)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), groups=2)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def digest(state) -> str:
    """Returns the digest of the parameters, of the state of the optimizer, and of the learning rate."""
    h = hashlib.sha256(repr((state.step, state.least, state.again, state.optimizer.param_groups[0]["lr"])).encode())
    for tensor in state.model.state_dict().values():
        h.update(tensor.numpy().tobytes())
    for entry in state.optimizer.state_dict()["state"].values():
        for value in entry.values():
            h.update(value.numpy().tobytes() if torch.is_tensor(value) else repr(value).encode())
    return h.hexdigest()[:16]


class Own(hvd.elastic.State):
    """A State of a program, which keeps one commit."""

    def __init__(self, **values) -> None:
        super().__init__(hvd.broadcast_object, hvd.rank)
        self.__dict__.update(values)
        self.save()

    def content(self):
        parts = self.model, self.optimizer, self.scheduler
        return [part.state_dict() for part in parts], (self.step, self.least, self.again)

    def fill(self, content) -> None:
        parts, (self.step, self.least, self.again) = copy.deepcopy(content)
        for part, state in zip((self.model, self.optimizer, self.scheduler), parts):
            part.load_state_dict(state)

    def save(self) -> None:
        self.last = copy.deepcopy(self.content())

    def restore(self) -> None:
        self.fill(self.last)

    def sync(self) -> None:
        self.fill(self._bcast_object(self.content()))


def step(state, mine: object = None) -> list:
    """Makes a step, and checks that its gradients are the averages of those of the ranks. zero_grad follows, so that an
    error in the step leaves gradients behind. Returns what each rank has passed as mine.
    """
    loss = (state.model(torch.randn(8, 20)).sum() - 1).pow(2)
    params = list(state.model.parameters())
    grads, parts = zip(*hvd.allgather_object((torch.autograd.grad(loss, params, retain_graph=True), mine)))
    loss.backward()
    state.optimizer.step()
    state.scheduler.step()
    state.step += 1
    for p, *theirs in zip(params, *grads):
        average = sum(theirs) / len(theirs)
        assert torch.allclose(p.grad, average, rtol=1e-3, atol=1e-4), (state.step, p.grad.norm(), average.norm())
    state.optimizer.zero_grad()
    return list(parts)


class Deadly:
    """A value that kills the process when it is copied for a commit or sent to other ranks, if armed is set."""

    armed = False

    def __deepcopy__(self, memo) -> Deadly:
        if Deadly.armed:
            os.kill(os.getpid(), signal.SIGKILL)
        return self

    def __reduce__(self):
        self.__deepcopy__({})
        return Deadly, ()


def train(kind: str, victim: str, where: str) -> None:
    """Trains until there were fewer ranks, because rank victim has died, and then more again. It dies at a random time or,
    if where is "commit", before it has saved a commit that the others have saved.
    """
    hvd.init()
    make_state = {"TorchState": hvd.elastic.TorchState, "State": Own}[kind]
    state = make_state(**make(), step=0, least=1000, again=0, deadly=Deadly())
    resets: list[int] = []

    def reset() -> None:
        # After the death these are the values of the last commit, and later the present ones.
        # A new process has got those of another rank.
        assert state.step > 0 and (not FIRST or resets or state.step % 3 == 0), state.step
        resets.append(hvd.size())

    state.register_reset_callbacks([reset])
    armed, used = FIRST and hvd.rank() == int(victim), None

    @hvd.elastic.run
    def run(state) -> None:
        nonlocal armed, used
        gc.collect()
        assert used is None or used() is None, "the tensor of an operation that has failed is kept"
        say("begins at step", state.step)
        twin = make()  # its parameters have the same names, and its gradients are in flight at the same time
        while state.again < 20:
            if armed and state.step == 10:
                armed = False
                if where == "commit":
                    Deadly.armed = True
                else:
                    threading.Timer(random.random() * 0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
            tensor = torch.ones(1000)
            used = weakref.ref(tensor)
            handle = hvd.allreduce_async_(tensor, name="used")
            twin["model"](torch.ones(1, 20)).sum().backward()
            step(state)
            hvd.synchronize(handle)
            twin["optimizer"].step()
            twin["optimizer"].zero_grad()
            digests = hvd.allgather_object(digest(state))
            assert digests == [digests[0]] * hvd.size(), digests
            state.least = min(state.least, hvd.size())
            state.again += hvd.size() > state.least
            if state.step % 3 == 0:  # two steps in three can be lost
                state.commit()
            else:
                state.check_host_updates()

    run(state)
    assert not FIRST or resets == [2, 3], resets
    say("done", digest(state))


def samples(hosts: str, *names: str) -> None:
    """Goes through a data set once, while hosts are added and removed and a rank dies. hosts is the file with the hosts
    that are offered.
    """

    def offer(*numbers: int) -> None:
        new = pathlib.Path(hosts + ".new")
        new.write_text("".join(f"{names[i]}:1\n" for i in numbers))
        new.rename(hosts)

    hvd.init()
    data = range(10_007)
    sampler = hvd.elastic.ElasticSampler(data, seed=7)
    state = hvd.elastic.TorchState(sampler=sampler, events=0, seen=[], sizes=[])

    def change(state) -> None:
        """Makes the next change, and waits until the launcher has announced it."""
        number = state.events
        state.events += 1
        state.commit()
        if hvd.rank() == 0:
            if number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if number in (0, 1, 4):
                offer(*{0: (0, 1, 2), 1: (1, 2), 4: (1, 2, 0)}[number])
            limit = time.monotonic() + LIMIT_SECONDS
            while state._host_messages.empty():
                assert time.monotonic() < limit, "the launcher has not changed the ranks"
                time.sleep(0.01)
        hvd.broadcast_object(None)
        state.check_host_updates()

    @hvd.elastic.run
    def run(state) -> None:
        state.sizes.append(hvd.size())
        loader = torch.utils.data.DataLoader(data, batch_size=50, sampler=state.sampler)
        for number, batch in enumerate(loader):
            for part in hvd.allgather_object(batch.tolist()):
                state.seen += part
            state.sampler.record_batch(number, len(batch))
            state.commit()
            if state.events < 5 and len(state.seen) > 1500 * (state.events + 1):
                change(state)

    run(state)
    counts = collections.Counter(state.seen)
    assert sorted(counts) == list(data), f"{len(counts)} samples of {len(data)}"
    again = sum(counts.values()) - len(data)
    assert again < hvd.size(), f"{again} samples more than once"
    say("done with ranks", *state.sizes)


def steps(victim: str) -> None:
    """Each step is a commit. Rank victim dies at a random time, a new process takes its place, and gets SIGTERM later. No
    rank goes back, the ranks are equal after each step, and each sample of an epoch is used once.
    """
    hvd.init()
    data = range(1009)
    sampler = hvd.elastic.ElasticSampler(data, seed=5)
    state = hvd.elastic.TorchState(
        **make(), sampler=sampler, step=0, least=1000, again=0, seen=[], epochs=0, sizes=[hvd.size()]
    )  # fmt: skip
    armed, done, furthest = FIRST and hvd.rank() == int(victim), 0, 0

    def use(batch: list[int], number: int) -> None:
        nonlocal done, furthest
        state.seen += [i for part in step(state, batch) for i in part]
        state.sampler.record_batch(number, len(batch))
        state.least = min(state.least, hvd.size())
        state.again += hvd.size() > state.least
        if state.sizes[-1] != hvd.size():
            state.sizes.append(hvd.size())
        done, furthest = done + 1, state.step
        digests = hvd.allgather_object(digest(state))
        assert digests == [digests[0]] * hvd.size(), digests

    @hvd.elastic.run(step=True)
    def run(state) -> None:
        nonlocal armed
        assert state.step in (furthest, furthest + 1) or not done, (state.step, furthest)
        while state.sizes != [3, 2, 3, 2] or state.seen:
            for number, batch in enumerate(torch.utils.data.DataLoader(data, batch_size=20, sampler=state.sampler)):
                if armed and state.step == 10:
                    armed = False
                    threading.Timer(random.random() * 0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
                if not FIRST and state.again == 10:
                    os.kill(os.getpid(), signal.SIGTERM)
                use(batch.tolist(), number)
            counts = collections.Counter(state.seen)
            assert sorted(counts) == list(data), f"{len(counts)} samples of {len(data)}"
            assert sum(counts.values()) - len(data) < 3, f"{sum(counts.values())} samples of {len(data)}"
            state.seen, state.epochs = [], state.epochs + 1
            state.sampler.set_epoch(state.epochs)

    run(state)
    assert done >= state.step - 1, (done, state.step)  # another rank may have made one step without this one
    say("done", digest(state))


def ahead(folder: str) -> None:
    """Ranks 2 and 3 learn that the vote for step 10 has succeeded, rank 0 does not, and rank 1 dies. Then rank 2 dies
    while it sends its state to rank 0. Rank 3 does not go back, and rank 0 gets the state from it.
    """
    hvd.init()
    role = hvd.rank() if FIRST else -1
    learned = [pathlib.Path(folder, name) for name in ("2", "3")]
    state = hvd.elastic.TorchState(**make(), step=0, least=0, again=0, deadly=Deadly())
    vote, furthest, begun = elastic._vote, 0, []

    def vote_for_step(flags: int) -> None:
        if role not in (0, 1) or state.step < 10 or learned[0].exists():
            vote(flags)
            if role in (2, 3) and state.step == 10:
                Deadly.armed = role == 2
                learned[role - 2].touch()
            return
        # This is the operation of the vote, but the library does not learn of its result.
        how = operation(ALLREDUCE, hvd.Sum, any_kind=True)
        ballot = torch.tensor([1 << 16])  # of commits.Step
        mpi_ops._call(mpi_ops._torch, how, "elastic.vote", hvd.global_process_set, ballot, wait=True)
        if role == 1:
            limit = time.monotonic() + LIMIT_SECONDS
            while not all(path.exists() for path in learned):
                assert time.monotonic() < limit, "the other ranks have not learned of the vote"
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.barrier()
        raise AssertionError("rank 1 has not died")

    elastic._vote = vote_for_step

    @hvd.elastic.run(step=True)
    def run(state) -> None:
        nonlocal furthest
        assert state.step >= furthest, (state.step, furthest)
        begun.append(state.step)
        while state.step < 20:
            step(state)
            furthest = state.step
            digests = hvd.allgather_object(digest(state))
            assert digests == [digests[0]] * hvd.size(), digests

    run(state)
    if FIRST:
        say("done", *begun)


def votes(count: str) -> None:
    """Measures votes for steps and, in turn with them, allreduces of 4 bytes."""
    hvd.init()
    tensor = torch.ones(1)

    @hvd.elastic.run(step=True)
    def run(state) -> None:
        votes, sums = [], []
        for _ in range(int(count)):
            began = time.perf_counter_ns()
            state._vote_for_step()
            voted = time.perf_counter_ns()
            hvd.allreduce_(tensor, op=hvd.Sum, name="x")
            votes.append(voted - began)
            sums.append(time.perf_counter_ns() - voted)
        say("votes took", int(statistics.median(votes)), int(statistics.median(sums)))

    run(hvd.elastic.TorchState(step=0))


def refuses_gloo(dist) -> None:
    """Checks that what needs a store fails at once in a group of gohvd://."""
    for call in (dist.monitored_barrier, lambda: dist.new_group(backend="gloo")):
        try:
            call()
        except Exception as e:
            assert "have no store" in str(e), e
        else:
            raise AssertionError("want an error that says that there is no store")


def ddp() -> None:
    """Rank 1 dies, and a new process takes its place. The ranks train with gohvd's DistributedDataParallel over groups of a
    generation, and are equal after each step.
    """
    import torch.distributed as dist

    import gohvd.torch.distributed

    hvd.init()
    torch.manual_seed(random.randrange(1 << 30))
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, least=1000, again=0)

    @hvd.elastic.run
    def run(state) -> None:
        dist.init_process_group("gohvd", init_method="gohvd://")
        assert (dist.get_rank(), dist.get_world_size()) == (hvd.rank(), hvd.size())
        parallel = gohvd.torch.distributed.DistributedDataParallel(state.model)
        refuses_gloo(dist)
        pair = dist.new_group([0, 1])
        while state.again < 20:
            if FIRST and hvd.local_rank() == 1 and state.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            state.optimizer.zero_grad()
            parallel(torch.randn(8, 20)).sum().backward()
            state.optimizer.step()
            state.step += 1
            state.least = min(state.least, hvd.size())
            state.again += hvd.size() > state.least
            if hvd.rank() < 2:
                dist.all_reduce(torch.ones(1), group=pair)
            digests: list = [None] * hvd.size()
            dist.all_gather_object(digests, digest(state))
            assert digests == [digests[0]] * hvd.size(), digests
            state.commit()

    run(state)
    say("done", digest(state))


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
