"""`imece plan`: output and files, start without torch, and one line for each mistake."""

from __future__ import annotations

import functools
import html
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import imece
from imece.cli.main import main
from imece.cli.plan.options import PlanOptions
from imece.cli.plan.plan import _cluster_with, cluster_of, default_batch, question_of
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer
from imece.plan.answer.search import judge
from imece.plan.answer.text import _amount, _round
from imece.plan.check import PLAN_FILE
from imece.plan.models.by_name import find_model
from imece.plan.presets import find_cluster, find_gpu
from imece.plan.setup import Parallel, Recipe, Setup
from tests.cli.refused import refused
from tests.data_parallel.sharding.test_offload import late
from tests.plan.test_check import CONTENT
from tests.plan.test_here import FIGURES, without_home
from tests.ranks import run_ranks


def found(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> dict[str, Any]:
    assert main(["plan", *argv, "--json"]) == status
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_a_gpu_of_ones_own_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('[gpu]\nlike = "A100-40"\nname = "H100 at home"\n[between]\nbandwidth = 1e9\n')
    options = PlanOptions(gpus="16xH100 at home", hardware=path)
    asked = cluster_of(options)
    assert (asked.gpus_per_host, asked.hosts, asked.between.bandwidth) == (8, 2, 1e9)
    assert asked.gpu == replace(find_gpu("A100-40"), name="H100 at home")
    assert _cluster_with(options, asked, asked.gpu.name, 4, 1) == replace(asked, gpus_per_host=4, hosts=1)
    # Of other GPUs, which might be large enough, the file says nothing.
    assert _cluster_with(options, asked, "H200", 4, 2) == find_cluster("H200", 4, 2)
    path.write_text("[between]\nbandwidth = 1e9\n")
    asked = cluster_of(PlanOptions(gpus="8xH100", hardware=path))
    assert asked.gpu == find_gpu("H100")
    assert _cluster_with(options, asked, "H200", 4, 2).between.bandwidth == 1e9


def test_text_says_what_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["llama-8b", "--gpus", "8xA100-40", "--global-batch", "128"]
    content = found(capsys, *argv)
    assert main(["plan", *argv]) == 0
    text = capsys.readouterr().out
    winner = content["winner"]
    labels = ["plan ", "fits ", "speed ", "step ", "others ", "to gain ", "next "]
    starts = [text.index(f"\n{label}") for label in labels]
    assert starts == sorted(starts)
    assert f"{winner['tokens_per_s']:,.0f} tokens/s" in text
    assert f"{winner['needed_bytes'] / 1e9:.1f} of 42.3 GB a GPU" in text
    flat = " ".join(text.split())
    for line in [winner["plan"], *content["to_gain"], *(each["why"] for each in content["others"])]:
        assert " ".join(line.split()) in flat
    assert sum(winner["memory_bytes"].values()) == pytest.approx(winner["needed_bytes"])
    assert sum(winner["parts_s"].values()) == pytest.approx(winner["step_s"])
    assert content["fits"] and content["considered"] > 500
    assert content["ranking"][0] | {"bucket_bytes": winner["bucket_bytes"]} == winner
    assert all(len(line) <= 110 for line in text.splitlines())
    assert content["hours"] == pytest.approx(1e9 / winner["tokens_per_s"] / 3600)
    assert content["dollars"] == pytest.approx(content["hours"] * 8 * 1.3)


def test_what_is_shown_has_the_buckets_that_are_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "13B --gpus 8xA100-80 --global-batch 256 --tensor 2 --pipeline 1 --strategy zero2 --micro-batch 2"
    winner = found(capsys, *argv.split())["winner"]
    assert winner["bucket_bytes"] == winner["recipe"]["bucket_bytes"] == 100 * 2**20
    recipe = replace(Recipe(4096), micro_batch=2, accumulation=32, bucket_bytes=100 * 2**20)
    setup = Setup(find_model("13B"), Parallel("zero2", 4, 4, tensor=2), recipe)
    judged = judge(setup, find_cluster("A100-80", 8))
    assert (winner["step_s"], winner["needed_bytes"]) == (judged.seconds, judged.needed)


def test_a_question_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    page = tmp_path / "new" / "folder" / "plan.html"
    assert main(["plan", "nosuch", "--gpus", "8xH100", "--html", str(page)]) == 2
    assert list(tmp_path.iterdir()) == []


def test_what_leaves_no_reserve_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """It needs 85.0 of 85.2 GB, of which 4 % are to stay free."""
    argv = ["13.9B", "--gpus", "8xA100-80", "--global-batch", "256", "--tensor", "1", "--pipeline", "1"]
    others = {each["name"]: each for each in found(capsys, *argv)["others"]}
    assert others["ZeRO-1"]["why"].startswith("does not fit: needs 85.0 of 81.8 GB")
    assert {each["fits"] for each in others.values()} == {True, False}
    for each in others.values():
        assert each["fits"] == (not each["why"].startswith("does not fit"))


def test_other_gpus_are_told_what_their_own_command_tells(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, gpus in (
        ("30B --global-batch 64 --tensor 2 --pipeline 4 --network ethernet-25g", "8xRTX-4090"),
        ("13B --global-batch 256 --tensor 2 --pipeline 1 --strategy zero2 --micro-batch 2", "8xA100-40"),
    ):
        told = found(capsys, *argv.split(), "--gpus", gpus, status=2)["instead"]
        changes = [each for each in told if each["change"].startswith("--gpus")]
        assert len(changes) == 2
        for each in changes:
            winner = found(capsys, *argv.split(), *each["change"].split())["winner"]
            assert winner["tokens_per_s"] == each["tokens_per_s"]


def test_options_narrow_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["7B", "--gpus", "8xA100-80", "--hosts", "2"]
    for name, key, value in (
        ("--strategy", "strategy", "SHARD_GRAD_OP"),
        ("--tensor", "tensor", "4"),
        ("--pipeline", "pipeline", "2"),
    ):
        winner = found(capsys, *argv, name, value)["winner"]
        expected = "zero2" if value == "SHARD_GRAD_OP" else int(value)
        assert winner["parallel"][key] == expected
    recipe = found(capsys, *argv, "--optimizer", "adamw-8bit", "--recompute", "full", "--micro-batch", "2")
    assert recipe["winner"]["recipe"]["micro_batch"] == 2
    assert recipe["winner"]["recipe"]["optimizer"] == "adamw-8bit"
    assert recipe["winner"]["recipe"]["recompute"] == "full"
    lora = found(capsys, "7B", "--gpus", "A100-40", "--adapters", "lora", "--global-batch", "16")
    assert lora["winner"]["recipe"]["adapters"] == "lora" and lora["fits"]


def next_of(capsys: pytest.CaptureFixture[str], argv: str) -> tuple[str, str]:
    """What `next` prints: the calls, and all that follows, each without its line breaks."""
    assert main(["plan", *argv.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    after = lines[next(at for at, line in enumerate(lines) if line.startswith("next ")) :]
    assert all(len(line) <= 110 for line in after)
    call = left = ""
    for line in (line[9:].strip() for line in after):
        if " = imece." in line or call.count("(") > call.count(")"):
            call = f"{call} {line}".strip()
        else:
            left = f"{left} {line}".strip()
    return call, left


CALLS = {  # plan -> the arguments that follow the optimizer, and some of what is left to the script
    "7B --gpus 4xA100-80 --global-batch 256": (
        'strategy="zero1", precision=imece.MixedPrecision(param=torch.bfloat16, reduce=torch.bfloat16)',
        "loss: imece.cross_entropy(logits, targets): torch's of fp32 logits needs 0.78 GB more batch: 1 "
        "sequence a GPU, 64 times (loss / 64).backward() before each optimizer.step(), all but the last in "
        "model.no_sync()",
    ),
    "7B --gpus 1xA100-40 --global-batch 16 --seq 2048 --adapters qlora --offload optimizer": (
        'strategy="zero1", precision=imece.MixedPrecision(param=torch.bfloat16, reduce=torch.bfloat16), '
        'offload="optimizer"',
        "adapters: wrap the model, loaded in 4 bits, with peft first (rank 16), or imece train --l",
    ),
    "7B --gpus 8xA100-40 --offload parameters --global-batch 512 --tensor 1 --pipeline 1": (
        'strategy="zero3", precision=imece.MixedPrecision(param=torch.bfloat16, reduce=torch.bfloat16), '
        'offload="parameters"',
        "not in model.no_sync(), which would keep whole gradients",
    ),
    "1B --gpus 8xH100 --strategy ddp --precision autocast --global-batch 512": (
        'strategy="replicate", bucket_cap_mb=50',
        'forward: in fp32, under torch.autocast("cuda", torch.bfloat16)',
    ),
    "7B --gpus 8xH100 --hosts 4 --network ethernet-25g --strategy zero2 --precision fp16 --tensor 1": (
        # no bucket_cap_mb: as many gradients have buckets of 100 MiB by themselves
        'strategy="zero2", precision=imece.MixedPrecision(param=torch.float16, reduce=torch.float16)',
        "backward: through imece.GradScaler()",
    ),
    "llama-8b --gpus 8xA100-40 --global-batch 128 --optimizer adamw-8bit --precision bf16-pure --tensor 1 "
    "--pipeline 1": (
        'strategy="zero3"',
        "optimizer: bitsandbytes.optim.AdamW8bit: pip install 'imece[quant]'",
    ),
    "1B --gpus 1xH100 --precision fp32 --global-batch 8 --recompute full": (
        'strategy="replicate"',
        "recomputation: torch.utils.checkpoint.checkpoint(..., use_reentrant=False) around each layer's f",
    ),
}  # fmt: skip


def accepted(calls: Sequence[str]) -> list[str]:
    """The class of the model that each call gives, on a CPU that gathers and offloads as a GPU does."""
    imece.init()
    as_on_a_gpu = functools.partial(imece.parallelize, gather=True)
    found = []
    for call in calls:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        names = {"imece": imece, "torch": torch, "model": model}
        names["optimizer"] = torch.optim.AdamW(model.parameters())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(imece, "parallelize", as_on_a_gpu)
            patch.setattr("imece.data_parallel.parallelize.offload_of", lambda name, _: late(name))
            exec(call, names)
        found.append(type(names["model"]).__name__)
    return found


DIVIDED = {  # plan of 4 GPUs -> its mesh, and some of what is left to the script
    "13B --gpus 4xA100-80 --global-batch 64 --pipeline 1": (
        '{"replicate": 2, "tensor": 2}',
        "1 sequence a group of 2 GPUs, 32 times",
    ),
    "7B --gpus 4xRTX4090 --global-batch 64 --pipeline 4 --optimizer adamw-8bit --precision bf16-pure": (
        '{"pipeline": 4}',
        "pipeline.step(inputs, targets), then optimizer.step()",
    ),
    "llama-8b --gpus 4xH100 --global-batch 4 --seq 131072 --tensor 1": (
        '{"context": 4}',
        "sequences: imece.ContextParallel(mesh)",
    ),
}


def divided(calls: Sequence[str]) -> list[str]:
    """What each of the calls makes of a small model, on all ranks that they speak of."""
    found = []
    for call in calls:
        shape = TransformerConfig(64, layers=8, width=16, heads=4, kv_heads=4, mlp_width=32, max_seq=8)
        names: dict[str, Any] = {
            "imece": imece,
            "torch": torch,
            "model": Transformer(shape),
            "loss": imece.cross_entropy,
        }
        names["optimizer"] = torch.optim.AdamW
        exec(call, names)
        found.append(type(names.get("stage", names["model"])).__name__)
        names["mesh"].close()
    return found


def test_what_divides_a_model_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    calls = []
    for argv, (axes, said) in DIVIDED.items():
        told = found(capsys, *argv.split())["next"]
        left = "; ".join(f"{what}: {how}" for what, how in told["left"].items())
        assert told["call"].startswith(f"mesh = imece.init({axes})") and said in left, told
        calls.append(told["call"])
    for wrapped in run_ranks(divided, 4, args=(calls,), backend=None):
        assert wrapped == ["ShardedDataParallel", "DistributedDataParallel", "ShardedDataParallel"]


def test_what_has_no_bf16_is_told_fp16(capsys: pytest.CaptureFixture[str]) -> None:
    told = found(
        capsys, *["1.3b", "--gpus", "8xV100", "--tensor", "1", "--pipeline", "1", "--strategy", "zero1"]
    )
    assert "param=torch.float16, reduce=torch.float16" in told["next"]["call"]
    assert told["next"]["left"]["backward"].startswith("through imece.GradScaler()")
    assert "V100 has no bf16: parameters and activations are in fp16" in told["notes"]


def test_what_is_taken_of_experts_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_QWEN_MIXTURE))
    notes = found(capsys, str(tmp_path), "--gpus", "8xA100-80", "--global-batch", "64")["notes"]
    (note,) = (each for each in notes if "experts" in each)
    assert note.startswith("each token goes through 2 of 16 experts, as if all had as many tokens")
    assert note.endswith("expert parallelism is not planned")
    (note,) = found(capsys, "llama-3.2-1b", "--gpus", "8xA100-80", "--global-batch", "64")["notes"]
    assert note.endswith("GB of summed gradients come as backward lets go of activations, and count once")


_QWEN_MIXTURE = {
    "model_type": "qwen3_moe", "hidden_size": 1024, "moe_intermediate_size": 512, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 8, "num_experts": 16,
    "num_experts_per_tok": 2, "vocab_size": 32000,
}  # fmt: skip


def test_the_usual_sequence_is_no_longer_than_the_models_positions(tmp_path: Path) -> None:
    for positions in (2048, 32768):
        (tmp_path / f"{positions}.json").write_text(
            json.dumps(_QWEN_MIXTURE | {"max_position_embeddings": positions})
        )
    files = [(f"{tmp_path}/2048.json", 2048), (f"{tmp_path}/32768.json", 4096)]
    for model, seq in (("gpt-3-175b", 2048), ("7B", 4096), ("medium", 512), ("1.3b", 2048), *files):
        assert question_of(PlanOptions(model, gpus="8xH100")).seq == seq
    assert question_of(PlanOptions(files[0][0], gpus="8xH100", seq=8192)).seq == 8192  # scaled positions


def test_a_sequence_beyond_what_the_file_names_is_noted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "some.json"
    path.write_text(json.dumps(_QWEN_MIXTURE | {"max_position_embeddings": 2048}))
    few = ["--tensor", "8", "--pipeline", "1", "--context", "1"]  # ways of dividing it: all take seconds
    argv = [str(path), "--gpus", "8xA100-80", "--hosts", "3200", *few, "--seq"]
    (note,) = (each for each in found(capsys, *argv, "8192")["notes"] if "--seq" in each)
    assert note.startswith("--seq 8192: some was made for 2,048 tokens, says its file")
    assert "--seq" not in " ".join(found(capsys, *argv, "2048")["notes"])
    for more, status in (["--scale", "weak"], 0), (["--reserve", "0.99"], 2):
        assert main(["plan", *argv, "8192", *more]) == status
        assert note in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("seq", "window", "said"), [(32768, None, True), (4096, None, False), (32768, 2048, False)]
)
def test_what_a_mask_hides_of_long_sequences_is_told_of_the_mfu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, seq: int, window: int | None, said: bool
) -> None:
    path = tmp_path / "some.json"
    shape = {
        "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 14336, "vocab_size": 32000, "sliding_window": window,
    }  # fmt: skip
    path.write_text(json.dumps(shape))
    answer = found(
        capsys, str(path), "--gpus", "8xH100", "--seq", str(seq), "--tensor", "4", "--context", "1"
    )
    notes = [each for each in answer["notes"] if "mask" in each]
    if not said:
        assert notes == []
        return
    scores = 12 * 32 * 4096 * seq
    hidden = scores / 2 / (6 * answer["model"]["parameters"] + scores)
    left = (1 - hidden) * answer["winner"]["mfu"]
    assert 0.25 < hidden < 0.3
    (note,) = notes
    assert f"hides: {100 * hidden:.0f} % of" in note and note.endswith(f"{100 * left:.0f} % without them")


def test_what_is_next_is_the_whole_plan_and_parallelize_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    calls = []
    for argv, (arguments, said) in CALLS.items():
        call, left = next_of(capsys, argv)
        assert call == f"model, optimizer = imece.parallelize(model, optimizer, {arguments})", argv
        assert said in left, argv
        calls.append(call)
    (found,) = run_ranks(accepted, 1, args=(calls,), backend=None)
    assert set(found) == {"ShardedDataParallel", "DistributedDataParallel"} and len(found) == len(CALLS)


def test_what_imece_does_not_do_by_itself_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    call, left = next_of(capsys, "7B --gpus 4xA100-40 --global-batch 64")
    assert '{"pipeline": 2, "tensor": 2}' in call and 'strategy="zero1"' in call  # which is the plan itself
    assert left.startswith("model: its trained parameters in fp32")
    assert main(["plan", *NO_WAY]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.endswith(
        "next no way fits that imece does by itself: it keeps masters in sharded strategies alone, which sum "
        "gradients in the masters' dtype besides, and that needs 83.2 of 81.8 GB"
    )
    call, left = next_of(capsys, "70B --gpus 8xH100 --global-batch 64 --adapters lora")
    assert 'strategy="zero3"' in call and "a GPU: ZeRO-3 (FULL_SHARD)" in left
    assert main(["plan", *["1000B", "--gpus", "8xH100", "--global-batch", "64", "--adapters", "qlora"]]) == 0
    assert "next no way fits that imece does by itself: it does not do all of that together" in " ".join(
        capsys.readouterr().out.split()
    )
    two = ["70B", "--gpus", "2xRTX-3090", "--global-batch", "16", "--seq", "1024"]
    assert main(["plan", *two, "--adapters", "qlora"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "; with --offload parameters it does ZeRO-3 (FULL_SHARD), micro-batch 8" in said
    call, _ = next_of(capsys, "7B --gpus 8xH100 --global-batch 12 --optimizer muon --tensor 2")
    assert "tensor_parallel" not in call


NO_WAY = ["30B", "--gpus", "8xA100-80", "--global-batch", "1", "--seq", "4095"]  # of no even length


def test_what_is_next_may_be_without_what_was_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, call, why in (
        (
            "1B --gpus 8xH100 --strategy ddp --global-batch 64",
            "zero1",
            "--strategy replicate (it keeps masters, or what is offloaded, in sharded strategies alone, such "
            "as zero1), ",
        ),
        (
            "1B --gpus 8xH100 --hosts 2 --precision fp8 --tensor 2 --context 1 --global-batch 64",
            "zero1",
            "--tensor 2 and --context 1 (it does not do all of that together), 15 % faster, ",
        ),
    ):
        found_call, left = next_of(capsys, argv)
        assert f'strategy="{call}"' in found_call
        assert left.startswith(f"what imece does by itself, without {why}"), left


def test_what_is_next_is_told_to_programs_too(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, tensor in (
        ("7B --gpus 4xA100-80 --global-batch 256", 1),
        ("15B --gpus 8xA100-80 --global-batch 64", 2),
    ):
        call, left = next_of(capsys, argv)
        told = found(capsys, *argv.split())["next"]
        assert " ".join(told["call"].split()) == call
        said = [told["says"]] if told["says"] else []
        assert left == " ".join([*said, *(f"{what}: {how}" for what, how in told["left"].items())])
        assert told["does"]["fits"] and told["does"]["parallel"]["tensor"] == tensor
    told = found(capsys, *NO_WAY)["next"]
    assert told["call"] is told["does"] is None and told["says"].startswith("no way fits that")


def test_nothing_fits_in_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv, page, png = ["70B", "--gpus", "8xH100"], tmp_path / "new" / "x.html", tmp_path / "x.png"
    assert main(["plan", *argv, "--html", str(page), "--plot", str(png)]) == 2
    assert capsys.readouterr().err == (f"imece: nothing fits, so nothing is drawn: {png} is not written\n")
    assert not png.exists()
    text = html.unescape(page.read_text(encoding="utf-8"))
    content = found(capsys, *argv, status=2)
    assert "<h1>Nothing fits</h1>" in text and content["least"]["plan"] in text
    assert content["instead"] and all(each["says"] in text for each in content["instead"])


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["70B", "--gpus", "8xH100", "--global-batch", "128"]
    content = found(capsys, *argv, status=2)
    assert not content["fits"] and content["missing_bytes"] > 50e9
    assert {each["change"] for each in content["instead"] if each["fits"]} >= {"--adapters qlora"}
    assert main(["plan", *argv]) == 2
    text = capsys.readouterr().out
    assert "16 bytes a parameter x 70.6B = 1,129 GB; 8 GPUs have 684 GB" in text
    assert f"{content['missing_bytes'] / 1e9:.1f} GB too" in text


def test_many_gpus_are_hosts_of_eight() -> None:
    cluster = cluster_of(PlanOptions(gpus="64xH100"))
    assert (cluster.gpus_per_host, cluster.hosts) == (8, 8)


def test_the_default_batch_is_a_million_tokens() -> None:
    for gpus, hosts, seq in ((8, 1, 4096), (6, 1, 2048), (8, 128, 8192), (1, 1, 10_000_000)):
        cluster = find_cluster("H100", gpus, hosts)
        batch = default_batch(cluster, seq)
        assert batch % cluster.gpus == 0 and batch >= cluster.gpus
        assert batch == cluster.gpus or 0.5 <= batch * seq / 2**20 <= 2


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("more", [[], ["--scale", "weak", "--hosts", "3200"]])
def test_any_name_of_a_model_can_be_drawn(
    tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A dollar sign begins a formula to matplotlib, and its font has no Japanese letters."""
    config, png = tmp_path / "m$x^{$ 日本.json", tmp_path / "plan.png"
    llama = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    config.write_text(json.dumps(llama | {"num_attention_heads": 8, "vocab_size": 32000}), encoding="utf-8")
    argv = ["--gpus", "8xA100-80", "--tensor", "2", "--pipeline", "1", "--plot", str(png)]
    assert main(["plan", str(config), *argv, *more]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "m$x^{$ 日本" in capsys.readouterr().out.splitlines()[0]


def test_the_default_batch_is_of_whole_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    winner = found(capsys, "7B", "--gpus", "4xA100-80", "--micro-batch", "3")["winner"]
    assert winner["recipe"]["micro_batch"] == 3
    recipe, parallel = winner["recipe"], winner["parallel"]
    assert recipe["micro_batch"] * recipe["accumulation"] * parallel["data"] == 252 == 21 * 3 * 4


def test_pictures_and_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    png, page = tmp_path / "new" / "plan.png", tmp_path / "other" / "plan.html"
    argv = ["plan", "8B", "--gpus", "8xA100-40", "--pipeline", "1"]
    assert main([*argv, "--plot", str(png), "--html", str(page)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text(encoding="utf-8")
    assert text.count("<h1>") == 1 and "data:image/png;base64," in text
    assert "<script" not in text and "http://" not in text and "https://" not in text
    assert re.search(r"computing</th><td>[^<]*forward [\d.]+ m?s, from [\d.]+( m?s)? to [\d.]+ m?s; ", text)
    assert "GB a GPU" in capsys.readouterr().out


def test_a_page_has_what_is_next(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["13B", "--gpus", "8xA100-80", "--global-batch", "256", "--html"]
    call, left = next_of(capsys, " ".join([*argv, str(tmp_path / "plan.html")]))
    text = html.unescape((tmp_path / "plan.html").read_text(encoding="utf-8"))
    assert call.startswith("mesh = ") and all(f"{line})" in text for line in call[:-1].split(") "))
    assert "batch: " in left and left.partition("batch: ")[2].partition(";")[0] in text
    how = re.search(
        r"How to do it with imece</h2>\n<pre>(.*?)</pre>.*?<table[^>]*>(.*?)</table>", text, re.DOTALL
    )
    assert how is not None and how[1].startswith("mesh = ") and len(how[1].splitlines()) > 1  # to be copied
    assert how[2].count("<th>") == how[2].count("<td>") == how[2].count("<tr>")


def test_a_page_about_one_gpu_has_no_messages_and_no_losers(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", "1B", "--gpus", "1xH100", "--global-batch", "8", "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "tokens in " in text and "messages" not in text and "What lost" not in text


def test_amounts_are_told_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "1B", "--gpus", "1xH100", "--global-batch", "8", "--tokens", "1.005B"]) == 0
    assert "; 1.005B tokens in " in " ".join(capsys.readouterr().out.split())
    amounts = {1.005e9: "1.005B", 1e9: "1B", 15e12: "15T", 3e8: "300M", 123_456.0: "123,456"}
    assert [_amount(number) for number in amounts] == [*amounts.values()]
    assert [_round(number) for number in (99.4, 99.6, 100.4, 9.96)] == ["99", "100", "100", "10"]


def test_the_ranking_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "7B", "--gpus", "8xA100-80", "--top", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["1", "2", "3"]


@pytest.mark.parametrize("columns", [40, 60, 80, 110])
def test_lines_are_no_wider_than_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imece.cli.plan.plan.width", lambda: columns)
    assert main(["plan", "llama-8b", "--gpus", "8xA100-40", "--global-batch", "128", "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= columns or len(line.split()) == 1 for line in out.splitlines()), out
    assert ("kept for backward" in out, "█" in out) == (columns == 110, columns > 40)
    ranking = " ".join(out.partition("  plan\n" if columns > 40 else "    GB\n")[2].split())
    assert re.fullmatch(r"1 .* micro-batch \d+, \d+ accumulated 2 .* accumulated 3 .* accumulated", ranking)
    if columns == 80:
        assert all(len(line) <= 80 for line in out.splitlines())


@pytest.mark.parametrize(("encoding", "blocks"), [("ascii", "#-"), ("utf-8", "█░")])
def test_bars_are_of_what_stdout_has(encoding: str, blocks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, encoding=encoding))
    assert main(["plan", "1B", "--gpus", "1xH100", "--global-batch", "8"]) == 0
    text = out.getvalue().decode(encoding)
    assert all(2 * block in text for block in blocks) and "\\u2588" not in text


def test_scaling(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["7B", "--gpus", "8xH100", "--hosts", "400", "--tensor", "1", "--pipeline", "1", "--scale", "weak"]
    picture = tmp_path / "scale.png"
    assert main(["plan", *argv, "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("weak scaling of llama-2-7b") and "25,600" in out
    assert all(len(line) <= 110 for line in out.splitlines())
    assert picture.is_file()
    points = found(capsys, *argv)["points"]
    assert [point["gpus"] for point in points] == [3200, 6400, 12800, 25600]


def test_a_curve_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "plan 7B --gpus 8xH100 --hosts 3200 --tensor 8 --pipeline 1 --scale weak --plot /proc/x.png"
    assert main(argv.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("imece: cannot write /proc/x.png: ") and err.count("\n") == 1


def test_checking_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / PLAN_FILE).write_text(json.dumps(CONTENT))
    assert main(["plan", "--check", str(tmp_path)]) == 0
    assert "furthest off: step, predicted 50.0 % too high" in capsys.readouterr().out
    assert found(capsys, "--check", str(tmp_path))["rows"][-1]["what"] == "step"


def test_here_is_measured_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = []

    def measure(ranks: int) -> dict[str, Any]:
        measured.append(ranks)
        return FIGURES

    monkeypatch.setattr("imece.bench.here.measure_here", measure)
    monkeypatch.setenv("IMECE_HERE", str(tmp_path / "cache" / "here.toml"))
    first = found(capsys, "small", "--here", "--seq", "256", "--global-batch", "16")
    assert first["cluster"]["gpus_per_host"] == 4 and first["cluster"]["gpu"]["name"] == FIGURES["device"]
    assert found(capsys, "small", "--here", "--seq", "256", "--global-batch", "16") == first
    assert len(measured) == 1 and [each.name for each in (tmp_path / "cache").iterdir()] == ["here.toml"]
    two = found(capsys, "small", "--here", "--gpus", "2", "--seq", "256", "--global-batch", "16")
    memory = [
        each["cluster"]["gpus_per_host"] * each["cluster"]["gpu"]["memory_bytes"] for each in (two, first)
    ]
    assert two["cluster"]["gpus_per_host"] == 2 and memory[0] == memory[1]
    rates = [each["winner"]["tokens_per_s"] for each in (two, first)]
    assert rates[0] == pytest.approx(rates[1], rel=0.05), "no more ranks are faster than the machine"
    assert main(["plan", "small", "--here", "--offload", "optimizer"]) == 2
    assert "and ranks compute on CPUs here: leave it out" in capsys.readouterr().err
    assert main(["plan", "small", "--here", "--again", "--seq", "256", "--global-batch", "16"]) == 0
    assert len(measured) == 2
    assert "measured 20" in capsys.readouterr().err
    monkeypatch.setenv("IMECE_HERE", "/proc/here.toml")
    assert main(["plan", "small", "--here"]) == 2 and len(measured) == 2
    assert capsys.readouterr().err.endswith("; set IMECE_HERE to a file that can be written\n")


def test_cpus_are_no_gpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures = FIGURES | {"product_fp32": 2 * FIGURES["product"]}
    monkeypatch.setattr("imece.bench.here.measure_here", lambda ranks: figures)
    monkeypatch.setenv("IMECE_HERE", str(tmp_path / "here.toml"))
    argv = ["plan", "small", "--here", "--seq", "256", "--global-batch", "64"]
    page = tmp_path / "plan.html"
    assert main([*argv, "--html", str(page)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for said in (" work on different sequences", " rank-hours ", " a rank computes ", " GB a rank;"):
        assert said in out, said
    (fp32,) = re.findall(
        r"--precision fp32: (\d+) % faster, its products are faster here than in fewer bits", out
    )
    for text in (out, page.read_text(encoding="utf-8")):
        assert "GPU" not in text and "CUDA" not in text and "libraries" in text
    steps = [found(capsys, *argv[1:], *more)["winner"]["step_s"] for more in ([], ["--precision", "fp32"])]
    assert int(fp32) == round(100 * (1 - steps[1] / steps[0])) >= 2


def test_what_this_machine_cannot_hold_is_told_of_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And what would help is what the command takes beside --here."""
    monkeypatch.setattr("imece.bench.here.measure_here", lambda ranks: FIGURES)
    monkeypatch.setenv("IMECE_HERE", str(tmp_path / "here.toml"))
    argv, page = ["1.3b", "--here", "--global-batch", "8", "--strategy", "ddp"], tmp_path / "plan.html"
    argv += ["--tensor", "1", "--pipeline", "1"]
    assert main(["plan", *argv, "--html", str(page)]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "; 4 ranks have 24.0 GB" in out and " GB a rank, " in out
    for text in (out, page.read_text(encoding="utf-8")):
        assert "GPU" not in text
    changes = {each["change"]: each for each in found(capsys, *argv, status=2)["instead"]}
    (gpus,) = [name for name in changes if name.startswith("--gpus")]
    fewer = found(capsys, *argv, *gpus.split())
    assert fewer["winner"]["needed_bytes"] == changes[gpus]["needed_bytes"] and gpus == "--gpus 1"


def test_a_cpu_that_only_emulates_bf16_is_planned_for_in_fp32(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures = FIGURES | {"dtype": "float32", "product_fp32": FIGURES["product"]}
    monkeypatch.setattr("imece.bench.here.measure_here", lambda ranks: figures)
    monkeypatch.setenv("IMECE_HERE", str(tmp_path / "here.toml"))
    for hardware in (["--here"], ["--gpus", "2xCPU"]):
        argv = ["small", *hardware, "--seq", "256", "--global-batch", "64"]
        usual, fp32 = found(capsys, *argv), found(capsys, *argv, "--precision", "fp32")
        assert usual == fp32 and "precision" not in usual["next"]["call"]
        for name in ("bf16", "autocast", "bf16-pure", "fp16"):
            said = f"has no {'fp16' if name == 'fp16' else 'bf16'}: say fp32"
            assert main(["plan", *argv, "--precision", name]) == 2
            assert said in capsys.readouterr().err


def test_where_its_figures_cannot_be_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told before it is measured."""
    monkeypatch.setattr("imece.bench.here.measure_here", None)
    monkeypatch.setenv("IMECE_HERE", "/proc/here.toml")
    assert "cannot write /proc/here.toml: " in refused(capsys, "plan", "7B", "--here")
    without_home(monkeypatch)
    assert "set HOME, or IMECE_HERE to a file" in refused(capsys, "plan", "7B", "--here")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("", "no model is named"),
        ("lama-8b --gpus 8xH100", "did you mean llama-8b"),
        ("7B", "--gpus is missing"),
        ("lama-8b", "unknown model 'lama-8b': did you mean llama-8b"),
        ("7B --gpus 8xH100 --top -1", "--top is -1: how many of the ranking to list, 0 for none"),
        (
            "7B --gpus 8xH100 --html /proc/x/plan.html",
            "cannot write /proc/x/plan.html: No such file or directory",
        ),
        ("7B --gpus 8xH100 --plot /dev/null/plan.png", "cannot write /dev/null/plan.png: "),
        ("7B --gpus 8xH10", "did you mean H100"),
        ("7B --gpus 0xH100", "at least 1"),
        ("7B --gpus 1001xH100", "not whole hosts of 8"),
        ("7B --gpus 100xGB200", "not whole hosts of 72"),
        ("7B --gpus 80000000000xH100", "10000000000 hosts: at least 1, and at most a million"),
        ("7B --gpus 8xH100 --hosts -2", "--hosts is -2: how many hosts"),
        ("7B --gpus 8xH100 --network tokenring", "is unknown: there are infiniband-ndr"),
        ("gpt-3-175b --gpus 1024xH100 --seq 4096", "gpt-3-175b has learned positions for 2,048 tokens"),
        ("1B --gpus 8xV100 --precision autocast", "V100 has no bf16: say fp16 or fp32"),
        ("7B --gpus 8xH100 --hardware none.toml", "(No such file or directory): name a TOML file with [gpu]"),
        ("7B --gpus 4xH100 --global-batch 30 --micro-batch 4", "the nearest are 16 and 32"),
        ("7B --gpus 8xH100 --strategy hybrid", "there is one host: use zero3"),
        ("7B --gpus 8xH100 --strategy zero9", "--strategy 'zero9': one of auto,"),
        ("7B --gpus 8xH100 --scale week", "; did you mean weak?"),
        ("7B --gpus 8xH100 --adapters lora --adapter-rank 0", "--adapter-rank is 0: at least 1"),
        ("7B --gpus 8xH100 --adapter-rank 8", "--adapter-rank 8 is of --adapters lora or qlora: say which"),
        ("7B --gpus 8xH100 --again", "--again measures this machine anew, for --here"),
        ("70B --check runs/r2 --html q.html --top 3", "of that run: leave out MODEL, --top, --html"),
        ("7B --here --network 1Gb", "--here is one machine, measured: leave out --network"),
        ("7B --here --scale weak", "--here is one machine, measured: leave out --scale"),
        ("small --gpus 2xCPU --seq 512", "--seq 512: small has positions for 256 tokens, no more"),
        ("7B --gpus 8xH100 --tokens many", "a number like 300M, 1B or 15T"),
        ("7B --gpus 8xH100 --plot plan.doc", "name a file that ends in .png"),
        ("7B --gpus 8xH100 --html .", "name a file that ends in .html"),
        ("7B --gpus 8xH100 --hosts 8000 --scale weak --global-batch 64000", "it goes up to 25,600"),
        ("7B --gpus 8xH100 --scale weak --top 3", "--top 3 lists plans for one number of GPUs"),
        ("7B --gpus 8xH100 --scale weak --tokens 2B", "--tokens 2B is for time and price, which --scale"),
        ("/x/mod.py --gpus 8xH100", "which function of it builds the model? Say /x/mod.py:function"),
        ("--check nowhere", "no plan.json"),
        ("--hosts -1", "--hosts is -1: how many hosts, 0 for as many as --gpus needs"),
        ("7B --here --gpus 8xH100", "it is a number of ranks"),
        ("7B --here --hosts 2 --hardware x", "is one machine, measured: leave out --hardware, --hosts"),
        (
            "small --gpus 4xCPU --tensor 2 --pipeline 4",
            "does not divide 4 ranks; the nearest numbers of ranks",
        ),
        ("7B --gpus 8xH100 --hosts 100000 --global-batch 3", "cannot be divided by any arrangement"),
        ("7B --here --gpus \N{SUPERSCRIPT TWO}", "it is a number of ranks"),
        ("/nowhere/7B --gpus 8xH100", "/nowhere/7B/config.json: no such file: name a config.json of a model"),
        pytest.param(f"7B --here --gpus {10**310}", "it is a number of ranks", id="many ranks"),
        pytest.param(f"7B --gpus 8xH100 --hosts {10**310}", "0 hosts: at least 1, and at most", id="hosts"),
        pytest.param(f"7B --gpus 8xH100 --seq {10**310}", "0: at least 1, and at most 1e+12", id="seq"),
        pytest.param("7B --gpus 8xH100 --tokens 1e999", "a number like 300M, 1B or 15T", id="tokens"),
        pytest.param(f"{'x' * 300} --gpus 8xH100", "unknown model 'xxx", id="a long model"),
        pytest.param(f"7B --gpus 8xH100 --html {'x' * 300}", "name a file that ends in .html", id="html"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], argv: str, said: str) -> None:
    assert said in refused(capsys, "plan", *argv.split())


def test_a_config_without_the_fields_needed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama", "hidden_size": 4096}')
    assert "num_hidden_layers" in refused(capsys, "plan", str(config), "--gpus", "8xH100")


def test_it_starts_without_torch() -> None:
    code = "import sys; from imece.cli.main import main; main(['plan', '7B', '--gpus', '8xH100']); "
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'matplotlib')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, env=dict(os.environ))
    assert done.returncode == 0, done.stderr.decode()
    assert b"tokens/s" in done.stdout
