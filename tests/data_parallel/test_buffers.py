"""Which buffers of a module are found."""

from __future__ import annotations

import torch
from torch import nn

from imece.data_parallel.buffers import BufferSync


class Shared(nn.Module):
    """One inner module under two names, a buffer under two, one that is None, and what is added later."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.other = nn.BatchNorm1d(2)
        table = torch.zeros(2)
        self.register_buffer("table", table)
        self.register_buffer("again", table)
        self.register_buffer("none", None)
        self.missing = None
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def test_they_are_those_that_torch_names_in_its_order() -> None:
    module = Shared()
    for _ in range(2):
        found = BufferSync(module, {"inner.1.running_var"}).named
        expected = {name: each for name, each in module.named_buffers() if name != "inner.1.running_var"}
        assert list(found) == list(expected)
        assert all(found[name] is expected[name] for name in expected)
        module.inner.append(nn.BatchNorm1d(2))
        module.one.register_buffer("later", torch.ones(1))
