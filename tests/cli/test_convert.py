"""`imece convert`: what becomes of another program's configuration, and the file for imece train."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import imece
from imece.cli import convert
from imece.errors import UserError
from imece.foreign.training import train_toml
from imece.train.config import TrainConfig
from imece.train.config_file import read_toml
from tests.data.helpers import files_of_at_most
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
        "  zero_optimization.zero_quantized_gradients  true            gradients are sent in int8\n",
        "LEFT OUT\n  optimizer.params.bias_correction ",
        "  optimizer = torch.optim.AdamW(model.parameters(), lr=3e-05, betas=(0.9, 0.95), eps=1e-08, ",
        "      precision=imece.MixedPrecision(param=torch.bfloat16, reduce=torch.bfloat16),\n",
        "  # a step is 4 backwards, each of loss / 4, none in model.no_sync(), which would keep whole "
        "gradients\n",
        "  # after optimizer.step(): scheduler.step(), one of torch's: a warm-up of 100 steps, then "
        "cosine to 0.0001 of the rate at step 900\n",
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
    whole = {"train_batch_size": 2, "fp16": {"enabled": True}, "gradient_accumulation_steps": 2}
    for content in (WHOLE, whole, {"distributed_type": "FSDP"}):
        settings = imece.read_settings(write(tmp_path / "a.json", content))
        if content is whole:
            assert "each of loss / 2, all but the last in model.no_sync()" in convert.script(settings)[-1]
        compile("\n".join(convert.script(settings)), "script", "exec")


def test_which_gpus(tmp_path: Path) -> None:
    """The commands hide the GPUs that the file does not name: pasted as they stand, they do as it says."""
    for content, expected in (
        ({"use_cpu": True, "gpu_ids": "0,1"}, "CUDA_VISIBLE_DEVICES= "),
        ({"use_cpu": False, "gpu_ids": "1,3"}, "CUDA_VISIBLE_DEVICES=1,3 "),
        ({"gpu_ids": "all"}, ""),
    ):
        file = write(tmp_path / "a.json", {"distributed_type": "MULTI_GPU", "num_processes": 2, **content})
        settings = imece.read_settings(file)
        assert convert.command(settings) == f"{expected}imece launch --ranks 2 train.py"
        assert convert.training(settings, Path("a.toml")).startswith(f"{expected}imece train a.toml ")


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


def test_comments_and_last_commas(tmp_path: Path) -> None:
    """DeepSpeed reads its files as Hjson, which has them."""
    text = """{
      // at first
      "train_batch_size": 8,  # all ranks
      "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.9,], /* the
      usual */ },},
      "zero_optimization": {"stage": 2}, "//,}": "a \\" # b",
    }"""
    (tmp_path / "a.json").write_text(text)
    found = imece.read_settings(tmp_path / "a.json")
    assert (found.strategy, found.global_batch) == ("zero2", 8)
    assert found.optimizer is not None and found.optimizer.betas == (0.8, 0.9)
    assert found.values[-1].name == "//,}" and found.values[-1].value == 'a " # b'
    (tmp_path / "a.json").write_text('{ /* two\nlines */ "train_batch_size": 8 x}')
    with pytest.raises(UserError, match=r"not JSON \(.*line 2 column 32"):
        imece.read_settings(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", None, r"a.json: cannot be read \(No such file or directory\): name a file of DeepSpeed's"),
        ("a.json", "{", r"a.json: not JSON \(.*\); Accelerate's other format ends in .yaml"),
        ("a.json", "[" * 100_000, r"a.json: not JSON"),
        ("a.json", '{"bf16": {"a": 1, "a": 2}}', "a.json: a is there twice, as 1 and as 2: take one out"),
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


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (
            {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}},
            "it has AdamW and a Muon of its own, not Adam",
        ),
        ({"type": "SGD"}, "it has AdamW and a Muon of its own, not SGD"),
        ({"type": "Lamb"}, "it has AdamW and a Muon of its own, not Lamb"),
        (
            {"type": "Muon", "params": {"lr": 0.02}},
            "its own Muon makes updates as long as AdamW's, and so wants another lr",
        ),
    ],
)
def test_an_optimizer_that_imece_train_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], optimizer: dict[str, Any], why: str
) -> None:
    """Its file would train by another, and by another rate."""
    file, into = (
        write(tmp_path / "a.json", {"train_batch_size": 8, "optimizer": optimizer}),
        tmp_path / "b.toml",
    )
    assert convert.run([str(file)]) == 0
    said = capsys.readouterr().out
    assert said.endswith(f"\n\nno file for imece train: {why}\n")
    assert f"torch.optim.{optimizer['type']}(" in said or optimizer["type"] == "Lamb"
    with pytest.raises(UserError, match=f"{why}: leave --to out, or change optimizer.type"):
        convert.run([str(file), "--to", str(into)])
    assert not into.exists() and not capsys.readouterr().out


def test_adam_without_decay_is_adamw() -> None:
    optimizer = {"type": "Adam", "params": {"adam_w_mode": False}}
    assert 'kind = "adamw"' in train_toml(imece.read_settings({"bf16": {}, "optimizer": optimizer}))


def test_what_a_trainer_says_is_not_made_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As usual then; and so is clipping by a file of Accelerate's, which says nothing of it."""
    auto = {"enabled": "auto"}
    content = {
        "bf16": auto, "fp16": auto, "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}},
    }  # fmt: skip
    file, into = write(tmp_path / "a.json", content), tmp_path / "b.toml"
    assert convert.run([str(file), "--to", str(into)]) == 0
    assert "lr=" not in (said := capsys.readouterr().out) and "eps=1e-06" in said
    assert ")  # lr: as its Trainer says\n" in said
    config, usual = read_toml(into), TrainConfig()
    assert config.compute.dtype == usual.compute.dtype and config.optimizer.clip == usual.optimizer.clip
    text = into.read_text()
    assert (
        "# as its Trainer says, so as usual here: bf16.enabled, fp16.enabled, gradient_clipping, opt" in text
    )
    assert "clip" not in train_toml(imece.read_settings({"distributed_type": "FSDP"}))
    assert "clip = 0.0\n" in train_toml(imece.read_settings({"train_batch_size": 8}))


def test_what_deepspeed_takes_is_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {
        "train_batch_size": 8, "optimizer": {"type": "AdamW"}, "bananas\n": "a\x7f\nb",
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 100}},
    }  # fmt: skip
    file, into = write(tmp_path / "a.json", content), tmp_path / "b.toml"
    assert convert.run([str(file), "--to", str(into)]) == 0
    optimizer = read_toml(into).optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.beta2) == (1e-3, 0.0, 0.999)
    assert (optimizer.warmup, optimizer.min_lr) == (1000, 1e-4)
    assert "\n# left out: bananas\\n = 'a\\x7f\\nb': not known\n" in into.read_text()
    assert capsys.readouterr().out.endswith(f"\nwritten  {into}: imece train {into} --data YOUR_TEXT\n")


def test_a_file_for_several_hosts_is_started_on_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 2}
    file = write(tmp_path / "a.json", {"train_batch_size": 8, "zero_optimization": zero})
    for ranks, strategy, start in (
        (2, "zero3", ""),
        (4, "hybrid", "imece launch --hosts 2 --host-rank 0 --rendezvous HOST:29400 --ranks 2 -m "),
    ):
        into = tmp_path / f"{ranks}.toml"
        assert convert.run([str(file), "--ranks", str(ranks), "--to", str(into)]) == 0
        assert read_toml(into).strategy == strategy
        said = capsys.readouterr().out.splitlines()[-1]
        assert said == f"written  {into}: {start}imece train {into} --data YOUR_TEXT"


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"a.json: not a text file"):
        convert.run([str(tmp_path / "a.json")])


def test_without_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    file = write(tmp_path / "a.yaml", "distributed_type: 'NO'")
    with pytest.raises(UserError, match=r"a.yaml: YAML is read by PyYAML: pip install pyyaml"):
        convert.run([str(file)])


def test_a_file_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, into = write(tmp_path / "a.json", {"train_batch_size": 8}), write(tmp_path / "run.toml", "mine")
    with pytest.raises(UserError, match="it is there already, and stays as it is"):
        convert.run([str(file), "--to", str(into)])
    assert into.read_text() == "mine"
    with pytest.raises(UserError, match=r"run.json: imece train reads a .toml file"):
        convert.run([str(file), "--to", str(tmp_path / "run.json")])
    assert capsys.readouterr().out == "", "what is refused is refused at once"


def test_a_full_disk_leaves_no_file_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, into = write(tmp_path / "a.json", {"train_batch_size": 8}), tmp_path / "out/run.toml"
    into.parent.mkdir()
    with (
        files_of_at_most(9),
        pytest.raises(UserError, match=r"cannot write .*run.toml: File too"),
    ):
        convert.run([str(file), "--to", str(into)])
    assert list(into.parent.iterdir()) == []
    assert convert.run([str(file), "--to", str(into)]) == 0


def test_the_command_is_one_for_a_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, into = write(tmp_path / "a.json", {"train_batch_size": 8}), tmp_path / "my run.toml"
    assert convert.run([str(file), "--to", str(into)]) == 0
    assert capsys.readouterr().out.endswith(f"\nwritten  {into}: imece train '{into}' --data YOUR_TEXT\n")
