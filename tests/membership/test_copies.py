"""Copies of what only one rank holds, and training state assembled from pieces of several ranks."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch

import imece
from imece.checkpoint.deal import Slice
from imece.errors import UserError
from imece.membership.copies import Copies
from imece.membership.copy import Copy
from imece.membership.pieces import Pieces
from tests.membership import seldom_sums
from tests.ranks import run_ranks
from tests.train.command import in_fork, launched


def held(step: int) -> dict[str, torch.Tensor | Slice]:
    """Elements 3 to 9 of a matrix of 12, and two of its own."""
    numbers = torch.arange(6, dtype=torch.float32) + step
    return {
        "model/a": Slice(numbers, (3, 4), 3),
        "optimizer/a/step": torch.tensor(float(step)),
        "model/none": torch.empty(0, dtype=torch.bfloat16),
        "model/wave": torch.full((2,), step * 1j, dtype=torch.complex128),
    }


def test_two_slots_hold_the_last_two_steps() -> None:
    copy = Copy.of(held(0))
    assert copy.steps == set()
    for step in range(1, 5):
        copy.write(step, held(step))
        assert copy.steps == {step, step - 1} - {0}
    seen_by_another = Copy(copy.memory)
    for step in (3, 4):
        pieces = Pieces()
        seen_by_another.read(step, pieces)
        assert pieces.names() == ["model/a", "optimizer/a/step", "model/none", "model/wave"]
        assert pieces.shape("model/a") == (3, 4) and pieces.dtype("model/none") is torch.bfloat16
        assert pieces.slice("model/a", 3, 9).tolist() == [step + at for at in range(6)]
        assert float(pieces.tensor("optimizer/a/step")) == step
        assert pieces.tensor("model/wave").tolist() == [step * 1j, step * 1j]
    copy.memory.close()


def test_only_the_same_tensors_fit() -> None:
    copy = Copy.of(held(0))
    seen_by_another = Copy(copy.memory)
    assert copy.write(6, held(6)) and seen_by_another.asks == math.inf
    for other in (
        held(7) | {"optimizer/a/exp_avg": torch.zeros(6)},
        {**held(7), "model/a": Slice(torch.zeros(5), (3, 4), 3)},
        {**held(7), "model/a": Slice(torch.zeros(6, dtype=torch.float64), (3, 4), 3)},
    ):
        assert not copy.write(7, other)
        assert seen_by_another.asks == 7 and seen_by_another.steps == {6}
    copy.memory.close()


def test_what_is_copied_again_is_what_it_is_now() -> None:
    """The same object, so that it is not looked through again."""
    now = held(0)
    copy = Copy.of(now)
    for step in (1, 2):
        now["optimizer/a/step"].fill_(step)  # type: ignore[union-attr]
        copy.write(step, now)
        pieces = Pieces()
        copy.read(step, pieces)
        assert float(pieces.tensor("optimizer/a/step")) == step
    copy.memory.close()


def test_pieces_of_several_ranks() -> None:
    pieces = Pieces()
    whole = torch.arange(12, dtype=torch.float32)
    for start, stop in ((8, 12), (0, 5), (4, 9)):  # in no order, and some elements twice
        pieces.add("a", (3, 4), start, whole[start:stop])
    assert torch.equal(pieces.tensor("a"), whole.view(3, 4))
    turned = torch.empty(4, 3).t()
    pieces.fill(turned, "a")
    assert torch.equal(turned, whole.view(3, 4))
    pieces.add("b", (4,), 0, whole[:2])
    pieces.add("b", (4,), 3, whole[:1])
    with pytest.raises(UserError, match=r"b: elements from 2 on are in the memory of no rank"):
        pieces.tensor("b")


def leaves_a_copy(folder: str) -> list[float]:
    """Rank 1 dies in the middle of writing its slot of step 3; the others read what it left of step 2."""
    mesh = imece.init()
    rank, size = mesh.rank, mesh.world_size
    copies, group = Copies(mesh), mesh.world_group

    def mine(step: int) -> dict[str, torch.Tensor | Slice]:
        return {"model/a": Slice(torch.full((4,), float(step)) + 10 * rank, (4 * size,), 4 * rank)}

    assert copies.exchange(1, mine(1)) == ""
    assert copies.write(2, mine(2))
    imece.barrier(group=group)
    if rank == 1:
        assert copies._own is not None
        copies._own._words[2 + 3 % 2] = -1  # as `write` begins
        os.kill(os.getpid(), signal.SIGKILL)
    copies.write(3, mine(3))
    while Path(folder, "dead").exists() is False:
        try:
            imece.barrier(group=group)
        except imece.errors.PeerLostError:
            Path(folder, "dead").touch()
    found = copies.recovered([copies.note()])
    assert found is not None
    step, pieces = found
    assert step == 2
    return [float(value) for value in pieces.tensor("model/a")]


def test_a_copy_outlives_its_rank(tmp_path: Path) -> None:
    told = run_ranks(survivors, 3, args=[str(tmp_path)], backend=None)
    expected = [2.0] * 4 + [12.0] * 4 + [22.0] * 4
    assert [values for values in told if values] == [expected] * 2


def survivors(folder: str) -> list[float]:
    """Rank 1's place is taken by a child that dies, so that the test's helper sees all ranks end well."""
    if os.environ["RANK"] != "1":
        return leaves_a_copy(folder)
    child = os.fork()
    if child == 0:
        leaves_a_copy(folder)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return []


def test_steps_without_sums_and_states_that_come_late(tmp_path: Path) -> None:
    """Ranks whose copies are a step apart at most, though nothing holds them together; a frozen part."""
    words = ["--ranks", str(seldom_sums.RANKS), seldom_sums.__file__, str(tmp_path)]
    status, _, err = in_fork(launched, str(tmp_path), *words)
    assert status == 0, err
    assert err.count("was killed by signal 9") == len(seldom_sums.DEATHS), err
    joined = [line.partition(" joined; ")[0] for line in err.splitlines() if " joined; " in line]
    assert " and ".join(joined).count("(pid ") == len(seldom_sums.DEATHS), err  # one line may name two

    alone = seldom_sums.Network()
    optimizer = seldom_sums.optimizer_of(alone)
    for number in range(seldom_sums.STEPS):
        seldom_sums.step(alone, optimizer, number)
    ends = [json.loads(file.read_text()) for file in tmp_path.glob("member-*.json")]
    assert len(ends) == seldom_sums.RANKS
    for end in ends:
        for name, each in alone.state_dict().items():
            assert end[name] == pytest.approx(each.flatten().tolist(), rel=1e-12), name


@pytest.mark.parametrize("is_allowed", [True, False])
def test_memory_that_a_gpu_writes_is_locked(is_allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, calls = Copy.of(held(0)), mock.Mock()
    raises = mock.Mock(side_effect=RuntimeError("CUDA error: out of memory"))
    monkeypatch.setattr(torch, "zeros", raises)  # what runs after an error raises it
    calls.cudaHostRegister.return_value = 0 if is_allowed else 2
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    copy.pin()
    calls.cudaHostRegister.assert_called_once_with(copy.memory.address, copy.memory.nbytes, 0)
    assert raises.called is not is_allowed
    copy.close()
    copy.close()
    given_back = [mock.call(copy.memory.address)] if is_allowed else []
    assert calls.cudaHostUnregister.mock_calls == given_back
