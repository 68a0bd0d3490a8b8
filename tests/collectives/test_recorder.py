"""The recorder: what was entered and left, read by another process and put in words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import timeit
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import imece
from imece import opening
from imece.collectives import recorder
from imece.collectives.recording import (
    CAPACITY,
    RECORD_BYTES,
    RING_AT,
    Call,
    GroupSeen,
    Recording,
    attach,
    find,
    ranks_text,
)
from imece.collectives.who_waits import explain
from imece.errors import UserError
from imece.launch.processes import die_with_parent
from tests.ranks import run_ranks, start_ranks

F32 = torch.float32
S = 1_000_000_000  # ns


@pytest.fixture
def own() -> Iterator[recorder.Recorder]:
    made = recorder.Recorder(rank=1, job="test")
    yield made
    made.close()


def enter(
    own: recorder.Recorder, op: str = "all_reduce", group: str = "g", shape: tuple[int, ...] = (2, 3)
) -> int:
    return own.enter(op, group, F32, shape, "sum", -1, "blocks.0.weight")


def test_calls_are_read_back(own: recorder.Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_ranks_of", lambda name: b"0:8:2" if name == "g" else b"")
    left, failed = enter(own), enter(own)
    own.leave(left)
    own.leave(failed, -1)
    own.enter("recv", "g", torch.int64, (), "", 3, "")
    own.enter("barrier", "other", None, (), "", -1, "")
    found = own.recording()
    assert (found.rank, found.job, found.pid) == (1, "test", os.getpid())
    assert [call.state for call in found.calls] == ["left", "failed", "entered", "entered"]
    assert [call.number for call in found.calls] == [1, 2, 1, 1]  # point-to-point is counted apart
    assert found.calls[0].what == "all_reduce(sum) of float32[2, 3] (blocks.0.weight)"
    assert found.calls[2].what == "recv from 3 of int64[]"
    assert found.calls[3].what == "barrier"
    assert found.groups == {"g": GroupSeen((0, 2, 4, 6), 2), "other": GroupSeen(None, 1)}
    assert 0 <= found.age_s(found.calls[0]) < 60


def test_ring_holds_the_last_calls_and_an_old_token_harms_nobody(own: recorder.Recorder) -> None:
    first = enter(own)
    for _ in range(CAPACITY):
        last = enter(own)
    own.leave(first)  # its slot belongs to `last` now
    found = own.recording()
    assert len(found.calls) == CAPACITY
    assert [call.token for call in found.calls] == list(range(2, CAPACITY + 2))
    assert found.calls[-1].token == last and found.calls[-1].state == "entered"


def test_a_call_that_goes_on_by_itself_is_waited_for_from_its_wait_on(own: recorder.Recorder) -> None:
    token = enter(own)
    own.turn(token, 1)  # it was never handed out: what it waits for it waits for since its beginning
    began = own.recording().calls[0].start_ns
    own.turn(token, -1)
    assert [call.state for call in own.recording().calls] == ["started"]
    own.turn(token, 1)
    (waiting,) = own.recording().calls
    assert waiting.state == "entered" and waiting.start_ns > began
    own.turn(token, 1)  # a second wait, after one that was given up
    assert own.recording().calls[0].start_ns == waiting.start_ns
    own.leave(token)
    assert own.recording().calls[0].state == "left"


def test_nothing_of_another_rank_is_left(own: recorder.Recorder) -> None:
    enter(own, group="before")
    under_way = enter(own)
    own.begin(0, "test")
    own.leave(under_way)
    last = enter(own)
    own.leave(under_way)
    found = own.recording()
    assert (found.rank, set(found.groups)) == (0, {"g"})
    assert [(call.number, call.state) for call in found.calls] == [(1, "entered")] and last > under_way


def test_many_groups_long_names_many_dims(own: recorder.Recorder) -> None:
    for index in range(70):
        enter(own, group=f"{index} " + "g" * 100)
    own.enter("all_reduce", "g", F32, (2, 1, 2, 1, 2, 3, 5), "", -1, "blocks.31.attention.key_value.weight.x")
    found = own.recording()
    assert len(found.groups) == 64 and "further groups" in found.groups
    assert found.calls[-1].shape == (2, 1, 2, 1, 2, 15)
    assert found.calls[-1].label == "blocks.31.att..ey_value.weight.x"


def test_torn_and_damaged_records_are_left_out(own: recorder.Recorder) -> None:
    tokens = [enter(own) for _ in range(3)]
    word = (RING_AT + tokens[1] * RECORD_BYTES) // 8
    assert own._words[word] == tokens[1]
    own._words[word] += 1  # as if the writer stood between the first word and the last
    found = own.recording()
    assert [call.token for call in found.calls] == [1, 3]


def test_ranks_of_a_group_as_text() -> None:
    assert ranks_text(tuple(range(3, 100))) == "3:100:1"
    assert ranks_text((5,)) == "5:6:1"
    assert ranks_text((0, 1, 3)) == "0,1,3"
    assert ranks_text((7, 3)) == "7,3"
    assert ranks_text(tuple(i * i for i in range(200))) == ""


def test_cost() -> None:
    shape = torch.Size([768, 3072])

    def pair() -> None:
        recorder.leave(recorder.enter("all_reduce", "cost", F32, shape, "sum", -1, "blocks.3.mlp.up.weight"))

    best_us = min(timeit.repeat(pair, number=2000, repeat=20)) / 2000 * 1e6
    print(f"\nenter + leave: {best_us:.2f} us")
    assert best_us < 15, "ten times what it costs on an idle machine"


def test_dump(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(20):
        recorder.leave(recorder.enter("broadcast", "dumped", F32, (4,), "", 0, "w"))
    recorder.dump()
    head, *calls = capsys.readouterr().err.splitlines()
    assert head.endswith("last 16 calls") and len(calls) == 16
    assert calls[-1].endswith("dumped number 20: broadcast from 0 of float32[4] (w)")


def test_a_forked_child_has_its_own_recorder() -> None:
    recorder.enter("barrier", "parent", None, ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on fork with threads
        child = os.fork()
    if child == 0:
        recorder.enter("barrier", "child", None, ())
        time.sleep(30)
        os._exit(0)
    try:
        deadline = time.monotonic() + 10
        groups: set[str] = set()
        while not groups and time.monotonic() < deadline:  # the ring exists a moment before its first call
            with suppress(UserError):
                groups = set(attach(child).groups)
        assert groups == {"child"}
        assert "child" not in attach(os.getpid()).groups
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_attach_to_no_rank() -> None:
    with subprocess.Popen(["sleep", "30"]) as process:
        with pytest.raises(UserError, match="has no imece recorder"):
            attach(process.pid)
        process.kill()
    with pytest.raises(UserError, match="no process"):
        attach(process.pid)


def test_attach_to_one_that_ends_meanwhile(own: recorder.Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(pid: int) -> int:
        raise FileNotFoundError(f"/proc/{pid}/status")

    assert attach(os.getpid()).pid == os.getpid()
    monkeypatch.setattr("imece.collectives.recording._own_pid", ended)
    with pytest.raises(UserError, match=f"process {os.getpid()} has no imece recorder"):
        attach(os.getpid())


SIGNALLED = """
import signal, sys, time, torch
from imece.collectives import recorder
recorder.install_signal()
recorder.enter("all_reduce", "replicate", torch.float32, (8,), "sum", label="w")
def sleeps_in_python():
    print("ready", flush=True)
    while True: time.sleep(0.05)
sleeps_in_python()
"""


def test_signal_shows_stacks_and_calls() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SIGNALLED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    limit = threading.Timer(30, process.kill)  # ends the reading below, so the test, whatever comes
    limit.start()
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        seen = ""
        while "number 1:" not in seen and (line := process.stderr.readline()):
            seen += line
        limit.cancel()
        process.kill()
    assert "sleeps_in_python" in seen and "all_reduce(sum) of float32[8] (w)" in seen


# --- words, from recordings made by hand


def call(
    op: str, number: int, start_s: float, end_s: float = 0, group: str = "replicate", peer: int = -1
) -> Call:
    token = int(start_s * 1000)
    return Call(token, number, group, op, "", "float32", (4,), peer, "", int(start_s * S), int(end_s * S))


def recording(
    rank: int, *calls: Call, job: str = "j", state: str = "S", last: int | None = None
) -> Recording:
    numbers = [each.number for each in calls if each.op not in ("send", "recv")]
    groups = {"replicate": GroupSeen((0, 1, 2, 3), last if last is not None else max(numbers, default=0))}
    return Recording(100 + rank, rank, job, state, 100 * S, calls, groups)


def test_who_is_missing() -> None:
    waiting = [recording(rank, call("all_reduce", 812, 87.6 + rank / 100)) for rank in (0, 1, 3)]
    absent = recording(2, call("broadcast", 811, 86, 87))
    assert explain([*waiting, absent]) == [
        "all_reduce number 812 on group replicate (ranks 0-3): ranks 0, 1, 3 wait since 12.4 s; rank 2 is "
        "not in it (pid 102): its last call was broadcast number 811 on group replicate (left 13.0 s ago)"
    ]
    stopped = replace(absent, process_state="T")
    assert "rank 2 is not in it (pid 102, stopped by a signal): its" in explain([*waiting, stopped])[0]
    held = replace(absent, stopped=(107,))
    assert (
        "is not in it (pid 102, whose worker 107 is stopped by a signal): its" in explain([*waiting, held])[0]
    )
    assert "rank 2 has no recorder on this host" in explain(waiting)[0]
    assert "rank 2 is not in it (pid 102): it has made no call" in explain([*waiting, recording(2)])[0]


def test_missing_because_it_is_elsewhere_or_past() -> None:
    waiting = recording(0, call("all_reduce", 5, 90))
    elsewhere = recording(1, call("all_gather", 3, 95, group="shard"), last=4)
    left = recording(2, call("all_reduce", 5, 90, 91), call("all_reduce", 6, 91, 92))
    past = recording(3, call("all_reduce", 4000, 91, 92))
    lines = explain([waiting, elsewhere, left, past])
    assert (
        "rank 1 is not in it (pid 101): it is in all_gather number 3 on group shard since 5.0 s" in lines[0]
    )
    assert "rank 2 left it 9.0 s ago" in lines[0]
    assert "rank 3 is past it (it is at number 4000)" in lines[0]
    assert lines[1].startswith("all_gather number 3 on group shard: rank 1 waits since 5.0 s")


def test_all_are_in_it() -> None:
    everyone = [recording(rank, call("all_reduce", 5, 90)) for rank in range(4)]
    assert explain(everyone)[0].endswith("wait since 10.0 s; all of them are in it")
    everyone[1] = replace(everyone[1], process_state="T")
    assert explain(everyone)[0].endswith("rank 1 (pid 101) is stopped by a signal")
    everyone[1] = recording(1, call("broadcast", 5, 90, peer=0))
    assert "collective number 5" in explain(everyone)[0]
    assert (
        "they differ: rank 0 in all_reduce of float32[4], rank 1 in broadcast from 0 of"
        in explain(everyone)[0]
    )


def test_messages() -> None:
    receiver = recording(1, call("recv", 1, 97, peer=0))
    idle = recording(0, call("all_reduce", 5, 90, 91))
    assert explain([receiver, idle]) == [
        "recv from 0 of float32[4] on group replicate: rank 1 waits since 3.0 s; rank 0 (pid 100) does not "
        "answer it: its last call was all_reduce number 5 on group replicate (left 9.0 s ago)"
    ]
    sending = recording(0, call("send", 1, 98, peer=1))
    assert "rank 0 (pid 100) is in send to 1 of float32[4]" in explain([receiver, sending])[0]
    assert "rank 0 has no recorder" in explain([receiver])[0]


def test_what_was_started_is_not_waited_for() -> None:
    """On Gloo and NCCL a call ends by itself: only `wait` says that a rank has nothing else to do."""
    started = [recording(rank, call("all_reduce", 5, -90 - rank)) for rank in (0, 1)]
    own, other = (each.calls[0] for each in started)
    began = "all_reduce number 5 on group replicate"
    yet = f"{began}: ranks 0, 1 started it 10.0 s ago and do not wait for it yet"
    said = explain(started)
    assert said[0].startswith(
        f"no rank waits in a call. rank 0 (pid 100): it started {began} 10.0 s ago and does"
    )
    assert said[1:] == [yet]
    behind, ahead = ({"replicate": GroupSeen((0, 1), last)} for last in (5, 6))
    started[1] = replace(recording(1, other, call("barrier", 6, 98)), groups=ahead)
    started[0] = replace(recording(0, own, state="T"), groups=behind)
    assert explain(started) == [
        "barrier number 6 on group replicate (ranks 0, 1): rank 1 waits since 2.0 s; rank 0 is not in it "
        f"(pid 100, stopped by a signal): it started {began} 10.0 s ago and does not wait for it yet",
        yet,
    ]
    started[1] = recording(1, call("all_reduce", 5, 97))
    assert explain(started)[0].endswith(
        "rank 1 waits since 3.0 s; rank 0 started it 10.0 s ago and does not wait for it yet (pid 100, "
        "stopped by a signal)"
    )
    receiving = [recording(1, call("recv", 1, -97, peer=0))]
    assert explain(receiving)[1:] == [
        "recv from 0 of float32[4] on group replicate: rank 1 started it 3.0 s ago and does not wait for it "
        "yet"
    ]


def test_jobs_do_not_mix_and_idle_ranks_are_told() -> None:
    one = recording(0, call("all_reduce", 5, 90), job="a")
    other = recording(1, call("all_reduce", 4, 90, 91), job="b")
    lines = explain([one, other])
    assert lines[0] == "job a (rank 0):" and "rank 1 has no recorder" in lines[1]
    assert lines[2] == "job b (rank 1):" and lines[3].startswith(
        "no rank waits in a call. rank 1 (pid 101): its last call"
    )
    assert explain([]) == []


# --- the real thing


def default_group() -> str:
    """The name of the group of all ranks."""
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD.group_name)


def change_places() -> list[Any]:
    """What is noted of a rank that has become another one, and of its first call then."""
    rank = imece.init(device="cpu").rank
    for _ in range(1 + rank):  # as if one of them came from a world of its own
        recorder.leave(recorder.enter("broadcast", default_group(), F32, (4,)))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    opening.reform(1 - rank, 2, dist.PrefixStore("turned", store))
    imece.all_reduce(torch.ones(4))
    found = attach(os.getpid())
    calls = [f"{call.op} number {call.number} on group {call.group}" for call in found.calls]
    return [found.rank, calls, found.groups["0"].ranks]


def test_a_rank_that_becomes_another_is_noted_as_that() -> None:
    calls = ["all_reduce number 1 on group 0"]
    assert run_ranks(change_places, 2, backend=None) == [[1, calls, [0, 1]], [0, calls, [0, 1]]]


def hang() -> None:
    """Rank 2 stops after the broadcast; the others sit in Gloo's C++ wait."""
    group = default_group()
    for op in ("broadcast", "all_reduce"):
        tensor = torch.ones(4)
        token = recorder.enter(op, group, tensor.dtype, tensor.shape, label="weights")
        if op == "broadcast":
            dist.broadcast(tensor, 0)
        else:
            dist.all_reduce(tensor)
        recorder.leave(token)
        if dist.get_rank() == 2:
            rank = os.getpid()
            if (worker := os.fork()) == 0:
                die_with_parent(rank)
                os.kill(os.getpid(), signal.SIGSTOP)
            os.waitpid(worker, os.WUNTRACED)
            os.kill(os.getpid(), signal.SIGSTOP)


def test_a_hang_is_explained_from_outside() -> None:
    with start_ranks(hang, 3, backend="gloo") as ranks:
        ranks.wait_entered()
        deadline = time.monotonic() + 30
        text = ""
        while "ranks 0, 1 wait" not in text and time.monotonic() < deadline:
            time.sleep(0.1)
            found = [each for each in find() if each.pid in ranks.pids]
            text = "\n".join(explain(found))
        attached = attach(ranks.pids[2])
        assert ranks.alive() == [0, 1, 2], "the ranks must still hang"
    print("\n" + text)
    assert "all_reduce number 2 on group 0 (ranks 0-2): ranks 0, 1 wait since" in text
    (worker,) = attached.stopped
    held = f"stopped by a signal, whose worker {worker} is stopped by a signal"
    assert f"rank 2 is not in it (pid {ranks.pids[2]}, {held}): its last call was" in text
    assert "broadcast number 1 on group 0 (left" in text
    assert attached.rank == 2 and attached.calls[-1].label == "weights"
    assert {each.job for each in found} == {attached.job}


def beside_another_job() -> list[list[int]]:
    """A fork that takes itself for a rank of another job, and waits."""
    recorder.enter("barrier", "ours", None, ())
    pipe = os.pipe()
    child = os.fork()
    if child == 0:
        os.environ["MASTER_PORT"] = "1"
        recorder.enter("barrier", "theirs", None, ())
        os.write(pipe[1], b"x")
        time.sleep(60)
        os._exit(0)
    os.read(pipe[0], 1)
    seen = [find(), find(attach(os.getpid()).job), find(attach(child).job)]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    names = {os.getpid(): 0, child: 1}
    return [sorted(names[each.pid] for each in found if each.pid in names) for found in seen]


def test_other_jobs_of_the_same_user_are_told_apart() -> None:
    assert run_ranks(beside_another_job, 1, backend=None) == [[[0, 1], [0], [1]]]
