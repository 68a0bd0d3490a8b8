"""How ranks end, in words, and which failure was first."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imece.errors import PeerLostError
from imece.launch.endings import Ending, first_cause
from imece.status import Failure, describe
from imece.store import NO_MORE


def ending(rank: int, status: int, time_s: float, failure: Failure | None = None, **more: Any) -> Ending:
    return Ending(rank, 1000 + rank, status, time_s, failure, **more)


def test_no_failure_no_cause() -> None:
    assert first_cause([]) is None
    assert first_cause([ending(0, 0, 1.0), ending(1, 0, 2.0)]) is None


def test_what_a_rank_says_of_itself_counts_before_its_slow_exit() -> None:
    slow = ending(1, 1, 9.0, Failure(3.0, "ValueError", "boom", False))
    quick = ending(0, 1, 4.0, Failure(3.5, "KeyError", "x", False))
    assert first_cause([quick, slow]) is slow


@pytest.mark.parametrize(
    ("kind", "message", "hint"),
    [
        ("RuntimeError", "can't start new thread", NO_MORE),  # as under `ulimit -u`
        (
            "OSError",
            "[Errno 24] Too many open files: 'a.txt'",
            "close some, or raise the limit (ulimit -Hn, docker run --ulimit nofile=65536)",
        ),
        (
            "RuntimeError",
            "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)",
            "/dev/shm is full: give it more (docker run --shm-size), or take fewer workers",
        ),
        ("MemoryError", "", "give it more memory (ulimit -v, docker --memory), or use less"),
    ],
)
def test_a_rank_at_a_limit_says_what_to_do(kind: str, message: str, hint: str) -> None:
    line = ending(0, 1, 5.0, Failure(3.0, kind, message, False)).describe()
    what = f"{kind}: {message}" if message else kind
    assert line == f"rank 0 (pid 1000) failed with {what} (exit status 1): {hint}"


def test_leaving_early_is_a_failure() -> None:
    early = ending(1, 0, 5.0, left_early=True)
    assert first_cause([ending(0, 0, 1.0), early]) is early
    assert "left early with exit status 0" in early.describe()


SILENT = "stopped, its host hangs, or C code keeps Python's lock"


@pytest.mark.parametrize(
    ("status", "more", "said"),
    [
        (-9, {}, "was killed by signal 9 (SIGKILL) {}, perhaps out of memory"),
        (-9, {"out_of_memory": False}, "was killed by signal 9 (SIGKILL) {}"),
        (
            -9,
            {"out_of_memory": True},
            "was killed by signal 9 (SIGKILL) {}, as memory ran out: give it more "
            "(docker --memory, SLURM's --mem), or use less",
        ),
        (
            -24,
            {},
            "was killed by signal 24 (SIGXCPU) {}, as its CPU time was used up: raise that limit (ulimit -t)",
        ),
        (-9, {"silent_s": 3.0}, f"was silent for 3 s {{}}{{comma}} and was ended ({SILENT})"),
        (0, {"left_early": True}, "left early {}{comma} with exit status 0 (os._exit?)"),
    ],
)
@pytest.mark.parametrize("where", ["in backward of step 41", "between steps, after step 40"])
def test_a_death_names_its_phase(status: int, more: dict[str, Any], said: str, where: str) -> None:
    comma = "," if "," in where else ""
    line = ending(1, status, 5.0, where=where, **more).describe()
    assert line == "rank 1 (pid 1001) " + said.format(where, comma=comma)
    assert "  " not in ending(1, status, 5.0, **more).describe()


@given(st.permutations(range(4)), st.lists(st.floats(0, 100), min_size=4, max_size=4))
def test_survivors_and_those_we_ended_are_never_the_cause(order: list[int], times: list[float]) -> None:
    lost = Failure(times[0], "PeerLostError", "rank 2 is dead", True)
    endings = [
        ending(0, 1, times[0], lost),
        ending(1, -15, times[1], ended_by_us=True),
        ending(2, -9, times[2]),
        ending(3, 0, times[3]),
    ]
    cause = first_cause([endings[index] for index in order])
    assert cause is endings[2]


def test_a_survivor_is_the_cause_if_nothing_else_failed() -> None:
    lost = ending(0, 1, 2.0, Failure(2.0, "PeerLostError", "rank 1 has left", True))
    assert first_cause([lost, ending(1, 0, 1.0)]) is lost


def test_what_says_that_a_peer_has_gone() -> None:
    assert describe(PeerLostError("rank 1")).because_of_peer
    assert describe(
        RuntimeError("[gloo/pair.cc:550] Connection closed by peer [127.0.0.1]:3")
    ).because_of_peer
    assert not describe(RuntimeError("shapes differ")).because_of_peer
    assert not describe(ValueError("Connection closed by peer")).because_of_peer
    assert len(describe(ValueError("x" * 9999)).message) == 500


def test_every_signal_has_a_line() -> None:
    for number, left in itertools.product(range(1, 65), (True, False)):
        line = ending(0, -number, 0.0, left_early=left and number == 0).describe()
        assert f"signal {number} (" in line and "\n" not in line
