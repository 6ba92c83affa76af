"""The function horovod.spark.run, which is gohvd.spark.run."""

from typing import Any

from gohvd.spark import run

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    if name == "run_elastic":  # an AttributeError would lose the text in "from horovod.spark import run_elastic"
        raise ImportError(
            "gohvd has no run_elastic, because Spark can neither go on without a task of a stage in barrier mode nor add one: "
            "use run, which Spark starts again after a failure, or hvdrun --min-np, or gohvd.ray.ElasticRayExecutor"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
