"""Gradients accumulated over several steps do not survive a death, and imece says so in advance."""

from __future__ import annotations

import contextlib
import io
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import imece
from imece.membership.kept_gradients import KeptGradients
from imece.membership.modes import Modes
from imece.membership.steps import _Loop
from tests.ranks import run_ranks

SAID = "imece: step 3 has kept its gradients and made no update: they are lost when a rank dies or joins"


def made() -> tuple[nn.Linear, torch.optim.Optimizer, KeptGradients]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, KeptGradients(model, [optimizer])


def test_it_is_said_once_and_by_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    model, _, kept = made()
    model(torch.ones(1, 2)).sum().backward()
    kept.look(2, 1)
    assert capsys.readouterr().err == ""
    for step in (3, 4):
        kept.look(step, 0)
    said = capsys.readouterr().err
    assert said.startswith(SAID) and said.count("\n") == 1


def test_what_is_no_gradient_of_another_step_s(capsys: pytest.CaptureFixture[str]) -> None:
    """After an update they may stay, for `zero_grad` may stand first; and a step may have none."""
    model, optimizer, kept = made()
    assert not kept.look(0, 0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert kept.look(1, 0), "it has made an update"
    optimizer.zero_grad()
    assert not kept.look(2, 0)
    assert capsys.readouterr().err == ""


def test_a_loop_looks_at_each_step() -> None:
    recovery, kept = mock.Mock(member=mock.Mock(is_joining=False)), mock.Mock()
    recovery.member.mesh.rank = 1
    loop = _Loop(recovery, Modes(nn.Linear(1, 1)), kept, 5, 9, lambda _: None)
    loop.finish(None)
    kept.look.assert_called_once_with(5, 1)


def keeps() -> dict[str, list[str]]:
    """What is said after an update, and after a step without one; "no_sync" too, where nothing was summed."""
    imece.init()
    found = {}
    for strategy in ("replicate", "zero1", "zero2", "zero3"):
        network = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
        optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.1)
        model, optimizer = imece.parallelize(network, optimizer, strategy)
        for sums in (contextlib.nullcontext, model.no_sync):
            kept, said = KeptGradients(model, [optimizer]), []
            for updates in (True, False):
                optimizer.zero_grad()
                with contextlib.nullcontext() if updates else sums():
                    model(torch.ones(1, 2)).sum().backward()
                if updates:
                    optimizer.step()
                with contextlib.redirect_stderr(io.StringIO()) as err:
                    kept.look(3, 0)
                said.append(err.getvalue())
            found[f"{strategy} {sums.__name__}"] = said
    return found


def test_where_strategies_keep_them() -> None:
    found, _ = run_ranks(keeps, 2, backend=None)  # rank 1 has no part of so small a model
    assert len(found) == 8
    for way, said in found.items():
        assert said[0] == "" and said[1].startswith(SAID), way
