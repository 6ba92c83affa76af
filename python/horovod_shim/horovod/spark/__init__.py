"""The function horovod.spark.run, which is gohvd.spark.run."""

from gohvd.spark import run

__all__ = ["run"]
