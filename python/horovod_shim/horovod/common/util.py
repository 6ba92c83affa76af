"""The functions of horovod.common.util that programs use."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import gohvd.basics
from gohvd.exceptions import HorovodVersionMismatchError

_T = TypeVar("_T")
_FRAMEWORKS = {"torch": "gohvd.torch"}


@contextlib.contextmanager
def env(**kwargs: Any) -> Iterator[None]:
    """Is a context in which the environment has these variables. Variables whose value is None are unset."""
    before = {name: os.environ.get(name) for name in kwargs}
    try:
        _set(kwargs)
        yield
    finally:
        _set(before)


def _set(variables: Any) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)


def _cache(f: Callable[..., _T]) -> Callable[..., _T]:
    """Returns a function that caches the results of f: it calls f only once for the same arguments."""
    return functools.lru_cache(maxsize=None)(f)


def _has(framework: str) -> bool:
    return framework in _FRAMEWORKS and importlib.util.find_spec(framework) is not None


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether a framework is supported and installed. Only torch is supported."""
    return _has(ext_base_name)


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether operations can use GPUs with this framework."""
    return _has(ext_base_name) and (gohvd.basics.cuda_built() or gohvd.basics.rocm_built())


def mpi_built(verbose: bool = False) -> bool:
    return bool(gohvd.basics.mpi_built())


def gloo_built(verbose: bool = False) -> bool:
    return bool(gohvd.basics.gloo_built())


def nccl_built(verbose: bool = False) -> bool:
    return bool(gohvd.basics.nccl_built())


def ddl_built(verbose: bool = False) -> bool:
    return bool(gohvd.basics.ddl_built())


def ccl_built(verbose: bool = False) -> bool:
    return bool(gohvd.basics.ccl_built())


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raises ImportError if the framework that an extension is for is not supported."""
    framework = ext_name.rsplit(".", 1)[-1]
    if framework not in _FRAMEWORKS and ext_name not in _FRAMEWORKS:
        raise ImportError(f"gohvd has no support for {ext_name}")


def check_installed_version(name: str, version: str, exception: Any = None) -> None:
    """Raises HorovodVersionMismatchError if the installed version of the framework is not version."""
    found = getattr(importlib.import_module(name), "__version__")
    if found != version:
        mismatch = HorovodVersionMismatchError(name, version, found)
        if exception is None:
            raise mismatch
        raise mismatch from exception


def split_list(items: Sequence[_T], num_parts: int) -> list[Sequence[_T]]:
    """Divides a list into num_parts parts. If the items do not divide evenly, the first parts get one more."""
    size, longer = divmod(len(items), num_parts)
    parts, start = [], 0
    for i in range(num_parts):
        end = start + size + (i < longer)
        parts.append(items[start:end])
        start = end
    return parts


def num_rank_is_power_2(num_rank: int) -> bool:
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(x: Any) -> bool:
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Returns whether version ver is equal to or newer than target. It ignores the suffix of a build, as in 2.1.0+cpu.

    Raises ValueError if target does not have the form x.y.z.
    """
    if not re.match(r"\d+\.\d+\.\d+", target):
        raise ValueError(f"got target version {target!r}, want the form x.y.z")
    return _numbers(ver) >= _numbers(target)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3])
