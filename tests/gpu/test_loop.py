"""Without a GPU: what the host waits for in a step of `imece train` (cpu_as_gpu.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import imece
from imece.data.batches import Batches
from imece.data.tokens import Part
from imece.membership.aborting import Aborting
from imece.membership.recovery import Recovery
from imece.models.presets import PRESETS
from imece.models.transformer import Transformer
from imece.train import loop as loops
from imece.train.batch import BatchPlan
from imece.train.config import OptimizerSection, TrainConfig
from imece.train.loop import Loop
from imece.train.model.optimizer import make_optimizers
from imece.train.model.precision import Precision
from imece.train.passes import InTurn
from imece.train.session import Session
from imece.train.step import Step
from imece.train.watch.clock import Clock
from imece.train.watch.stopping import Stop
from tests.gpu.cpu_as_gpu import CUDA, cpu_as_gpu, gpu
from tests.gpu.fake_world import enter
from tests.meshes import FakeMesh
from tests.ranks import run_ranks

SEQ, RANKS, STEPS = 8, 2, 4
MEMORY = {"allocated_bytes": {"all": {"peak": 0}}, "reserved_bytes": {"all": {"current": 0}}}


class Enough(Exception):
    """So many steps."""


class Watching:
    """Of each step what the host has waited for."""

    def __init__(self) -> None:
        self.waits: list[list[str]] = []
        self.told = 0

    def start(self, done: int) -> None:
        gpu.waits.clear()

    def step(self, record: Mapping[str, Any], late: bool) -> None:
        assert late and self.told == 1 + len(self.waits)
        assert record["loss"] > 0 and record["grad_norm"] > 0 and not record.get("skipped")
        self.waits.append(list(gpu.waits))
        gpu.waits.clear()
        if len(self.waits) == STEPS:
            raise Enough

    def tell(self) -> None:
        assert not gpu.waits, "the GPU has had nothing to do"
        self.told += 1


def session_of(strategy: str, clip: float, replaces: bool) -> Session:
    """A small model that is trained on the first of two ranks, by a Step as a Session has it.

    replaces: as where the launcher replaces ranks that die.
    """
    world = dist.group.WORLD
    assert world is not None
    mesh = FakeMesh({"replicate": RANKS}, device="cuda", backend="nccl", groups=[world])
    shape = replace(PRESETS["tiny"], vocab_size=257, width=16, mlp_width=24, max_seq=SEQ)
    model = Transformer(shape, generator=torch.Generator().manual_seed(1)).to(CUDA)
    optimizers = make_optimizers(model, OptimizerSection(), CUDA)
    wrapped, _ = imece.parallelize(model, optimizers, strategy, world, average="tokens")
    tokens = np.arange(1000).astype(np.uint16) % 256
    plan = BatchPlan(SEQ, 8, RANKS, micro=2, accumulation=2)
    batches = Batches(Part("train", tokens, np.array([0, 1000]), 256, 1000), SEQ, plan.sequences, seed=1)
    precision, clock, context = Precision("fp32", "cuda"), Clock(CUDA), imece.ContextParallel(mesh)
    passes = InTurn(wrapped, precision, None, clock, context, SEQ)
    step = Step(wrapped, optimizers, batches, plan, passes, None, clip, clock, context, mesh)
    nobody: Any = None
    session = Session(
        TrainConfig(), nobody, mesh, nobody, plan, precision, nobody, model, wrapped, optimizers, batches,
        clock, nobody, step, deque(),
    )  # fmt: skip
    if replaces:
        member: Any = mock.Mock(aborting=Aborting(), mesh=mesh, newest=0, generation=0)
        session.replace_by(Recovery(member, wrapped, optimizers, state=dict, take=nobody))
    return session


def waits(strategy: str, replaces: bool) -> list[list[str]]:
    enter(RANKS, "cuda")
    try:
        with (
            cpu_as_gpu(),
            mock.patch.object(torch.cuda, "memory_stats_as_nested_dict", lambda _: MEMORY),
            mock.patch.object(torch.cuda, "mem_get_info", lambda _: (0, 0)),
            mock.patch.object(torch.cuda, "is_bf16_supported", lambda **_: True),
            mock.patch.object(loops, "measured_peak", lambda *_: 1.0),
        ):
            watching: Any = Watching()
            loop = Loop(session_of(strategy, 1e-3, replaces), watching, Stop())
            with pytest.raises(Enough):
                loop.run()
            assert watching.told == STEPS + 1, "in each step, and in the end"
            return list(watching.waits)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("strategy", "replaces"), [("replicate", False), ("replicate", True), ("zero1", False), ("zero3", False)]
)
def test_the_host_waits_before_the_update_and_after_it(strategy: str, replaces: bool) -> None:
    """For norm and loss, by which it is made; and for what the other ranks say. Each is one copy."""
    (found,) = run_ranks(waits, 1, args=(strategy, replaces), backend=None)
    first, *others = found
    assert others == [["copy_", "copy_"]] * (STEPS - 1)
    if strategy != "replicate":  # whether the first update has moved the parameters
        first = [each for each in first if each != "equal"]
    assert first == ["copy_", "copy_"]
