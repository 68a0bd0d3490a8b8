"""`imece train`, its continuation, and `imece sample`, as a user with a GPU types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from imece.cli.main import main
from tests.gpu.devices import DEVICES
from tests.train.command import Train
from tests.train.small import options


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("ranks", "backend", "strategy"),
    [(1, "", "replicate"), (2, "gloo", "zero3")],
)
def test_train_goes_on_and_writes(
    device: str, ranks: int, backend: str, strategy: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("IMECE_BACKEND", backend)
    run = tmp_path / "run"
    for steps in (5, 8):
        words = options(tmp_path, "run", f"--steps={steps}", f"--ranks={ranks}", f"--strategy={strategy}")
        with Train([*words, "--compute.dtype=auto"], tmp_path) as running:
            outcome = running.wait(240)
        assert outcome.status == 0, outcome.err
        own = backend or ("nccl" if device == "cuda" else "shm")
        assert f"({device}, {own})" in outcome.out
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [each["step"] for each in records] == list(range(1, steps + 1))
        assert all(each["forward_s"] > 0 and each["backward_s"] > 0 for each in records)
    assert records[-1]["loss"] < records[0]["loss"]
    assert main(["sample", str(run), "--prompt", "one", "--tokens", "8"]) == 0
    assert capsys.readouterr().out
