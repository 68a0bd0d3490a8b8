"""Fine-tuning mixtures of experts: of each layer one parameter, in files a tensor for each expert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from imece.cli.main import main
from imece.data.batches import Batches
from imece.data.tokens import open_tokens
from imece.errors import UserError
from imece.models.hugging_face import read_config
from imece.models.language_model import outline
from imece.train.config import OptimizerSection
from tests.train.command import in_fork, train
from tests.train.compare import exact, last, records
from tests.train.model.test_origin import SEQ, ready, words
from tests.train.test_foreign import write_foreign

_SIZE = {
    "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32,
}  # fmt: skip
# With more experts than some micro-batches reach, and a dense layer.
SOURCES: dict[str, dict[str, Any]] = {
    "mixtral": _SIZE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": _SIZE | {
        "num_experts": 32, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "mlp_only_layers": [0],
        "output_router_logits": True, "router_aux_loss_coef": 0.5,
    },
}  # fmt: skip
STRATEGIES = ["replicate", "zero2", "zero3"]
STEPS, MICRO, LR = 4, 3, 3e-3


def story(folder: str) -> None:
    """What the tests below look at. The ranks are forks of this process, which imports all."""
    path = Path(folder)
    for kind in SOURCES:
        outline(read_config(path / kind / "config.json"))
    how = [
        f"--batch.micro={MICRO}", "--optimizer.warmup=0", "--optimizer.schedule=constant",
        f"--optimizer.lr={LR}", "--optimizer.clip=0.1",
    ]  # fmt: skip

    def run(name: str, source: str, strategy: str, *more: str) -> None:
        done = train(words(path, source, name, *how, f"--strategy={strategy}", *more), path)
        assert done.status == 0, done.err

    for strategy in STRATEGIES:
        run(strategy, "qwen3_moe", strategy, f"--steps={STEPS}")
    run("four", "qwen3_moe", "zero3", f"--steps={STEPS}", "--ranks=4", "--compute.recompute")
    run("again", "qwen3_moe", "zero3", "--steps=2")
    run("again", "qwen3_moe", "zero1", f"--steps={STEPS}")
    run("mixtral-run", "mixtral", "zero3", "--steps=2", "--compute.dtype=bf16")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("experts")
    for kind, content in SOURCES.items():
        write_foreign(folder / kind, kind, **content)
    in_fork(story, str(folder), timeout_s=400)
    return folder


def by_transformers(source: Path, run: Path) -> tuple[list[float], list[float], dict[str, torch.Tensor], int]:
    """Losses without the routers' own and norms of gradients of the same steps in a loop of transformers' and
    torch's own, its model at the end, and how many of its experts some micro-batches have not reached."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
    section = OptimizerSection()
    groups: list[dict[str, Any]] = [
        {"params": [each for each in model.parameters() if each.ndim >= 2]},
        {"params": [each for each in model.parameters() if each.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=LR, betas=(section.beta1, section.beta2), eps=section.eps,
        weight_decay=section.weight_decay,
    )  # fmt: skip
    batches, losses, norms, idle = Batches(open_tokens(run / "tokens").train, SEQ, 12, 1), [], [], 0
    experts = model.model.layers[1].mlp.experts.down_proj
    for step in range(STEPS):
        optimizer.zero_grad()
        of_step, sequences = 0.0, torch.from_numpy(batches.sequences(step))
        for some in sequences.split(MICRO):
            inputs, targets = some[:, :-1], some[:, 1:].contiguous()
            found = model(inputs, labels=inputs, shift_labels=targets)
            balance = SOURCES["qwen3_moe"]["router_aux_loss_coef"] * float(found.aux_loss.detach())
            of_step += (float(found.loss.detach()) - balance) * MICRO / len(sequences)
            (found.loss * MICRO / len(sequences)).backward()
            idle += int((torch.autograd.grad(model(inputs).logits.sum(), experts)[0] == 0).all((1, 2)).sum())
        losses.append(of_step)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
    return losses, norms, model.state_dict(), idle


def test_trains_as_transformers_does(runs: Path) -> None:
    """With the loss by which routers learn to use all experts, some of which no token of a micro-batch goes
    to."""
    losses, norms, weights, idle = by_transformers(runs / "qwen3_moe", runs / "zero3")
    assert idle > 0 and min(norms) > 0.1
    for name in ("zero3", "four"):
        found = records(runs / name)
        assert [each["loss"] for each in found] == pytest.approx(losses, abs=1e-5), name
        assert [each["grad_norm"] for each in found] == pytest.approx(norms, rel=1e-4), name
        saved = last(runs / name)
        for key, value in weights.items():
            assert torch.allclose(saved.tensor(f"model/inner.{key}"), value, atol=1e-4, rtol=0), (name, key)


def test_every_strategy_comes_to_the_same_bits(runs: Path) -> None:
    """Also when a run goes on."""
    found = {run: exact(runs / run) for run in (*STRATEGIES, "again")}
    del found["again"][1]["val_loss"]  # it ended there for a while
    saved = last(runs / "replicate")
    assert len({each["loss"] for each in found["replicate"]}) == STEPS
    for run, steps in found.items():
        assert steps == found["replicate"], run
        other = last(runs / run)
        for name in saved.names():
            assert torch.equal(saved.tensor(name), other.tensor(name)), (run, name)


@pytest.mark.parametrize(("kind", "run"), [("mixtral", "mixtral-run"), ("qwen3_moe", "zero3")])
def test_is_exported_as_it_came(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, run: str
) -> None:
    import transformers

    assert main(["export", str(runs / run), str(tmp_path / "out"), "--which=last", "--max-shard=8KB"]) == 0
    before, after = (
        {
            name: each
            for path in sorted(folder.glob("model*.safetensors"))
            for name, each in load_file(path).items()
        }
        for folder in (runs / kind, tmp_path / "out")
    )
    assert {name: each.shape for name, each in before.items()} == {
        name: each.shape for name, each in after.items()
    }
    assert sum(".experts.1." in name for name in after) == 3 * {"mixtral": 2, "qwen3_moe": 1}[kind]
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report.values()), report
    saved = last(runs / run)
    for name, each in model.state_dict().items():
        assert torch.equal(each, saved.tensor(f"model/inner.{name}")), name
    changed = [name for name, each in before.items() if not torch.equal(each, after[name])]
    assert len(changed) == len(before)
    capsys.readouterr()
    assert main(["eval", str(runs / run), "--which=last", "--json"]) == 0
    nats = json.loads(capsys.readouterr().out)["model"]["nats_per_token"]
    assert nats == pytest.approx(records(runs / run)[-1]["val_loss"], abs=2e-2 if run != "zero3" else 1e-5)
    assert main(["sample", str(tmp_path / "out"), "--tokens=5", "--seed=1", "--prompt=village"]) == 0
    assert capsys.readouterr().out.startswith("village")


def test_a_loss_of_routers_is_not_compiled(tmp_path: Path) -> None:
    write_foreign(tmp_path / "source", "qwen3_moe", **SOURCES["qwen3_moe"])
    with pytest.raises(UserError, match="or write false for output_router_logits") as refused:
        ready([*words(tmp_path, "source", "run"), "--compute.compile"])
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()
