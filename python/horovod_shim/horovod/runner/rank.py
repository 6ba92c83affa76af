"""The program that each rank of horovod.run executes: ``python -m horovod.runner.rank DIRECTORY``."""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import sys
import traceback

from horovod.runner import _pickler


def main(directory: str) -> int:
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    value, error = None, ""
    try:
        with open(os.path.join(directory, "call"), "rb") as f:
            multiprocessing.spawn.prepare(pickle.load(f))
            func, args, kwargs = pickle.load(f)
        value = func(*args, **kwargs)
        data = _pickler.dumps((rank, size, error, value))
    except Exception:
        error = traceback.format_exc()
        data = pickle.dumps((rank, size, error, None))
        sys.stderr.write(error)
    path = os.path.join(directory, f"result.{rank}")
    with open(path + ".new", "wb") as f:
        f.write(data)
    os.rename(path + ".new", path)
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
