"""Horovod's modules over gohvd: programs that were written for Horovod run unmodified.

Classes and functions are gohvd's own, so a program may mix both names.
"""

from horovod import _absent as _absent
from horovod.runner import run

# The release whose interface this is, for programs that ask for it.
__version__ = "0.28.1"

__all__ = ["run", "__version__"]
