"""What `imece.steps` refuses at once, under every launcher."""

from __future__ import annotations

import re
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import imece
from imece import mesh as meshes
from imece.data_parallel import other_models
from imece.membership import steps as loops_of
from imece.membership.unwatched import say_not_carried
from tests.meshes import FakeMesh

NETWORK = nn.Linear(2, 1)
SGD = torch.optim.SGD(NETWORK.parameters(), lr=0.1)
SCHEDULER = torch.optim.lr_scheduler.StepLR(SGD, 1)
LARGE = nn.Linear(1024, 1024)


@pytest.mark.parametrize(
    ("arguments", "more", "kind", "said"),
    [
        ((2.5, NETWORK, SGD), {}, TypeError, "total=2.5: give a whole number"),
        ((SGD, NETWORK, 5), {}, TypeError, "total=an SGD: give a whole number"),
        ((5, NETWORK, SGD), {"start": -2}, ValueError, "start=-2: steps are counted from 0 on"),
        ((5, SGD, NETWORK), {}, TypeError, r"an SGD is no model: imece.steps\(total, model, optimizer\)"),
        ((5, [NETWORK], SGD), {}, TypeError, "a list is no model: .*; several are one nn.Module"),
        ((5, NETWORK, SCHEDULER), {}, TypeError, "a StepLR is no optimizer"),
        ((5, NETWORK, [SGD, None]), {}, TypeError, "None is no optimizer"),
        ((5, NETWORK, []), {}, ValueError, "there is no optimizer: give all that step the model"),
        (
            (5, NETWORK, SGD),
            {"also": SCHEDULER},
            TypeError,
            r"also is a StepLR: give a list, also=\[scheduler\]",
        ),
        ((5, NETWORK, SGD), {"also": [SCHEDULER, 7]}, TypeError, r"also\[1\], an int, has no state_dict"),
        (
            (5, NETWORK, SGD),
            {"also": [LARGE]},
            ValueError,
            r"\['weight'\]: 4194304 bytes, and 1048576 at most: keep it in the model, as a buffer",
        ),
    ],
)
def test_what_is_refused(
    arguments: Any, more: dict[str, Any], kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meshes, "current", FakeMesh)
    with pytest.raises(kind, match=said):
        list(imece.steps(*arguments, **more))


def test_a_model_that_was_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by one rank that nobody replaces: the script is tried there first."""
    monkeypatch.setattr(meshes, "current", lambda: FakeMesh(can_change=True))
    with pytest.raises(TypeError, match=r"a Linear is not wrapped: .* imece.parallelize\(model, opt"):
        list(imece.steps(5, NETWORK, SGD))  # type: ignore[arg-type]


def test_another_wrapped_model_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    """It would wait for who has died; one that nobody has any more, and a rank that is alone, do not."""
    loop, other = mock.Mock(module=NETWORK), mock.Mock(module=NETWORK)
    with mock.patch.object(other_models, "_wrapped", weakref.WeakSet([loop, other])):
        for ranks in (1, 2):
            say_not_carried(FakeMesh({"replicate": ranks}), loop)
        assert re.fullmatch("imece: .* the Linear wrapped beside it is not: .*\n", capsys.readouterr().err)
        del other
        say_not_carried(FakeMesh({"replicate": 2}), loop)
        assert capsys.readouterr().err == ""


def test_of_a_compiled_model_the_one_inside_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose ranks change, and which knows whether it is sharded."""
    taken: list[nn.Module] = []
    monkeypatch.setattr(meshes, "current", FakeMesh)
    monkeypatch.setattr(loops_of, "check_model", lambda model, _: taken.append(model))
    list(imece.steps(0, torch.compile(NETWORK), SGD))  # type: ignore[arg-type]
    assert taken == [NETWORK]
