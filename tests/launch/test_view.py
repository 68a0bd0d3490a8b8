"""A thread that watches a running job: what it sees, and what becomes of its exceptions."""

from __future__ import annotations

import signal
import time

from imece.launch.generations import Limits
from imece.launch.local import launch
from imece.launch.view import View
from tests.launch.launcher import Launcher


def see(view: View) -> None:
    places = view.living()
    print("slots", sorted(place.slot for place in places.values()), flush=True)
    first = min(places)
    print("signal", view.signal(first, signal.SIGKILL), flush=True)
    while view.ending(first) is None:
        time.sleep(0.01)
    print(
        "ending", view.ending(first), view.signal(first, signal.SIGKILL), first in view.living(), flush=True
    )
    print("over", view.over.wait(30), flush=True)


def test_what_it_sees() -> None:
    with Launcher(call=lambda: launch(["sleep", "60"], Limits(2), watch=see)) as launcher:
        outcome = launcher.wait()
    assert outcome.status == 128 + signal.SIGKILL
    assert "slots [0, 1]\nsignal True\n" in outcome.out
    assert "status=-9" in outcome.out and outcome.out.endswith("False False\nover True\n")


def test_it_ends_the_job() -> None:
    with Launcher(call=lambda: launch(["sleep", "60"], Limits(2), watch=View.end)) as launcher:
        outcome = launcher.wait()
    assert outcome.status == 128 + signal.SIGTERM


def test_what_it_raises_is_raised_at_the_end() -> None:
    def fail(view: View) -> None:
        raise LookupError("nothing to see")

    with Launcher(call=lambda: launch(["true"], Limits(1), watch=fail)) as launcher:
        outcome = launcher.wait()
    assert outcome.status == 70 and "LookupError: nothing to see" in outcome.err
