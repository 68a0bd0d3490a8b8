"""The secret that the agents of a job prove to each other: from the environment, or from a file of its owner.

It is never an argument, which everybody on the host could see, and never passed on to a rank.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from imece.errors import UserError

TOKEN = "IMECE_TOKEN"
TOKEN_FILE = "IMECE_TOKEN_FILE"
VARIABLES = (TOKEN, TOKEN_FILE)
"""Variables to remove from the environment of whatever a launcher starts."""
LEAST_CHARACTERS = 16
_MOST_BYTES = 4096
_POLL_S = 0.1


def token_path(environ: Mapping[str, str]) -> Path:
    """The file that holds the token if the environment does not. UserError if there is no home folder."""
    try:
        if environ.get(TOKEN_FILE):
            return Path(environ[TOKEN_FILE]).expanduser()
        # The specification says: ignore a relative path in XDG_CONFIG_HOME.
        config = Path(environ.get("XDG_CONFIG_HOME") or "")
        if not config.is_absolute():
            config = Path(environ.get("HOME") or Path.home()) / ".config"
    except RuntimeError as error:
        raise UserError(
            f"no home folder for the token's file: set {TOKEN}, or {TOKEN_FILE} to a file"
        ) from error
    return config / "imece" / "token"


def find_token(
    environ: Mapping[str, str], *, create: bool, patience_s: float = 5.0
) -> tuple[bytes, str | None]:
    """The token, and one line to print if a new one was written (`create`: write one if there is none).

    Without `create` the file may come within `patience_s`: hosts often share a home, and start together.
    UserError if there is none, if it is short, or if others can read the file.
    """
    if TOKEN in environ:
        return _checked(environ[TOKEN].encode(errors="surrogateescape"), TOKEN), None
    path = token_path(environ)
    deadline = time.monotonic() + patience_s
    while True:
        token = _read(path)
        if token is not None:
            return token, None
        if create:
            said = _write(path)
            if said is not None:
                return _read(path) or b"", said
            continue  # another launcher wrote it meanwhile
        if time.monotonic() >= deadline:
            raise UserError(
                f"no token: neither {TOKEN} nor {path}; host 0 writes that file when it starts: "
                "copy it to this host with mode 600"
            )
        time.sleep(_POLL_S)


def _read(path: Path) -> bytes | None:
    """The token in `path`; None if there is no such file."""
    try:
        # Do not wait for a writer, if it is a pipe; the checks below are on what was opened, not on a name.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read the token file {path}: {error.strerror}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"the token file {path} is not a regular file")
        if found.st_mode & 0o077:
            raise UserError(
                f"others can read or write the token file {path} (mode {stat.S_IMODE(found.st_mode):o}): "
                f"chmod 600 {path}, and a new token if they may have done so"
            )
        if found.st_uid not in (0, os.geteuid()):
            raise UserError(f"the token file {path} belongs to user {found.st_uid}, not to {os.geteuid()}")
        return _checked(os.read(fd, _MOST_BYTES), str(path))
    finally:
        os.close(fd)


def _write(path: Path) -> str | None:
    """Write a new token to `path`, completely or not at all, and say so; None if there is one by now."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "w") as file:
                file.write(secrets.token_hex(32) + "\n")
            os.link(beside, path)  # unlike a rename, a link never replaces an existing file
        finally:
            beside.unlink()
    except FileExistsError:
        return None
    except OSError as error:
        raise UserError(
            f"cannot write the token file {path} ({error.strerror}): set {TOKEN} or {TOKEN_FILE}"
        ) from None
    return f"imece: wrote a new token to {path}: the other hosts need the same file, with mode 600"


def _checked(token: bytes, where: str) -> bytes:
    token = token.strip()
    if len(token) < LEAST_CHARACTERS:
        raise UserError(
            f"the token in {where} has {len(token)} characters, at least {LEAST_CHARACTERS} are needed: "
            "`openssl rand -hex 32` makes one"
        )
    return token
