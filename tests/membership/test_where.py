"""Where a member notes its place in a step, and what its launcher reads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from imece.membership.where import RECORD, Where, new_record, read_record


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """This process' own."""
    fd = new_record()
    monkeypatch.setenv(RECORD, str(fd))
    yield fd
    os.close(fd)


def test_the_phases_of_a_step(record: int) -> None:
    steps, found = 0, [read_record(record)]

    class Looks(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            found.append(read_record(record))
            return super().forward(input)

    model = Looks(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    where = Where(lambda: steps)
    where.watch(model, [optimizer])
    optimizer.register_step_pre_hook(lambda *_: found.append(read_record(record)))
    loss = model(torch.ones(1, 2)).sum()
    loss.register_hook(lambda _: found.append(read_record(record)))
    loss.backward()
    optimizer.step()
    steps = 1
    where.note("between steps")
    found.append(read_record(record))
    model.eval()
    model(torch.ones(1, 2))
    assert found == [
        "", "in forward of step 1", "in backward of step 1", "in update of step 1",
        "between steps, after step 1", "in validation of step 2",
    ]  # fmt: skip
    assert read_record(record) == "between steps, after step 1"
    where.note("saving")
    assert read_record(record) == "saving, after step 1"


def test_it_outlives_its_process_and_is_of_that_alone(record: int) -> None:
    text = (
        "import os, subprocess, sys; from imece.membership.where import Where; "
        "Where(lambda: 1233).note('backward'); "
        "subprocess.run([sys.executable, '-c', 'from imece.membership.where import Where; "
        'Where(lambda: 7).note("forward")\'], check=True); os.kill(os.getpid(), 9)'
    )
    done = subprocess.run([sys.executable, "-c", text], pass_fds=(record,), check=False)
    assert done.returncode == -9 and read_record(record) == "in backward of step 1,234"


def test_another_file_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may have closed all descriptors, and this number is another one's now."""
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"a" * 16)
        file.flush()
        monkeypatch.setenv(RECORD, str(file.fileno()))
        Where(lambda: 0).note("forward")
        assert (tmp_path / "file").read_bytes() == b"a" * 16


@pytest.mark.parametrize("given", [None, "", "x", "0", "99999"])
def test_without_a_record_nothing_is_noted(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RECORD, raising=False)
    if given is not None:
        monkeypatch.setenv(RECORD, given)
    where = Where(lambda: 0)
    where.note("forward")
    model = torch.nn.Linear(1, 1)
    where.watch(model, [])
    assert not model._forward_hooks
