"""Modes that a block changes in its model are restored when the block is left and repeated."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from torch import nn

from imece.data_parallel.sharding.freed import free
from imece.membership import steps as loops_of
from imece.membership.carried import Carried
from imece.membership.modes import Modes
from imece.membership.states import packed, unpacked


class Merges(nn.Linear):
    """One that does more than to set a flag, as adapters do that are a part of the weight in evaluation."""

    merged = False

    def train(self, mode: bool = True) -> Merges:
        self.merged = not mode
        super().train(mode)
        return self


def network() -> nn.Sequential:
    made = nn.Sequential(Merges(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    made[1].eval()
    made[2].weight.requires_grad_(False)
    return made


def flags(model: nn.Module) -> list[bool]:
    return [each.training for each in model.modules()] + [each.requires_grad for each in model.parameters()]


def test_modes_are_as_they_were_noted() -> None:
    model = network()
    modes, begun = Modes(model), flags(model)
    noted = modes.noted
    assert not modes.note()
    for change in (model.eval, model.train, lambda: model.requires_grad_(False), model.requires_grad_):
        change()
        assert flags(model) != begun and modes.note() and modes.noted != noted
        modes.restore(noted)
        assert flags(model) == begun and modes.noted == noted and not modes.note()
    model.eval()
    assert model[0].merged
    modes.restore(noted)
    assert not model[0].merged


def test_a_rank_that_joins_gets_the_modes_of_the_others() -> None:
    """It has not seen that a layer was frozen in step 100."""
    model, other = network(), network()
    there, joins = Carried(model, [], []), Carried(other, [], [])
    model[0].requires_grad_(False)
    there.modes.note()
    joins.take(unpacked(packed(there.state())))
    assert flags(other) == flags(model)


class Loop:
    """One whose blocks are left by deaths, and what it has made of them."""

    def __init__(self, model: nn.Module) -> None:
        self.lost: tuple[str, ...] = ("rank 1 was killed",)
        self.recovery = mock.Mock(member=mock.Mock(is_joining=False))
        self.recovery.recover.side_effect = self.recover
        self.model, self.modes_then = model, Modes(model)
        self.modes = Modes(model)
        self.loop = loops_of._Loop(self.recovery, self.modes, mock.Mock(), 0, 9, lambda _: None)

    def recover(self, error: BaseException | None, step: int) -> Any:
        if isinstance(error, RuntimeError) and "its own" in str(error):
            raise error
        self.modes_then.note()
        return mock.Mock(step=step, generation=mock.Mock(lost=self.lost))

    def turn(self, *, evaluates: bool = False, error: Exception | None = None, after: Any = None) -> None:
        step = loops_of.Step(self.loop, lambda _: None)
        with step:
            if evaluates:
                self.model.eval().requires_grad_(False)
            if error is not None:
                raise error
            self.model.train().requires_grad_(True)
        if after is not None:
            after()
        self.loop.look()


def test_a_block_that_is_left_in_a_validation_begins_in_training() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    played, begun = Loop(model), flags(model)
    played.turn()
    played.turn(evaluates=True, error=RuntimeError("a rank is gone"))
    assert flags(model) == begun and played.loop.done == 1
    assert played.modes_then.noted == played.modes.noted, "before ranks share out the model anew"


def test_what_a_block_changes_for_good_belongs_to_the_next_step() -> None:
    model = nn.Linear(2, 2).eval()
    played, noted = Loop(model), []
    played.recovery.finished.side_effect = lambda _: noted.append(played.modes.noted)
    played.turn()
    assert noted == [Modes(model).noted] and model.training
    played.recovery.note_state.assert_not_called()  # it has been


def test_modes_may_change_after_a_block() -> None:
    model = nn.Linear(2, 2)
    played = Loop(model)
    played.turn(after=model.eval)
    played.recovery.note_state.assert_called_once_with(1)  # what a rank gets that is behind
    played.turn(evaluates=True, error=RuntimeError("a rank is gone"))
    assert not model.training


@pytest.mark.parametrize("kind", [RuntimeError, KeyError])
def test_an_error_in_the_first_step_after_a_death_says_so(kind: type[Exception]) -> None:
    played, said = Loop(nn.Linear(2, 2)), "in the first step after rank 1 was killed"
    played.turn(error=RuntimeError("a rank is gone"))
    with pytest.raises(kind, match="its own") as raised:
        played.turn(error=kind("its own"))
    (note,) = raised.value.__notes__
    assert said in note and "is not taken back" in note
    played.turn()
    with pytest.raises(kind, match="its own") as raised:
        played.turn(error=kind("its own"))
    assert not hasattr(raised.value, "__notes__")


def test_a_rank_that_joins_is_no_death() -> None:
    played = Loop(nn.Linear(2, 2))
    played.lost = ()
    played.turn(error=RuntimeError("a generation takes over"))
    with pytest.raises(ValueError, match="its own") as raised:
        played.turn(error=ValueError("its own"))
    assert not hasattr(raised.value, "__notes__")


def test_flags_of_a_freed_parameter() -> None:
    model = nn.Linear(2, 2)
    free(model.weight, "weight", "unit")
    modes = Modes(model)
    model.requires_grad_(False)
    assert modes.note()
    modes.restore("1 11")
    assert model.weight.requires_grad and model.bias.requires_grad
