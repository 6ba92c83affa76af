"""What the tests of clusters have in common: two hosts, and what ranks do."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Iterator

import numpy as np

import gohvd.numpy as hvd

ELEMENTS = 4 << 20


def place() -> tuple[int, ...]:
    hvd.init()
    return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()


def without_secret() -> None:
    """Joins the job at rank 0 without the secret."""
    if os.environ["HOROVOD_RANK"] == "0":
        del os.environ["HVD_SECRET"]
    hvd.init()


HOSTS = ("192.0.2.1", "192.0.2.2")
ISOLATED = "alone0"
"""An interface of each host that does not reach the other host."""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, ...]]:
    """Is a context with two hosts with the addresses HOSTS. One is the network namespace of this process, which must be of
    its own. Gives the first words of commands that run in the other one.
    """

    def ip(*words: str, there: bool = False) -> None:
        subprocess.run([*(inside if there else ()), "ip", *words], check=True)

    command = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.read(1)  # the namespace is there
        inside = ("nsenter", "--net", "--target", str(other.pid))
        ip("link", "add", "host0", "type", "veth", "peer", "name", "host1", "netns", str(other.pid))
        for there, name in enumerate(("host0", "host1")):
            ip("address", "add", HOSTS[there] + "/24", "dev", name, there=bool(there))
            ip("link", "add", ISOLATED, "type", "veth", "peer", "name", "alone1", there=bool(there))
            ip("address", "add", f"198.51.100.{there + 1}/24", "dev", ISOLATED, there=bool(there))
            for link in name, ISOLATED, "alone1", "lo":
                ip("link", "set", link, "up", there=bool(there))
        try:
            yield inside
        finally:
            ip("link", "delete", "host0")
            ip("link", "delete", ISOLATED)
            other.kill()


def traffic() -> int:
    """Returns the number of bytes that this network namespace has sent, also over loopback."""
    lines = pathlib.Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def sum_of_ranks() -> tuple[float, int]:
    """Returns a sum over the ranks, and the bytes that were sent meanwhile."""
    hvd.init()
    x = np.full(ELEMENTS, hvd.rank(), np.float32)
    hvd.allreduce(x, op=hvd.Sum, name="first")
    hvd.barrier()
    before = traffic()
    total = hvd.allreduce(x, op=hvd.Sum, name="second")
    hvd.barrier()
    return float(total[-1]), traffic() - before
