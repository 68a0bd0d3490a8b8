"""Adapters beside a frozen model of another kind, which transformers computes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from imece.cli.main import main
from imece.data.batches import Batches
from imece.data.tokens import open_tokens
from imece.errors import UserError
from imece.models.cross_entropy import cross_entropy
from imece.models.hugging_face import read_config
from imece.models.language_model import outline
from imece.train.config import LoraSection, OptimizerSection
from imece.train.model.adapters import add, first_values
from imece.train.model.origin import trained_model
from imece.train.run.folder import RunFolder
from tests.train.command import in_fork, train
from tests.train.compare import exact, last, records
from tests.train.model.test_adapters import STRATEGIES, four_bits_apart, same
from tests.train.model.test_origin import SEQ, ready, words
from tests.train.test_foreign import write_foreign

RANK, ALPHA, LR = 3, 9, 1e-2
TRAINED = [
    f"--lora.rank={RANK}", f"--lora.alpha={ALPHA}", f"--optimizer.lr={LR}", "--optimizer.warmup=0",
    "--optimizer.schedule=constant",
]  # fmt: skip
# GPT-2's weights lie and its matrices are fused; its name c_proj is that of two. Gemma 4 has buffers too.
TARGETS = {"gpt2": (), "gemma4_text": ("q_proj", "mlp.down_proj")}
NF4 = ["--lora.quantize=nf4", "--lora.targets", "attn.c_proj"]


def story(folder: str) -> dict[str, str]:
    """What the tests below look at, made at once. The ranks are forks of this process, which imports all."""
    path, told = Path(folder), dict[str, str]()
    for kind in TARGETS:
        add(outline(read_config(path / kind / "config.json")), LoraSection(rank=RANK))

    def run(name: str, *more: str, source: str = "gpt2") -> None:
        done = train(words(path, source, name, *TRAINED, *more), path)
        assert done.status == 0, done.err
        told[name] = done.out

    for strategy in STRATEGIES:
        run(strategy, f"--strategy={strategy}", "--steps=4")
    run("alone", "--ranks=1", "--steps=4")
    run("again", "--strategy=zero3", "--steps=2")
    run("again", "--strategy=replicate", "--steps=4")
    targets = ["--lora.targets", *TARGETS["gemma4_text"]]
    run("gemma4-run", *targets, "--strategy=zero3", "--compute.recompute", "--steps=4", source="gemma4_text")
    if find_spec("bitsandbytes") is not None:
        run("nf4", *NF4, "--strategy=zero2", "--steps=2")
        run("nf4", *NF4, "--strategy=zero3", "--steps=4")
    return told


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("foreign_adapters")
    for kind in TARGETS:
        write_foreign(folder / kind, kind)
    return folder, in_fork(story, str(folder), timeout_s=400)


def by_peft(kind: str, source: Path, run: Path) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and norms of gradients of the same steps in a loop of peft's, transformers' and torch's own, and
    the adapters that it ends with by their names in a run."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    wanted = [*TARGETS[kind]] or "all-linear"
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=wanted, fan_in_fan_out=kind == "gpt2")
    )
    saved = RunFolder(run).config()
    named = outline(read_config(source / "config.json"))
    add(named, saved.lora)
    own = {name.replace("base_model.model.", "inner."): each for name, each in model.named_parameters()}
    for name, value in first_values(named, saved.seed):
        own[name].data.copy_(value)
    section = OptimizerSection()
    adapters = {name: each for name, each in own.items() if each.requires_grad}
    optimizer = torch.optim.AdamW(
        adapters.values(), lr=LR, betas=(section.beta1, section.beta2), eps=section.eps,
        weight_decay=section.weight_decay,
    )  # fmt: skip
    batches, losses, norms = Batches(open_tokens(run / "tokens").train, SEQ, 12, 1), [], []
    model.train()
    for step in range(4):
        sequences = torch.from_numpy(batches.sequences(step))
        loss = cross_entropy(model(sequences[:, :-1]).logits, sequences[:, 1:])
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(adapters.values(), section.clip)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: each.detach() for name, each in adapters.items()}


@pytest.mark.parametrize("kind", TARGETS)
def test_trains_as_peft_does(runs: tuple[Path, dict[str, str]], kind: str) -> None:
    """On one rank, on two, and sharded with recomputation."""
    folder, _ = runs
    names = ["alone", "replicate"] if kind == "gpt2" else ["gemma4-run"]
    losses, norms, adapters = by_peft(kind, folder / kind, folder / names[0])
    for name in names:
        found, saved = records(folder / name), last(folder / name)
        assert [each["loss"] for each in found] == pytest.approx(losses, abs=1e-5), name
        assert [each["grad_norm"] for each in found] == pytest.approx(norms, rel=1e-4), name
        in_model = {each for each in saved.names() if each.startswith("model/")}
        buffers = {each for each in in_model if each.endswith(".layer_scalar")}
        assert in_model - buffers == {f"model/{each}" for each in adapters}
        for adapter, value in adapters.items():
            assert torch.allclose(saved.tensor(f"model/{adapter}"), value, atol=2e-5, rtol=0), adapter
    assert all(value.abs().max() > 1e-3 for name, value in adapters.items() if ".lora_B." in name)


def test_every_strategy_trains_the_same_adapters(runs: tuple[Path, dict[str, str]]) -> None:
    """To the same bits, also when a run goes on."""
    folder, told = runs
    found = {run: exact(folder / run) for run in (*STRATEGIES, "again")}
    del found["again"][1]["val_loss"]  # it ended there for a while
    for run, steps in found.items():
        assert steps == found["replicate"], run
        assert same(last(folder / run), last(folder / "replicate")), run
    assert "frozen; LoRA rank 3 on 4 layers a block: 1.5k of 11.9k parameters trained" in told["zero3"]
    assert "frozen; LoRA rank 3 on 2 layers a block" in told["gemma4-run"]
    assert "trained; adapters of its own checkpoint of step 2\n" in told["again"]


def test_what_was_predicted_is_counted(runs: tuple[Path, dict[str, str]]) -> None:
    parameters = {}
    for run in (*STRATEGIES, "gemma4-run"):
        plan = json.loads((runs[0] / run / "plan.json").read_bytes())
        counted, predicted = plan["measured"]["memory_bytes"], plan["predicted"]["counted_bytes"]
        parameters[run] = counted["parameters"]
        for kind in ("parameters", "gradients", "optimizer", "communication"):
            padding = 1024 if kind == "parameters" else 6000  # so much of so few
            assert predicted[kind] == pytest.approx(counted[kind], rel=0.02, abs=padding), (run, kind)
    assert parameters["zero3"] == pytest.approx(parameters["zero2"] / 2, rel=0.02)


@pytest.mark.parametrize(("kind", "run"), [("gpt2", "zero3"), ("gemma4_text", "gemma4-run")])
def test_is_exported_merged_and_for_peft(
    runs: tuple[Path, dict[str, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    run: str,
) -> None:
    import peft
    import transformers

    folder, _ = runs
    tokens = torch.randint(290, (2, 12), generator=torch.Generator().manual_seed(1))
    ours, _ = trained_model(RunFolder(folder / run), "last")
    logits = []
    for to in ("adapter", "hf"):
        assert main(["export", str(folder / run), str(tmp_path / to), f"--to={to}", "--which=last"]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float32).eval()
    with torch.no_grad():
        before = base(tokens).logits
        logits.append(peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(tokens).logits)
        logits.append(
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()(tokens).logits
        )
        for found in logits:
            assert float((found - ours(tokens)).abs().max()) < 1e-4
    assert float((before - logits[0]).abs().max()) > 1e-2
    said = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert said["target_modules"] == {
        "gpt2": ["c_attn", "c_fc", "c_proj"], "gemma4_text": ["down_proj", "q_proj"]
    }[kind]  # fmt: skip
    capsys.readouterr()
    assert main(["eval", str(folder / run), "--which=last", "--json"]) == 0
    nats = json.loads(capsys.readouterr().out)["model"]["nats_per_token"]
    assert nats == pytest.approx(records(folder / run)[-1]["val_loss"], abs=1e-5)
    assert main(["sample", str(folder / run), "--tokens=5", "--seed=1", "--prompt=village"]) == 0
    assert capsys.readouterr().out.startswith("village")


def test_transformers_loads_the_same_four_bits(
    runs: tuple[Path, dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bitsandbytes")
    folder, told = runs
    run, out = folder / "nf4", tmp_path / "adapter"
    assert "QLoRA (nf4) rank 3 on 1 layer a block" in told["nf4"]
    assert four_bits_apart(run, folder / "gpt2", out, capsys) < 1e-4
    assert [*json.loads((out / "adapter_config.json").read_text())["target_modules"]] == [
        "transformer.h.0.attn.c_proj", "transformer.h.1.attn.c_proj"
    ]  # fmt: skip
    assert main(["eval", str(run), "--which=last", "--json"]) == 0
    nats = json.loads(capsys.readouterr().out)["model"]["nats_per_token"]
    assert nats == pytest.approx(records(run)[-1]["val_loss"], abs=1e-5)
    ours, _ = trained_model(RunFolder(run), "last")
    weight = ours.get_parameter("inner.transformer.h.0.mlp.c_fc.weight").detach().T
    assert all(len(block.unique()) <= 16 for block in weight.reshape(-1, 64))


def test_a_name_that_no_matrix_has(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    write_foreign(tmp_path / "source")
    for target in ("q", "proj", "lm_head", "wte"):
        with pytest.raises(UserError) as mistake:
            ready([*words(tmp_path, "source", "run"), "--lora.rank=2", "--lora.targets", "c_fc", target])
        assert str(mistake.value) == (
            f"--lora.targets {target}: the model of {tmp_path / 'source'} has no such matrix, but c_attn, "
            "c_proj, c_fc: name some of these, or leave the option out for all"
        )
    assert not (tmp_path / "run").exists()
