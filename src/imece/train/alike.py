"""Checks before the first step that all ranks have the same options, code, run folder and tokens."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from imece.collectives.texts import gather_texts
from imece.data.prepare import Prepared
from imece.data_parallel.same import by_rank, texts_that_differ
from imece.errors import UserError
from imece.listing import some
from imece.mesh import Mesh
from imece.observe.environment import version
from imece.train.agreeing import together
from imece.train.config import TrainConfig, flat

# Each host may keep its token files in its own place.
_MAY_DIFFER = frozenset({"data.folder"})
_MOST_SHOWN = 3
_LOOKS_S = 30.0  # a file server's client may show an older state of a folder for so long


def check_same_start(config: TrainConfig, mesh: Mesh) -> None:
    """All ranks call this. Unless all have the same: UserError on one of them, SystemExit(2) on the
    others."""
    facts = {"torch": torch.__version__, "imece": version("imece"), "imece's source": _source_digest()}
    options = {name: value for name, value in flat(config).items() if name not in _MAY_DIFFER}
    _check(facts | options, mesh, "start all with the same options and the same installation")


def check_same_folder(folder: Path, mesh: Mesh) -> None:
    """Like check_same_start, for the run folder of ranks on several hosts, which there is where rank 0 is.

    Without a common one no checkpoint would ever be complete: each save would wait for minutes, and say so.
    """
    if len(mesh.hosts) == 1:
        return
    mark, content = folder / f"host.{os.getpid()}.partial", secrets.token_hex(8)
    try:
        if mesh.rank == 0:
            try:
                mark.write_text(content)
            except OSError:  # of a full disk the first save will tell
                content = ""
        mine = [mark.name, content, socket.gethostname()]
        name, content, host = gather_texts(mine, mesh.world_group, mesh.device, "run folder")[0]
        if content:
            together(mesh, lambda: _look_for(folder, name, content, host))
    finally:
        if mesh.rank == 0:
            with contextlib.suppress(OSError):
                mark.unlink(missing_ok=True)


def _look_for(folder: Path, name: str, content: str, host: str) -> None:
    """UserError if rank 0's file, on `host`, is not to be seen here."""
    until = time.monotonic() + _LOOKS_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            if (folder / name).read_text() == content:
                return
        time.sleep(0.1)
    raise UserError(
        f"{folder} on {socket.gethostname()} is another folder than on {host}: checkpoints need one that all "
        f"hosts share, by NFS say: name it with --run"
    )


def check_same_tokens(prepared: Prepared, mesh: Mesh) -> None:
    """Like check_same_start, for the tokens that the ranks read."""
    facts: dict[str, object] = {
        "tokenizer": prepared.tokenizer.hash,
        "text": prepared.tokens.made_from,
        "tokens": prepared.tokens.identity,
    }
    _check(facts, mesh, "give all hosts the same text")


def _check(facts: dict[str, object], mesh: Mesh, cure: str) -> None:
    mine = [json.dumps([name, value], default=list) for name, value in facts.items()]
    texts = texts_that_differ(mine, mesh.world_group, mesh.device, "what each rank was started with")
    if texts:

        def refuse() -> NoReturn:
            raise UserError(f"the ranks differ in {_differences(texts)}: {cure}")

        together(mesh, refuse)


def _differences(texts: Mapping[int, Sequence[str]]) -> str:
    said = {rank: dict(map(json.loads, each)) for rank, each in texts.items()}
    names = dict.fromkeys(name for each in said.values() for name in each)
    found = []
    for name in names:
        values = {rank: json.dumps(each.get(name)) for rank, each in said.items()}
        if len(set(values.values())) > 1:
            found.append(f"{name}: {by_rank(values)}")
    return some(found, _MOST_SHOWN, "; ")


def _source_digest() -> str:
    """A digest of this package's code, because two checkouts may have the same version."""
    total, folder = hashlib.blake2b(digest_size=8), Path(__file__).parent.parent
    for file in sorted(folder.rglob("*.py")):
        total.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return total.hexdigest()
