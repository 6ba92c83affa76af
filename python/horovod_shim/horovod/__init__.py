"""Horovod's modules, implemented by gohvd. Programs that were written for Horovod run unmodified.

Classes and functions are the same objects as in gohvd, so a program may use names of both packages.
"""

from horovod import _absent as _absent
from horovod import _conflict

_conflict.refuse()

from horovod.runner import run

# The release of Horovod whose interface this package has.
__version__ = "0.28.1"

__all__ = ["run", "__version__"]
