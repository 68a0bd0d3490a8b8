"""A new connection between two agents, up to the point where each knows who the other is.

    dialler  -> listener    Hello: what for, and who
    listener -> dialler     Hello, or {"no": why, "again_s": for how long it is worth trying}

Both come after the handshake, so from someone who knows the token, but perhaps of another version or job.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from imece.launch.hosts import frames, handshake
from imece.launch.hosts.handshake import HandshakeError, prove
from imece.launch.hosts.link import prepare
from imece.system.addresses import Address, describe

VERSION = importlib.metadata.version("imece")
CONNECT_S = 2.0  # a lost SYN is sent again after 1 s, and then after ever longer waits
Purpose = Literal["link", "tunnel", "probe"]
MOST_HOSTS = 65_536


class Unreached(ConnectionError):
    """There is no agent at the other end that lets this one in; the message says what there is."""

    def __init__(
        self, why: str, *, refused: bool = False, told: bool = False, again_s: float | None = None
    ) -> None:
        """refused: nothing listens there. told: an agent said so. again_s: for how long it is worth trying
        on; None: without limit."""
        super().__init__(why)
        self.refused, self.told, self.again_s = refused, told, again_s


@dataclass(frozen=True)
class Hello:
    """How an agent introduces itself."""

    purpose: Purpose
    version: str
    job: str
    host: int
    agent: str
    """Random: names the process."""
    port: int
    """Where it listens; 0 if it does not."""
    hello: dict[str, Any]
    """From the user of the network, with what a peer learns about it."""

    @staticmethod
    def of(message: dict[str, Any] | None) -> Hello:
        """What a peer sent; FrameError if it is no introduction. The version may be another one."""
        message = message or {}
        version = message.get("version")
        if isinstance(version, str) and version != VERSION:
            return Hello("link", version, "", -1, "", 0, {})  # the rest may mean anything
        match message:
            case {
                "purpose": str(purpose), "version": str(version), "job": str(job), "host": int(host),
                "agent": str(agent), "port": int(port), "hello": dict(hello),
            } if purpose in get_args(Purpose) and 0 <= host < MOST_HOSTS and 0 <= port < 65_536:  # fmt: skip
                return Hello(purpose, version, job, host, agent, port, hello)  # type: ignore[arg-type]
        raise frames.FrameError("it did not say who it is")

    def message(self) -> dict[str, Any]:
        """The message to send."""
        return asdict(self)


async def reach(
    address: Address,
    token: bytes,
    hello: Hello,
    speak: Callable[[], object] = lambda: None,
) -> tuple[socket.socket, Hello]:
    """A connection to the agent at `address`, and who that is; what follows the connection
    may take HANDSHAKE_S.

    speak: called just before this side says who it is; may raise Unreached, as this function does.
    """
    sock = await _connect(address)
    where = describe(address)
    with contextlib.ExitStack() as unless_reached:
        unless_reached.callback(sock.close)
        try:
            async with asyncio.timeout(handshake.HANDSHAKE_S):
                await prove(sock, token)
                speak()
                await frames.write(sock, hello.message())
                answer = await frames.read(sock)
            if answer is not None and "no" in answer:
                again_s = answer.get("again_s")
                worth = float(again_s) if isinstance(again_s, int | float) else 0.0
                raise Unreached(frames.printable(answer["no"]), told=True, again_s=worth)
            peer = Hello.of(answer)
        except HandshakeError as error:
            raise Unreached(f"{where}: {error}", told=True, again_s=0.0) from None
        except (frames.FrameError, EOFError) as error:
            raise Unreached(f"{where}: {error}") from None
        except TimeoutError:
            raise Unreached(f"{where} does not answer") from None
        except Unreached:
            raise
        except OSError as error:
            raise Unreached(f"{where}: {error.strerror or error}") from None
        unless_reached.pop_all()
    return sock, peer


async def _connect(address: Address) -> socket.socket:
    """A connection to the first address for `address` that accepts one."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: this is no host name at all
        why = error.strerror if isinstance(error, OSError) else "it is no host's name"
        raise Unreached(f"{address[0]!r} is not a host that can be found: {why}") from None
    failure = Unreached(f"{describe(address)} does not answer")
    for family, kind, protocol, _, target in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            prepare(sock)
            async with asyncio.timeout(CONNECT_S):
                await loop.sock_connect(sock, target)
            return sock
        except ConnectionRefusedError:
            failure = Unreached(f"nothing listens at {describe(address)}", refused=True)
        except TimeoutError:
            pass
        except OSError as error:
            failure = Unreached(f"{describe(address)}: {error.strerror or error}")
        except BaseException:
            sock.close()
            raise
        sock.close()
    raise failure
