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

    from gohvd import _results, elastic
    from gohvd.exceptions import HorovodInternalError

    def note(result: object, error: object) -> None:
        """Writes the result or the error for the program that has started the job."""
        path = os.path.join(folder, f"outcome.{os.getpid()}")
        with open(path + ".new", "wb") as file:
            ray.cloudpickle.dump((result, error), file)
        os.rename(path + ".new", path)

    try:
        value = ray.cloudpickle.loads(function)()
        note((*_results.place(), value), None)
    except Exception as e:
        is_cause = not isinstance(e, HorovodInternalError)  # the others are often the errors of other ranks
        note(None, (elastic._progress().generation, is_cause, traceback.format_exc()))
        raise


main(sys.argv[1])
