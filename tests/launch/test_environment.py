"""The environment of a rank."""

from __future__ import annotations

from imece.launch.environment import worker_environment


def test_a_persons_own_settings_stay() -> None:
    theirs = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth9", "RANK": "5", "HOME": "/home"}
    environ = worker_environment(theirs, 1, 2, 4000, "job")
    assert environ["OMP_NUM_THREADS"] == "7" and environ["GLOO_SOCKET_IFNAME"] == "eth9"
    assert environ["RANK"] == "1" and environ["HOME"] == "/home"
    for ranks in (1, 2, 1000):
        assert int(worker_environment({}, 0, ranks, 1, "job")["OMP_NUM_THREADS"]) >= 1


def test_no_rank_knows_the_launchers_secret() -> None:
    theirs = {"IMECE_TOKEN": "0123456789abcdef", "IMECE_TOKEN_FILE": "/run/secret"}
    assert not theirs.keys() & worker_environment(theirs, 0, 2, 4000, "job").keys()


def test_ranks_of_a_rank_are_no_members_of_its_job() -> None:
    theirs = {"IMECE_MEMBER": "7", "IMECE_JOINING": "1"}
    assert not theirs.keys() & worker_environment(theirs, 0, 2, 4000, "job").keys()
    environ = worker_environment(theirs, 1, 2, 4000, "job", member=3)
    assert environ["IMECE_MEMBER"] == "3" and "IMECE_JOINING" not in environ
