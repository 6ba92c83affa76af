#!/usr/bin/env bash
# Prints the path of a Python interpreter with PyTorch 2, which is in the user's cache folder (venv.sh). The first run
# installs it from PyPI, in about a minute, 5.4 GB.
# The tests of gohvd.torch.distributed need it, because Debian's PyTorch is older than 2.1. More than half of it are CUDA
# packages. PyPI's PyTorch cannot be imported without them.
set -euo pipefail

# The versions are fixed, so that a release of PyTorch does not break CI. Once make test-torch2 passes with newer ones,
# these can be raised.
"$(dirname "$0")/venv.sh" torch /usr/bin/python3 torch==2.15.0 numpy==2.4.6
