"""``python -m gohvd.doctor`` is ``hvdrun doctor`` for this Python interpreter. It takes the same flags."""

import sys

from . import _programs

if __name__ == "__main__":
    _programs.execute("hvdrun", "doctor", "--python", sys.executable, *sys.argv[1:])
