"""`imece.steps` if nobody replaces ranks: a plain loop, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import imece
from imece import mesh as meshes
from imece.membership import recovery
from imece.membership import steps as loops_of
from imece.membership.borders import Borders
from imece.membership.modes import Modes
from imece.membership.states import packed, unpacked
from tests.launch.launcher import run_launch
from tests.ranks import run_ranks
from tests.train.command import in_fork, launched


def made() -> tuple[imece.DistributedDataParallel, torch.optim.Optimizer]:
    imece.init()
    model = imece.DistributedDataParallel(nn.Linear(2, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loops() -> list[int]:
    model, optimizer = made()
    numbers = []
    for step in imece.steps(5, model, optimizer, start=2):
        with step as number:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            numbers.append(number)
            assert number == step.index
    return numbers


def test_a_plain_loop() -> None:
    assert run_ranks(loops, 2, backend=None) == [[2, 3, 4]] * 2


def draws() -> list[list[float]]:
    torch.manual_seed(3)
    model, optimizer = made()
    found = []
    for start, seed in ((0, None), (2, 3), (2, 4)):
        for step in imece.steps(4, model, optimizer, start=start, seed=seed):
            torch.rand(start + 1)  # whatever is drawn between two steps
            with step:
                found.append([step.index, *torch.rand(2).tolist()])
    return found


def test_what_is_drawn_is_a_step_s_own() -> None:
    both = run_ranks(draws, 2, backend=None)
    for found in both:
        whole, went_on, another = found[:4], found[4:6], found[6:]
        assert went_on == whole[2:], "from the start that it says, with the seed of torch.manual_seed"
        assert another != whole[2:]
        assert len({number for _, number, _ in whole}) == 4
    assert both[0][0] != both[1][0], "ranks draw each their own"


def raises() -> int:
    model, optimizer = made()
    for step in imece.steps(5, model, optimizer):
        with step as number:
            if number == 1:
                raise RuntimeError("of the user's own")
    return 0


def forgets() -> int:
    model, optimizer = made()
    return sum(1 for _ in imece.steps(5, model, optimizer))


@pytest.mark.parametrize("watched", [False, True])
def test_an_error_of_the_block_s_own_has_its_own_traceback(watched: bool) -> None:
    played = mock.Mock(member=mock.Mock(is_joining=False), recover=mock.Mock(side_effect=_raises))
    watches = loops_of._Loop(played, Modes(nn.Linear(1, 1)), mock.Mock(), 0, 9, mock.Mock())
    loop = watches if watched else loops_of._Plain(0)
    with pytest.raises(RuntimeError, match="of the user's own") as caught, loops_of.Step(loop, mock.Mock()):
        raise RuntimeError("of the user's own")
    assert {Path(str(entry.path)).name for entry in caught.traceback} == {"test_steps.py"}


def _raises(error: RuntimeError, *_: Any) -> None:
    raise error


def test_what_is_refused() -> None:
    assert run_ranks(raises, 1, backend=None, expect="of the user's own")
    assert run_ranks(forgets, 1, backend=None, expect="enter each step, `with step:`")


BREAKS = """
import sys, torch, imece
from imece.membership.roster import Roster
mesh = imece.init()
sgd = lambda each: torch.optim.SGD(each, lr=0.1)
model, optimizer = imece.parallelize(torch.nn.Linear(2, 1), sgd, "zero1")
roster, members = Roster(mesh._launchers), range(mesh.world_size)
for step in imece.steps(100, model, optimizer):
    with step as number:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            imece.barrier()
            print("in the loop", roster.all_resilient(members))
    if number == 2:
        break
imece.barrier()
print("after it", roster.all_resilient(members))
"""


@pytest.mark.slow
def test_a_loop_that_is_left_protects_nobody(tmp_path: Path) -> None:
    (tmp_path / "breaks.py").write_text(BREAKS)
    outcome = run_launch("--ranks", "2", tmp_path / "breaks.py", timeout_s=200)
    assert outcome.status == 0, outcome.err
    assert outcome.out.count("in the loop True") == 2 and outcome.out.count("after it False") == 2


BORDERS = """
import sys, torch, imece
from imece.membership import borders, recovery
mesh, now, met = imece.init(), [0.0], []
recovery.Borders = lambda: borders.Borders(lambda: now[0])
border = recovery.Recovery.border
recovery.Recovery.border = lambda self, step, *more: met.append(step) or border(self, step, *more)
sgd = lambda each: torch.optim.SGD(each, lr=0.1)
model, optimizer = imece.parallelize(torch.nn.Linear(2, 1), sgd, sys.argv[1])
for step in imece.steps(23, model, optimizer):
    with step:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        now[0] += [0.09, 0.01][mesh.rank]
print(met)
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_ranks_ask_each_other_at_the_same_borders(tmp_path: Path, strategy: str) -> None:
    """As seldom as the slower one wishes."""
    expected = [1, 6, 11, 16, 21, 23]
    (tmp_path / "borders.py").write_text(BORDERS)
    outcome = run_launch("--ranks", "2", tmp_path / "borders.py", strategy, timeout_s=200)
    assert outcome.status == 0, outcome.err
    assert sorted(outcome.out.splitlines()) == [f"[rank {rank}] {expected}" for rank in range(2)]


READS_AHEAD = """
import os, sys, time, torch, imece
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
TOTAL, TOGETHER, SAMPLES = 60, 12, 48
data = TensorDataset(torch.arange(SAMPLES), torch.ones(SAMPLES, 2))
def share(number):
    sampler = imece.DistributedSampler(data)
    epoch, at = divmod(number, SAMPLES // TOGETHER)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch, "consumed": at * TOGETHER})
    return [i for _, i in zip(range(sampler.rank, TOGETHER, sampler.num_replicas), sampler)]
def main():
    mesh, batches = imece.init(), None
    sgd = lambda each: torch.optim.SGD(each, lr=0.1)
    model, optimizer = imece.parallelize(torch.nn.Linear(2, 1), sgd, "zero1")
    def drop(_):
        nonlocal batches
        batches = None
    for step in imece.steps(TOTAL, model, optimizer, recovered=drop):
        with step as number:
            batches = batches or iter(DataLoader(
                data, batch_sampler=[share(each) for each in range(number, TOTAL)], num_workers=1))
            numbers, inputs = next(batches)
            model(inputs).sum().backward()
            if number == 5 and os.environ["IMECE_MEMBER"] == "1":
                os.kill(os.getpid(), 9)
            optimizer.step()
            optimizer.zero_grad()
        if step.made:
            with open(Path(sys.argv[1]) / f"read-{number}", "a") as file:
                print(*numbers.tolist(), file=file)
            time.sleep(0.2 if mesh.world_size == 2 else 0)
if __name__ == "__main__":  # the workers import this script, from Python 3.14 on
    main()
"""


@pytest.mark.slow
def test_batches_that_are_read_ahead(tmp_path: Path) -> None:
    """By a DataLoader's workers; begun anew with the ranks there are, each sample is read once an epoch."""
    (tmp_path / "ahead.py").write_text(READS_AHEAD)
    outcome = run_launch("--ranks", "3", tmp_path / "ahead.py", tmp_path)
    assert outcome.status == 0, outcome.err
    assert "2 ranks go on, a replacement is starting" in outcome.err
    read = [list(map(int, (tmp_path / f"read-{number}").read_text().split())) for number in range(60)]
    for epoch in range(15):
        assert sorted(each for step in read[4 * epoch :][:4] for each in step) == list(range(48)), read


SAVES = """
import os, sys, time, torch, imece
from pathlib import Path
from imece.checkpoint import Checkpoints, TrainingState, files
mesh = imece.init()
torch.manual_seed(0)
sgd = lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9)
model, optimizer = imece.parallelize(torch.nn.Linear(2, 1), sgd, "zero1")
state = TrainingState(model, [optimizer])
folder = Path(sys.argv[1]) / "saved"
checkpoints = Checkpoints(folder, alarm=print)
for step in imece.steps(30, model, optimizer):
    with step as number:
        model(torch.ones(2, 2) * number).square().mean().div(1000).backward()
        if number == 5 and os.environ["IMECE_MEMBER"] == "1":
            if sys.argv[2] == "saving":
                files.write = lambda *_: os.kill(os.getpid(), 9)
            else:
                os.kill(os.getpid(), 9)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
        if (number + 1) % 3 == 0:
            checkpoints.save(number + 1, state.tensors(), {}, rank_state=None)
            if number == 5:
                checkpoints.finish()
print("on the disk", checkpoints.finish(), [each.tolist() for each in model.state_dict().values()])
checkpoints.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["backward", "saving"])
def test_checkpoints_of_the_ranks_there_are(tmp_path: Path, when: str) -> None:
    """A rank dies, whose part nobody waits for; another joins, which was alone when it opened the folder."""
    (tmp_path / "saves.py").write_text(SAVES)
    words = ["--ranks", "3", str(tmp_path / "saves.py"), str(tmp_path), when]
    status, out, err = in_fork(launched, str(tmp_path), *words, timeout_s=100)
    assert status == 0 and "2 ranks go on" in err, err
    assert "another job" not in out, out
    plain = nn.Linear(2, 1)
    assert imece.load_weights(plain, tmp_path / "saved").step == 30
    learnt = [each.tolist() for each in plain.state_dict().values()]
    assert len(told := [line for line in out.splitlines() if "on the disk True" in line]) >= 2, out
    assert all(line.endswith(f"on the disk True {learnt}") for line in told), (learnt, out)


@pytest.mark.parametrize(("step_s", "count"), [(0.0, 8), (1e-3, 8), (0.09, 5), (0.26, 1), (3.0, 1)])
def test_how_often_a_rank_would_ask(step_s: float, count: int) -> None:
    now = [10.0]
    borders = Borders(lambda: now[0])
    borders.begin(40)
    assert not borders.is_due(40) and borders.is_due(41)
    for step in (41, 43):  # of however many steps
        now[0] = 10.0 + (step - 40) * step_s
        assert borders.wished(step) == count
    borders.agreed(43, 3)
    assert [borders.is_due(step) for step in (44, 45, 46)] == [False, False, True]


def test_without_init() -> None:
    with pytest.raises(imece.errors.UserError, match=r"call imece.init\(\) first"):
        list(imece.steps(1, None, None))  # type: ignore[arg-type]


class Played:
    """A mesh, which takes any model."""

    can_change = False
    rank, world_size, device = 0, 1, torch.device("cpu")

    def coordinate(self, axis: str) -> int:
        return 0


def carried(
    monkeypatch: pytest.MonkeyPatch, optimizer: torch.optim.Optimizer, also: list[Any]
) -> tuple[Any, Any]:
    """What a loop with these hands to Recovery: `state` and `take`."""
    kept: dict[str, Any] = {}

    def recovery(*_: Any, **given: Any) -> Any:
        kept.update(given)
        return mock.Mock(member=mock.Mock(is_joining=False))

    monkeypatch.setattr(loops_of, "keeps_roster", lambda _: True)
    monkeypatch.setattr(meshes, "current", Played)
    monkeypatch.setattr(loops_of, "Member", mock.Mock())
    monkeypatch.setattr(loops_of, "Recovery", recovery)
    said = mock.Mock()
    monkeypatch.setattr(loops_of, "say_not_carried", said)
    next(iter(imece.steps(9, nn.Linear(1, 1), optimizer, also=also)))  # type: ignore[arg-type]
    said.assert_called_once()
    return kept["state"], kept["take"]


def test_a_scheduler_goes_on_after_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """MultiStepLR looks up numbers, which are no keys in JSON."""

    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)

    optimizer, scheduler = made()
    state, take = carried(monkeypatch, optimizer, [scheduler])
    rates = []
    for _ in range(5):
        optimizer.step()
        scheduler.step()
        take(unpacked(packed(state())))
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [1.0, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("place", ["before", "inside", "after"])
def test_where_a_scheduler_may_go_on(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that joins comes to the next turn's beginning: after the block it has not been."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model = nn.Linear(1, 1)
    model.module, model.device = nn.Linear(1, 1), torch.device("cpu")  # type: ignore[assignment]
    member = mock.Mock(is_joining=False, steps=0, newest=1, generation=1)
    monkeypatch.setattr(loops_of, "keeps_roster", lambda _: True)
    monkeypatch.setattr(meshes, "current", Played)
    monkeypatch.setattr(loops_of, "begin_draws", mock.Mock())
    monkeypatch.setattr(loops_of, "Member", lambda *_: member)
    monkeypatch.setattr(recovery, "TrainingState", mock.Mock())
    monkeypatch.setattr(recovery.Recovery, "meet", mock.Mock())

    def run() -> list[bool]:
        made = []
        for step in imece.steps(3, model, optimizer, also=[scheduler]):  # type: ignore[arg-type]
            if place == "before":
                scheduler.step()
            with step:
                optimizer.step()
                if place == "inside":
                    scheduler.step()
            if place == "after":
                scheduler.step()
            made.append(step.made)
        return made

    if place == "after":
        with pytest.raises(RuntimeError, match=r"changed after the block.*inside of `with step:`"):
            run()
    else:
        assert run() == [True] * 3


@pytest.mark.parametrize(
    ("fails", "made"), [("nothing", True), ("block", False), ("finished", False), ("meet", True)]
)
def test_whether_a_rank_has_made_a_step(fails: str, made: bool) -> None:
    """Not if its sums turn out to have been aborted; but if others wait to join after it."""
    played = mock.Mock(member=mock.Mock(is_joining=False))
    played.recover.return_value.step, played.recover.return_value.generation.lost = 1, ()
    if fails in ("finished", "meet"):
        getattr(played, fails).side_effect = RuntimeError("a rank is gone")
    loop = loops_of._Loop(played, Modes(nn.Linear(1, 1)), mock.Mock(), 0, 9, lambda _: None)
    assert loop.finish(RuntimeError("a rank is gone") if fails == "block" else None) == made
    assert loop.done == 1 and played.recover.called == (fails != "nothing")


def test_a_death_that_the_block_has_caught_itself() -> None:
    """As `except Exception: skip this batch` does: up to eight steps were counted that had made no update."""
    played = mock.Mock(member=mock.Mock(is_joining=False))
    played.recover.return_value.step, played.recover.return_value.generation.lost = 3, ()
    played.meet.side_effect = error = RuntimeError("a rank is gone")
    kept = mock.Mock(look=lambda *_: False)  # no update
    loop = loops_of._Loop(played, Modes(nn.Linear(1, 1)), kept, 3, 9, lambda _: None)
    assert not loop.finish(None) and loop.done == 3
    played.recover.assert_called_once_with(error, 3)
    played.finished.assert_not_called()


@pytest.mark.parametrize("joins", [False, True])
def test_a_death_while_ranks_tell_each_other_of_the_one_before(joins: bool) -> None:
    """`recovered` may have collectives, for all call it: they are left as a block is, and all come again."""
    played = mock.Mock(member=mock.Mock(is_joining=joins))
    played.recover.return_value.step, played.recover.return_value.generation.lost = 4, ("a rank",)
    gone, called = RuntimeError("a rank is gone"), mock.Mock(side_effect=[RuntimeError("another is"), None])
    loop = loops_of._Loop(played, Modes(nn.Linear(1, 1)), mock.Mock(), 0, 9, called)
    if not joins:
        assert not loop.finish(gone)
    first, second = (call.args for call in played.recover.call_args_list)
    assert first == ((None, loops_of._NOTHING) if joins else (gone, 0))
    assert str(second[0]) == "another is" and second[1] == loop.done == 4 and called.call_count == 2


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, imece.GradScaler])
def test_a_scaler_makes_a_step_again(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer was lost between `unscale_` and `update`."""
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), kind("cpu", init_scale=8.0)
    state, take = carried(monkeypatch, optimizer, [scaler])
    begun = unpacked(packed(state()))
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    take(begun)
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 0.0, "unscaled once"
