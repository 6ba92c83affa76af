"""The queries of horovod.common.basics."""

from __future__ import annotations

from typing import Any

import gohvd.basics


class HorovodBasics:
    """Has the functions of gohvd.basics as methods. Horovod's arguments, which name its library, have no effect."""

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(gohvd.basics, name)
