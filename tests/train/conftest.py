"""For the tests of training."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def as_few_variables_as_before() -> Iterator[None]:
    """torch's first optimizer leaves TORCHINDUCTOR_CACHE_DIR behind, with which all later ranks of other
    tests would be fresh interpreters (tests/zygote.py)."""
    before = set(os.environ)
    yield
    for name in set(os.environ) - before:
        if name.startswith("TORCH"):
            del os.environ[name]
