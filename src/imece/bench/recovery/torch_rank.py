"""The same training with torch alone: DistributedDataParallel on Gloo, with a checkpoint every few steps.

It appends a line for each finished step to a file, which is measured from outside. Under torchrun it restarts
from the checkpoint; `imece launch` starts it too, to time the start.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from imece.bench.recovery.rank import SHAPE, Text, train_step
from imece.bench.reference_model import new_decoder, optimizer_of
from imece.launch.processes import die_with_parent

PROGRESS, CHECKPOINT = "progress", "checkpoint.pt"


@dataclass(frozen=True)
class TorchTask:
    """A rank's task."""

    folder: str
    steps: int
    checkpoint_every: int = 10
    """In steps."""


def main() -> None:
    """Entry of `python -m imece.bench.recovery.torch_rank TASK`."""
    die_with_parent(os.getppid())
    torch.set_num_threads(1)
    task = TorchTask(**json.loads(sys.argv[1]))
    folder = Path(task.folder)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    made = new_decoder(SHAPE)
    optimizer = optimizer_of(made)
    model, text, done = DistributedDataParallel(made), Text(), 0
    with contextlib.suppress(FileNotFoundError):
        saved = torch.load(folder / CHECKPOINT, weights_only=True)
        made.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
    for step in range(done, task.steps):
        train_step(model, optimizer, text.batch(step, rank, world_size), world_size)
        if rank != 0:
            continue
        with (folder / PROGRESS).open("a") as file:
            file.write(f"{time.monotonic()} {step + 1} {os.getpid()}\n")
        if (step + 1) % task.checkpoint_every == 0:
            content = {"model": made.state_dict(), "optimizer": optimizer.state_dict(), "done": step + 1}
            torch.save(content, folder / f"{CHECKPOINT}.new")
            (folder / f"{CHECKPOINT}.new").replace(folder / CHECKPOINT)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
