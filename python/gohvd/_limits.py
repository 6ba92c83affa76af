"""Checks whether an allocation of shared memory exceeds a limit of the machine or of a cgroup.

Shared memory is allocated in full at once. If an allocation exceeds a cgroup's limit or the machine's memory, the
kernel does not refuse it but kills a process. So this module checks the limits before an allocation. It ignores limits
that it cannot read.
"""

from __future__ import annotations

import os
from typing import Dict, Iterator, Optional, Tuple

# For each version of cgroups: the name of the file with the limit, the name of the file with the usage, and the fields
# of memory.stat that count cached file pages. The kernel reclaims these pages when memory is needed.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_VERSION_2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))


def lacking(
    need: int, meminfo: str = "/proc/meminfo", own: str = "/proc/self/cgroup", mount: str = "/sys/fs/cgroup"
) -> Optional[str]:
    """Returns a text that names the limit that an allocation of need further bytes would exceed. Returns None if the
    allocation exceeds no limit.
    """
    machine = _fields(meminfo)
    if "MemAvailable:" in machine:
        left = (machine["MemAvailable:"] + machine.get("SwapFree:", 0)) << 10
        if need > left:
            return f"the machine has only {left} bytes of memory and swap left"
    for directory, (limit_file, use_file, cached) in _groups(own, mount):
        limit, used = _number(os.path.join(directory, limit_file)), _number(os.path.join(directory, use_file))
        if limit is None or used is None:
            continue
        stat = _fields(os.path.join(directory, "memory.stat"))
        left = max(0, limit - used + sum([stat.get(name, 0) for name in cached]))
        if need > left:
            where = os.path.join(directory, limit_file)
            return f"the cgroup has only {left} bytes left of its memory limit of {limit} bytes ({where})"
    return None


def _groups(own: str, mount: str) -> Iterator[Tuple[str, Tuple[str, str, Tuple[str, ...]]]]:
    """Yields the directories of the cgroups that limit this process's memory, each with the names of its files. It
    begins with the process's own cgroup and ends with the root.
    """
    for line in _text(own).splitlines():
        # A line has the form hierarchy:controllers:path. In version 2 the hierarchy is 0 and the controllers are empty
        # (cgroups(7)).
        hierarchy, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon:
            continue
        if hierarchy == "0":
            roots, names = (mount, os.path.join(mount, "unified")), _VERSION_2
        elif "memory" in controllers.split(","):
            roots, names = (os.path.join(mount, "memory"),), _VERSION_1
        else:
            continue
        for root in roots:
            # In a container, the path may be a path of the host, which does not exist in the container. In that case
            # the container's cgroup is the root of the mount, and the loop reaches it.
            parts = [p for p in path.split("/") if p not in ("", ".", "..")]
            for depth in range(len(parts), -1, -1):
                yield os.path.join(root, *parts[:depth]), names


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            return f.read(1 << 20)
    except OSError:
        return ""


def _number(path: str) -> Optional[int]:
    """Returns the number in the file. Returns None if the file contains "max" or does not exist."""
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _fields(path: str) -> Dict[str, int]:
    """Returns the numbers in a file whose lines have a word and a number. The keys are the words."""
    out = {}
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[1].isascii() and words[1].isdigit():
            out[words[0]] = int(words[1])
    return out
