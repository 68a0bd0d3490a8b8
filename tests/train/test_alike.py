"""A rank that was started with other options, code or tokens is refused before the first step, and named."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import imece
from imece.cli.train import read_config
from imece.errors import UserError
from imece.train import alike
from imece.train.alike import check_same_folder
from imece.train.start import run_rank
from imece.train.watch.stopping import Stop
from tests.ranks import run_ranks
from tests.train.command import leave_out
from tests.train.small import options, write_text

# What rank 2 has instead, and how it is told. More than one may follow from one.
CASES: dict[str, str] = {
    "--seed=7": "seed: 1 on ranks 0, 1, 7 on rank 2: start all with the same options",
    "--optimizer.lr=0.5": "optimizer.lr: 0.004 on ranks 0, 1, 0.5 on rank 2: start",
    "--model.layers=2": "model.layers: 1 on ranks 0, 1, 2 on rank 2: start",
    "--watch.drift-every=3": "watch.drift_every: 20 on ranks 0, 1, 3 on rank 2: start",
    "another text": 'data.paths: ["text"] on ranks 0, 1, ["other"] on rank 2: start',
    "another torch": f'torch: "{torch.__version__}" on ranks 0, 1, "0.0.1" on rank 2: start',
    "another source": "imece's source: ",
    "another text of the same name": "text: {",
}


def starts(cases: list[str], folder: str) -> list[list[Any]]:
    """Each case as a start of three ranks: [who raised, its message or exit status] and what was left."""
    leave_out()
    path, found = Path(folder), []
    odd = os.environ["RANK"] == "2"
    for number, case in enumerate(cases):
        words = options(path, f"run-{number}", "--steps=2")
        instead: Any = contextlib.nullcontext()
        if odd and case.startswith("--"):
            words.append(case)
        elif odd and case == "another text":
            words = options(
                path, f"run-{number}", "--steps=2", f"--data={write_text(path / 'other.jsonl', seed=5)}"
            )
        elif odd and case == "another torch":
            instead = mock.patch("torch.__version__", "0.0.1")
        elif odd and case == "another source":
            instead = mock.patch("imece.train.alike._source_digest", lambda: "abc")
        elif case == "another text of the same name":  # on another disk
            words.append(f"--data.folder={path / f'tokens-{odd}'}")
            other = [write_text(path / "other.jsonl", seed=5)]
            instead = mock.patch("imece.data.prepare.sources", return_value=other) if odd else instead
        try:
            with instead:
                run_rank(read_config(words), Stop())
        except UserError as error:
            found.append(["says", str(error), (path / f"run-{number}").exists()])
        except SystemExit as error:
            found.append(["leaves", error.code, (path / f"run-{number}").exists()])
        else:
            found.append(["trains", "", True])
    return found


def test_a_rank_that_is_not_like_the_others(tmp_path: Path) -> None:
    cases = list(CASES)
    first, *others = run_ranks(starts, 3, args=(cases, str(tmp_path)), backend=None)
    for case, (does, said, _) in zip(cases, first, strict=True):
        expected = CASES[case].replace('"text"', f'"{tmp_path}/text.jsonl"')
        expected = expected.replace('"other"', f'"{tmp_path}/other.jsonl"')
        assert does == "says" and said.startswith(f"the ranks differ in {expected}"), (case, said)
        assert "on ranks 0, 1" in said and "on rank 2" in said and "\n" not in said
    assert all(each[:2] == ["leaves", 2] for rank in others for each in rank), others
    assert not any((tmp_path / f"run-{number}").exists() for number in range(len(cases)))


def looks(mine: list[str]) -> list[Any]:
    """[who raised, its message or exit status], and what is left in the folder."""
    with contextlib.closing(imece.init()) as mesh, mock.patch.object(alike, "_LOOKS_S", 1.0):
        folder = Path(mine[mesh.rank])
        folder.mkdir(exist_ok=True)
        imece.barrier()
        try:
            check_same_folder(folder, mesh)
        except UserError as error:
            found: list[Any] = ["says", str(error)]
        except SystemExit as error:
            found = ["leaves", error.code]
        else:
            found = ["trains", ""]
        imece.barrier()  # rank 0 has put away what the others looked for
        return [*found, *sorted(each.name for each in folder.iterdir())]


def test_hosts_that_share_no_run_folder(tmp_path: Path) -> None:
    """They are told before the first step, not when the first checkpoint has been waited for."""
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    assert run_ranks(looks, 2, args=([one, one],), backend=None, ranks_per_host=1) == [["trains", ""]] * 2
    first, second = run_ranks(looks, 2, args=([one, other],), backend=None, ranks_per_host=1)
    host = socket.gethostname()
    assert first == ["leaves", 2] and second == [
        "says",
        f"{other} on {host} is another folder than on {host}: checkpoints need one that all hosts share, by "
        "NFS say: name it with --run",
    ]
    assert run_ranks(looks, 2, args=([one, other],), backend=None) == [["trains", ""]] * 2, (
        "one host is not asked"
    )
