"""Signals are noted, once."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from imece.train.stopping import SIGNALS, Stop


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_is_noted_and_the_second_acts(number: signal.Signals) -> None:
    came: list[int] = []
    before = {each: signal.signal(each, lambda signum, _: came.append(signum)) for each in SIGNALS}
    ours = {each: signal.getsignal(each) for each in SIGNALS}
    try:
        stop = Stop()
        assert stop.signal == 0
        with stop.listening():
            os.kill(os.getpid(), number)
            assert (stop.signal, came) == (number, [])
            for each in SIGNALS:
                os.kill(os.getpid(), each)
            assert (stop.signal, came) == (number, list(SIGNALS))
        assert {each: signal.getsignal(each) for each in SIGNALS} == ours
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_handlers_come_back_without_a_signal_too() -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(KeyError), Stop().listening():
        assert [signal.getsignal(each) for each in SIGNALS] != before
        raise KeyError
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_other_threads_have_no_handlers() -> None:
    seen = []

    def listen() -> None:
        with Stop().listening():
            seen.append([signal.getsignal(each) for each in SIGNALS])

    before = [signal.getsignal(each) for each in SIGNALS]
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [before]
