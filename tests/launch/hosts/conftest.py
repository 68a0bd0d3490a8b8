"""Fixtures of the tests of launchers on several hosts."""

from __future__ import annotations

import pytest

from imece.launch import job
from imece.launch.hosts import coordinator, follower, seeker
from tests.clock import Clock
from tests.launch.hosts.cluster import Cluster, Make


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes one, of agents that have started their ranks."""
    clock = Clock()
    for module in (job, coordinator, follower, seeker):
        monkeypatch.setattr(module, "time", clock)
    return lambda hosts, **limits: Cluster(hosts, clock, **limits)
