"""The function horovod.spark.run, which is gohvd.spark.run."""

from typing import NoReturn

from gohvd.spark import run
from horovod._absent import NO_RUN_ELASTIC

__all__ = ["run"]


def __getattr__(name: str) -> NoReturn:
    why = f": {NO_RUN_ELASTIC}" if name == "run_elastic" else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{why}")
