"""A script under zero1 that updates only in every third step, whose ranks kill themselves.

Run it as `imece launch seldom_sums.py FOLDER`. From step LATE on the optimizer keeps more state, on one of
the ranks. All ranks see the same samples, so their number does not change the result.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import imece

RANKS = 3
STEPS = 16
DEATHS = {4: 1, 11: 2}  # step: member. While the others run ahead, and soon after one's copy fits no more
LATE = 9


class Network(nn.Module):
    """Of which one number is not used before step LATE, and a part is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.inner, self.late = nn.Linear(3, 3), nn.Parameter(torch.ones(1))
        self.double()

    def forward(self, inputs: torch.Tensor, number: int) -> torch.Tensor:
        hidden: torch.Tensor = torch.tanh(self.inner(inputs)) * self.frozen
        return hidden * self.late if number >= LATE else hidden


def optimizer_of(network: Network) -> torch.optim.Optimizer:
    return torch.optim.Adam([each for each in network.parameters() if each.requires_grad], lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    if number % 3 == 0 and number < STEPS:
        generator = torch.Generator().manual_seed(number)
        inputs = torch.rand(4, 3, generator=generator, dtype=torch.float64)
        model(inputs, number).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main(folder: Path) -> None:
    mesh = imece.init()
    member, network = int(os.environ["IMECE_MEMBER"]), Network()
    if member >= RANKS:  # who comes later has the frozen part from the others
        network.frozen.data.zero_()
    model, optimizer = imece.parallelize(network, optimizer_of(network), "zero1")
    for each in imece.steps(10_000, model, optimizer):
        with each as number:
            time.sleep(0.01)
            if DEATHS.get(number) == member:
                time.sleep(0.1)  # the others run ahead as far as they can
                os.kill(os.getpid(), signal.SIGKILL)
            step(model, optimizer, number)
            whole = mesh.world_size == RANKS
        if number > STEPS and whole:
            break  # those who come in the place of others are there
    state = {name: each.flatten().tolist() for name, each in network.state_dict().items()}
    (folder / f"member-{member}.json").write_text(json.dumps(state))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
