"""Lists of hosts, and the numbers of the ranks on them. hvdrun numbers ranks in the same way."""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass
class HostInfo:
    """A host and the number of ranks that may run there."""

    hostname: str
    slots: int

    @staticmethod
    def from_string(host_string: str) -> HostInfo:
        name, _, slots = host_string.strip().rpartition(":")
        return HostInfo(name, int(slots)) if name else HostInfo(slots, 1)


@dataclasses.dataclass
class SlotInfo:
    """The numbers of one rank."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        return ",".join(str(v) for v in (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size))

    @classmethod
    def from_response_string(cls, response_string: str) -> SlotInfo:
        rank, size, local_rank, local_size, cross_rank, cross_size = map(int, response_string.split(","))
        return cls("", rank, local_rank, cross_rank, size, local_size, cross_size)


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)


def parse_hosts(hosts_string: str) -> list[HostInfo]:
    """Returns the hosts of a list such as ``node1:2,node2:4``."""
    return [HostInfo.from_string(host) for host in hosts_string.split(",") if host.strip()]


def parse_host_files(filename: str) -> str:
    """Returns the list of the hosts in a file, whose lines have the form ``node1 slots=2``."""
    hosts = []
    with open(filename, encoding="utf-8") as file:
        for line in file:
            words = line.split("#")[0].split(None, 1)
            if words:
                slots = re.search(r"slots\s*=\s*(\d+)", words[1]) if len(words) > 1 else None
                hosts.append(f"{words[0]}:{slots[1] if slots else 1}")
    return ",".join(hosts)


def get_host_assignments(
    hosts: list[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Returns the numbers of the ranks on the hosts, which are filled one after the other. Raises ValueError if the hosts
    have fewer than min_num_proc slots.
    """
    slots = [(i, local) for i, host in enumerate(hosts) for local in range(host.slots)][:max_num_proc]
    if len(slots) < min_num_proc:
        raise ValueError(f"got hosts with {len(slots)} slots, want at least {min_num_proc}")
    local_sizes: dict[int, int] = {}
    cross_sizes: dict[int, int] = {}
    made = []
    for rank, (i, local) in enumerate(slots):
        cross_rank = cross_sizes.get(local, 0)
        made.append(SlotInfo(hosts[i].hostname, rank, local, cross_rank, len(slots), 0, 0))
        cross_sizes[local] = cross_rank + 1
        local_sizes[i] = local + 1
    for slot, (i, local) in zip(made, slots):
        slot.local_size, slot.cross_size = local_sizes[i], cross_sizes[local]
    return made
