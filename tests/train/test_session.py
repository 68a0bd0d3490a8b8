"""What a session keeps through a death, a join or a checkpoint; the other ranks are stand-ins."""

from __future__ import annotations

import contextlib
import json
import math
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from imece.collectives import ops
from imece.errors import PeerLostError, UserError
from imece.membership.recovery import MovedOnError
from imece.mesh import Mesh
from imece.observe.metrics import read_metrics
from imece.train import loop as loops
from imece.train import opening
from imece.train import session as sessions
from imece.train.batch import BatchPlan
from imece.train.config import CheckpointSection, ModelSection, TrainConfig, ValidateSection
from imece.train.loop import Loop, _Together
from imece.train.model.precision import Precision
from imece.train.opening import first_ranks, open_session
from imece.train.prediction import Given
from imece.train.run import resuming
from imece.train.run.resuming import check_of_run
from imece.train.run.same import computed_with
from imece.train.session import Session
from imece.train.step import Outcome, Step
from imece.train.watch.watching import Watching
from tests.meshes import FakeMesh

CPU = torch.device("cpu")
EVERY_2 = CheckpointSection(every=2)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    """After 8 steps, of which the figures are known; others may be asked, and say the same."""
    monkeypatch.setattr(sessions, "together", lambda _, call: call())
    monkeypatch.setattr(sessions, "gather_json", lambda mine, *_: [mine])
    made = Session.__new__(Session)
    made.mesh = FakeMesh()
    made.folder, made.config, made.alarms = mock.Mock(), TrainConfig(steps=100), deque()
    made.model = mock.Mock(config=TrainConfig().model.shape(300))
    made.prepared, made.wrapped, made.training_state = mock.Mock(), mock.Mock(), mock.Mock()
    made.prepared.tokens = mock.Mock(identity="a text", folder="run/tokens")
    part = made.prepared.tokens.validation
    part.tokens, part.learned, part.targets, part.sources, part.divided = range(50), None, 50, [part], ()
    made.clock = mock.Mock(phase=lambda _: contextlib.nullcontext())
    made.clock.lap.return_value = SimpleNamespace(seconds=2.0, phases={}, own={})
    made.plan, made.step, made.batches = BatchPlan(8, 4, 1, 4, 1), mock.Mock(scaler_state={}), mock.Mock()
    made.checkpoints, made.recovery = mock.Mock(is_saving=False), mock.Mock()
    made.recovery.member.steps = 8
    generation = mock.Mock(number=1, lost=())
    made.recovery.recover.return_value = mock.Mock(step=8, seconds=0.1, generation=generation)
    made.recovery.says.return_value = (0.0, 0.0)
    made.recovery.saving = contextlib.nullcontext
    monkeypatch.setattr(made, "_open_checkpoints", lambda: made.checkpoints)
    monkeypatch.setattr(sessions, "accumulating", lambda strategy, given, mesh: given.plan)
    made.precision, made.machine = Precision("fp32", "cpu"), mock.Mock()
    made.done = made.counted = 8
    made.seconds, made.tokens, made.best_val_loss, made.val_loss = 16.0, 256, 1.5, (8, 1.5)
    made.owes_save = False
    return made


def loop_of(session: Session) -> Any:
    """Its loop, in which nobody shows anything."""
    loop = Loop.__new__(Loop)
    loop._session, loop._watching, loop._stop = session, mock.Mock(), mock.Mock(signal=0)
    loop._drift = mock.Mock(key=0.0)
    loop._drift.digest.return_value = 0.0
    loop._new_drift = mock.Mock(return_value=loop._drift)  # type: ignore[method-assign]
    loop._memory, loop._stragglers = mock.Mock(most_bytes=lambda: 0), mock.Mock()
    loop._saved_at = 0.0
    loop._own = loop._made = loop._pending = loop._recovered = loop._save_s = None
    loop._tokens_per_s_of_rank = 1.0
    return loop


def metric(session: Session) -> Any:
    """With which it saves."""
    session.save()
    return session.checkpoints.save.call_args.kwargs["metric"]  # type: ignore[attr-defined]


def test_a_checkpoint_that_is_saved_again_keeps_its_metric(session: Session) -> None:
    """A rank dies in the step after it; a rank that joins as the first has the metric too."""
    loop = loop_of(session)
    loop._gather = lambda _: _Together(0.0, 0, 1, 0)
    session.config = TrainConfig(steps=8)
    loop.recovered(session.recover(MovedOnError("a rank has joined")))
    assert session.checkpoints.save.call_args.kwargs["metric"] == 1.5  # type: ignore[attr-defined]
    state = json.loads(json.dumps(session._said()))
    joins, session.val_loss = session, (-1, None)
    joins.recovery.member.steps = 0  # type: ignore[union-attr]
    joins._take(state)
    assert metric(joins) == 1.5
    joins.done = 9
    assert metric(joins) is None, "of another step"


def test_where_gradients_accumulate_is_decided_anew(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks that are left may have more micro-batches than before, and larger parts of everything."""

    def sharded(strategy: str, given: Given, mesh: Mesh) -> BatchPlan:
        assert given.plan == BatchPlan(8, 4, 2, 1, 2) and mesh is session.mesh
        return replace(given.plan, whole=False)

    session.plan, session.mesh = BatchPlan(8, 4, 4, 1, 1), FakeMesh({"replicate": 2})
    monkeypatch.setattr(sessions, "accumulating", sharded)
    session.recover(MovedOnError("a rank has ended"))
    assert session.plan == BatchPlan(8, 4, 2, 1, 2, whole=False)
    session.step.take_over.assert_called_once_with(session.plan)  # type: ignore[attr-defined]


def test_a_save_that_was_given_up_is_made_at_the_next_border(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "all_gather", lambda out, mine, **_: out.copy_(mine))
    loop, checkpoints = loop_of(session), mock.Mock(is_saving=True)
    session.checkpoints = checkpoints
    checkpoints.close = lambda _why: setattr(checkpoints, "is_saving", False)
    for _ in range(2):
        loop.recovered(session.recover(MovedOnError("a rank has joined")))
        steps = [call.args[0] for call in checkpoints.save.call_args_list]
        assert steps == [8], "it is not due, and once is enough"


def test_numbers_of_an_aborted_call_are_not_believed(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which leaves anything in the GPU's memory: no number of tokens, and a signal that nobody got."""
    monkeypatch.setattr(ops, "all_gather", lambda out, *_, **__: out.fill_(math.nan))
    monkeypatch.setattr(ops, "all_reduce", lambda both, **_: both.zero_())
    monkeypatch.setattr(ops, "broadcast", lambda both, **_: both)
    monkeypatch.setattr(loops, "evaluate", lambda *_, **__: (1.0, 2))
    recovery: Any = session.recovery
    recovery.member.aborting.check.side_effect = PeerLostError
    session.precision, loop = Precision("fp32", "cpu"), loop_of(session)
    with pytest.raises(PeerLostError):
        loop._gather(Outcome(0.0, 0, 1.0))
    with pytest.raises(PeerLostError):
        loop.validate(8)


def saves_of(
    session: Session,
    skipped: list[int],
    steps: int,
    signal_at: int = 0,
    watching: Any = None,
    checkpoint: CheckpointSection = EVERY_2,
) -> list[tuple[int, bool]]:
    """The steps that a run from step 8 on saves, and whether older ones make room for them."""
    loop = loop_of(session)
    loop._watching = watching or loop._watching
    session.config = TrainConfig(steps=steps, checkpoint=checkpoint)
    session.prepared.tokens.validation.tokens = range(0)  # type: ignore[misc, assignment]
    session.batches.epoch.return_value = 0.0  # type: ignore[attr-defined]
    session.step.blame.return_value = []  # type: ignore[attr-defined]
    session.recovery.border.return_value = False  # type: ignore[union-attr]

    def run(index: int, lr: float) -> Outcome:
        loop._watching.tell()  # meanwhile
        loop._stop.signal = 15 if index + 1 == signal_at else 0
        return Outcome(1.0, 32, 1.0, "not finite" if index + 1 in skipped else "")

    session.step.run = run  # type: ignore[method-assign]
    loop._stragglers.slow = None
    with (
        mock.patch.object(ops, "all_gather", lambda out, mine, **_: out.copy_(mine)),
        mock.patch.object(loops, "sent", lambda tensor, _: tensor),  # there need be no GPU
    ):
        assert loop.run() == (15 if signal_at else 0)
    calls = session.checkpoints.save.call_args_list  # type: ignore[attr-defined]
    return [(call.args[0], not call.kwargs["keep_all"]) for call in calls]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_record_is_there_before_its_checkpoint(
    session: Session, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU else once it has the next step to do; and where the run ends by an error."""
    session.mesh.device = torch.device(device)
    there: list[tuple[str, int]] = []

    def note(what: str) -> None:
        there.append((what, max((each["step"] for each in read_metrics(tmp_path)), default=8)))

    def next_rate(index: int, *_: object) -> float:
        note("next")
        if index == 13:
            raise OSError
        return 0.1

    checkpoints: Any = session.checkpoints
    recovery: Any = session.recovery
    checkpoints.save.side_effect = lambda *_, **__: note("save")
    recovery.finished.side_effect = lambda _: note("made")
    monkeypatch.setattr(loops, "learning_rate", next_rate)
    watching = Watching(tmp_path, 0, 12, 8, deque())
    saves_of(session, [], steps=12, watching=watching)
    late = device == "cuda"
    assert there == [
        ("next", 8), ("made", 8), ("next", 9 - late), ("made", 9), ("save", 10), ("next", 10), ("made", 10),
        ("next", 11 - late), ("made", 11), ("save", 12),
    ]  # fmt: skip
    with pytest.raises(OSError):
        saves_of(session, [], steps=15, watching=watching)
    note("end")
    assert there[-1] == ("end", 13)
    watching.close()


@pytest.mark.parametrize("scale", [0.0, 1024.0])  # of fp16: such steps are nothing bad, and wait as well
def test_a_step_that_was_skipped_is_not_saved_and_the_next_one_makes_up_for_it(
    session: Session, scale: float
) -> None:
    session.step.scale, session.plan = scale, BatchPlan(8, 4, 1, 4, 1)  # type: ignore[misc]
    found = saves_of(session, skipped=[9, 10, 12, 13], steps=17)
    assert found == [(11, True), (14, True), (16, True), (17, True)]


def test_a_run_that_ends_after_a_skipped_step_loses_neither_work_nor_checkpoints(session: Session) -> None:
    session.step.scale, session.plan = 0.0, BatchPlan(8, 4, 1, 4, 1)  # type: ignore[misc]
    assert saves_of(session, [11, 12], steps=20, signal_at=12) == [(10, True), (12, False)]
    session.checkpoints.save.reset_mock()  # type: ignore[attr-defined]
    assert saves_of(session, [14, 15], steps=15) == [(15, False)], "with the step 13"


def test_ranks_that_meet_anew_after_a_skipped_step_save_later(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "all_gather", lambda out, mine, **_: out.copy_(mine))
    loop, session.skipped_steps = loop_of(session), 1
    session.config = TrainConfig(steps=100, checkpoint=CheckpointSection(every=4))
    for skipped, saves in ((1, 0), (0, 1)):  # it is due after step 8; then it is owed
        session.skipped_steps, session.done = skipped, 8 if skipped else 9
        session.recovery.recover.return_value.step = session.done  # type: ignore[union-attr]
        loop.recovered(session.recover(MovedOnError("a rank has joined")))
        assert session.checkpoints.save.call_count == saves  # type: ignore[attr-defined]
    assert not session.owes_save


def test_a_save_that_is_owed_stays_so_until_it_is_begun(session: Session) -> None:
    """A rank dies while the others wait for the save before it."""
    session.owes_save = True
    session.finish_save = mock.Mock(side_effect=MovedOnError("a rank"))  # type: ignore[method-assign]
    with pytest.raises(MovedOnError):
        loop_of(session)._save(False)
    assert session.owes_save


def test_a_save_after_so_many_minutes(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(
        monotonic=lambda: 50.0 * (session.done - 8), perf_counter=lambda: 0.0, time=lambda: 0.0
    )
    monkeypatch.setattr(loops, "time", clock)
    every = CheckpointSection(every=0, minutes=2)
    assert saves_of(session, [], 18, checkpoint=every) == [(11, True), (14, True), (17, True), (18, True)]


def test_own_figures_of_a_step_are_kept(session: Session) -> None:
    """The state of a step is noted when it is made, before its time and its loss are known."""
    state = session._said() | {"counted": 7, "seconds": 14.0, "tokens": 224, "best_val_loss": 2.0}
    session._take(state)
    assert (session.counted, session.seconds, session.tokens, session.best_val_loss) == (8, 16.0, 256, 1.5)
    session.recovery.member.steps = 7  # type: ignore[union-attr]
    session._take(state)  # this rank was behind
    assert (session.counted, session.seconds, session.tokens, session.best_val_loss) == (7, 14.0, 224, 2.0)


@pytest.mark.parametrize("dies_in", ["step_done", "step_judged"])
def test_a_rank_that_joins_ends_at_the_same_bad_step(session: Session, dies_in: str) -> None:
    """Though the others were in the step in which the last of them were counted."""
    loop, states = loop_of(session), []
    session.first, session.config = 5, TrainConfig(steps=100)
    session.step.scale, session.plan = 0.0, BatchPlan(8, 4, 1, 4, 1)  # type: ignore[misc]
    recovery = session.recovery
    assert recovery is not None

    def noted(*_: Any) -> None:
        states.append(json.loads(json.dumps(session._said())))
        if session.done == 11:
            raise MovedOnError("a rank has joined")

    loop._gather = lambda _: _Together(math.nan, 32, 1, 0)
    loop._stragglers.slow = None
    session.batches.epoch.return_value = 0.0  # type: ignore[attr-defined]
    session.step.blame.return_value = []  # type: ignore[attr-defined]
    session.step.run.side_effect = [  # type: ignore[attr-defined]
        Outcome(1.0, 32, math.nan, skipped) for skipped in ("not finite", "", "not finite")
    ]
    name = "finished" if dies_in == "step_done" else "note_state"
    setattr(recovery, name, mock.Mock(side_effect=noted))
    recovery.border.return_value = False  # type: ignore[attr-defined]
    with pytest.raises(MovedOnError):
        loop.run()
    assert [state["bad_steps"] for state in states] == [1, 0, 1]
    session.first = session.skipped_steps = session.bad_steps = 0
    session._take(states[-1] | {"skipped_steps": 2})  # as if fp16 had skipped the one before
    assert (session.first, session.skipped_steps, session.bad_steps) == (5, 2, 1)
    session._take(states[-1])
    assert session.bad_steps == 1, "a rank that has made the step counts it once"


def test_the_figures_of_the_newest_step_are_counted_once(session: Session) -> None:
    """By whoever does not know them, a rank that has just joined say, from those that do."""
    for counted, tokens in ((7, 288), (8, 256)):
        session.counted, session.tokens, session.seconds = counted, 256, 16.0
        loop = loop_of(session)
        loop._gather = lambda _: _Together(3.0, 32, 1, 0)
        loop._made = 8, Outcome(96.0, 32, 1.0), 0.1
        loop._make_up()
        assert (session.counted, session.tokens) == (8, tokens)
        assert loop._made[0] == 8, "others may lack it after the next death"


def test_ranks_that_see_different_checkpoints(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the memory of all is gone, and not only at the start."""
    monkeypatch.setattr(resuming, "together", lambda _, call: call())
    monkeypatch.setattr(resuming, "newest_of_all", lambda *_: mock.Mock(step=4))
    monkeypatch.setattr(resuming, "check_of_run", lambda *_: None)
    monkeypatch.setattr(resuming, "gather_json", lambda mine, *_: [mine, 2])
    with pytest.raises(UserError) as mistake:
        session._from_checkpoint()
    assert str(mistake.value) == (
        f"{session.config.folder}/checkpoints: rank 1 can read step 2 at most, others step 4: check that all "
        "hosts see the same disk"
    )
    assert not session.training_state.load.called  # type: ignore[attr-defined]


def saved_at_step_4(on: str = "a text", over: int = 7) -> mock.Mock:
    """A checkpoint, judged by this many windows of this text: by default those of the session."""
    counters = {"seconds": 8.0, "tokens": 128}
    state = {"scaler": {}, "best_val_loss": 2.5, "since_best": 0, "counters": counters}
    return mock.Mock(step=4, metric=2.5, state=state | {"metric_on": on, "metric_over": over})


def test_back_to_a_checkpoint(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    found = saved_at_step_4()
    monkeypatch.setattr(sessions, "newest_for", lambda *_: found)
    assert session._from_checkpoint() == session.done == session.counted == 4
    assert (session.tokens, session.val_loss) == (128, (4, 2.5))
    assert list(session.alarms) == ["back to the checkpoint of step 4: 4 steps are lost"]


@pytest.mark.parametrize(("made", "said"), [(8, ": 8 steps are lost"), (0, "")])
def test_back_to_the_beginning(
    session: Session, monkeypatch: pytest.MonkeyPatch, made: int, said: str
) -> None:
    """Before the first checkpoint; one that joins has made no step."""
    begun = mock.Mock()
    monkeypatch.setattr(sessions, "begin_again", begun)
    monkeypatch.setattr(sessions, "newest_for", lambda *_: None)
    session.precision, session.optimizers = Precision("fp16", "cpu"), [mock.Mock()]
    session.skipped_steps = session.bad_steps = 2
    session.recovery.member.steps = made  # type: ignore[union-attr]
    assert session._from_checkpoint() == 0
    begun.assert_called_once_with(session.training_state, session.optimizers, session.config, session.model)
    assert session._said() == {
        "done": 0, "first": 0, "skipped_steps": 0, "bad_steps": 0, "counted": 0, "seconds": 0.0, "tokens": 0,
        "best_val_loss": None, "since_best": 0, "val_loss": (-1, None), "scaler": {}, "micro": 4,
        "text": "a text", "base": "",
    }  # fmt: skip
    assert session.step.load_scaler.call_args.args[0]["scale"] == 65536.0  # type: ignore[attr-defined]
    assert list(session.alarms) == [f"back to the beginning, as nothing was saved yet{said}"]
    loop = loop_of(session)
    session.recovery.recover.return_value.step = 0  # type: ignore[union-attr]
    loop._gather = lambda _: _Together(0.0, 0, 1, 0)
    loop.recovered(session.recover(MovedOnError("a rank has ended")))
    assert not session.checkpoints.save.called, "there is nothing to save yet"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("on", "val_loss"), [("a text", 2.5), ("another text", None)])
def test_gone_on_with_after_the_text_has_changed(
    session: Session, monkeypatch: pytest.MonkeyPatch, on: str, val_loss: float | None
) -> None:
    monkeypatch.setattr(sessions, "newest_for", lambda *_: saved_at_step_4(on))
    assert session._resume()
    assert (session.done, session.tokens, session.best_val_loss) == (4, 128, val_loss)
    assert metric(session) == val_loss
    assert session.checkpoints.save.call_args.args[2]["metric_on"] == "a text"  # type: ignore[attr-defined]
    assert list(session.alarms) == ([] if val_loss else [
        "the text has changed since step 4: its order begins anew, and validation losses do not compare with "
        "those before"
    ])  # fmt: skip


@pytest.mark.parametrize(("tokens", "then", "val_loss"), [(16, 2, 2.5), (16, 4, None), (0, 7, 2.5)])
def test_gone_on_with_another_validate_tokens(
    session: Session, monkeypatch: pytest.MonkeyPatch, tokens: int, then: int, val_loss: float | None
) -> None:
    """50 tokens are held out, in windows of 8."""
    session.config = TrainConfig(steps=100, validate=ValidateSection(tokens=tokens))
    monkeypatch.setattr(sessions, "newest_for", lambda *_: saved_at_step_4(over=then))
    assert session._resume()
    assert session.best_val_loss == metric(session) == val_loss
    saved = session.checkpoints.save.call_args.args[2]  # type: ignore[attr-defined]
    assert saved["metric_over"] == (2 if tokens else 7)
    assert list(session.alarms) == ([] if val_loss else [
        "validation reads 2 windows of 8 tokens now, not 4: validation losses do not compare with those "
        "before"
    ])  # fmt: skip


@pytest.mark.parametrize("joining", [False, True])
def test_who_joins_makes_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joining: bool) -> None:
    """The text may have changed since the others began."""
    called = {name: mock.Mock(side_effect=UserError(name)) for name in ("prepare", "reopen")}
    monkeypatch.setattr(opening, "together", lambda _, call: call())
    for name, each in called.items():
        monkeypatch.setattr(opening, name, each)
    with pytest.raises(UserError, match="reopen" if joining else "prepare"):
        open_session(TrainConfig(run=str(tmp_path)), mock.Mock(world=mock.Mock(joining=joining)))
    arguments = TrainConfig().data, tmp_path / "tokenizer.json", tmp_path / "tokens"
    assert [each.call_args_list for each in called.values()] == (
        [[], [mock.call(*arguments)]] if joining else [[mock.call(*arguments)], []]
    )


def test_who_joins_with_another_text_is_refused(session: Session) -> None:
    state = json.loads(json.dumps(session._said()))
    session._take(state)
    session.prepared.tokens.identity = "another text"  # type: ignore[misc]
    with pytest.raises(UserError) as mistake:
        session._take(state)
    assert str(mistake.value) == (
        "run/tokens: not the text that the other ranks read: give this host the text that they began with, "
        "or start the run again, which then goes on with the text as it is now"
    )


def test_who_joins_with_another_base_is_refused(session: Session) -> None:
    state = json.loads(json.dumps(session._said())) | {"base": "of another model"}
    session.config = replace(session.config, model=ModelSection(preset="", weights="exported"))
    with pytest.raises(
        UserError, match="exported: not the model beside which the other ranks train adapters"
    ):
        session._take(state)


@pytest.mark.parametrize(("joining", "config_ranks", "expected"), [(False, 0, 2), (True, 0, 4), (True, 6, 6)])
def test_a_rank_that_joins_plans_for_all(joining: bool, config_ranks: int, expected: int) -> None:
    """It is alone, and compiles for the micro-batches of the others."""
    mesh = FakeMesh({"replicate": 1 if joining else 2}, joining=joining, full_size=4)
    assert first_ranks(TrainConfig(ranks=config_ranks), mesh) == expected


def test_a_scaler_begins_anew_with_its_state() -> None:
    """A peer was lost between `unscale_` and `update`."""
    scaler = Precision("fp16", "cpu").scaler()
    step = Step.__new__(Step)
    step._scaler = scaler
    assert scaler is not None
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    for _ in range(2):
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        step.load_scaler(step.scaler_state)


def test_what_a_checkpoint_was_made_with_is_what_the_run_goes_on_with(session: Session) -> None:
    """Though the run's file was changed by hand, so that nothing tells; but the text may be elsewhere."""
    tokenizer = mock.Mock(hash="t")
    state = json.loads(json.dumps({"tokenizer_hash": "t", "computed_with": computed_with(session.config)}))
    saved: Any = SimpleNamespace(state=state, folder=Path("run/checkpoints/step-00000008"))
    check_of_run(saved, session.config, tokenizer)
    began = session.config
    session.config = replace(began, steps=200, data=replace(began.data, paths=("moved",), folder="elsewhere"))
    check_of_run(saved, session.config, tokenizer)
    session.config = replace(began, seed=7, data=replace(began.data, vocab_size=300))
    with pytest.raises(UserError) as mistake:
        check_of_run(saved, session.config, tokenizer)
    assert str(mistake.value) == (
        "run/checkpoints/step-00000008 was made with seed = 1, the run's config.toml says 7 (data.vocab_size "
        "differs too): put it back, or begin another run with --run"
    )
