"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import imece


@pytest.fixture
def mesh() -> Iterator[imece.Mesh]:
    """Of this process alone."""
    made = imece.init()
    yield made
    made.close()
