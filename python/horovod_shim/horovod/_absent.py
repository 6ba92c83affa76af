"""Says of Horovod's modules that are not here what there is instead."""

from __future__ import annotations

import sys
from typing import Any, Dict

_FRAMEWORK = "gohvd supports PyTorch (horovod.torch, which is gohvd.torch) and numpy arrays (gohvd.numpy)"
_LAUNCHER = "start the ranks with hvdrun or horovod.run, or with another launcher of docs/launchers.md"
_INSTEAD: Dict[str, str] = {
    "horovod.tensorflow": _FRAMEWORK,
    "horovod.keras": _FRAMEWORK,
    "horovod.mxnet": _FRAMEWORK,
    "horovod.spark": "gohvd does not start jobs on Spark: " + _LAUNCHER,
    "horovod.ray": "gohvd does not start jobs on Ray: " + _LAUNCHER,
}


class Finder:
    """The last of sys.meta_path, which is asked for modules that no other finder has found."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.startswith("horovod."):
            instead = _INSTEAD.get(fullname, "docs/migration.md lists the modules that it has")
            # Without its name, which would make "from horovod import tensorflow" drop this text.
            raise ModuleNotFoundError(f"gohvd's horovod package has no module {fullname}: {instead}")


sys.meta_path.append(Finder)  # type: ignore[arg-type]
