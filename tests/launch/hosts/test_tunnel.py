"""A rank's connection leads to a store on another host, wherever that moves."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from imece.launch.hosts.events import Up
from imece.world import LOOPBACK
from tests.launch.hosts.agents import LIMIT_S, Agent, agents, all_that_comes, exactly, is_open


class Store:
    """In a store's place: says its name, and then says again whatever it is told."""

    def __init__(self, name: bytes) -> None:
        self.name, self.served = name, 0
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            if not self._threads:
                sock.close()
                return
            self.served += 1
            self._threads.append(threading.Thread(target=self._answer, args=(sock,)))
            self._threads[-1].start()

    def _answer(self, sock: socket.socket) -> None:
        with sock:
            try:
                sock.sendall(self.name)
                while data := sock.recv(1 << 16):
                    sock.sendall(data)
            except OSError:
                return  # the tunnel was closed

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_exception: object) -> None:
        threads, self._threads = self._threads, []
        socket.create_connection((LOOPBACK, self.port)).close()
        for thread in threads:
            thread.join()
        self._listener.close()


@pytest.fixture
def pair() -> Iterator[list[Agent]]:
    """Hosts 0 and 1 with a link between them."""
    with agents(0, 1) as both:
        both[1].dial(0, both[0].address, patience_s=10)
        both[0].next(Up), both[1].next(Up)
        yield both


def rank(agent: Agent) -> socket.socket:
    """A connection as a rank of that host makes it."""
    return socket.create_connection((LOOPBACK, agent.tunnel_port), timeout=LIMIT_S)


def test_bytes_go_both_ways_and_so_do_ends(pair: list[Agent]) -> None:
    zero, one = pair
    sent = os.urandom(1 << 20)
    with Store(b"zero") as store:
        zero.serve_store(store.port)
        one.lead_to(zero.address)
        with rank(one) as sock:
            assert exactly(sock, 4) == b"zero"

            def send() -> None:
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)

            sender = threading.Thread(target=send)
            sender.start()
            back = all_that_comes(sock)
            sender.join()
        assert hashlib.sha256(back).digest() == hashlib.sha256(sent).digest()


def test_the_own_hosts_store_is_reached_the_same_way(pair: list[Agent]) -> None:
    with Store(b"here") as store:
        pair[0].lead_to(store.port)
        with rank(pair[0]) as sock:
            sock.sendall(b" again")
            assert exactly(sock, 10) == b"here again"


def test_a_rank_waits_while_its_tunnel_leads_nowhere(pair: list[Agent]) -> None:
    zero, one = pair
    with Store(b"zero") as store, rank(one) as sock, rank(one) as gone:
        sock.sendall(b" hello")
        gone.sendall(b"never mind")
        gone.close()
        assert pair[0].is_calm(0.2) and is_open(sock)
        one.lead_to(zero.address)  # which serves no store yet
        assert pair[0].is_calm(0.2) and is_open(sock)
        zero.serve_store(store.port)
        assert exactly(sock, 10) == b"zero hello"
        assert zero.is_calm(0.2) and store.served == 1, "who has gone is not led anywhere"


def test_tunnels_that_lead_elsewhere_now_are_closed(pair: list[Agent]) -> None:
    zero, one = pair
    with Store(b"old") as old, Store(b"new") as new:
        zero.serve_store(old.port)
        one.lead_to(zero.address)
        with rank(one) as before:
            assert exactly(before, 3) == b"old"
            one.lead_to(zero.address)
            before.sendall(b"!")
            assert exactly(before, 1) == b"!", "nothing has changed"
            one.lead_to(new.port)
            assert all_that_comes(before) == b""
            with rank(one) as after:
                assert exactly(after, 3) == b"new"


def test_another_store_at_the_far_end_closes_the_tunnels_to_the_old_one(pair: list[Agent]) -> None:
    zero, one = pair
    with Store(b"old") as old, Store(b"new") as new:
        zero.serve_store(old.port)
        one.lead_to(zero.address)
        with rank(one) as before:
            assert exactly(before, 3) == b"old"
            zero.serve_store(new.port)
            assert all_that_comes(before) == b""
        with rank(one) as after:
            assert exactly(after, 3) == b"new"


def test_a_host_without_a_link_has_no_tunnel(pair: list[Agent]) -> None:
    zero, one = pair
    with Store(b"zero") as store, agents(2) as (two,):
        zero.serve_store(store.port)
        one.lead_to(zero.address)
        two.lead_to(zero.address)
        with rank(one) as sock, rank(two) as stranger:
            assert exactly(sock, 4) == b"zero"
            zero.drop(zero.links[1])
            assert all_that_comes(sock) == b""
            assert two.is_calm(0.2) and is_open(stranger)
            two.dial(0, zero.address, patience_s=10)
            assert exactly(stranger, 4) == b"zero"


def test_all_tunnels_end_with_the_network() -> None:
    with Store(b"zero") as store:
        with agents(0, 1) as (zero, one):
            one.dial(0, zero.address, patience_s=10)
            one.next(Up)
            zero.serve_store(store.port)
            one.lead_to(zero.address)
            sock, waiting = rank(one), rank(zero)
            assert exactly(sock, 4) == b"zero"
        with sock, waiting:
            assert all_that_comes(sock) == b"" and all_that_comes(waiting) == b""
