"""Ranks that save together within this process: a single thread calls `save` on each before `finish`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from imece.checkpoint import Checkpoints, Saved, Slice, newest

Tensors = Mapping[str, torch.Tensor | Slice]

_LIMIT_S = 20.0  # never reached, but where a test makes it shorter for one rank


class Crew:
    """`alarms` has the lines of each rank."""

    def __init__(self, folder: Path, world_size: int, *, keep: int = 2) -> None:
        self.folder = folder
        self.alarms: list[list[str]] = [[] for _ in range(world_size)]
        self.ranks = [
            Checkpoints(
                folder, rank=rank, world_size=world_size, keep=keep, alarm=alarms.append, limit_s=_LIMIT_S
            )
            for rank, alarms in enumerate(self.alarms)
        ]

    def save(
        self, step: int, tensors: Tensors | Callable[[int], Tensors], metric: float | None = None
    ) -> bool:
        """Whether it is on the disk; AssertionError if the ranks have different answers."""
        for rank, checkpoints in enumerate(self.ranks):
            own = tensors(rank) if callable(tensors) else tensors
            checkpoints.save(step, own, {"step": step}, {"rank": rank, "step": step}, metric=metric)
        answers = {checkpoints.finish() for checkpoints in self.ranks}
        assert len(answers) == 1, f"the ranks do not agree whether step {step} was saved: {self.alarms}"
        return answers.pop()


@contextmanager
def crew(folder: Path, world_size: int, *, keep: int = 2) -> Iterator[Crew]:
    """Closed at the end."""
    made = Crew(folder, world_size, keep=keep)
    try:
        yield made
    finally:
        for checkpoints in made.ranks:
            checkpoints.close()


def state_of(step: int) -> dict[str, torch.Tensor]:
    """What is saved at a step in most tests: small, of several dtypes, and another one at each step."""
    numbers = torch.arange(24, dtype=torch.float32) + 1000 * step
    return {
        "model/a.weight": numbers.view(4, 6),
        "model/b.weight": (numbers + 0.5)[:7].bfloat16(),
        "optimizer/a.weight/step": torch.tensor(float(step)),
        "optimizer/empty": torch.empty(0, 3),
        "model/count": torch.tensor([step, -step, 2**62], dtype=torch.int64),
    }


def assert_whole(saved: Saved | None, step: int, world_size: int) -> None:
    """It is what a crew saved with `state_of(step)`."""
    assert saved is not None
    assert (saved.step, saved.state) == (step, {"step": step})
    assert saved.rank_states == [{"rank": rank, "step": step} for rank in range(world_size)]
    expected = state_of(step)
    assert sorted(saved.names()) == sorted(expected)
    for name, tensor in expected.items():
        assert saved.shape(name) == tuple(tensor.shape) and saved.dtype(name) == tensor.dtype
        assert torch.equal(saved.tensor(name), tensor), name


def newest_whole(folder: Path) -> Saved | None:
    """The newest checkpoint; AssertionError if one of those in `folder` is damaged."""
    damaged: list[str] = []
    saved = newest(folder, damaged.append)
    assert not damaged
    return saved


def partials(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.partial"))
