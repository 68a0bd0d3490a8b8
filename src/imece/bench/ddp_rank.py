"""One rank of `imece bench ddp`: the same model on two backends in the same process."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from imece.bench import crew
from imece.collectives.shared_memory import register

BACKENDS = ("shm", "gloo")
WRAP = "IMECE_BENCH_WRAP"  # "ddp" or "fully_shard"

_VOCABULARY, _WIDTH, _LAYERS, _HEADS, _LENGTH = 2048, 320, 8, 5, 128


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(_WIDTH)
        self.query_key_value = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.attention_out = nn.Linear(_WIDTH, _WIDTH)
        self.mlp_norm = nn.LayerNorm(_WIDTH)
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, length, width], and so is the result."""
        batch, length, _ = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, _HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, _WIDTH))
        return x + torch.as_tensor(self.mlp(self.mlp_norm(x)))


class Decoder(nn.Module):
    """A small GPT of 11M parameters: embeddings, blocks, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        self.positions = nn.Embedding(_LENGTH, _WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(_LAYERS)))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64[batch, length]; the mean loss of predicting each from those before it."""
        positions = torch.arange(tokens.shape[1] - 1)
        hidden = self.blocks(self.tokens(tokens[:, :-1]) + self.positions(positions))
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Rank:
    """The orders of a rank."""

    def __init__(self, wrap: str) -> None:
        torch.set_num_threads(1)
        register()
        dist.init_process_group("gloo")
        world = dist.group.WORLD
        assert world is not None
        groups = {"gloo": world, "shm": dist.new_group(backend="shm")}
        self._groups = groups
        self._models = {backend: _wrapped(wrap, groups[backend]) for backend in BACKENDS}
        self._optimizers = {
            backend: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            for backend, model in self._models.items()
        }
        self._steps = dict.fromkeys(BACKENDS, 0)
        self._parameters = sum(parameter.numel() for parameter in Decoder().parameters())

    def describe(self) -> dict[str, Any]:
        """The model's size."""
        return {"parameters": self._parameters, "tokens": _LENGTH}

    def measure(self, backend: str, steps: int) -> dict[str, Any]:
        """Seconds of one of `steps` training steps after a barrier, and the last loss."""
        model, optimizer = self._models[backend], self._optimizers[backend]
        dist.barrier(self._groups[backend])
        begin = time.perf_counter()
        for _ in range(steps):
            seed = self._steps[backend] * dist.get_world_size() + dist.get_rank()
            tokens = torch.randint(
                _VOCABULARY, (1, _LENGTH + 1), generator=torch.Generator().manual_seed(seed)
            )
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self._steps[backend] += 1
        seconds = (time.perf_counter() - begin) / steps
        return {"seconds": seconds, "loss": float(loss.detach())}


def _wrapped(wrap: str, group: dist.ProcessGroup) -> nn.Module:
    torch.manual_seed(0)
    model = Decoder()
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=group)
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    """Entry of `python -m imece.bench.ddp_rank`, which only a crew starts."""
    rank = Rank(os.environ[WRAP])
    crew.serve({"describe": rank.describe, "measure": rank.measure})


if __name__ == "__main__":
    main()
