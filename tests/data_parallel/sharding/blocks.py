"""Small models of blocks, and ways to train them, for tests of parameters that are gathered by unit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from imece import parallelize
from imece.data_parallel.sharding.freed import FreedParameter
from imece.data_parallel.sharding.units import State, Unit
from imece.mesh import Mesh
from tests.meshes import FakeMesh

WIDTH, VOCAB, LAYERS = 12, 17, 4


class Block(nn.Module):
    """Like a transformer's, with matrices of sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(self.norm(x)).tanh())
        return out


class Small(nn.Module):
    """Tokens to the mean of their logits."""

    def __init__(self, tied: bool = False, reentrant: bool | None = None, spare: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)  # of the root, and wanted in backward after all blocks
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if spare:
            self.blocks[1].spare = nn.Linear(3, 3)
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(tokens))
        for block in self.blocks:
            if self.reentrant is None or not torch.is_grad_enabled():
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)  # type: ignore[no-any-return]


class Branch(Block):
    """Rank 0 uses one of its sides, in turn, the others use both: there all gradients come earlier."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        self.steps: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        for at, side in enumerate(self.sides):
            if dist.get_rank() or at == int(self.steps) % 2:
                x = x + side(x).sin()
        return x


class Routed(Small):
    """Ranks use different parameters of the same blocks."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__(reentrant=reentrant)
        self.blocks = nn.ModuleList(Branch() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            assert isinstance(block, Branch)
            block.steps += torch.is_grad_enabled()
        return super().forward(tokens)


def partly_frozen() -> Small:
    model = Small()
    model.embed.requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    return model


class Twice(Small):
    """Its blocks run twice, with weights of the first one in all of them."""

    def __init__(self) -> None:
        super().__init__()
        first, *others = (block for block in self.blocks if isinstance(block, Block))
        for block in others:
            block.down.weight = first.down.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(tokens))
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def made(make: Callable[[], nn.Module] = Small) -> nn.Module:
    torch.manual_seed(5)
    return make()


def mesh_of(group: dist.ProcessGroup) -> Mesh:
    """A mesh of these ranks."""
    return FakeMesh({"replicate": group.size()}, rank=group.rank(), groups=[group])


@contextlib.contextmanager
def two_hosts(group: dist.ProcessGroup) -> Iterator[Mesh]:
    """The mesh of four ranks on two of them."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    own = [each for each in groups if isinstance(each, dist.ProcessGroup)]
    yield FakeMesh(hosts=((0, 1), (2, 3)), rank=group.rank(), groups=[group, *own])
    for each in groups:
        dist.destroy_process_group(each)


def wrap(model: nn.Module, group: dist.ProcessGroup, strategy: str = "zero3", **options: Any) -> Any:
    optimizer = options.pop("make", adamw)(model)
    options.setdefault("gather", True)
    model, optimizer = parallelize(model, optimizer, strategy, mesh_of(group), **options)
    return model, optimizer if isinstance(optimizer, torch.optim.Optimizer) else Together(optimizer)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon looks at whole matrices, which no rank may have in part."""
    matrices = [each for name, each in model.named_parameters() if "blocks" in name and each.ndim == 2]
    others = [each for each in model.parameters() if not any(each is other for other in matrices)]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


class Together:
    """Several optimizers as one."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for each in self._optimizers:
            each.step()

    def zero_grad(self) -> None:
        for each in self._optimizers:
            each.zero_grad()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(VOCAB, (3, 6), generator=generator)
    return tokens, tokens.roll(1)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens, targets = batch(step)
    return nn.functional.cross_entropy(model(tokens).view(-1, VOCAB), targets.view(-1))


def units_of(model: Any) -> list[Unit]:
    units: list[Unit] = model.sharding.gathering.units
    return units


def full_bytes(model: Any) -> int:
    return sum(flat.full.untyped_storage().nbytes() for unit in units_of(model) for flat in unit.flats)


def assert_freed(model: Any) -> None:
    assert full_bytes(model) == 0, f"{full_bytes(model)} bytes of parameters are left"
    assert all(unit.state is State.FREED for unit in units_of(model))
    assert all(isinstance(each, FreedParameter) for each in model.parameters() if each.requires_grad)


def plain(model: Any, optimizer: Any, steps: int) -> Iterator[torch.Tensor]:
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def accumulated(model: Any, optimizer: Any, steps: int) -> Iterator[torch.Tensor]:
    for step in range(steps):
        for micro in range(3):
            loss = loss_of(model, 3 * step + micro)
            loss.backward()
            assert_freed_if_gathered(model)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def accumulated_in_no_sync(model: Any, optimizer: Any, steps: int) -> Iterator[torch.Tensor]:
    for step in range(steps):
        with model.no_sync():
            for micro in range(2):
                loss_of(model, 3 * step + micro).backward()
                assert_freed_if_gathered(model)
        loss = loss_of(model, 3 * step + 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def assert_freed_if_gathered(model: Any) -> None:
    sharding = getattr(model, "sharding", None)
    if sharding is not None and sharding.gathering is not None:
        assert_freed(model)


def there_when_blocks_run(model: Any) -> list[list[int]]:
    """From now on: of each forward and backward of a block, the blocks that have memory."""
    found: list[list[int]] = []

    def look(*_: Any) -> None:
        found.append([unit.number - 1 for unit in units_of(model)[1:] if unit.state is not State.FREED])

    for block in model.module.blocks:
        block.up.register_forward_hook(look)
        block.up.register_full_backward_hook(look)
    return found
