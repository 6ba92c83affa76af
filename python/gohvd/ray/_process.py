"""The program of a process of an elastic job on Ray. hvdrun's agent runs it by the path of this file, with the folder of
the job on this host as its argument.
"""

import os
import pickle
import sys


def main(folder: str) -> None:
    with open(os.path.join(folder, "job"), "rb") as file:
        cwd, sys.path[:], function = pickle.load(file)
    os.chdir(cwd)

    import traceback

    import ray.cloudpickle

    from gohvd import _engine, elastic

    def note(result: object, error: str | None) -> None:
        """Writes the result for the program that has started the job."""
        rank = _engine.engine.place().rank if _engine.engine.initialized() else None
        outcome = elastic._progress().generation, rank, os.environ["HVD_MEMBER"], result, error
        path = os.path.join(folder, f"outcome.{os.getpid()}")
        with open(path + ".new", "wb") as file:
            ray.cloudpickle.dump(outcome, file)
        os.rename(path + ".new", path)

    try:
        note(ray.cloudpickle.loads(function)(), None)
    except Exception:
        note(None, traceback.format_exc())
        raise


main(sys.argv[1])
