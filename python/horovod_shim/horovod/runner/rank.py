"""The program that each rank of horovod.run executes: ``python -m horovod.runner.rank DIRECTORY``."""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import sys
import tempfile
import traceback

from gohvd import _results
from horovod.runner import _pickler


def main(directory: str) -> int:
    error = ""
    try:
        with open(os.path.join(directory, "call"), "rb") as f:
            multiprocessing.spawn.prepare(pickle.load(f))
            func, args, kwargs = pickle.load(f)
        value = func(*args, **kwargs)
        data = _pickler.dumps((*_results.place(), value))
        prefix = "result."
    except Exception:
        error = traceback.format_exc()
        sys.stderr.write(error)
        who = f"rank {os.environ['HOROVOD_RANK']}" if "HOROVOD_RANK" in os.environ else os.environ["HVD_MEMBER"]
        data, prefix = f"{who}: {error}".encode(), "error."
    descriptor, path = tempfile.mkstemp(dir=directory)
    with os.fdopen(descriptor, "wb") as f:
        f.write(data)
    os.rename(path, os.path.join(directory, prefix + os.path.basename(path)))
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
