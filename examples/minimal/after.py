"""before.py for any number of ranks: an import and three other lines, the same on every rank."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import imece

torch.manual_seed(0)
device = imece.init().device
points = torch.randn(1024, 8)
values = points.sin().sum(dim=1, keepdim=True)
dataset = TensorDataset(points, values)

model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
model = imece.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(dataset, batch_size=32, sampler=imece.DistributedSampler(dataset))

for epoch in range(5):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(points.to(device)), values.to(device))
    print(f"epoch {epoch}: loss {loss.item():.6f}")
