"""The threads that run what is in the background."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial

import pytest

from imece.collectives.pending import in_background


class Group:
    """Stands for what the frames of a call know."""


def fail(group: Group) -> None:
    raise ZeroDivisionError(str(group))


@pytest.mark.parametrize("lane", [0, 1])
def test_nothing_keeps_what_failed_once_it_was_waited_for(lane: int) -> None:
    """A group ends with its last reference, and others wait for that."""
    group = Group()
    known = weakref.ref(group)
    task = in_background(partial(fail, group), lane=lane)
    with pytest.raises(ZeroDivisionError):
        task.wait()
    del task, group
    deadline = time.monotonic() + 5  # the thread lets go a moment after it has told
    while known() is not None and time.monotonic() < deadline:
        gc.collect()
    assert known() is None
