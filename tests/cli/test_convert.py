"""`imece convert`: what becomes of another program's configuration, and a file for imece train."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import imece
from imece.cli import convert
from imece.errors import UserError
from imece.train.config_file import read_toml
from tests.foreign.test_deepspeed import WHOLE


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_what_is_said_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, into = write(tmp_path / "ds.json", WHOLE), tmp_path / "run.toml"
    assert convert.run([str(file), "--ranks", "8", "--to", str(into)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{file}: DeepSpeed's configuration, for 8 ranks\n\ntaken\n")
    for part in (
        '  zero_optimization.stage                     3               strategy "zero3"\n',
        "LEFT OUT\n  zero_optimization.zero_quantized_gradients  true ",
        "  optimizer = torch.optim.AdamW(model.parameters(), lr=3e-05, betas=(0.9, 0.95), eps=1e-08, ",
        "      precision=imece.MixedPrecision(param=torch.bfloat16, reduce=torch.bfloat16),\n",
        "  # a step is 4 backwards, each of loss / 4, all but the last in model.no_sync()\n",
        "start it\n  imece launch --ranks 8 train.py\n",
        f"written  {into}: imece train {into} --data YOUR_TEXT\n",
    ):
        assert part in said
    assert all(line == line.rstrip() for line in said.splitlines())
    config = read_toml(into)
    assert (config.strategy, config.steps, config.ranks) == ("zero3", 900, 8)
    assert (config.batch.sequences, config.batch.micro, config.compute.dtype) == (64, 2, "bf16")
    optimizer = config.optimizer
    assert (optimizer.kind, optimizer.lr, optimizer.beta2, optimizer.clip) == ("adamw", 3e-5, 0.95, 0.5)
    assert (optimizer.schedule, optimizer.warmup, config.offload) == ("cosine", 100, "optimizer")


def test_the_lines_for_a_script_are_python(tmp_path: Path) -> None:
    for content in (WHOLE, {"train_batch_size": 2, "fp16": {"enabled": True}}, {"distributed_type": "FSDP"}):
        settings = imece.read_settings(write(tmp_path / "a.json", content))
        compile("\n".join(convert.script(settings)), "script", "exec")


def test_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {
        "distributed_type": "MULTI_GPU", "num_machines": 2, "num_processes": 16, "machine_rank": 1,
        "main_process_ip": "10.0.0.1", "main_process_port": 29500, "mixed_precision": "fp16",
    }  # fmt: skip
    file = write(tmp_path / "a.json", content)
    assert convert.run([str(file)]) == 0
    said = capsys.readouterr().out
    assert "  imece launch --hosts 2 --host-rank 1 --rendezvous 10.0.0.1:29500 --ranks 8 train.py\n" in said
    assert "# forward and loss in torch.autocast(mesh.device.type, torch.float16)\n" in said
    assert "# backward and step through imece.GradScaler(mesh.device.type)\n" in said
    with pytest.raises(UserError, match="5 ranks cannot be shared evenly by 2 hosts"):
        convert.run([str(file), "--ranks", "5"])
    assert capsys.readouterr().out == "", "nothing of an answer that cannot be"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", None, r"a.json: cannot be read \(No such file or directory\)"),
        ("a.json", "{", r"a.json: not JSON \(.*\); Accelerate's other format ends in .yaml"),
        ("a.json", "[" * 100_000, r"a.json: not JSON"),
        ("a.json", [1], "a.json: not a configuration: names and their values are wanted"),
        ("a.json", {"model": 3}, r"a.json: neither DeepSpeed's \(zero_optimization, .* nor Accelerate's"),
        ("a.yaml", "a: [", r"a.yaml: not YAML \(.*\)"),
        ("a.yaml", "- 1", "a.yaml: not a configuration"),
        (
            "a.json",
            {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": -1}}},
            "optimizer.lr is -1",
        ),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, content: Any, said: str) -> None:
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(UserError, match=said) as caught:
        convert.run([str(tmp_path / name), "--to", str(tmp_path / "run.toml")])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run.toml").exists()


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"a.json: not a text file"):
        convert.run([str(tmp_path / "a.json")])


def test_without_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    file = write(tmp_path / "a.yaml", "distributed_type: 'NO'")
    with pytest.raises(UserError, match=r"a.yaml: YAML is read by PyYAML: pip install pyyaml"):
        convert.run([str(file)])


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    file, into = write(tmp_path / "a.json", {"train_batch_size": 8}), write(tmp_path / "run.toml", "mine")
    with pytest.raises(UserError, match="it is there already, and stays as it is"):
        convert.run([str(file), "--to", str(into)])
    assert into.read_text() == "mine"
