"""Fine-tuning a model of another kind, which transformers computes: training, going on, and what follows."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from imece.checkpoint.load import open_checkpoint
from imece.cli import sample
from imece.cli.main import main
from imece.errors import UserError
from imece.models.cross_entropy import cross_entropy
from imece.models.foreign import ForeignConfig
from imece.plan.presets import find_cluster
from imece.train.batch import plan_batch
from imece.train.config import LoraSection, OptimizerSection, TrainConfig
from imece.train.model.precision import Precision
from imece.train.prediction import Given, Machine, planned, predict
from imece.train.run.folder import RunFolder
from tests.ranks import run_ranks
from tests.train.command import in_fork, train
from tests.train.compare import records
from tests.train.model.test_origin import first_sequences, opened, ready, words, write_tokenizer

_GPT2: dict[str, Any] = {
    "vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1,
    "eos_token_id": 2, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
_GEMMA2: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32, "sliding_window": 9,
}  # fmt: skip
# With buffers in files.
_GEMMA4 = _GEMMA2 | {
    "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0, "global_head_dim": 8,
    "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 300,
}  # fmt: skip
STRATEGIES = ["replicate", "zero3"]


def write_foreign(folder: Path, kind: str = "gpt2", **more: Any) -> Any:
    """A folder as transformers saves it, and the model."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    content = {"gpt2": _GPT2, "gemma2": _GEMMA2, "gemma4_text": _GEMMA4}.get(kind, {}) | more
    model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[kind](**content))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
        for name in dict(model.named_buffers()).keys() & model.state_dict().keys():
            model.get_buffer(name).uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size="8KB")
    write_tokenizer(folder)
    return model


def tuned(folder: str, strategies: list[str]) -> None:
    path = Path(folder)
    for strategy in strategies:
        run = words(path, "source", strategy, f"--strategy={strategy}", "--steps=3")
        assert (done := train(run, path)).status == 0, done.err
        assert f"weights  of {path / 'source'}\n" in done.out


def test_trains_as_transformers_model_does(tmp_path: Path) -> None:
    """The first loss is that of transformers' own model, and sharded it comes to the same bits."""
    model = write_foreign(tmp_path / "source")
    in_fork(tuned, str(tmp_path), STRATEGIES)
    with torch.no_grad():
        sequences = first_sequences(tmp_path / "zero3")
        expected = float(cross_entropy(model(sequences[:, :-1]).logits, sequences[:, 1:]))
    losses = {name: [each["loss"] for each in records(tmp_path / name)] for name in STRATEGIES}
    assert losses["replicate"][0] == pytest.approx(expected, abs=1e-5)
    assert len({*losses["replicate"]}) == 3
    assert all(losses[name] == losses["replicate"] for name in STRATEGIES), losses


def test_no_rank_reads_or_holds_the_whole_model(tmp_path: Path) -> None:
    """On two hosts, where parameters are gathered; nor of the model beside adapters."""
    model = write_foreign(tmp_path / "source", n_layer=12, n_embd=32)
    size, beside = 4 * sum(each.numel() for each in model.parameters()), ["zero3-adapters", "hybrid-adapters"]
    runs = ["zero2", "zero3", "hybrid", *(beside if find_spec("peft") is not None else [])]
    for run in runs:
        ready([*words(tmp_path, "source", run), "--ranks=4", *["--lora.rank=2"] * (run in beside)])
    found = run_ranks(opened, 4, args=[str(tmp_path), runs], backend="gloo", ranks_per_host=2)
    for some in (runs[:3], runs[3:]):
        norms = [told[runs.index(run)][2] for told in found for run in some]
        assert norms == pytest.approx(norms[:1] * len(norms), rel=1e-5) and 0 not in norms
    for run, *told in zip(runs, *found, strict=True):
        shards = 2 if "hybrid" in run else 4
        for most, read, _ in told:
            assert 0.9 * size / shards < read < 1.1 * size / shards, run
            assert most < (size / shards if run != "zero2" else 0) + 0.4 * size, run


def story(folder: str) -> None:
    """A run to its end, and again from its checkpoint in the middle."""
    path = Path(folder)
    more = ["--strategy=zero3", "--compute.recompute", "--data.separate=True", "--checkpoint.every=2"]
    assert (done := train([*words(path, "source", "run"), *more, "--steps=4"], path)).status == 0, done.err
    (path / "run/checkpoints/step-00000004").rename(path / "first")
    assert (done := train([f"--run={path / 'run'}"], path)).status == 0, done.err
    assert "going on after step 2" in done.out


def test_goes_on_and_is_exported_for_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With windows, documents kept apart, recomputation, and buffers that stay as they came."""
    source = write_foreign(tmp_path / "source", "gemma4_text")
    in_fork(story, str(tmp_path))
    saved, first = RunFolder(tmp_path / "run").saved("last"), open_checkpoint(tmp_path / "first")
    assert saved.step == first.step == 4
    for name in first.names():
        assert torch.equal(saved.tensor(name), first.tensor(name)), name
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "exported"), "--which=last"]) == 0
    transformers = pytest.importorskip("transformers")
    found, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", output_loading_info=True
    )
    assert not any(report.values()), report
    for name, each in found.state_dict(keep_vars=True).items():
        if name != "lm_head.weight":  # which is the embedding
            assert torch.equal(each, saved.tensor(f"model/inner.{name}")), name
            changed = not torch.equal(each, source.state_dict()[name])
            assert changed == isinstance(each, torch.nn.Parameter), name
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "exported"), f"--data={tmp_path / 'text.jsonl'}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["nats_per_token"] > 0
    assert sample.run([str(tmp_path / "run"), "--tokens=5", "--seed=1", "--prompt=village"]) == 0
    assert capsys.readouterr().out.startswith("village")
    assert found.config.model_type == "gemma4_text"
    assert not torch.equal(found.get_buffer("model.layers.0.layer_scalar"), torch.ones(1))


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("gpt2", ["--mesh.tensor=2"], r"--mesh.tensor 2: .*/source is of the kind gpt2, which transformers"),
        ("gpt2", ["--mesh.pipeline=2"], "--mesh.pipeline 2: .* --strategy zero3 divides its parameters"),
        ("gpt2", ["--compute.compile", "--lora.rank=2", "--lora.quantize=nf4"], "nf4: .*: leave one out"),
        ("gpt2", ["--model.max-seq=33"], r"--model.max-seq 33: the model of .* has 32 positions: at most 32"),
        (
            "opt",
            ["--data.separate=True"],
            "its documents are not known to stay apart: say --data.separate False",
        ),
    ],
)
def test_what_only_a_model_of_ours_can(tmp_path: Path, kind: str, more: list[str], said: str) -> None:
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 24}
    opt = size | {"word_embed_proj_dim": 16, "vocab_size": 300, "max_position_embeddings": 32}
    write_foreign(tmp_path / "source", kind, **(opt if kind == "opt" else {}))
    with pytest.raises(UserError, match=said):
        ready([*words(tmp_path, "source", "run"), *more])
    assert not (tmp_path / "run").exists()


def test_is_planned_with_all_its_parameters() -> None:
    """Also if the planner does not know its kind; of experts few work for a token."""
    pytest.importorskip("transformers")
    codegen = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
    mixtures: dict[str, Any] = {
        "mixtral": {**experts, "num_local_experts": 8},
        "qwen2_moe": {**experts, "num_experts": 8, "shared_expert_intermediate_size": 12},
    }
    kinds = {"gpt2": _GPT2, "gemma2": _GEMMA2, "codegen": codegen}
    for kind, content in {**kinds, **{kind: _GEMMA2 | more for kind, more in mixtures.items()}}.items():
        config = ForeignConfig.of(content | {"model_type": kind})
        found = planned("x", config)
        assert found.parameters == config.parameter_count and found.layers == config.layers, kind
        assert (found.experts, found.active_experts) == ((8, 2) if kind in mixtures else (0, 0)), kind
    gpt2 = ForeignConfig.of(_GPT2 | {"n_embd": 128, "n_layer": 4, "model_type": "gpt2"})
    for targets, sides in (((), 4 + 2 + 5 + 5), (("c_attn", "mlp.c_proj"), 4 + 5)):
        lora = LoraSection(rank=3, targets=targets)
        asked = replace(TrainConfig(), lora=lora, optimizer=OptimizerSection("adamw"))
        plan, on = plan_batch(asked.batch, 32, 1), Machine(find_cluster("CPU", 1), False)
        said = predict("replicate", Given(asked, gpt2, plan, Precision("fp32", "cpu"), on)).as_json()
        gradients = said["counted_bytes"]["gradients"]
        assert gradients == pytest.approx(4 * 3 * 4 * sides * 128, rel=1e-3), "fused matrices"
