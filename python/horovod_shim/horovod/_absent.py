"""Makes imports of Horovod's packages that gohvd does not have fail with an error that says what to use instead."""

from __future__ import annotations

import importlib.machinery
import sys
from typing import Any, NoReturn

_FRAMEWORK = "gohvd supports PyTorch (horovod.torch, which is gohvd.torch) and numpy arrays (gohvd.numpy)"
_ESTIMATOR = (
    "gohvd has no estimators: write the data frame to Parquet files, and train in a function that reads them and that "
    "gohvd.spark.run calls"
)
NO_RUN_ELASTIC = (
    "gohvd has no run_elastic, because Spark can neither go on without a task of a stage in barrier mode nor add one: use "
    "run, which Spark starts again after a failure, or hvdrun --min-np, or gohvd.ray.ElasticRayExecutor"
)
_INSTEAD: dict[str, str] = {
    "horovod.tensorflow": _FRAMEWORK,
    "horovod.keras": _FRAMEWORK,
    "horovod._keras": _FRAMEWORK,
    "horovod.mxnet": _FRAMEWORK,
    "horovod.spark.torch": _ESTIMATOR,
    "horovod.spark.keras": _ESTIMATOR,
    "horovod.spark.lightning": _ESTIMATOR,
    "horovod.spark.common": _ESTIMATOR,
    "horovod.spark.run_elastic": NO_RUN_ELASTIC,  # "from horovod.spark import run_elastic" looks for a module too
}


class Finder:
    """Finds these packages but fails to load them, as Horovod does if it is built without a framework. Some programs
    only check whether a package can be found.
    """

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, cls) if fullname in _INSTEAD else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> NoReturn:
        # The error does not have the attribute name, because with it "from horovod import tensorflow" would drop this
        # text.
        raise ModuleNotFoundError(f"gohvd's horovod package has no module {spec.name}: {_INSTEAD[spec.name]}")

    @staticmethod
    def exec_module(module: Any) -> None:
        """Does nothing. It is never called, but a loader must have this method."""


sys.meta_path.append(Finder)  # type: ignore[arg-type]
