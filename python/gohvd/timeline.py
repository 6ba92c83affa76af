"""The timeline of operations. Its names are here; it comes later."""

from __future__ import annotations


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Will write the timeline to file_path. Raises NotImplementedError."""
    raise NotImplementedError("gohvd: start_timeline: this version writes no timeline")


def stop_timeline() -> None:
    """Will end what start_timeline began. Raises NotImplementedError."""
    raise NotImplementedError("gohvd: stop_timeline: this version writes no timeline")
