"""A run that trains adapters beside a frozen model."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from imece.checkpoint.load import Saved, open_checkpoint
from imece.cli.main import main
from imece.cli.train import read_config
from imece.errors import UserError
from imece.models.cross_entropy import cross_entropy
from imece.models.hugging_face import from_hugging_face
from imece.models.transformer import Transformer
from imece.train.config import ADAPTER_LR, TUNING_LR
from imece.train.model.origin import open_weights, trained_model
from imece.train.run.folder import RunFolder
from imece.train.step import Step
from imece.train.watch.peak import flops_per_token
from tests.membership.deaths import death, difference
from tests.membership.test_several_hosts import two_hosts
from tests.train.command import in_fork, train
from tests.train.compare import exact, last, records
from tests.train.model.test_origin import QWEN, SHAPE, first_sequences, ready, words, write_model

STRATEGIES = ["replicate", "zero1", "zero2", "zero3"]
RANK, ALPHA = 3, 9
LINEAR = ("q", "k", "v", "out", "gate", "up", "down")  # the matrices of a block
TRAINED = [
    f"--lora.rank={RANK}", f"--lora.alpha={ALPHA}", "--optimizer.lr=1e-2", "--optimizer.warmup=0",
    "--optimizer.schedule=constant", "--lora.dropout=0.2",
]  # fmt: skip

needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")


# What is refused, with or without peft.


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--lora.rank=-1"], "lora.rank is -1: at least 0"),
        (["--lora.rank=2", "--lora.alpha=0"], "lora.alpha is 0: at least 1"),
        (["--lora.rank=2", "--lora.dropout=1"], "lora.dropout is 1.0: at least 0 and less than 1"),
        (
            ["--lora.rank=2", "--lora.targets", "q", "o"],
            "has no such matrix, but q, k, v, out, gate, up, down: name some of these",
        ),
        (["--lora.rank=2", "--lora.targets", "q", "q"], "lora.targets has 'q' twice: each at most once"),
        (["--lora.alpha=4"], "--lora.alpha without --lora.rank: name a rank, such as 16"),
        (
            ["--lora.rank=2", "--optimizer.kind=muon"],
            "--optimizer.kind muon: adapters are trained with adamw",
        ),
    ],
)
def test_mistakes(more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "source")
    assert main(["train", *words(tmp_path, "source", "run", *more)]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_adapters_need_a_model_that_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--lora.rank=4"]) == 2
    assert "adapters stand beside a model that is trained already: name its folder with --from" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("peft", "imece: --lora.rank needs peft: pip install 'imece[hf]'\n"),
        ("bitsandbytes", "imece: --lora.quantize nf4 needs bitsandbytes: pip install 'imece[quant]'\n"),
    ],
)
def test_what_is_to_be_installed_is_told_before_anything_is_made(
    missing: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    there = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None if name == missing else name))
    monkeypatch.setattr("imece.train.model.adapters.importlib", there)
    write_model(tmp_path / "source")
    arguments = words(tmp_path, "source", "run", "--lora.rank=2", "--lora.quantize=nf4")
    assert main(["train", *arguments]) == 2
    assert capsys.readouterr().err == said
    assert not (tmp_path / "run").exists()


def test_adapters_learn_faster_unless_told_otherwise(tmp_path: Path) -> None:
    write_model(tmp_path / "source")
    arguments = words(tmp_path, "source", "run")
    assert read_config(arguments).optimizer.lr == TUNING_LR
    assert read_config([*arguments, "--lora.rank=2"]).optimizer.lr == ADAPTER_LR
    assert read_config([*arguments, "--lora.rank=2", "--optimizer.lr=1"]).optimizer.lr == 1
    file = tmp_path / "my.toml"
    file.write_text(f'[model]\nweights = "{tmp_path / "source"}"\n[lora]\nrank = 2\n')
    config = read_config([str(file)])
    assert config.optimizer.lr == ADAPTER_LR and config.lora.alpha_or_usual == 4
    assert read_config([str(file), "--lora.rank=0"]).optimizer.lr == TUNING_LR


def test_a_frozen_model_takes_two_thirds_of_the_products() -> None:
    scores = 6 * SHAPE.q_width * sum(SHAPE.max_seq for _ in range(SHAPE.layers))
    whole, frozen = flops_per_token(SHAPE), flops_per_token(SHAPE, frozen=True)
    assert (whole - scores) * 2 == (frozen - scores) * 3


# Runs.


def alone_slowly() -> None:
    """A rank that is left alone takes so long for a step that another one can join it."""
    run = Step.run

    def slow(self: Step, *args: Any) -> Any:
        time.sleep(0.5 if self._plan.ranks == 1 else 0.0)
        return run(self, *args)

    mock.patch.object(Step, "run", slow).start()


def story(folder: str) -> dict[str, Any]:
    """What the tests below look at, made at once: what adapters need is imported only here."""
    import peft  # noqa: F401  (the ranks are forks of this process)

    path, told = Path(folder), dict[str, Any]()

    def run(name: str, *more: str, source: str = "source", fault: Callable[[], None] = lambda: None) -> str:
        done = train(words(path, source, name, *TRAINED, *more), path, fault=fault)
        assert done.status == 0, done.err
        return done.out

    for strategy in STRATEGIES:
        told[strategy] = run(strategy, f"--strategy={strategy}", "--steps=6")
    run("again", "--strategy=zero3", "--steps=3")
    told["again"] = run("again", "--strategy=replicate", "--steps=6")
    if find_spec("bitsandbytes") is not None:
        nf4 = ["--lora.quantize=nf4", "--lora.targets", "q", "v"]
        run("nf4", *nf4, "--strategy=zero2", "--steps=3")
        told["nf4"] = run("nf4", *nf4, "--strategy=zero3", "--steps=6")
    told["of a run"] = run("of a run", "--steps=2", source="zero2")
    more = ["--steps=16", "--lora.dropout=0"]
    run("whole", *more)
    dies = death("backward", [1], 3)

    def both() -> None:
        alone_slowly()
        dies()

    for strategy in ("replicate", "zero2", "zero3"):
        arguments = words(path, "source", f"killed-{strategy}", *TRAINED, *more, f"--strategy={strategy}")
        done = train(arguments, path, fault=both)
        assert done.status == 0, done.err
        told[f"killed-{strategy}"] = done.err
    shutil.move(path / "source", path / "kept")
    write_model(path / "source", QWEN, 6)
    told["another base"] = train(["--run", path / "zero1", "--steps=8"], path).mistake()
    shutil.rmtree(path / "source")
    shutil.move(path / "kept", path / "source")
    return told


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    if find_spec("peft") is None:
        pytest.skip("peft is not installed")
    folder = tmp_path_factory.mktemp("adapters")
    write_model(folder / "source", QWEN)
    return folder, in_fork(story, str(folder))


def same(one: Saved, two: Saved) -> bool:
    assert one.names() == two.names()
    return all(torch.equal(one.tensor(name), two.tensor(name)) for name in one.names())


def test_every_strategy_trains_the_same_adapters(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, told = runs
    losses = {strategy: exact(folder / strategy) for strategy in STRATEGIES}
    assert len({each["loss"] for each in losses["replicate"]}) == 6
    for strategy in STRATEGIES:
        assert losses[strategy] == losses["replicate"], strategy
        assert same(last(folder / strategy), last(folder / "replicate"))
        (line,) = [each for each in told[strategy].splitlines() if each.startswith("weights")]
        assert line == (
            f"weights  of {folder / 'source'}, frozen; LoRA rank 3 on 7 layers a block: "
            "1.5k of 14.4k parameters trained"
        )


def test_what_was_predicted_is_counted(runs: tuple[Path, dict[str, Any]]) -> None:
    """Bytes of a rank; under zero3 the base too is shared out."""
    parameters = {}
    for strategy in STRATEGIES:
        plan = json.loads((runs[0] / strategy / "plan.json").read_bytes())
        counted, predicted = plan["measured"]["memory_bytes"], plan["predicted"]["counted_bytes"]
        parameters[strategy] = counted["parameters"]
        for kind in ("parameters", "gradients", "optimizer", "communication"):
            padding = 1024 if kind == "parameters" else 6000  # so much of so few
            assert predicted[kind] == pytest.approx(counted[kind], rel=0.02, abs=padding), (strategy, kind)
    assert parameters["zero3"] == pytest.approx(parameters["zero2"] / 2, rel=0.02)


def test_only_adapters_are_saved(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = runs
    saved = last(folder / "zero3")
    kinds: dict[str, set[str]] = {}
    for name in saved.names():
        kind, _, rest = name.partition("/")
        kinds.setdefault(kind, set()).add(rest)
    adapters = {
        f"blocks.{block}.{part}.lora_{side}.default.weight"
        for block in range(QWEN.layers)
        for part in [f"attention.{each}" for each in LINEAR[:4]] + [f"mlp.{each}" for each in LINEAR[4:]]
        for side in "AB"
    }
    assert kinds["model"] == adapters
    assert {name.rpartition("/")[0] for name in kinds["optimizer"]} == adapters
    with torch.device("meta"):
        parameters = dict(Transformer(QWEN).named_parameters())
    assert {name.replace(".base_layer", "") for name in kinds["left_out"]} == parameters.keys()


def test_a_run_goes_on_bit_for_bit(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, told = runs
    again = exact(folder / "again")
    del again[2]["val_loss"]  # it ended there for a while
    assert again == exact(folder / "replicate")
    assert same(last(folder / "again"), last(folder / "replicate"))
    assert "trained; adapters of its own checkpoint of step 3\n" in told["again"]


@pytest.mark.parametrize("strategy", ["replicate", "zero2", "zero3"])
def test_a_rank_that_is_killed_comes_back(runs: tuple[Path, dict[str, Any]], strategy: str) -> None:
    folder, told = runs
    run = folder / f"killed-{strategy}"
    assert "rank 1" in told[run.name] and "was killed by signal 9" in told[run.name]
    assert [each for each in records(run) if "generation" in each]
    assert len(last(run).rank_states) == 2, "nobody has replaced it"
    assert difference(run, folder / "whole") < 1e-4


def loses_a_host(folder: str, *more_words: str) -> str:
    """Of two, with the parts of the base that its ranks kept. What was said."""
    import peft  # noqa: F401

    path = Path(folder)
    write_model(path / "source", QWEN)
    more = ["--strategy=zero3", "--steps=8", "--checkpoint.every=3", "--lora.dropout=0", "--ranks=4"]
    more += more_words
    assert train(words(path, "source", "whole", *TRAINED, *more), path).status == 0
    dies = death("backward", [2, 3], 5)

    def both() -> None:
        two_hosts()
        dies()

    done = train(words(path, "source", "run", *TRAINED, *more), path, fault=both)
    assert done.status == 0, done.err
    assert difference(path / "run", path / "whole") < 1e-4
    return done.out


@needs_peft
@pytest.mark.slow
def test_a_base_that_was_in_parts_is_read_again(tmp_path: Path) -> None:
    assert "back to the checkpoint of step 3" in in_fork(loses_a_host, str(tmp_path))


@needs_peft
@pytest.mark.slow
def test_codes_that_were_in_parts_are_made_again(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    said = in_fork(loses_a_host, str(tmp_path), "--lora.quantize=nf4")
    assert "back to the checkpoint of step 3" in said


def refused(run: Path) -> str:
    """By `imece train`, before there are ranks."""
    with pytest.raises(UserError) as mistake:
        ready([f"--run={run}", "--steps=8"])
    return str(mistake.value)


def test_another_base_is_refused(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, told = runs
    run, source = folder / "zero1", folder / "source"
    step = run / "checkpoints/step-00000006"
    said = told["another base"]
    assert said.startswith(f"{step} was trained on a frozen base that it does not hold, and this model has")
    shutil.move(source, folder / "kept")
    try:
        assert refused(run) == (
            f"{run}: its adapters stand beside the model of {source}, which is not there: put it back, or "
            f"say in {run}/config.toml where it is now (weights, below [model])"
        )
        write_model(source, SHAPE)
        assert refused(run) == (
            f"{run}: its adapters stand beside another model than that of {source}, which has changed since: "
            "put the old one back"
        )
    finally:
        shutil.rmtree(source, ignore_errors=True)
        shutil.move(folder / "kept", source)


def merged(folder: Path, run: str) -> dict[str, torch.Tensor]:
    """By the formula, in float64."""
    found = {name: each.double() for name, each in from_hugging_face(folder / "source")[1].items()}
    saved = open_checkpoint(folder / run / "checkpoints/step-00000006")
    for name in saved.names():
        if name.endswith(".lora_A.default.weight"):
            a, b = saved.tensor(name), saved.tensor(name.replace("lora_A", "lora_B"))
            of = f"{name.removeprefix('model/').removesuffix('.lora_A.default.weight')}.weight"
            assert name.startswith("model/")
            found[of] = found[of] + b.double() @ a.double() * (ALPHA / RANK)
    return found


def test_commands_read_the_merged_model(
    runs: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without peft: sample, eval, export and --from."""
    folder, _ = runs
    expected = merged(folder, "replicate")
    model, _ = trained_model(RunFolder(folder / "replicate"), "last")
    for name, each in model.named_parameters():
        assert torch.equal(each, expected[name].float()), name
    assert main(["export", str(folder / "replicate"), str(tmp_path / "hf"), "--which=last"]) == 0
    config, tensors = from_hugging_face(tmp_path / "hf")
    assert config == from_hugging_face(folder / "source")[0]
    assert all(torch.equal(each, expected[name].float()) for name, each in tensors.items())
    assert main(["eval", str(folder / "replicate"), "--which=last", "--json"]) == 0
    out = capsys.readouterr().out
    nats = json.loads(out[out.index("{") :])["model"]["nats_per_token"]
    assert nats == pytest.approx(records(folder / "replicate")[-1]["val_loss"], abs=1e-5)
    # The first step of a run that began with one is that of the merged model: its own adapters give nothing.
    weights = open_weights(str(folder / "zero2"))
    first = Transformer(config)
    first.load_state_dict({name.removeprefix("model/"): weights.tensor(name) for name in weights.names()})
    sequences = first_sequences(folder / "of a run")
    with torch.no_grad():
        loss = float(cross_entropy(first(sequences[:, :-1]), sequences[:, 1:]))
    assert records(folder / "of a run")[0]["loss"] == pytest.approx(loss, abs=1e-5)
    assert torch.equal(weights.slice("model/norm.weight", 3, 9), weights.tensor("model/norm.weight")[3:9])
    full = torch.empty(5)
    weights.fill(full, "model/blocks.1.mlp.up.weight", 20)
    assert torch.equal(full, weights.tensor("model/blocks.1.mlp.up.weight").view(-1)[20:25])


def four_bits_apart(run: Path, source: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> float:
    """How far logits of a run's model are from those of peft's: of the base in `source` in four bits, as the
    command prints it, with the adapters that it exports to `out`."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    assert main(["export", str(run), str(out), "--to=adapter", "--which=last"]) == 0
    printed = capsys.readouterr().out.partition("quantization_config=")[2].splitlines()[0].removesuffix(")")
    quantised = eval(printed, {"BitsAndBytesConfig": transformers.BitsAndBytesConfig})
    base = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, device_map="cpu", quantization_config=quantised
    )
    model = peft.PeftModel.from_pretrained(base, out).eval()
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # it rounds to bf16, and needs other widths
    ours, _ = trained_model(RunFolder(run), "last")
    tokens = torch.randint(290, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return float((model(tokens).logits - ours(tokens)).abs().max())


def test_transformers_loads_the_same_four_bits(
    runs: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adapters lie beside the very weights that they were trained beside."""
    pytest.importorskip("bitsandbytes")
    folder, _ = runs
    assert four_bits_apart(folder / "nf4", folder / "source", tmp_path / "adapter", capsys) < 1e-5


def test_a_base_of_four_bits(
    runs: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read is what was trained: the numbers that the codes stand for, and adapters beside some."""
    pytest.importorskip("bitsandbytes")
    folder, told = runs
    run = folder / "nf4"
    assert (
        "frozen; QLoRA (nf4) rank 3 on 2 layers a block: 408 of 14.4k parameters trained; adapters"
        in (told["nf4"])
    )
    base = from_hugging_face(folder / "source")[1]
    model, _ = trained_model(RunFolder(run), "last")
    up, norm = (model.get_parameter(f"blocks.0.mlp.{each}.weight").detach() for each in ("up", "norm"))
    assert all(len(block.unique()) <= 16 for block in up.view(-1, 64))
    assert 0 < float((up - base["blocks.0.mlp.up.weight"]).abs().max()) < 0.2
    assert torch.equal(norm, base["blocks.0.mlp.norm.weight"])
    assert main(["eval", str(run), "--which=last", "--json"]) == 0
    out = capsys.readouterr().out
    nats = json.loads(out[out.index("{") :])["model"]["nats_per_token"]
    assert nats == pytest.approx(records(run)[-1]["val_loss"], abs=1e-5)
    monkeypatch.setattr("imece.train.model.adapters.importlib.util.find_spec", lambda name: None)
    assert main(["sample", str(run)]) == 2
    assert capsys.readouterr().err.startswith("imece: --lora.quantize nf4 needs bitsandbytes: pip install")


def test_a_base_that_has_changed_is_not_merged(
    runs: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = runs
    source, run = folder / "source", str(folder / "zero3")
    shutil.move(source, folder / "kept")
    try:
        for changed in (False, True):
            if changed:
                write_model(source, QWEN, 6)
            for command in (["sample", run], ["eval", run], ["export", run, str(tmp_path / "out")]):
                assert main(command) == 2
                said = capsys.readouterr().err
                assert said.count("\n") == 1
                assert "which has changed since: put the old model back" in said or not changed
                assert "which is not there: put it back" in said or changed
                assert not (tmp_path / "out").exists()
            arguments = words(folder, "zero3", "third")
            if not changed:
                with pytest.raises(UserError, match="which is not there: put it back"):
                    ready(arguments)
            assert not (folder / "third").exists()
        assert main(["export", run, str(tmp_path / "out"), "--to=adapter"]) == 0, "which needs no base"
    finally:
        shutil.rmtree(source)
        shutil.move(folder / "kept", source)


def test_peft_reads_the_adapters(runs: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder, _ = runs
    run, out = folder / "replicate", tmp_path / "adapter"
    assert main(["export", str(run), str(out), "--to=adapter"]) == 0
    files = ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert sorted(path.name for path in out.iterdir()) == files
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "source", dtype=torch.float32)
    ours, _ = trained_model(RunFolder(run), "best")
    tokens = torch.randint(290, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, before = ours(tokens), base.eval()(tokens).logits
        theirs = peft.PeftModel.from_pretrained(base, out).eval()(tokens).logits
    assert float((theirs - expected).abs().max()) < 1e-4 < float((before - expected).abs().max())
