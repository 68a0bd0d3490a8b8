"""Processes that build at once, or die while they build.

Run as a program, so that it can fork: it starts no threads, and without torch each fork takes a millisecond.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

if __name__ == "__main__":
    # The package without its __init__.py, which imports torch. The data room needs none of it.
    package = ModuleType("imece")
    package.__path__ = [str(Path(__file__).parents[2] / "src/imece")]
    sys.modules["imece"] = package

from imece import writing
from imece.data import bpe as bpe_module
from imece.data import build as build_module
from imece.data import prepare as prepare_module
from imece.data.build import build
from imece.data.corpus import Source
from imece.data.files import digest
from imece.data.prepare import TextSource, prepare
from imece.data.records import TEXT
from imece.data.sources import sources
from imece.data.tokenizer import ByteTokenizer
from imece.data.tokens import TokenFiles, open_tokens
from imece.errors import UserError


def run_processes(name: str, folder: Path) -> Any:
    """What the function of this file returned, called with the folder in a process of its own."""
    command = [sys.executable, __file__, name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def write_texts(folder: Path, word: str, count: int = 6) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"{word} {number}")
    return sources([folder])


def content(tokens: TokenFiles) -> list[list[int]]:
    parts = (tokens.train, tokens.validation)
    return [[*part.tokens.tolist(), -1, *part.offsets.tolist()] for part in parts]


def open_or_none(folder: Path, verify: bool = True) -> list[list[int]] | None:
    try:
        return content(open_tokens(folder, verify=verify))
    except UserError:
        return None


def forked(function: Callable[[], object]) -> int:
    """The process id of a copy of this process, which calls the function and ends: with 0 if it returned."""
    pid = os.fork()
    if pid:
        return pid
    try:
        function()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the copy must never go on with its parent's work
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


# --- killed ---


def kill_at_every_line(folder: Path) -> dict[str, int]:
    """How often what was found after a kill was the old content, the new, or none; and half files beside.

    Any mixture is an AssertionError, and so is a next build that does not make all new.
    """
    old_files, new_files = write_texts(folder / "old", "old"), write_texts(folder / "new", "new")
    os.fsync = lambda fd: None  # a killed process does not take the kernel's memory with it
    old = content(build(folder / "template", [Source(old_files)], TEXT, ByteTokenizer(), share=0.3))
    new = content(build(folder / "expected", [Source(new_files)], TEXT, ByteTokenizer(), share=0.3))
    names = sorted(os.listdir(folder / "template"))
    assert list(map(len, old)) == list(map(len, new))  # so that sizes alone would not show a mixture
    seen, number = Counter[str](), 0
    while True:
        number += 1
        tokens = folder / f"tokens{number}"
        shutil.copytree(folder / "template", tokens)
        again = partial(build, tokens, [Source(new_files)], TEXT, ByteTokenizer(), share=0.3)
        if not _killed(again, number):
            return seen
        found = open_or_none(tokens)
        for each in (found, open_or_none(tokens, verify=False)):
            assert each in (old, new, None), f"killed at line {number}: a mixture"
        seen["old" if found == old else "new" if found == new else "none"] += 1
        seen["half"] += any(name.endswith(".partial") for name in os.listdir(tokens))
        assert content(again()) == new, number
        assert sorted(os.listdir(tokens)) == names, number


def _killed(function: Callable[[], object], number: int) -> bool:
    """Whether a process that calls the function comes to as many different lines of ours, and dies there.

    A line counts the first time and the second: in a loop, one round is done then and others are not.
    """
    ours = {module.__file__ for module in (build_module, writing)}
    seen, lines = Counter[tuple[str, int]](), 0

    def line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if event == "line":
            place = (frame.f_code.co_filename, frame.f_lineno)
            seen[place] += 1
            lines += seen[place] <= 2
            if lines == number:
                os.kill(os.getpid(), signal.SIGKILL)
        return line

    def call(frame: FrameType, event: str, _: object) -> Any:
        return line if frame.f_code.co_filename in ours else None

    def traced() -> None:
        sys.settrace(call)
        function()

    _, status = os.waitpid(forked(traced), 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


# --- at once ---


def prepare_at_once(folder: Path) -> dict[str, Any]:
    """What five processes note, and what they leave. The first that makes something is killed meanwhile."""
    write_texts(folder / "texts", "some words", count=40)
    source = TextSource((str(folder / "texts"),), vocab_size=270)
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    train_bpe, build_all = bpe_module.train_bpe, vars(build_module)["_build"]

    def note(word: str) -> None:
        os.write(log, f"{word}\n".encode())

    def noted(word: str) -> list[str]:
        return [line for line in (folder / "log").read_text().splitlines() if line.startswith(word)]

    def pause(*_: object) -> None:
        note(f"pauses {os.getpid()}")
        signal.pause()

    def learn(*arguments: Any, **options: Any) -> Any:
        note("learns")
        tokenizer = train_bpe(*arguments, **options)
        if len(noted("learns")) == 1:
            pause()
        return tokenizer

    def make(*arguments: Any) -> None:
        note("builds")
        *others, progress = arguments
        build_all(*others, pause if len(noted("builds")) == 1 else progress)

    def one() -> None:
        prepared = prepare(source, folder / "run/tokenizer.json", folder / "tokens")
        note(f"done {digest(json.dumps([prepared.tokenizer.hash, *content(prepared.tokens)]).encode())}")

    vars(prepare_module)["train_bpe"], vars(build_module)["_build"] = learn, make
    pids, killed = [forked(one) for _ in range(5)], list[int]()
    while len(killed) < 2:
        time.sleep(0.01)
        if len(paused := noted("pauses")) > len(killed):
            time.sleep(0.1)  # time for the others to come in, if nothing held them
            assert len(noted("pauses")) == len(paused) and not noted("done")
            killed.append(int(paused[-1].split()[1]))
            os.kill(killed[-1], signal.SIGKILL)
    ended = {pid: os.waitpid(pid, 0)[1] for pid in pids}
    assert ended == {pid: signal.SIGKILL if pid in killed else 0 for pid in pids}
    return {"log": noted(""), "left": sorted(os.listdir(folder / "run") + os.listdir(folder / "tokens"))}


if __name__ == "__main__":
    functions = {function.__name__: function for function in (kill_at_every_line, prepare_at_once)}
    print(json.dumps(functions[sys.argv[1]](Path(sys.argv[2]))))
