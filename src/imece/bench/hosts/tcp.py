"""Plain TCP between two hosts: the rate of the link without any library."""

from __future__ import annotations

import socket
import sys
import time

PORT = 29_399
_BLOCK = 2**18


def receive(address: str) -> float:
    """Listen, count what one peer sends, and return megabits per second from its first byte to its last.

    TimeoutError if nobody connects within 20 s.
    """
    with socket.create_server((address, PORT)) as listener:
        listener.settimeout(20.0)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(20.0)
            buffer = bytearray(_BLOCK)
            connection.recv_into(buffer, 1)
            begin, total = time.perf_counter(), 0
            while count := connection.recv_into(buffer):
                total += count
            return total * 8 / (time.perf_counter() - begin) / 1e6


def send(address: str, nbytes: int) -> None:
    """Send `nbytes` to the listener on `address`, which may start up to 10 s later."""
    deadline = time.monotonic() + 10.0
    while True:
        try:
            connection = socket.create_connection((address, PORT), timeout=20.0)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    with connection:
        block = memoryview(bytes(_BLOCK))
        while nbytes > 0:
            nbytes -= connection.send(block[:nbytes])


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        print(receive(sys.argv[2]))
    else:
        send(sys.argv[2], int(sys.argv[3]))
