"""before.py with two other lines: when a rank dies, the others go on, and another takes its place.

imece launch --ranks 3 after.py                            kill one of its processes and see
imece drill --ranks 3 --kills 3 --every-s 2 after.py       or let that be done
"""

import torch
from torch import nn

import imece

mesh = imece.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1)).to(mesh.device)
model, optimizer = imece.parallelize(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of the global batch of this number: 24 points and their targets."""
    points = torch.randn(24, 64, generator=torch.Generator().manual_seed(number))
    mine = points.chunk(mesh.world_size)[mesh.rank].to(mesh.device)
    return mine, mine.sin().sum(dim=1, keepdim=True)


for step in imece.steps(2_000, model, optimizer):
    with step as number:
        inputs, targets = batch(number)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 200 == 0:
            print(f"step {number}: {mesh.world_size} ranks, loss {loss.item():.4f}")
