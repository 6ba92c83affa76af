"""Refuses to be imported from a folder in which Horovod itself is installed too."""

from __future__ import annotations

import importlib.metadata
import os


def refuse() -> None:
    """Raises ImportError if pip has installed Horovod and this package in the same folder. Then each has overwritten
    files of the other. In different folders, the one that is first in sys.path is used.
    """
    try:
        theirs = importlib.metadata.distribution("horovod").locate_file("horovod")
    except importlib.metadata.PackageNotFoundError:
        return
    ours = os.path.dirname(os.path.abspath(__file__))
    if os.path.realpath(str(theirs)) == os.path.realpath(ours):
        raise ImportError(
            f"Horovod and gohvd-horovod are both installed in {os.path.dirname(ours)}, and have overwritten files of "
            "each other: uninstall both (pip uninstall horovod gohvd-horovod), then install one of them again"
        )
