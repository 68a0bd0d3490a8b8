"""The token: where it comes from, and who may read it."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from imece.errors import UserError
from imece.launch.hosts.token import TOKEN, TOKEN_FILE, find_token, token_path

LONG = "0123456789abcdef"


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


def keep(path: Path, text: str, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_where_the_file_is(home: dict[str, str], tmp_path: Path) -> None:
    assert token_path(home) == tmp_path / ".config/imece/token"
    assert token_path({**home, "XDG_CONFIG_HOME": "/etc/xdg"}) == Path("/etc/xdg/imece/token")
    assert token_path({**home, "XDG_CONFIG_HOME": "relative"}) == tmp_path / ".config/imece/token"
    assert token_path({**home, TOKEN_FILE: "/run/secret"}) == Path("/run/secret")


def test_where_nobody_knows_of_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: object) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.delenv("HOME", raising=False)
    for environ in ({}, {TOKEN_FILE: "~/token"}, {TOKEN_FILE: "~no-such-user/token"}):
        with pytest.raises(UserError, match=r"no home .*: set IMECE_TOKEN, or IMECE_TOKEN_FILE to a file"):
            find_token(environ, create=True)


def test_the_environment_comes_first(home: dict[str, str]) -> None:
    keep(token_path(home), "a" * 20)
    assert find_token({**home, TOKEN: f" {LONG}\n"}, create=True) == (LONG.encode(), None)
    assert find_token(home, create=True) == (b"a" * 20, None)


def test_host_0_writes_a_new_one_that_only_its_owner_can_read(home: dict[str, str]) -> None:
    token, said = find_token(home, create=True)
    path = token_path(home)
    assert re.fullmatch(rb"[0-9a-f]{64}", token)
    assert said is not None and str(path) in said and token.decode() not in said and "\n" not in said
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(path.parent) == ["token"]
    assert find_token(home, create=False) == (token, None)


def test_the_mask_of_a_careless_person_opens_nothing(home: dict[str, str]) -> None:
    before = os.umask(0)
    try:
        find_token(home, create=True)
    finally:
        os.umask(before)
    assert token_path(home).stat().st_mode & 0o777 == 0o600


def test_ten_launchers_that_start_together_have_one_token(home: dict[str, str]) -> None:
    found: list[tuple[bytes, str | None]] = []
    start = threading.Barrier(10)

    def find() -> None:
        start.wait()
        found.append(find_token(home, create=True))

    threads = [threading.Thread(target=find) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({token for token, _ in found}) == 1 and len(found) == 10
    assert sum(said is not None for _, said in found) == 1
    assert os.listdir(token_path(home).parent) == ["token"]


def test_another_host_waits_a_moment_for_a_shared_home(home: dict[str, str]) -> None:
    thread = threading.Timer(0.15, lambda: find_token(home, create=True))
    thread.start()
    token, said = find_token(home, create=False, patience_s=20)
    thread.join()
    assert len(token) == 64 and said is None


def test_no_token_says_what_to_do(home: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"no token: neither IMECE_TOKEN nor \S+/token; host 0 writes"):
        find_token(home, create=False, patience_s=0.0)
    assert not token_path(home).parent.exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_file_that_others_can_use_is_refused(home: dict[str, str], mode: int) -> None:
    path = keep(token_path(home), LONG, mode)
    with pytest.raises(UserError, match=f"others can .*{path} .mode {mode:o}.: chmod 600"):
        find_token(home, create=True)


@pytest.mark.parametrize("text", ["", "\n", "short", " " * 40])
def test_an_empty_or_short_token_is_refused(home: dict[str, str], text: str) -> None:
    keep(token_path(home), text)
    with pytest.raises(UserError, match="at least 16 are needed"):
        find_token(home, create=True)
    with pytest.raises(UserError, match="the token in IMECE_TOKEN has"):
        find_token({**home, TOKEN: text}, create=True)


def test_what_is_no_file_is_refused(home: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a regular file"):
        find_token({**home, TOKEN_FILE: str(tmp_path)}, create=True)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UserError, match="not a regular file"):
        find_token({**home, TOKEN_FILE: str(tmp_path / "pipe")}, create=True)
    with pytest.raises(UserError, match="cannot write the token file /proc/nothing/token"):
        find_token({**home, TOKEN_FILE: "/proc/nothing/token"}, create=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_person_is_refused(home: dict[str, str]) -> None:
    path = keep(token_path(home), LONG)
    os.chown(path, 12345, 12345)
    with pytest.raises(UserError, match="belongs to user 12345, not to 0"):
        find_token(home, create=True)
