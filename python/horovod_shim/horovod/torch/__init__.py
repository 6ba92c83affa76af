"""horovod.torch and its submodules are gohvd.torch and its submodules: the same module objects under other names."""

import sys

import gohvd.torch

# The submodules are imported here under their Horovod names. Otherwise the import system would look for them beside
# gohvd's files and load them a second time.
from horovod.torch import compression, elastic, functions, mpi_ops, optimizer, sync_batch_norm

sys.modules[__name__] = gohvd.torch
