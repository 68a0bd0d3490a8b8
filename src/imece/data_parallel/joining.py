"""Ranks that have run out of inputs take part in the others' collectives until all have ended.

torch's Join runs the loop. Here is what an ended rank does in each turn, in the order of
DistributedDataParallel.forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch.distributed.algorithms.join import JoinHook, _JoinConfig

from imece.collectives import ops
from imece.collectives.calls import host_device
from imece.data_parallel.optimizer_state import give_state
from imece.data_parallel.same import sync_from

if TYPE_CHECKING:
    from imece.data_parallel.replicate import DistributedDataParallel
    from imece.data_parallel.sharded import ShardedDataParallel


class DDPJoinHook(JoinHook):
    """One model's part in torch's Join."""

    def __init__(self, model: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        self._model = model
        model.reducer.average.present_only = not divide_by_initial_world_size

    def main_hook(self) -> None:
        """Follow one step of the ranks that go on."""
        if self._forward():
            self._model.reducer.shadow()

    def _forward(self) -> bool:
        """Follow one of their forwards; returns whether its backward is to be synchronised."""
        model = self._model
        syncs_buffers, after_forward = model.will_sync_module_buffers(), model.buffer_sync.after_forward
        if syncs_buffers and not after_forward:
            model.sync_buffers(joining=True, present=False)
        synchronises = agree(model, False)
        if synchronises:
            model.synchronised += 1
            model.reducer.prepare()
        if syncs_buffers and after_forward:
            model.sync_buffers(joining=True, present=False)
        model.require_forward_param_sync = synchronises
        return synchronises

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have ended: everybody gets the model of the ranks that trained longest, and what its optimizers
        keep."""
        model = self._model
        root = common_rank(model, is_last_joiner)
        states = model.states(buffers=model.forward_sync_buffers)
        sync_from(root, states, model.process_group, "the model after uneven inputs")
        model.script_writes.pass_over()
        # Of a sharded model's parts ended ranks have made each step.
        if model.sharding is None and (optimizers := model.known_optimizers):
            give_state(optimizers, root, model.process_group, model.device)
        model.reducer.average.present_only = False
        model._join_config = _JoinConfig.construct_disabled_join_config()  # torch leaves it on


class Turn(IntEnum):
    """What the ranks that still have inputs do next; each turn carries a number."""

    FORWARD = 1
    ZERO = 2  # zero an optimizer's gradients: twice its number, plus 1 if to None
    STEP = 3  # an optimizer's step: its number
    NORM = 4  # the norm of the gradient: its type
    SCALE = 5  # scale the gradient: the factor
    BACKWARD = 6  # apart from FORWARD: many loops zero gradients between the two


class ShardedJoinHook(DDPJoinHook):
    """A rank that has ended still owns a part of the model: it follows everything the others do to theirs."""

    _model: ShardedDataParallel

    def main_hook(self) -> None:
        """Follow one turn of the ranks that go on."""
        model, (turn, number) = self._model, next_turn(self._model, 0, 0.0)
        model.has_joined = True
        try:
            if turn == Turn.FORWARD:
                self._forward()
            elif turn == Turn.BACKWARD:
                model.reducer.shadow()
            elif turn == Turn.ZERO:
                model.zero_gradients(int(number) // 2, set_to_none=bool(number % 2))
            elif turn == Turn.STEP:
                model.step(int(number))
            elif turn == Turn.NORM:
                model.gradient_norm(norm_type=number)
            elif turn == Turn.SCALE:
                model.scale_gradients(number)
        finally:
            model.has_joined = False

    def post_hook(self, is_last_joiner: bool) -> None:
        """As in DDPJoinHook."""
        super().post_hook(is_last_joiner)
        self._model.sharding.note_versions()


def next_turn(model: DistributedDataParallel, turn: int, number: float) -> tuple[int, float]:
    """The next turn and its number, which is not negative; ranks that have ended bring 0."""
    agreed, value = most_of_all(model, [turn, number], "what is done next")
    return int(agreed), value


def agree(model: DistributedDataParallel, synchronise: bool) -> bool:
    """Whether any rank synchronises the backward of this turn."""
    return bool(most_of_all(model, [synchronise], "ranks that synchronise")[0])


def common_rank(model: DistributedDataParallel, candidate: bool) -> int:
    """The highest rank of the group that is a candidate."""
    mine = model.process_group.rank() if candidate else -1
    (highest,) = most_of_all(model, [mine], "rank whose model counts")
    assert highest >= 0, "no rank is there any more"
    return int(highest)


def most_of_all(model: DistributedDataParallel, numbers: Sequence[float], label: str) -> list[float]:
    """The largest of all ranks, of each number. They travel beside what a GPU computes: in each turn the host
    would wait for it."""
    group = model.process_group
    told = torch.tensor(numbers, dtype=torch.float64, device=host_device(group, model.device))
    ops.all_reduce(told, "max", group=group, label=label)
    found: list[float] = told.tolist()
    return found
