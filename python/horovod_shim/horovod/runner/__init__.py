"""Runs a Python function at all ranks of a job."""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from gohvd import _programs, _results

try:
    import cloudpickle as _pickler
except ImportError:
    _pickler = pickle


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    network_interface: str | None = None,
) -> list[Any]:
    """Calls func(*args, **kwargs) at each of num_proc ranks (default 1), and returns a list of the results, by rank.

    hvdrun starts the ranks. Its path is HVD_RUN, or else hvdrun in the package gohvd, or else hvdrun on PATH. The ranks
    run the interpreter executable, by default this one. The function, its arguments and the results are pickled into a
    directory that only this user can access. Ranks on other hosts must see this directory under the same path: set
    TMPDIR to a directory that the hosts share. Without cloudpickle the function must be importable. A function of the
    main module is importable if the module does its work under ``if __name__ == "__main__"``.

    With use_mpi, hvdrun runs mpirun with the arguments mpi_args (docs/mpi.md).

    The job is elastic (docs/elastic.md) with a host_discovery_script or a min_num_proc. It is not if min_num_proc and
    max_num_proc are num_proc and there is no host_discovery_script. In an elastic job func calls a function that
    hvd.elastic.run has decorated, and the results are those of the ranks at the end. In others, max_num_proc has no
    effect.

    If this process or the thread that calls run ends, the job ends too. After Ctrl-C, the ranks have 5 s to end. hvdrun
    has a session of its own, so Ctrl-Z does not stop the ranks, nor do they get signals to the group of this process.

    Raises RuntimeError with the errors of the ranks if the job has failed. disable_cache and use_gloo have no effect.
    """
    ranks = num_proc if num_proc is not None else np
    least = min_num_proc if min_num_proc is not None else min_np
    most = max_num_proc if max_num_proc is not None else max_np
    if host_discovery_script is None and (least is None or least == most == ranks):
        least = most = None  # some programs say so of a job that is not elastic
    command = [_programs.path_of_hvdrun()]
    options = {
        "--num-proc": 1 if all(value is None for value in (ranks, hosts, hostfile, host_discovery_script)) else ranks,
        "--min-num-proc": least,
        "--max-num-proc": most,
        "--slots-per-host": slots,
        "--reset-limit": reset_limit,
        "--blacklist-cooldown-range": cooldown_range and ",".join(map(str, cooldown_range)),
        "--host-discovery-script": host_discovery_script,
        "--hosts": hosts,
        "--hostfile": hostfile,
        "--start-timeout": start_timeout,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--output-filename": output_filename,
        "--network-interfaces": network_interfaces or network_interface,
        "--mpi-args": mpi_args or None,
    }
    for option, value in options.items():
        if value is not None:
            command += [option, str(value)]
    if verbose:
        command.append("--verbose")
    if use_mpi:
        command.append("--mpi")
    directory = tempfile.mkdtemp(prefix="horovod-run-")
    try:
        call = os.path.join(directory, "call")
        with open(call, "wb") as f:
            # With this data the process of a rank loads the main module of this process, and finds the same modules.
            preparation = multiprocessing.spawn.get_preparation_data("rank")
            del preparation["authkey"]
            pickle.dump(preparation, f)
            _pickler.dump((func, tuple(args), dict(kwargs or {})), f)
        command += [executable or sys.executable, "-m", "horovod.runner.rank", directory]
        path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
        # In a session of its own, hvdrun gets a Ctrl-C only once: a second signal kills the ranks.
        process = subprocess.Popen(
            _programs.with_parent(command), env={**os.environ, "PYTHONPATH": path}, start_new_session=True
        )
        try:
            status = process.wait()
        except BaseException as e:
            _programs.end(process, signal.SIGINT if isinstance(e, KeyboardInterrupt) else signal.SIGTERM)
            raise
        return _collect(directory, status)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _collect(directory: str, status: int) -> list[Any]:
    outcomes, errors = [], []
    for name in os.listdir(directory):
        with open(os.path.join(directory, name), "rb") as f:
            if name.startswith("error."):
                errors.append(f.read().decode())
            if name.startswith("result."):
                outcomes.append(pickle.load(f))
    if status != 0:
        raise RuntimeError(f"gohvd: run: hvdrun ended with status {status}\n" + "\n".join(sorted(errors)))
    return _results.by_rank(outcomes, f"check that all hosts share {directory}")
