"""horovod.torch is gohvd.torch: the same module, under another name, and so are its submodules."""

import sys

import gohvd.torch

# The submodules by their names here, before the import system looks for them beside gohvd's files and loads them twice.
from horovod.torch import compression, elastic, functions, mpi_ops, optimizer, sync_batch_norm

sys.modules[__name__] = gohvd.torch
