"""The store where ranks meet: one address, one job, each rank once."""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

import imece
from imece.errors import NotMetError, PeerLostError, UserError
from imece.launch.generations import Limits
from imece.launch.hosts.network import Network
from imece.launch.local import launch
from imece.store import (
    client,
    connect,
    launchers_store,
    listen,
    of_this_start,
    root_store,
    say_finished,
    serve,
    swap_notes,
)
from imece.world import World

SECOND = timedelta(seconds=1)


def world(rank: int, port: int, *, job: str | None = None, address: str = "127.0.0.1") -> World:
    return World(rank, 2, rank, 2, "host", "slurm", address, port, job)


def free_port() -> int:
    with listen() as listener:
        return int(listener.getsockname()[1])


def test_rank_0_serves_on_loopback_and_rank_1_finds_it() -> None:
    port = free_port()
    found: list[dist.Store] = []
    late = threading.Thread(target=lambda: found.append(connect(world(1, port, job="a"), SECOND * 20, {})[0]))
    late.start()  # before there is anything to connect to
    store, met = connect(world(0, port, job="a"), SECOND * 20, {})
    late.join()
    store.set("key", "value")
    assert found[0].get("key") == b"value" and met.master_port == port
    addresses = {
        c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.laddr.port == port and not c.raddr
    }
    assert addresses == {"127.0.0.1"}
    found.clear()
    del store
    listen("127.0.0.1", port).close()  # the port is free again


def test_one_rank_opens_no_port() -> None:
    store, _ = connect(World(0, 1, 0, 1, "host", "single"), SECOND, {})
    assert isinstance(store, dist.HashStore)


def test_who_hears_how_a_rank_is() -> None:
    listener = listen()
    port = listener.getsockname()[1]
    agents, meeting = serve(listener), dist.HashStore()
    on_hosts = replace(world(0, 1), agent_port=port)  # nobody listens at port 1: nobody must ask it
    joins = replace(world(0, port), world_size=1, joining=True)
    for number, each in enumerate((on_hosts, replace(joins, agent_port=port, master_port=1), joins)):
        launchers_store(each, meeting, SECOND * 20).set(f"{number}", "said")
        assert agents.get(f"{number}") == b"said" and not meeting.check([f"{number}"])
    assert isinstance(connect(joins, SECOND, {})[0], dist.HashStore)  # it meets nobody yet
    inner, served = dist.PrefixStore("mesh", meeting), {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    launchers_store(world(0, 1), inner, SECOND, served).set("one host", "said")
    assert meeting.get("one host") == b"said"
    launchers_store(world(0, 1), inner, SECOND, {}).set(
        "mpirun's", "said"
    )  # rank 0 serves it, and may be gone
    assert not meeting.check(["mpirun's"])


def test_another_jobs_store_is_refused() -> None:
    port = free_port()
    store, _ = connect(world(0, port, job="theirs"), SECOND * 20, {})
    with pytest.raises(UserError, match=f"port {port} .*'theirs', this is job 'ours': set MASTER_PORT"):
        connect(world(1, port, job="ours"), SECOND * 20, {})
    del store


def test_a_port_that_is_taken() -> None:
    with listen() as taken, pytest.raises(UserError, match="choose another MASTER_PORT"):
        connect(world(0, taken.getsockname()[1]), SECOND, {})


def test_nobody_there() -> None:
    with pytest.raises(UserError, match=r"rank 1 of 2 found no rank 0 at 127\.0\.0\.1 port .* within 0 s"):
        connect(world(1, free_port()), timedelta(seconds=0.2), {})


def test_an_address_that_is_none() -> None:
    with pytest.raises(UserError, match=r"MASTER_ADDR=no-such-host\.invalid"):
        connect(world(0, 1, address="no-such-host.invalid"), SECOND, {})
    for rank in range(2):  # that it is no name is known at once
        with pytest.raises(UserError, match=r"^MASTER_ADDR=a\.\.b is no"):
            connect(world(rank, 1, address="a..b"), SECOND * 60, {})


def test_loopback_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a network namespace of its own, where one may listen all the same."""

    def down(sock: socket.socket, address: object) -> None:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(socket.socket, "connect", down)
    said = r"^cannot listen on 127\.0\.0\.1 \(Network is unreachable\): is the loopback interface"
    with pytest.raises(UserError, match=said):
        imece.spawn(print)
    with pytest.raises(UserError, match=said):
        launch(["true"], Limits(1))
    with pytest.raises(UserError, match=said):
        Network(b"a token", 0, "job", {}, silent_s=1.0)


def test_no_thread_for_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    said = os.strerror(errno.EAGAIN)

    def no_thread(*_: object, **__: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(dist, "TCPStore", no_thread)
    with pytest.raises(UserError, match=r"no more processes or threads may be started here: raise the limit"):
        imece.spawn(print)
    said = "another"
    with pytest.raises(RuntimeError, match="another"):
        imece.spawn(print)


def test_mpi_without_a_launcher_above() -> None:
    with pytest.raises(UserError, match="did not say where they meet"):
        connect(World(0, 2, 0, 2, "host", "mpich", "127.0.0.1"), SECOND, {})


def test_a_rank_says_for_whom_it_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no launcher does: it may wait for ten minutes."""
    monkeypatch.setattr("imece.store._SILENT_S", 0.06)
    patience, launched = SECOND * 0.6, {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    listener = listen()
    port = listener.getsockname()[1]
    listener.close()
    with pytest.raises(UserError, match="found no rank 0"):
        connect(world(1, port), patience, {})
    with pytest.raises(UserError, match="never came: ranks 1, 2"):
        swap_notes(dist.HashStore(), 0, 3, {}, patience)
    for rank, others in ((0, "ranks 1-9"), (1, "rank 0")):
        with pytest.raises(UserError, match=f"never came: {others}"):
            of_this_start(dist.HashStore(), rank, 10, patience, launched)
    (store := dist.HashStore()).set("note/0", "{}")
    threading.Timer(0.5, store.set, ("note/1", "{}")).start()
    assert swap_notes(store, 2, 3, {}, timedelta.max) == [{}] * 3
    lines = Counter(re.sub("in [01] s", "in N s", capsys.readouterr().err).splitlines())
    met_nobody = f"imece: rank 1 of 2 waits for rank 0 at 127.0.0.1 port {port} (Connection refused)"
    assert set(lines) == {
        f"{met_nobody}; it gives up in N s",
        "imece: rank 0 of 3 waits for ranks 1, 2; it gives up in N s",
        "imece: rank 0 of 10 waits for ranks 1-9; it gives up in N s",
        "imece: rank 1 of 10 waits for rank 0; it gives up in N s",
        "imece: rank 2 of 3 waits for rank 1",
    }
    assert all(times in (2, 3) for times in lines.values()), "again and again, but seldom"


def test_garbage_at_the_port_does_not_stop_the_ranks() -> None:
    listener = listen()
    port = listener.getsockname()[1]
    store = serve(listener)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        other, _ = connect(world(1, port), SECOND * 20, {"TORCHELASTIC_USE_AGENT_STORE": "True"})
        other.set("key", "value")
        assert store.get("key") == b"value"


def test_notes() -> None:
    store = dist.HashStore()
    assert swap_notes(store, 0, 1, {"a": [1]}, SECOND) == [{"a": [1]}]
    with pytest.raises(UserError, match="two processes say they are rank 0 of 1"):
        swap_notes(store, 0, 1, {}, SECOND)
    with pytest.raises(ValueError, match="16384"):
        swap_notes(dist.HashStore(), 0, 1, {"a": "x" * 20_000}, SECOND)
    store = dist.HashStore()
    store.set("note/1", "(pickle.")
    with pytest.raises(UserError, match="rank 1 left 8 bytes"):
        swap_notes(store, 0, 2, {}, SECOND)


def test_rank_0_ends_while_it_waits_for_others() -> None:
    listener = listen()
    port = listener.getsockname()[1]
    served = [serve(listener)]
    other = client("127.0.0.1", port, SECOND * 20)
    threading.Timer(0.3, served.clear).start()
    with pytest.raises(PeerLostError, match="rank 1 of 2 has lost the process in which ranks meet"):
        swap_notes(other, 1, 2, {}, SECOND * 20)


def test_what_an_earlier_start_has_left_in_a_launchers_store() -> None:
    """torchrun's agent serves one store for all starts: what ranks leave there says nothing to the next."""
    store, served = dist.HashStore(), {"TORCHELASTIC_USE_AGENT_STORE": "True"}

    def join(rank: int, ranks: int = 3, patience_s: float = 60.0) -> dist.Store:
        found = of_this_start(store, rank, ranks, timedelta(seconds=patience_s), served)
        assert swap_notes(found, rank, ranks, {"rank": rank}, SECOND * 60)[rank] == {"rank": rank}
        return found

    with ThreadPoolExecutor(3) as threads:
        for number in range(3):
            ranks = [threads.submit(join, rank) for rank in (2, 1)]
            assert not wait(ranks, 0.1 * number).done, "they believe an answer to others"
            found = [join(0), *(rank.result(60) for rank in ranks)]
            assert not found[0].check(["key"])
            found[1].set("key", str(number))
            assert [each.get("key").decode() for each in found] == [str(number)] * 3
        with pytest.raises(UserError, match="for 2 of 3 ranks, which never came: ranks 1, 2"):
            join(0, patience_s=0.1)
        twice = [threads.submit(join, 1) for _ in range(2)]
        said = [str(each.exception()) for each in wait(twice, 60, FIRST_COMPLETED).done]
        assert said == ["two processes say they are rank 1 of 3: check RANK in each of them"]
        threads.submit(join, 2)
        join(0)
        say_finished(store, [2], starts=1)
        for starts, why in (("0", "never came"), ("1", "waits for rank 2, which ended with exit status 0")):
            with pytest.raises(NotMetError, match=why):
                of_this_start(store, 0, 3, SECOND * 0.1, {**served, "TORCHELASTIC_RESTART_COUNT": starts})
    assert of_this_start(store, 1, 2, SECOND, {}) is store, "which rank 0 of this start serves"


def test_the_store_below_all_prefixes() -> None:
    store = dist.HashStore()
    root_store(dist.PrefixStore("a", dist.PrefixStore("b", store))).set("key", "value")
    assert store.get("key") == b"value"
