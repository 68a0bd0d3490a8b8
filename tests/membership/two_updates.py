"""A script that makes two updates per step, as a GAN does, and then evaluates; its ranks kill themselves.

Run it as `imece launch two_updates.py FOLDER`. All ranks see the same samples, so their number does not
change the result.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import imece

STEPS = 8
DEATHS = {("forward", 2): 1, ("after one", 4): 2, ("evaluating", 6): 3}  # (place, step): member


class Networks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 1)
        self.double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.other(torch.tanh(self.one(self.norm(inputs))))
        return result


def optimizers(networks: Networks) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adam(networks.one.parameters(), lr=0.01),
        torch.optim.SGD(networks.other.parameters(), lr=0.1),
    ]


def step(
    model: nn.Module, steppers: list[torch.optim.Optimizer], number: int, at: Callable[[str], object]
) -> None:
    """Two updates, for the second of which a part is frozen. at: called at each place with its name."""
    assert model.training and all(each.requires_grad for each in model.parameters()), "also if it comes again"
    for optimizer, sign, place in zip(steppers, (1.0, -1.0), ("after one", "after both"), strict=True):
        generator = torch.Generator().manual_seed(number)
        inputs = torch.rand(4, 3, generator=generator, dtype=torch.float64)
        loss = sign * model(inputs).square().mean()
        at("forward")
        model.zero_grad()
        loss.backward()
        optimizer.step()
        for each in steppers[0].param_groups[0]["params"]:
            each.requires_grad_(place == "after both")
        at(place)
    model.eval()
    at("evaluating")
    model.train()


def main(folder: Path) -> None:
    mesh = imece.init()
    if mesh.rank == 0 and not mesh.world.joining:
        with (folder / "begun").open("a") as file:
            print("by", mesh.world_size, file=file)
    member, networks = int(os.environ["IMECE_MEMBER"]), Networks()
    model, steppers = imece.DistributedDataParallel(networks), optimizers(networks)
    for each in imece.steps(STEPS, model, steppers):
        with each as number:

            def dies(place: str, number: int = number) -> None:
                assert not mesh.world.joining
                if DEATHS.get((place, number)) == member:
                    os.kill(os.getpid(), signal.SIGKILL)
                if place == "evaluating":
                    imece.all_reduce(torch.zeros(1), "avg")  # of the script's own

            step(model, steppers, number, dies)
    state = {name: each.double().flatten().tolist() for name, each in networks.state_dict().items()}
    (folder / f"member-{member}.json").write_text(json.dumps(state))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
