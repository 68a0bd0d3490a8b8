"""How generations change when ranks end, tested without processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imece.launch.endings import Ending
from imece.launch.generations import End, Generations, GoOn, Limits, StartAgain, Verdict
from imece.membership.roster import Generation
from imece.status import Failure

PEER_LOST = Failure(0.0, "PeerLostError", "rank 1 has left", True)
BOOM = Failure(0.0, "ValueError", "boom", False)


class Run:
    """A job in which everybody goes on without others, unless `resilient` is taken away."""

    def __init__(self, ranks: int = 4, **limits: Any) -> None:
        self.generations = Generations(Limits(ranks, **limits))
        self.generations.start_all(0.0)
        self.resilient = True

    def ends(
        self, *members: int, at: float = 10.0, status: int = -9, failure: Failure | None = None, **more: Any
    ) -> Verdict | None:
        endings = {
            member: Ending(self.generations.slots[member], 100 + member, status, at, failure, **more)
            for member in members
        }
        return self.generations.judge(endings, self.go_on, at)

    def go_on(self, members: Sequence[int]) -> bool:
        return self.resilient and bool(members)

    def join(self, slot: int, at: float) -> int:
        """A replacement starts and is taken in at once."""
        member = self.generations.start_one(slot, at)
        assert self.generations.take_in([member], {}, self.go_on) is not None
        return member


def goes_on(verdict: Verdict | None) -> GoOn:
    assert isinstance(verdict, GoOn)
    return verdict


def ended(verdict: Verdict | None) -> End:
    assert isinstance(verdict, End)
    return verdict


def test_the_others_go_on_and_a_replacement_joins() -> None:
    run = Run()
    verdict = goes_on(run.ends(2))
    assert verdict.generation is not None
    assert verdict.generation.number == 1 and verdict.generation.members == (0, 1, 3)
    assert verdict.generation.lost == (
        "rank 2 (pid 102) was killed by signal 9 (SIGKILL), perhaps out of memory",
    )
    assert (verdict.slots, verdict.at_s) == ((2,), 10.0)
    assert verdict.said == (
        "imece: rank 2 (pid 102) was killed by signal 9 (SIGKILL), perhaps out of memory; "
        "3 ranks go on, a replacement is starting"
    )
    assert run.generations.start_one(2, 10.0) == 4
    assert run.generations.take_in([], {}, run.go_on) is None
    assert run.generations.take_in([4], {}, run.go_on) == Generation(2, (0, 1, 3, 4))
    assert run.generations.joining == []


def test_deaths_seen_together_are_one_generation() -> None:
    verdict = goes_on(Run().ends(0, 2))
    assert verdict.generation is not None and verdict.generation.number == 1
    assert verdict.generation.members == (1, 3) and len(verdict.generation.lost) == 2
    assert verdict.slots == (0, 2) and "2 ranks go on, 2 replacements are starting" in verdict.said


def test_one_that_dies_while_it_joins_changes_no_generation() -> None:
    run = Run()
    run.ends(2)
    member = run.generations.start_one(2, 10.0)
    verdict = goes_on(run.ends(member, at=10.5))
    assert verdict.generation is None and run.generations.newest.number == 1
    assert (verdict.slots, verdict.at_s) == ((2,), 11.5)
    assert verdict.said.endswith("3 ranks go on, a replacement is starting in 1 s")


def test_one_that_fails_before_it_joins_fails_alone() -> None:
    """The script was edited meanwhile, or a GPU is not free yet: those that compute are none the worse."""
    for failure, status in ((BOOM, 1), (None, 2), (PEER_LOST, 1)):
        run = Run(max_restarts=5, exceptions=True)
        run.ends(2)
        member = run.generations.start_one(2, 10.0)
        verdict = goes_on(run.ends(member, at=10.5, status=status, failure=failure))
        assert verdict.generation is None and (verdict.slots, verdict.at_s) == ((2,), 11.5)
        assert verdict.said.endswith("; 3 ranks go on, a replacement is starting in 1 s")
        run.resilient = False
        member = run.generations.start_one(2, 12.0)
        assert not isinstance(run.ends(member, at=12.5, status=status, failure=failure), GoOn)
    run = Run()
    run.ends(2)
    own = run.join(2, 10.0)
    assert ended(run.ends(own, at=11.0, status=1, failure=BOOM)).endings, (
        "one that has joined is as any other"
    )


def test_those_that_never_join_are_tried_less_and_less_often_and_then_no_more() -> None:
    """A host without memory kills whoever starts. The others go on, with steps finished meanwhile or none."""
    for steps_meanwhile in (0, 1):
        run, waits, at = Run(2), [], 10.0
        verdict = goes_on(run.ends(1))
        for number in range(10):
            at = verdict.at_s
            member = run.generations.start_one(1, at)
            run.generations.note_steps({0: 5 + number * steps_meanwhile})
            verdict = goes_on(run.ends(member, at=at))
            waits.append(verdict.at_s - at)
        assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 0]
        assert verdict.slots == () and verdict.said == (
            "imece: rank 1 (pid 111) was killed by signal 9 (SIGKILL), perhaps out of memory, the 10th in a "
            "row that died before it had joined; 1 rank goes on without a replacement"
        )
    member = run.generations.start_one(1, at)  # its host has been away, and has come again
    assert goes_on(run.ends(member, at=at)).at_s == at + 1


def test_one_that_joins_ends_the_row_of_those_that_did_not() -> None:
    run = Run(2)
    run.ends(1)
    for at in (20.0, 30.0):
        assert goes_on(run.ends(run.generations.start_one(1, at), at=at)).at_s > at
    run.generations.note_steps({0: 1})
    joined = run.join(1, 40.0)
    run.generations.note_steps({0: 2})
    assert goes_on(run.ends(joined, at=50.0)).at_s == 50.0
    assert goes_on(run.ends(run.generations.start_one(1, 50.0), at=51.0)).at_s == 52.0


def test_leaving_early_is_a_death_and_finishing_is_none() -> None:
    run = Run()
    assert run.ends(3, status=0) is None
    assert goes_on(run.ends(1, status=0, left_early=True)).slots == (), "the run is at its end"


def test_an_exception_ends_all() -> None:
    for failure, status in ((BOOM, 1), (BOOM, -11), (None, 3)):
        assert len(ended(Run().ends(1, status=status, failure=failure)).endings) == 1
    run = Run(restart=True)
    run.resilient = False
    assert isinstance(run.ends(1, status=1, failure=BOOM), End), "no restart mends a mistake in the program"


def test_one_that_lost_its_peer_is_not_the_cause() -> None:
    run = Run()
    assert run.ends(0, status=1, failure=PEER_LOST) is None
    blame_at = run.generations.blame_at
    assert blame_at == 11.0
    verdict = goes_on(run.ends(1, at=10.2))
    assert verdict.generation is not None and verdict.generation.members == (2, 3)
    blame_at = run.generations.blame_at
    assert blame_at is None and verdict.slots == (0, 1)
    assert run.ends(2, status=1, failure=PEER_LOST) is None
    assert isinstance(run.generations.overdue(run.go_on, 12.0), End)


def test_the_last_that_lost_their_peers_end_the_run_at_once() -> None:
    """Nobody is left whose end could be the cause: it must not pass for success."""
    run = Run()
    assert run.ends(0, 1, status=0) is None
    assert run.ends(2, status=1, failure=PEER_LOST) is None
    assert len(ended(run.ends(3, status=1, failure=PEER_LOST)).endings) == 2
    assert run.generations.blame_at is None
    run = Run(restart=True, exceptions=True)
    run.resilient = False
    assert isinstance(run.ends(0, 1, 2, 3, status=1, failure=PEER_LOST), StartAgain)


def test_too_few() -> None:
    run = Run(min_ranks=3)
    assert isinstance(run.ends(0), GoOn)
    assert ended(run.ends(1)).why == "; fewer than --min-ranks 3 were left"
    run = Run(min_ranks=3, restart=True)
    assert isinstance(run.ends(0, 1), StartAgain)
    assert ended(Run().ends(0, 1, 2, 3)).why == ""
    run = Run(min_ranks=4, restart=True, max_restarts=1)
    assert isinstance(run.ends(0), StartAgain)
    too_few = "; fewer than --min-ranks 4 were left; --max-restarts 1 is used up"
    assert ended(run.ends(1)).why == too_few
    run.resilient = False
    assert ended(run.ends(2)).why == "; --max-restarts 1 is used up"


def test_too_few_would_stay() -> None:
    """With those who leave already, and those who are to follow them."""
    generations = Run(min_ranks=2).generations
    assert generations.leave([0, 1, 2]) is None and not generations.leaving
    assert generations.leave([3]) is not None and generations.leave([2]) is not None
    assert generations.leave([1]) is None


def test_others_that_do_not_go_on() -> None:
    run = Run()
    run.resilient = False
    assert isinstance(run.ends(0), End)
    run = Run(restart=True)
    run.resilient = False
    verdict = run.ends(0)
    assert isinstance(verdict, StartAgain) and verdict.at_s == 10.0
    assert verdict.said.endswith("perhaps out of memory; all 4 ranks start again now")
    for member in (1, 2, 3):
        run.generations.remove(member)
    assert run.generations.start_all(11.0) == Generation(1, (4, 5, 6, 7))
    assert run.generations.starts == 1


def test_the_state_that_dies_with_the_last_who_had_it() -> None:
    """One that was just taken in has nothing yet."""
    run = Run()
    run.generations.note_steps(dict.fromkeys(range(4), 7))
    goes_on(run.ends(3))
    run.join(3, 10.0)
    run.resilient = False
    why = ended(run.ends(0, 1, 2)).why
    assert why == "; none is left that could go on (--max-restarts N starts all again)"
    run = Run(max_restarts=0)
    run.generations.note_steps(dict.fromkeys(range(4), 7))
    assert ended(run.ends(0, 1, 2, 3)).why == ""


def test_plain_scripts_start_again_after_exceptions_but_not_after_mistakes() -> None:
    def plain(**limits: Any) -> Run:
        run = Run(restart=True, exceptions=True, **limits)
        run.resilient = False
        return run

    assert isinstance(plain().ends(1, status=1, failure=BOOM), StartAgain)
    assert isinstance(plain().ends(1, status=7), StartAgain)
    assert isinstance(plain().ends(1, status=2), End)
    assert isinstance(plain().ends(1, status=1, failure=Failure(0.0, "UserError", "x", False)), End)
    assert isinstance(plain(max_restarts=0).ends(1, status=7), End)
    run = plain(max_restarts=3)
    run.resilient = True
    assert isinstance(run.ends(1, status=1, failure=BOOM), End), "made to go on, so it knows what it raises"
    run = plain()
    assert run.ends(0, status=1, failure=PEER_LOST) is None
    assert isinstance(run.generations.overdue(run.go_on, 11.0), StartAgain)


def test_the_third_death_in_a_row_is_the_last() -> None:
    run = Run()
    run.generations.note_steps(dict.fromkeys(range(4), 7))
    waits = []
    for at in (10.0, 20.0):
        verdict = goes_on(run.ends(max(run.generations.slots), at=at))
        waits.append(verdict.at_s - at)
        run.join(3, at)
    assert waits == [0.0, 1.0]
    last = ended(run.ends(5, at=30.0))
    assert last.endings[0].pid == 105 and "3rd time in a row" in last.why


def test_a_finished_step_makes_a_new_row() -> None:
    run = Run()
    for number in range(20):
        run.generations.note_steps({0: number})
        assert goes_on(run.ends(max(run.generations.slots), at=10.0 * number)).at_s == 10.0 * number
        run.join(3, 10.0 * number)


def test_back_at_a_checkpoint_what_they_finish_is_new() -> None:
    run = Run()
    for died, at in ((1000, 10.0), (700, 3000.0), (900, 6000.0), (900, 9000.0)):
        run.generations.note_steps(dict.fromkeys(run.generations.slots, died))
        assert goes_on(run.ends(max(run.generations.slots), at=at)).at_s == at
        run.join(3, at)
        for number in (1, 0, 2):  # one after another says that it is back
            run.generations.note_steps({number: 500})
    goes_on(run.ends(max(run.generations.slots), at=9002.0))
    run.join(3, 9002.0)
    last = ended(run.ends(max(run.generations.slots), at=9004.0))
    assert "3rd time in a row" in last.why, "without a step since they were back"


def test_one_that_was_ahead_of_the_others_is_no_step_back() -> None:
    run = Run(4)
    for member, at in ((3, 10.0), (4, 20.0), (5, 30.0)):
        run.generations.note_steps({0: 6, 1: 6, 2: 6, member: 7})
        verdict = run.ends(member, at=at)
        if member < 5:
            run.join(3, at)
        run.generations.note_steps({0: 6, 1: 6, 2: 6})
    assert "3rd time in a row" in ended(verdict).why


def test_ranks_that_die_within_a_moment_are_one_death() -> None:
    run = Run(8)
    for member in range(5):
        assert isinstance(run.ends(member, at=10.0 + member / 10), GoOn)
    run = Run(8)
    for member in range(2):
        assert isinstance(run.ends(member, at=10.0 + 2 * member), GoOn)
    assert isinstance(run.ends(2, at=14.0), End)


def test_starting_again_has_a_row_too() -> None:
    for limits, starts in (({}, 2), ({"max_restarts": 1}, 1), ({"max_restarts": 7}, 7)):
        run = Run(1, restart=True, **limits)
        run.resilient = False
        for count in itertools.count():
            verdict = run.ends(count, at=100.0 * count)
            if isinstance(verdict, End):
                break
            run.generations.start_all(100.0 * count)
        assert count == starts, "where nobody says how far it is, a limit that is given counts alone"
        assert ("3rd time" in ended(verdict).why) == (limits == {})


def test_steps_may_be_counted_anew_after_a_start() -> None:
    run = Run(1, restart=True)
    run.resilient = False
    for count in range(10):
        run.generations.note_steps({count: 0})
        run.generations.note_steps({count: 5})
        assert isinstance(run.ends(count, at=100.0 * count), StartAgain)
        run.generations.start_all(100.0 * count)


def test_a_limit_on_replacements() -> None:
    run = Run(max_restarts=1)
    assert goes_on(run.ends(0, 1)).slots == (0,)
    verdict = goes_on(run.ends(2, at=20.0))
    assert verdict.slots == () and verdict.said.endswith("; 1 rank goes on without a replacement")


def test_while_all_are_asked_to_end() -> None:
    """They go on without one that dies, for they may need each other to save; nobody is replaced."""
    run = Run(restart=True)
    run.generations.stopping = True
    verdict = goes_on(run.ends(2))
    assert verdict.generation is not None and verdict.slots == ()
    assert verdict.said.endswith("perhaps out of memory; 3 ranks go on without a replacement")
    killed = Run()
    killed.generations.stopping = True
    verdict = goes_on(killed.ends(2, by_our_signal=True))
    assert verdict.said == "" and verdict.generation is not None
    assert verdict.generation.lost == ("rank 2 (pid 102) was killed by signal 9 (SIGKILL)",)
    assert run.ends(1, status=1, failure=BOOM) is None
    assert run.ends(0, status=143) is None
    run.resilient = False
    assert run.ends(3) is None


def test_those_that_wait_for_others_to_leave_go_on_when_all_are_asked_to_end() -> None:
    for way in ("closed", "ended"):
        run = Run()
        assert run.generations.leave([0, 1]) is not None
        run.generations.stopping = True
        verdict: Verdict | None = None
        if way == "closed":
            assert run.generations.closed([0], 10.0) is None
            verdict = run.generations.closed([0, 1], 10.0)
        else:
            verdict = run.ends(0, 1, status=-15)
        assert goes_on(verdict).generation == Generation(2, (2, 3)), way


def test_who_waits_for_ranks_that_have_finished_is_left_over() -> None:
    run = Run(2)
    run.ends(1)
    joining = run.generations.start_one(1, 10.0)
    assert run.generations.left_over(10.0) == []
    run.ends(0, status=0)
    assert run.generations.left_over(20.0) == [joining]

    run = Run(2)
    run.ends(1)
    taken_in = run.join(1, 10.0)
    run.generations.note_steps({taken_in: 0})
    run.ends(0, status=0)
    assert run.generations.left_over(10.1) == [], "it may be about to finish too"
    assert run.generations.left_over(20.0) == [taken_in]

    run = Run(2)
    run.ends(1)
    taken_in = run.join(1, 10.0)
    run.generations.note_steps({taken_in: 1})
    run.ends(0, status=0)
    assert run.generations.left_over(100.0) == [], "it is one of them"


@pytest.mark.parametrize("resilient", [True, False])
def test_one_that_was_just_taken_in_goes_on_alone_if_it_says_so(resilient: bool) -> None:
    run = Run(2)
    run.ends(1)
    run.join(1, 10.0)
    run.resilient = resilient
    assert isinstance(run.ends(0, at=20.0), GoOn if resilient else End)


def test_nobody_is_taken_in_by_those_whose_steps_are_over() -> None:
    """They would not come, and the one that joins would wait for them."""
    run = Run(2)
    run.ends(1)
    joining = run.generations.start_one(1, 10.0)
    run.resilient = False
    assert run.generations.take_in([joining], {}, run.go_on) is None
    assert run.generations.joining == [joining]
    run.ends(0, status=0)
    assert run.generations.left_over(20.0) == [joining]


_EVENTS = st.lists(
    st.tuples(st.sampled_from(["kill", "join", "finish", "step"]), st.integers(0, 9)), max_size=40
)


@given(_EVENTS, st.integers(1, 5))
def test_whatever_happens_numbers_grow_and_only_the_living_are_named(
    events: list[tuple[str, int]], ranks: int
) -> None:
    run = Run(ranks)
    generations = run.generations
    used = set(generations.slots)
    empty: list[int] = []
    for at, (what, choice) in enumerate(events):
        before, living = generations.newest, sorted(generations.slots)
        if what == "step":
            generations.note_steps(dict.fromkeys(living, at))
        elif what == "join" and empty:
            member = generations.start_one(empty.pop(), float(at))
            assert member not in used
            used.add(member)
            generations.take_in([member] if choice % 2 else [], {}, run.go_on)
        elif what in ("kill", "finish") and living:
            verdict = run.ends(living[choice % len(living)], at=float(at), status=-9 * (what == "kill"))
            if isinstance(verdict, End):
                return
            empty += verdict.slots if isinstance(verdict, GoOn) else ()
        after = generations.newest
        assert after == before or after.number == before.number + 1
        assert after == before or set(after.members) <= set(generations.slots)
        slots = list(generations.slots.values())
        assert len(set(slots)) == len(slots) and not set(slots) & set(empty)
        order = [member for member in before.members if member in after.members]
        assert list(after.members[: len(order)]) == order


def test_ranks_that_lost_each_other_though_nobody_has_ended() -> None:
    """A network closed connections, and goes on. Where that does not help, the ranks give up themselves."""
    run, lost = Run(2), ["rank 0 (pid 100)", "rank 1 (pid 101)"]
    why = "rank 0 (pid 100) and rank 1 (pid 101) lost the connection to others, though no rank has ended"
    generations = run.generations
    assert generations.renew_for([], run.go_on) is None
    for number in (1, 2, 3):
        assert generations.renew_for(lost, run.go_on) == Generation(number, (0, 1), (why,))
    assert generations.renew_for(lost, run.go_on) is None, "no step was finished in between"
    generations.note_steps({0: 1})
    many = generations.renew_for([f"rank {rank}" for rank in range(9)], run.go_on)
    assert many is not None
    assert many.lost[0].startswith("rank 0 and rank 1 and rank 2 and 6 more lost the connection")
    run.resilient = False
    generations.note_steps({0: 2})
    assert generations.renew_for(lost, run.go_on) is None, "others would not come"


def test_no_generation_follows_from_one_that_has_finished() -> None:
    run = Run(3)
    generations = run.generations
    assert not generations.is_last([]) and generations.is_last([1])
    assert generations.leave([1]) is not None
    assert not generations.is_last([1]), "it was asked to"
    assert generations.closed([1], 0.0) is not None
    assert not generations.is_last([1]) and generations.is_last([0, 1])
    assert run.ends(2, status=0) is None
    assert generations.is_last([])


def test_those_who_lost_a_rank_that_has_ended_wait_for_what_follows() -> None:
    run = Run(3)
    assert run.ends(1, status=1, failure=PEER_LOST) is None
    assert run.generations.renew_for(["rank 0"], run.go_on) is None
    other = Run(3)
    assert other.generations.leave([1]) is not None
    assert other.generations.renew_for(["rank 0"], other.go_on) is None
    ending = Run(3)
    ending.generations.stopping = True
    assert ending.generations.renew_for(["rank 0"], ending.go_on) is None
