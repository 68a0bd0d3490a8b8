"""A member's beat, from a store that is nobody else's."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from imece import mesh as meshes
from imece.membership import member
from imece.membership.roster import Generation, Roster


def test_it_beats_until_all_else_at_the_exit_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others' exit handlers (wandb's upload) come between: meanwhile it is no silent rank."""
    store = dist.HashStore()
    roster = Roster(store)
    roster.publish(Generation(0, (0,)))
    monkeypatch.setattr(member, "_connect", lambda where: store)
    monkeypatch.setattr(meshes, "ended_last", [])
    world = SimpleNamespace(member=0, master_addr="127.0.0.1", master_port=1, agent_port=None, joining=False)
    mesh: Any = SimpleNamespace(world=world)
    ours = member.Member(mesh)
    while roster.beat(0) is None:
        time.sleep(0.001)
    (end,) = meshes.ended_last
    assert ours._beating.is_alive()
    end()
    assert not ours._beating.is_alive()
