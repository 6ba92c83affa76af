"""Trains with Lightning and runs tests that Accelerate ships, with gloo and with gohvd at two ranks: ``frameworks.py``.

The interpreter needs torch, lightning and accelerate. The script prints what each program did, and the output of those
that failed. It exits with 1 if a program failed with gohvd, or if Lightning's weights differ between the backends."""

from __future__ import annotations

import os
import pathlib
import runpy
import subprocess
import sys
import tempfile

_LIMIT_SECONDS = 300.0

# Modules of accelerate.test_utils.scripts. Each checks its results itself. test_distributed_data_loop needs GPUs.
_ACCELERATE = ["test_ops", "test_sync", "test_script"]


def train_with_lightning(backend: str, result: str) -> None:
    """Trains Lightning's smallest model for two epochs, and writes the sum of its weights to the file result."""
    import lightning
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.strategies import DDPStrategy

    import gohvd.torch.distributed  # noqa: F401

    lightning.seed_everything(1)
    model = BoringModel()
    strategy = DDPStrategy(process_group_backend=backend)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, logger=False,
                                enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(model)
    assert torch.distributed.get_backend() == backend
    if trainer.global_rank == 0:
        total = sum(p.detach().double().sum().item() for p in model.parameters())
        pathlib.Path(result).write_text(repr(total))


def run_with_accelerate(backend: str, module: str) -> None:
    """Runs a module of Accelerate, which uses the process group that is there already."""
    import accelerate
    import torch.distributed as dist

    import gohvd.torch.distributed  # noqa: F401

    dist.init_process_group(backend)
    assert accelerate.PartialState(cpu=True).num_processes == 2
    assert dist.get_backend() == backend
    sys.argv = [module]
    runpy.run_module("accelerate.test_utils.scripts." + module, run_name="__main__")


def _torchrun(*args: str) -> bool:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, *args]
    env = dict(os.environ, ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    try:
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=_LIMIT_SECONDS)
    except subprocess.TimeoutExpired as e:
        output = e.stdout or b""
        print(f"{args}: timed out after {_LIMIT_SECONDS:.0f} s\n{output.decode(errors='replace')}")
        return False
    if done.returncode != 0:
        print(f"{args}: exit status {done.returncode}\n{done.stdout}")
    return done.returncode == 0


def main() -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        sums = {}
        for backend in "gloo", "gohvd":
            result = pathlib.Path(folder) / backend
            if _torchrun("lightning", backend, str(result)):
                sums[backend] = result.read_text()
        print(f"Lightning: the sums of the weights are {sums}", flush=True)
        failed += len(sums) < 2 or sums["gloo"] != sums["gohvd"]
    for module in _ACCELERATE:
        for backend in "gloo", "gohvd":
            ok = _torchrun("accelerate", backend, module)
            print(f"Accelerate: {module} with {backend}: {'ok' if ok else 'FAILED'}", flush=True)
            failed += backend == "gohvd" and not ok
    return min(failed, 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["lightning"]:
        train_with_lightning(*sys.argv[2:])
    elif sys.argv[1:2] == ["accelerate"]:
        run_with_accelerate(*sys.argv[2:])
    else:
        sys.exit(main())
