"""Both ends of a new connection prove that they know the token, without sending it.

    dialler  -> listener    MAGIC, a nonce
    listener -> dialler     MAGIC, a nonce
    dialler  -> listener    HMAC-SHA256(token, "dialler", both nonces)
    listener -> dialler     HMAC-SHA256(token, "listener", both nonces), or zeros for "another token"

Fixed lengths: 72 bytes are read from a stranger, and none of them is parsed. The dialler proves first, so a
stranger gets nothing that he could try tokens on. What follows is not encrypted, just as what Gloo and NCCL
send.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket

from imece.launch.hosts.frames import read_exactly

MAGIC = b"imece\0\0\1"  # the last byte is the version of this exchange
HANDSHAKE_S = 5.0
"""For a stranger to prove who he is, and for whoever was dialled to answer."""
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_NO = bytes(_PROOF_BYTES)


class HandshakeError(Exception):
    """The other side is no agent that knows the token; the message says what it is instead."""


class GoneError(Exception):
    """An agent that has not waited until it was answered."""


async def prove(sock: socket.socket, token: bytes) -> None:
    """The part of the side that dialled. Raises HandshakeError, EOFError or OSError."""
    loop = asyncio.get_running_loop()
    own = secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(sock, MAGIC + own)
    other = await _nonce(sock)
    await loop.sock_sendall(sock, _proof(token, b"dialler", own, other))
    answer = await read_exactly(sock, _PROOF_BYTES)
    if answer == _NO:
        raise HandshakeError("it has another token")
    if not hmac.compare_digest(answer, _proof(token, b"listener", own, other)):
        raise HandshakeError("it does not know the token")


async def demand(sock: socket.socket, token: bytes) -> None:
    """The part of the side that listens. Raises HandshakeError, GoneError, EOFError or OSError."""
    loop = asyncio.get_running_loop()
    other = await _nonce(sock)
    own = secrets.token_bytes(_NONCE_BYTES)
    try:
        await loop.sock_sendall(sock, MAGIC + own)
        proof = await read_exactly(sock, _PROOF_BYTES)
    except (EOFError, ConnectionError):
        raise GoneError from None
    if not hmac.compare_digest(proof, _proof(token, b"dialler", other, own)):
        await loop.sock_sendall(sock, _NO)
        raise HandshakeError("it has another token")
    await loop.sock_sendall(sock, _proof(token, b"listener", other, own))


async def _nonce(sock: socket.socket) -> bytes:
    """The other side's nonce. Its first bytes show whether it is an agent, so another program need not
    send more."""
    magic = await read_exactly(sock, len(MAGIC))
    if magic[:-1] != MAGIC[:-1]:
        raise HandshakeError("it is no agent of imece")
    if magic != MAGIC:
        raise HandshakeError("it runs another version of imece")
    return await read_exactly(sock, _NONCE_BYTES)


def _proof(token: bytes, role: bytes, dialler: bytes, listener: bytes) -> bytes:
    """All parts but the role have fixed lengths, so no two sets of them make the same message."""
    return hmac.digest(token, MAGIC + role + dialler + listener, "sha256")
