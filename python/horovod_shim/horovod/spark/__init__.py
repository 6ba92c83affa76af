"""The function horovod.spark.run, which calls gohvd.spark.run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, NoReturn

import gohvd.spark
from horovod._absent import NO_RUN_ELASTIC

__all__ = ["run"]


def run(
    fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None, num_proc: int | None = None,
    start_timeout: float | None = None, use_mpi: bool | None = None, use_gloo: bool | None = None,
    extra_mpi_args: str | None = None, env: dict[str, str] | None = None, stdout: IO[str] | None = None,
    stderr: IO[str] | None = None, verbose: int = 1, nics: str | Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False, executable: str | None = None,
) -> list[Any]:  # fmt: skip
    """Is gohvd.spark.run with the arguments of Horovod, in its order.

    nics are network interfaces, as for HOROVOD_GLOO_IFACE. use_gloo has no effect, nor has extra_mpi_args without
    use_mpi. use_mpi and executable raise ValueError.
    """
    if use_mpi:
        raise ValueError("gohvd: use_mpi: Spark starts the ranks, and mpirun cannot, so they cannot use MPI: omit use_mpi")
    if executable is not None:
        raise ValueError(
            f"gohvd: got executable {executable!r}, but Spark chooses the interpreter of its executors: set "
            "spark.pyspark.python or PYSPARK_PYTHON"
        )
    if nics:
        env = {"HOROVOD_GLOO_IFACE": nics if isinstance(nics, str) else ",".join(nics)} | (env or {})
    return gohvd.spark.run(
        fn, args, kwargs, num_proc, start_timeout, env, stdout, stderr, verbose, prefix_output_with_timestamp
    )


def __getattr__(name: str) -> NoReturn:
    why = f": {NO_RUN_ELASTIC}" if name == "run_elastic" else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{why}")
