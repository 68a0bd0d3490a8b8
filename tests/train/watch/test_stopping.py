"""Signals are noted, once."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from imece.train.watch.stopping import SIGNALS, Stop


def test_a_rank_that_was_launched_notes_the_first_alone() -> None:
    """systemd signals the launcher, which passes it on, and the ranks."""
    came: list[int] = []
    before = {each: signal.signal(each, lambda signum, _: came.append(signum)) for each in SIGNALS}
    try:
        stop = Stop()
        with stop.listening():
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
                assert (stop.signal, came) == (signal.SIGTERM, [])
        os.kill(os.getpid(), signal.SIGTERM)
        assert came == [signal.SIGTERM], "it has been saved by then"
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_one_that_came_before_anybody_listened_is_noted() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # other threads here hold nothing back
        stop = Stop()
        with stop.listening():
            assert stop.signal == signal.SIGTERM
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def test_handlers_come_back_without_a_signal_too() -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(KeyError), Stop().listening():
        assert [signal.getsignal(each) for each in SIGNALS] != before
        raise KeyError
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_what_this_process_was_started_to_ignore_stays_ignored() -> None:
    before = {each: signal.signal(each, signal.SIG_IGN) for each in SIGNALS}
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stop = Stop()
        with stop.listening():
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.signal == 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.signal == signal.SIGTERM
        assert [signal.getsignal(each) for each in SIGNALS] == [signal.SIG_IGN, signal.SIG_DFL]
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


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
