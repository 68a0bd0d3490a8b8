"""A port on loopback that leads to a store, as on each of several hosts; it can be redirected later."""

from __future__ import annotations

import contextlib
import socket
import threading


class Tunnel:
    """Listens until the process ends. While it leads nowhere, whoever connects waits."""

    def __init__(self, target: int) -> None:
        """target: a port on loopback."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._target: int | None = target
        self._waiting: list[socket.socket] = []
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def lead_to(self, target: int | None) -> None:
        """From now on to this port, or nowhere. What led elsewhere is closed."""
        self._target = target
        connections, self._open = self._open, []
        for connection in connections:
            _end(connection)
        if target is not None:
            waiting, self._waiting = self._waiting, []
            for connection in waiting:
                self._lead(connection, target)

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if self._target is None:
                self._waiting.append(connection)
            else:
                self._lead(connection, self._target)

    def _lead(self, connection: socket.socket, target: int) -> None:
        other = socket.create_connection(("127.0.0.1", target))
        self._open += [connection, other]
        for source, sink in ((connection, other), (other, connection)):
            threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            sink.sendall(data)
    _end(source)
    _end(sink)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
