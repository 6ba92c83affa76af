"""The store at which the ranks of a job on Ray or Spark meet. hvdrun serves it (docs/launchers.md)."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Sequence

from . import _programs


class Store:
    """A store with a secret of its own, on a free port of an address of this host. It is served until ``close``, or
    until this process ends. The host may be an IPv6 address in brackets, as Spark writes it.
    """

    def __init__(self, host: str) -> None:
        host = host.strip("[]")
        secret = secrets.token_hex(32)
        command = [_programs.path_of_hvdrun(), "store", "--listen", f"{_bracketed(host)}:0", "--secret-file", "-"]
        # In a session of its own, it is not ended by a Ctrl-C that the program may handle.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            self._process.stdin.write(secret + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the store has failed, and its standard error says why
        address, _, port = self._process.stdout.readline().removeprefix("listening on ").strip().rpartition(":")
        if not port:
            self.close()
            raise RuntimeError(f"gohvd: cannot serve the store of a job at {host}: hvdrun store has failed")
        self.place = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address.strip("[]"),
            "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
            "HVD_SECRET": secret,
        }
        """The variables with which a process connects to the store. They contain the secret."""

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        # A process that the program has forked, such as a worker of a DataLoader, may hold the pipe open.
        _programs.end(self._process)
        self._process.stdout.close()


def environment(place: dict[str, str], rank: int, hosts: Sequence[str]) -> dict[str, str]:
    """Returns the variables with which a process becomes a rank of the job that meets at a store. hosts has the host of
    each rank.
    """
    return {
        "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(len(hosts)), "HOROVOD_HOSTNAME": hosts[rank], **place
    }  # fmt: skip


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def by_host(hosts: Sequence[str]) -> list[int]:
    """Returns the indexes of the hosts in the order of the ranks: the processes of a host have consecutive ranks."""
    return sorted(range(len(hosts)), key=lambda i: hosts.index(hosts[i]))


def check_versions(driver: str, workers: Sequence[str], hosts: Sequence[str]) -> None:
    """Raises RuntimeError if a worker has another version of gohvd than the driver. hosts has the host of each worker."""
    other = {f"{version} on {host}" for version, host in zip(workers, hosts) if version != driver}
    if other:
        raise RuntimeError(
            f"gohvd: the driver has version {driver}, but workers have {', '.join(sorted(other))}: install the same "
            "version everywhere"
        )
