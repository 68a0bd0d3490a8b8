"""A run that begins from the model in a folder: another run's, an exported one, or one of transformers."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import imece
from imece.cli import sample
from imece.cli.main import main
from imece.cli.train import read_config
from imece.data.batches import Batches
from imece.data.tokenizer import load_tokenizer
from imece.data.tokens import open_tokens
from imece.errors import UserError
from imece.models.cross_entropy import cross_entropy
from imece.models.hugging_face import (
    HuggingFaceModel,
    from_hugging_face,
    hugging_face_shapes,
    to_hugging_face,
)
from imece.models.hugging_face_files import write_weights
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer
from imece.train.config import TUNING_LR
from imece.train.model.origin import open_weights, trained_model
from imece.train.opening import open_session
from imece.train.run.folder import RunFolder
from imece.train.run.lock import RunLock
from imece.train.start import make_ready
from tests.ranks import run_ranks
from tests.train.command import in_fork, train
from tests.train.compare import records
from tests.train.small import write_text

SHAPE = TransformerConfig(
    vocab_size=300, layers=2, width=16, heads=4, kv_heads=2, mlp_width=24, max_seq=32, rope_theta=500.0
)
QWEN = replace(SHAPE, head_dim=6, head_norms=True, qkv_bias=True, out_bias=True, window=9, full_layers=(1,))
SMOL = replace(SHAPE, nope_layers=(1,), window=9, full_layers=(0,), tied_head=True)
SEQ = 16
BOS, EOS = "<s>", "</s>"


def write_tokenizer(folder: Path, adds: bool = True) -> None:
    """Of 290 entries, with tokens of its own before and after a text, as transformers saves one."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<unk>", BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["one village does a job together and goes home"] * 9, trainer)
    if adds:
        made.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 1)]
        )
    made.save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": {"__type": "AddedToken", "content": EOS, "special": True},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def write_model(folder: Path, config: TransformerConfig = SHAPE, seed: int = 5) -> Transformer:
    """A folder as a model of others comes in, in several files."""
    model = Transformer(config, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8) if parameter.ndim == 2 else parameter.uniform_(0.5, 1.5)
    folder.mkdir(exist_ok=True)
    content, tensors = to_hugging_face(config, model.named_parameters())
    (folder / "config.json").write_text(json.dumps(content | {"bos_token_id": 1, "eos_token_id": [2, 7]}))
    write_weights(folder, hugging_face_shapes(config), tensors, dtype=torch.float32, most_bytes=20_000)
    write_tokenizer(folder)
    return model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_model(tmp_path / "source")
    return tmp_path / "source"


def words(folder: Path, source: str, run: str, *more: str) -> list[str]:
    text = folder / "text.jsonl"
    if not text.exists():
        write_text(text)
    return [
        f"--from={folder / source}", f"--data={text}", f"--run={folder / run}", "--data.held-out=0.1",
        f"--model.max-seq={SEQ}", "--batch.sequences=12", "--compute.dtype=fp32", "--ranks=2", *more,
    ]  # fmt: skip


def ready(arguments: Sequence[str]) -> None:
    """All that `imece train` does before it starts ranks."""
    config = read_config(list(arguments))
    with RunLock(config.folder) as lock:
        make_ready(config, None, lock)


def first_sequences(run: Path) -> torch.Tensor:
    """Of the first step, [12, SEQ + 1]."""
    return torch.from_numpy(Batches(open_tokens(run / "tokens").train, SEQ, 12, 1).sequences(0))


def tuned(folder: str, source: str, strategies: list[str]) -> None:
    """ "zero3-bf16" is zero3 in bf16."""
    path = Path(folder)
    for run in strategies:
        strategy, _, dtype = run.partition("-")
        arguments = words(path, source, run, f"--strategy={strategy}", "--steps=3")
        arguments += [f"--compute.dtype={dtype}"] if dtype else []
        assert (done := train(arguments, path)).status == 0, done.err
        assert f"weights  of {path / source}\n" in done.out


def test_every_strategy_begins_with_the_folders_weights(source: Path, tmp_path: Path) -> None:
    write_model(source, QWEN)
    strategies = ["replicate", "zero1", "zero2", "zero3", "replicate-bf16", "zero3-bf16"]
    in_fork(tuned, str(tmp_path), "source", strategies)
    config, tensors = from_hugging_face(source)
    model = Transformer(config)
    model.load_state_dict(tensors)
    sequences = first_sequences(tmp_path / "zero3")
    with torch.no_grad():
        expected = float(cross_entropy(model(sequences[:, :-1]), sequences[:, 1:]))
    for strategy in strategies:
        losses = [each["loss"] for each in records(tmp_path / strategy)]
        rounding = 2e-2 if "bf16" in strategy else 1e-5
        assert losses[0] == pytest.approx(expected, abs=rounding), strategy
        alike = [each["loss"] for each in records(tmp_path / strategy.replace("replicate", "zero3"))]
        assert len(set(losses)) == 3 and losses == pytest.approx(alike, abs=1e-5), strategy


class Live(TorchDispatchMode):
    """Most bytes that this process has in tensors at a time, but for memory that ranks have in common."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and not each.is_meta:
                storage = each.untyped_storage()
                self._known[storage._cdata] = weakref.ref(storage)
        found = [each() for each in self._known.values()]
        # What is mapped has a fixed size; what is gathered has none between two uses.
        self.most = max(
            self.most, sum(each.nbytes() for each in found if each is not None and each.resizable())
        )
        return out


def opened(folder: str, strategies: list[str]) -> list[list[float]]:
    """Of each strategy, the most that this rank had while a run began, the bytes that it read, its loss.
    "zero3-adapters" is zero3 with adapters."""
    read, mesh, told = 0, imece.init(), []
    of_folder = HuggingFaceModel.slice

    def counted(model: HuggingFaceModel, name: str, start: int, stop: int) -> torch.Tensor:
        nonlocal read
        found = of_folder(model, name, start, stop)
        read += found.nbytes
        return found

    for run in strategies:
        strategy, _, adapters = run.partition("-")
        more = [f"--strategy={strategy}", f"--ranks={mesh.world_size}", *["--lora.rank=2"] * bool(adapters)]
        arguments, read = words(Path(folder), "source", run, *more), 0
        with mock.patch.object(HuggingFaceModel, "slice", counted), Live() as live:
            session = open_session(read_config(arguments), mesh)
        told.append([live.most, read, session.step.run(0, 0.0).grad_norm])
        session.checkpoints.close()
    return told


@pytest.mark.parametrize(
    ("hosts", "strategies"),
    [
        pytest.param(1, ["zero1", "zero2", "zero3"], marks=pytest.mark.slow),
        pytest.param(2, ["zero2"], marks=pytest.mark.slow),
        (2, ["zero3", "hybrid"]),
    ],
)
def test_no_rank_reads_or_holds_the_whole_model(tmp_path: Path, hosts: int, strategies: list[str]) -> None:
    """Each reads the part that it owns. Between hosts parameters are gathered, and lie in its own memory."""
    shape = replace(QWEN, layers=12, width=32, mlp_width=64, head_dim=8)
    write_model(tmp_path / "source", shape)
    size, ranks = 4 * shape.parameter_count, 2 * hosts
    for strategy in strategies:
        ready([*words(tmp_path, "source", strategy), f"--ranks={ranks}"])
    backend = "shm" if hosts == 1 else "gloo"
    found = run_ranks(opened, ranks, args=[str(tmp_path), strategies], backend=backend, ranks_per_host=2)
    norms = [each[2] for told in found for each in told]
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-5) and norms[0] > 0
    for strategy, *told in zip(strategies, *found, strict=True):
        shards = 2 if strategy == "hybrid" else ranks
        assert sum(read for _, read, _ in told) == size * ranks // shards, strategy
        own = size / shards if hosts > 1 and strategy in ("zero3", "hybrid") else 0
        for most, read, _ in told:
            assert read < 1.1 * size / shards, strategy
            assert most < own + 0.3 * size, f"{strategy}: {most / size:.2f} of the model"


def test_its_tokenizer_begins_and_ends_each_document(source: Path, tmp_path: Path) -> None:
    ready(words(tmp_path, "source", "run"))
    part = open_tokens(tmp_path / "run/tokens").train
    assert all(part.document(i)[0] == 1 and part.document(i)[-1] == 2 for i in range(part.documents))
    tokenizer = load_tokenizer(RunFolder(tmp_path / "run").tokenizer_file)
    assert (tokenizer.begin, tokenizer.end, tokenizer.before) == (1, 2, 1)
    assert 1 not in tokenizer.encode(f"{BOS} village")
    # What puts none around a text, and says no other, has its documents follow each other's ends.
    write_tokenizer(source, adds=False)
    assert (load_tokenizer(source).begin, load_tokenizer(source).before) == (None, 2)
    said = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(said | {"add_bos_token": True}))
    assert load_tokenizer(source).begin == 1


def story(folder: str) -> list[str]:
    """Trains, goes on without the folder, begins another run with that one; what they said."""
    path, said = Path(folder), []
    assert (done := train(words(path, "source", "run", "--steps=2"), path)).status == 0, done.err
    shutil.move(path / "source", path / "gone")
    done = train([f"--run={path / 'run'}", "--steps=4"], path)
    assert done.status == 0, done.err
    said.append(done.out)
    done = train(words(path, "run", "third", "--steps=1", "--strategy=zero3"), path)
    assert done.status == 0, done.err
    said.append(done.out)
    return said


def test_a_run_goes_on_from_its_checkpoints_and_is_exported_as_it_came(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(source, SMOL)
    again, third = in_fork(story, str(tmp_path))
    assert f"weights  of its own checkpoint of step 2; {source} is not read again" in again
    assert [each["step"] for each in records(tmp_path / "run")] == [1, 2, 3, 4]
    assert f"weights  of {tmp_path / 'run'}\n" in third
    exported = tmp_path / "exported"
    assert main(["export", str(tmp_path / "third"), str(exported)]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (exported / name).read_bytes() == (tmp_path / "gone" / name).read_bytes()
    content = json.loads((exported / "config.json").read_text())
    assert (content["bos_token_id"], content["eos_token_id"]) == (1, [2, 7])
    config, tensors = from_hugging_face(exported)
    assert config == SMOL, "it has all its positions"
    assert content["model_type"] == "smollm3"
    model, _ = trained_model(RunFolder(tmp_path / "third"))
    assert all(torch.equal(tensors[name], each) for name, each in model.state_dict().items())
    # And what it had begun with is the other run's best checkpoint.
    before, _ = trained_model(RunFolder(tmp_path / "run"), "best")
    weights = open_weights(str(tmp_path / "run"))
    for name, each in before.state_dict().items():
        weights.fill(found := torch.empty_like(each), f"model/{name}")
        assert torch.equal(found, each)
    # Or the checkpoint whose folder is named.
    step = "run/checkpoints/step-00000004"
    ready(words(tmp_path, step, "fourth"))
    assert (tmp_path / "fourth/from/tokenizer.json").read_bytes() == (
        exported / "tokenizer.json"
    ).read_bytes()
    last, _ = trained_model(RunFolder(tmp_path / "run"), "4")
    for name, each in last.state_dict().items():
        assert torch.equal(open_weights(str(tmp_path / step)).tensor(f"model/{name}"), each)
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "third"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["nats_per_token"] > 0
    assert sample.run([str(tmp_path / "third"), "--tokens=5", "--seed=1", "--prompt=village"]) == 0
    assert capsys.readouterr().out.startswith("village")


def test_other_values_are_usual(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = read_config(["--from=source"])
    assert (config.optimizer.kind, config.optimizer.lr) == ("adamw", TUNING_LR)
    assert (config.folder, config.model.name) == (Path("runs/source"), "source")
    assert read_config(["--from=source", "--optimizer.lr=0.004"]).optimizer.lr == 0.004
    Path("a.toml").write_text("steps = 7\n[optimizer]\nlr = 0.004\n")
    config = read_config(["a.toml", "--from=source"])
    assert (config.steps, config.optimizer.lr, config.optimizer.kind) == (7, 0.004, "adamw")
    Path("b.toml").write_text('[model]\nweights = "source"\n')
    assert read_config(["b.toml"]) == read_config(["--from=source"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--model=tiny"], r"--model tiny and --from .*: a model is new or that of a folder: leave one"),
        (["--model.layers=3"], "model.layers is given, and model.weights too, whose shape is what it is"),
        (["--data.tokenizer=bytes"], "--data.tokenizer bytes: the model of --from .* knows its own tokens"),
        (["--model.max-seq=33"], r"--model.max-seq 33: the model of .* has 32 positions: at most 32"),
    ],
)
def test_options_that_say_something_else(source: Path, tmp_path: Path, more: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        ready([*words(tmp_path, "source", "run"), *more])
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_of_no_model() -> None:
    with pytest.raises(UserError, match=r"--data.tokenizer model: that of --from FOLDER, which"):
        read_config(["--data.tokenizer=model"])


def with_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: shutil.rmtree(folder), "no such folder: name a run, or a folder with config.json"),
        (lambda folder: (folder / "config.json").unlink(), "nor a model in .* has no config.json"),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "none"}'),
            "model_type is 'none'; there are llama, mistral",
        ),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: no such file"),
        (
            lambda folder: (folder / "tokenizer_config.json").write_text("["),
            "tokenizer_config.json: cannot be",
        ),
        (
            lambda folder: next(folder.glob("model-00002-*")).unlink(),
            r"model-00002-of-.*: no such file, but model.safetensors.index.json names it",
        ),
        (
            lambda folder: with_tensors(folder, lambda all: all.update({next(iter(all)): torch.zeros(3, 4)})),
            r"is \[3, 4\], by config.json it is \[",
        ),
        (
            lambda folder: with_tensors(folder, lambda all: all.pop(next(iter(all)))),
            r"model-00001-of-.*: it has no .*, but model.safetensors.index.json says so",
        ),
    ],
)
def test_folders_that_cannot_be_begun_with(
    source: Path, tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    arguments = words(tmp_path, "source", "run")
    spoil(source)
    with pytest.raises(UserError, match=said) as refused:
        ready(arguments)
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()


def test_more_tokens_than_the_model_knows(source: Path, tmp_path: Path) -> None:
    write_model(source, TransformerConfig(**{**vars(SHAPE), "vocab_size": 280}))
    with pytest.raises(UserError, match=r"tokenizer.json has 290 entries, the model beside it only 280"):
        ready(words(tmp_path, "source", "run"))


def test_weights_that_are_not_finite(source: Path, tmp_path: Path) -> None:
    model = write_model(source)
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    _, tensors = to_hugging_face(SHAPE, model.named_parameters())
    write_weights(source, hugging_face_shapes(SHAPE), tensors, dtype=torch.float32, most_bytes=20_000)
    with pytest.raises(UserError, match=r"model.norm.weight has numbers that are not finite"):
        open_weights(str(source)).fill(torch.empty(16), "model/norm.weight")


def begun_twice(folder: str) -> list[str]:
    """With weights that are not finite, then with others, in the same run folder."""
    path, said = Path(folder), []
    for source, strategy in (("bad", "zero3"), ("bad", "replicate"), ("source", "zero2")):
        done = train(words(path, source, "run", f"--strategy={strategy}", "--steps=1"), path)
        assert (path / "run/checkpoints").exists() is (source == "source")
        said.append(done.mistake() if source == "bad" else f"{done.status} {done.err}")
    return said


def test_a_run_that_could_not_begin_is_none(source: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "bad")
    with_tensors(tmp_path / "bad", lambda all: next(iter(all.values()))[:1].fill_(float("inf")))
    *mistakes, last = in_fork(begun_twice, str(tmp_path))
    assert all("has numbers that are not finite: get the file again" in said for said in mistakes), mistakes
    assert last == "0 "


def test_another_folder_than_the_run_began_with(source: Path, tmp_path: Path) -> None:
    ready(words(tmp_path, "source", "run"))
    (tmp_path / "run/checkpoints").mkdir()
    write_model(tmp_path / "other")
    with pytest.raises(UserError, match=r"holds a run that began with the weights of .*source, not with"):
        read_config(words(tmp_path, "other", "run"))
    new = [f"--data={tmp_path / 'text.jsonl'}", f"--run={tmp_path / 'new'}", "--model=tiny"]
    ready([*new, "--data.tokenizer=bytes"])
    with pytest.raises(UserError, match="holds a run that began with random weights, not with those of"):
        read_config(words(tmp_path, "source", "new"))


def test_what_was_begun_is_taken_back(source: Path, tmp_path: Path) -> None:
    """With its folder `from`: another command may say something else."""
    with pytest.raises(UserError, match="the train part holds"):
        ready(words(tmp_path, "source", "run", "--batch.sequences=5000"))
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- with transformers


@pytest.mark.parametrize(
    ("kind", "options", "dtype"),
    [
        ("llama", {"tie_word_embeddings": True}, torch.float32),
        ("llama", {"tie_word_embeddings": False}, torch.bfloat16),
        ("mistral", {"sliding_window": 9, "head_dim": 6}, torch.float32),
        ("mistral", {"sliding_window": None}, torch.float32),
        ("qwen2", {"tie_word_embeddings": True}, torch.float32),
        ("qwen3", {"head_dim": 6, "tie_word_embeddings": True}, torch.float32),
        ("smollm3", {"no_rope_layer_interval": 2, "pad_token_id": 0}, torch.float32),
    ],
)
def test_there_and_back_with_transformers(
    tmp_path: Path, kind: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """The first loss is that of transformers, and what comes of it computes the same there."""
    source = tmp_path / "source"
    with mock.patch.dict(os.environ):  # what it leaves there would cost ranks that import everything anew
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(
                kind, vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
                bos_token_id=1, eos_token_id=2, initializer_range=0.3, **options,
            )
        )  # fmt: skip
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                if parameter.ndim == 1:  # biases begin with zeros, norms with ones
                    parameter.uniform_(-0.5, 0.5).add_(float("norm" in name))
        theirs.to(dtype).save_pretrained(source, max_shard_size="15KB")
    write_tokenizer(source)
    assert list(source.glob("model-0*")), "in several files"
    in_fork(tuned, str(tmp_path), "source", ["zero1"])
    sequences = first_sequences(tmp_path / "zero1")
    with torch.no_grad():
        logits = theirs.float()(sequences[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())
    assert records(tmp_path / "zero1")[0]["loss"] == pytest.approx(float(expected), abs=1e-5)
    exported = tmp_path / "exported"
    assert main(["export", str(tmp_path / "zero1"), str(exported), "--which=last"]) == 0
    after = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert type(after) is type(theirs)
    assert after.config.tie_word_embeddings is theirs.config.tie_word_embeddings
    ours, saved = trained_model(RunFolder(tmp_path / "zero1"), "last")
    assert saved.step == 3
    with torch.no_grad():
        found = after(sequences).logits
        torch.testing.assert_close(found, ours(sequences), rtol=0, atol=1e-5)
        assert not torch.allclose(found, theirs(sequences).logits, rtol=0, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    own = load_tokenizer(RunFolder(tmp_path / "zero1").tokenizer_file)
    assert tokenizer("one village")["input_ids"] == [own.before, *own.encode("one village")]
