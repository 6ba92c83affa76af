"""A group whose members change: rank 1 of three is killed, and the others go on in their processes. internal/pythontest runs
it with the way in which they reconfigure the group, which is that of torch or that of torchft 0.2.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gohvd.exceptions import PeerError
from gohvd.torch.distributed import ElasticProcessGroup

_LIMIT_SECONDS = 300
STEPS, LAST = 10, 4  # rank 1 makes LAST steps
LONG = timedelta(seconds=_LIMIT_SECONDS)


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Makes a step that is the same for any number of ranks, if their gradients are averaged."""
    torch.manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(8, 20)).pow(2).mean().backward()
    optimizer.step()


def refuses(what: str, call: object) -> None:
    try:
        call()
    except (RuntimeError, ValueError) as e:
        assert what in str(e), e
    else:
        raise AssertionError(f"want an error with {what}")


def of_torch(rank: int, store: dist.Store) -> None:
    """Trains with DistributedDataParallel, which the survivors make anew, because it remembers the number of members."""
    dist.init_process_group("gohvd", store=store, rank=rank, world_size=3, timeout=LONG, enable_reconfigure=True)
    group = dist.group.WORLD
    assert dist._supports_reconfigure()
    refuses("no members yet", dist.barrier)

    def meet(generation: int, members: list[int]) -> list[str]:
        store.set(f"handle {generation} {rank}", dist._get_reconfigure_handle())
        handles = [store.get(f"handle {generation} {m}").decode() for m in members]
        dist._reconfigure(generation, handles).wait()
        assert (dist.get_rank(), dist.get_world_size()) == (members.index(rank), len(members))
        return handles

    used = meet(1, [2, 1, 0])
    model, optimizer = training()
    ddp = DistributedDataParallel(model)
    done, deaths = 0, 0
    while done < STEPS:
        if rank == 1 and done == LAST:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            step(ddp, optimizer, done)
            done += 1
        except RuntimeError:  # DistributedDataParallel waits in C++, which passes on only the text of an error
            failure = group.errored()
            assert isinstance(failure, PeerError) and list(failure.ranks) == [1], failure
            deaths += 1
            if rank == 2:  # the members have met by its handle
                refuses("used before", lambda: dist._reconfigure(2, used))
            meet(2, [0, 2])
            del ddp
            ddp = DistributedDataParallel(model)
    assert deaths == 1, deaths

    alone, optimizer = training()
    for number in range(STEPS):
        step(alone, optimizer, number)
    for mine, want in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(mine, want)
    mine = torch.zeros(3)
    mine[rank] = 1
    dist.all_reduce(mine, group=dist.new_group([0, 1]))
    assert mine.tolist() == [1, 0, 1], mine

    refuses("an elastic group has no store", dist.monitored_barrier)
    if rank == 0:
        group.abort()
        refuses("was aborted", dist.barrier)
    else:
        refuses("aborted process group", dist.barrier)
    meet(3, [2, 0])
    dist.barrier()
    dist.destroy_process_group()


def of_torchft(rank: int, store: dist.Store) -> None:
    if rank == 0:
        served = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        store.set("port", str(served.port))
    address = f"localhost:{store.get('port').decode()}"
    group = ElasticProcessGroup(timeout=LONG)

    def total() -> float:
        mine = torch.ones(1)
        assert group.allreduce([mine], dist.ReduceOp.SUM).wait()
        return mine.item()

    group.configure(f"{address}/torchft/1/0", "replica", rank, 3, 1, 0, 1, [0, 1, 2])
    assert total() == 3 and group.size() == 3 and group.errored() is None
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    refuses("rank 1 failed", total)
    assert isinstance(group.errored(), PeerError)
    group.configure(f"{address}/torchft/2/0", "replica", rank // 2, 2, 2, 0, 1, [0, 2])
    assert total() == 2 and group.size() == 2 and group.errored() is None
    group.barrier().wait()

    # A member goes on without the other one, which does not leave the group meanwhile.
    if rank == 0:
        group.configure(f"{address}/torchft/3/0", "replica", 0, 1)
        assert total() == 1
        store.set("went on", "yes")
    else:
        store.wait(["went on"])

    # An abort ends a configure that waits for a member that does not come.
    errors: list[Exception] = []

    def wait() -> None:
        try:
            group.configure(f"{address}/alone {rank}/0", "replica", 0, 2)
        except RuntimeError as e:
            errors.append(e)

    thread = threading.Thread(target=wait)
    thread.start()
    while thread.is_alive():
        group.abort()  # it does nothing if the thread does not wait yet
        thread.join(0.01)
    assert len(errors) == 1, errors
    assert "was aborted" in str(group.errored()) or "could not be reconfigured" in str(group.errored()), group.errored()
    group.shutdown()
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < 2:
        thread.join(0.01)


def run(rank: int, size: int, init_method: str, args: list[str]) -> None:
    if args[0] == "torch" and not hasattr(dist.ProcessGroup, "reconfigure"):
        print(f"\ntorch {torch.__version__} cannot reconfigure groups", flush=True)
        return
    faulthandler.dump_traceback_later(_LIMIT_SECONDS, exit=True)
    torch.set_num_threads(1)
    store = dist.FileStore(init_method.removeprefix("file://"), 3)
    {"torch": of_torch, "torchft": of_torchft}[args[0]](rank, store)
    # A rank exits while one of its threads waits for ranks that do not come.
    group = ElasticProcessGroup(timeout=LONG)
    with_another = type("Options", (), {"handles": [group.get_reconfigure_handle(), "another"], "timeout": None})
    threading.Thread(target=group.reconfigure, args=(with_another,), daemon=True).start()
    print(f"\nrank {rank} ends", flush=True)
