"""Says of Horovod's packages that are not here what there is instead."""

from __future__ import annotations

import importlib.machinery
import sys
from typing import Any, Dict, NoReturn, Optional

_FRAMEWORK = "gohvd supports PyTorch (horovod.torch, which is gohvd.torch) and numpy arrays (gohvd.numpy)"
_LAUNCHER = "start the ranks with hvdrun or horovod.run, or with another launcher of docs/launchers.md"
_PAGE = "docs/migration.md lists the modules that it has"
_INSTEAD: Dict[str, str] = {
    "horovod.tensorflow": _FRAMEWORK,
    "horovod.keras": _FRAMEWORK,
    "horovod._keras": _FRAMEWORK,
    "horovod.mxnet": _FRAMEWORK,
    "horovod.spark": "gohvd does not start jobs on Spark: " + _LAUNCHER,
    "horovod.ray": "gohvd does not start jobs on Ray: " + _LAUNCHER,
    "horovod.data": _PAGE,
}


class Finder:
    """Finds these packages, and fails to load them, as Horovod without a framework's support does: programs look for a package
    without wanting to load it."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Optional[importlib.machinery.ModuleSpec]:
        return importlib.machinery.ModuleSpec(fullname, cls) if fullname in _INSTEAD else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> NoReturn:
        # Without its name, which would make "from horovod import tensorflow" drop this text.
        raise ModuleNotFoundError(f"gohvd's horovod package has no module {spec.name}: {_INSTEAD[spec.name]}")

    @staticmethod
    def exec_module(module: Any) -> None:
        """Is never reached, but a loader must have it."""


sys.meta_path.append(Finder)  # type: ignore[arg-type]
