"""A rank of `imece bench recovery`: trains a small GPT on the standard library's bytes, in `imece.steps`.

It does one of two tasks:

    train    a number of steps; rank 0 writes times and the parameters to a folder
    cost     steps of the same model with and without recovery, in turn
"""

from __future__ import annotations

import json
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

import imece
from imece.bench.reference_model import Shape, new_decoder, optimizer_of
from imece.bench.rounds import ratio
from imece.collectives import ops
from imece.data.batches import rows
from imece.membership.recovery import Recovered
from imece.writing import write_whole

SHAPE = Shape(vocabulary=256, width=192, layers=4, heads=3, length=64)
"""1.8M parameters over bytes."""
SEQUENCES = 12
"""In the global batch, which 4, 3 or 2 ranks divide evenly."""
BEGAN, ENDED = "began.json", "ended.json"
PARAMETERS = "parameters.safetensors"
COST = "cost.json"
_TEXT_BYTES = 2**20


@dataclass(frozen=True)
class Task:
    """A rank's task."""

    folder: str
    strategy: str = "replicate"
    steps: int = 200
    compare: int = 200
    """Steps after which the parameters are written."""
    rounds: int = 0
    """If not 0, measure the cost instead: this many rounds of `steps` steps each way."""
    pause_s: float = 0.0
    """Seconds added to each step: for tests, whose steps are too short to be hit."""
    members: int = 0
    """To end sooner: once this many ranks, replacements included, have come,"""
    after: int = 0
    """and this many steps later."""


class Text:
    """Real bytes, the same on all ranks."""

    def __init__(self) -> None:
        read, found = 0, []
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            found.append(path.read_bytes())
            read += len(found[-1])
            if read >= _TEXT_BYTES:
                break
        self._bytes = torch.frombuffer(bytearray(b"".join(found)), dtype=torch.uint8)

    def batch(self, step: int, rank: int, world_size: int) -> torch.Tensor:
        """int64[sequences, length + 1]: this rank's part of the step's batch."""
        first, last = rows(SEQUENCES, rank, world_size)
        starts = np.random.default_rng(step).integers(len(self._bytes) - SHAPE.length - 1, size=SEQUENCES)
        picked = [self._bytes[begin : begin + SHAPE.length + 1] for begin in starts[first:last].tolist()]
        return torch.stack(picked).long()


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, world_size: int
) -> None:
    """One update whose gradient is the mean over the global batch, however unevenly ranks divide it."""
    loss = model(tokens) * (len(tokens) * world_size / SEQUENCES)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _train(task: Task, mesh: imece.Mesh) -> None:
    made = new_decoder(SHAPE)
    # AdamW amplifies rounding. In one process, with the batches in three parts instead of four in every other
    # 20 steps, parameters end 8e-3 apart after 200 steps; with this optimizer 3e-6.
    plain = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9, fused=True)
    model, optimizer = imece.parallelize(made, plain, task.strategy)
    text, folder, last = Text(), Path(task.folder), task.steps

    def recovered(found: Recovered) -> None:  # all ranks of a generation get the same
        nonlocal last
        if task.members and max(found.generation.members) + 1 >= task.members:
            last = max(found.step, task.compare) + task.after

    # One more step than asked for: what follows the last step is not protected, so no fault should come
    # there.
    for step in imece.steps(task.steps + 1, model, optimizer, recovered=recovered):
        with step:
            if step.index == 1 and mesh.rank == 0 and not (folder / BEGAN).exists():
                _write(folder / BEGAN, {"time_s": time.monotonic()})
            if step.index == task.compare:
                tensors = {name: value.detach().cpu() for name, value in model.state_dict().items()}
                if mesh.rank == 0:
                    _save(tensors, folder / PARAMETERS)
            if step.index == last and mesh.rank == 0:
                _write(folder / ENDED, {"time_s": time.monotonic()})
            train_step(model, optimizer, text.batch(step.index, mesh.rank, mesh.world_size), mesh.world_size)
            time.sleep(task.pause_s)
        if step.index == last:
            break


def _measure_cost(task: Task, mesh: imece.Mesh) -> None:
    """The same tensors both ways, so that no other memory is slower or faster by chance."""
    made = new_decoder(SHAPE)
    model, optimizer = imece.parallelize(made, optimizer_of(made), task.strategy)
    resilient = imece.steps(sys.maxsize, model, optimizer)
    tokens = Text().batch(0, mesh.rank, mesh.world_size)

    def go(protected: bool) -> float:
        ops.barrier(group=mesh.world_group)
        began = time.perf_counter()
        for _ in range(task.steps):
            if protected:
                with next(resilient):
                    train_step(model, optimizer, tokens, mesh.world_size)
            else:
                train_step(model, optimizer, tokens, mesh.world_size)
        ops.barrier(group=mesh.world_group)
        return (time.perf_counter() - began) / task.steps

    for protected in (True, False):  # the first steps make buckets, states and copies
        go(protected)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(task.rounds):
        for protected in (True, False) if turn % 2 else (False, True):
            seconds[protected].append(go(protected))
    if mesh.rank == 0:
        cost = ratio(seconds[True], seconds[False]) - 1
        _write(
            Path(task.folder) / COST, {"cost": cost, "resilient_s": seconds[True], "plain_s": seconds[False]}
        )
    ops.barrier(group=mesh.world_group)


def _write(path: Path, content: dict[str, object]) -> None:
    write_whole(path, json.dumps(content).encode())


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Whole or not at all, as all its files: this rank may be killed at any moment. Tied weights are written
    once."""
    held: dict[int, str] = {}
    for name, value in tensors.items():
        held.setdefault(value.data_ptr(), name)
    write_whole(path, save({name: tensors[name].contiguous() for name in held.values()}))


def main() -> None:
    """Entry of `python -m imece.bench.recovery.rank TASK`, which `imece launch` starts."""
    torch.set_num_threads(1)
    task = Task(**json.loads(sys.argv[1]))
    mesh = imece.init(device="cpu")
    (_measure_cost if task.rounds else _train)(task, mesh)


if __name__ == "__main__":
    main()
