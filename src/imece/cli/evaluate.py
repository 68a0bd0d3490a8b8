"""`imece eval RUN [--data PATH ...]`: the loss of a trained model, beside baselines that need no training."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor

from imece.checkpoint.commit import METRIC_ON
from imece.cli.options import check_named, parse
from imece.data.baselines import baselines, counted_in
from imece.data.build import build
from imece.data.corpus import Source
from imece.data.prepare import reading_of
from imece.data.records import Format
from imece.data.sources import sources
from imece.data.tokenizer import Tokenizer
from imece.data.tokens import Part, TokenFiles, open_tokens
from imece.data.whole_windows import WholeWindows
from imece.device import best_device
from imece.errors import UserError
from imece.listing import many
from imece.models.language_model import LanguageConfig
from imece.observe.units import megabytes, si
from imece.saying import say
from imece.train.config import DataSection, Dtype, TrainConfig, also, defaults
from imece.train.evaluate import Nats, evaluate, summed
from imece.train.model.origin import Weights, model_of, open_weights, sequence_length, tokenizer_of
from imece.train.model.precision import Precision, choose_precision
from imece.train.run.folder import Which, check_which

PROG = "imece eval"
DESCRIPTION = (
    "The loss of a trained model on the documents that its run held out, or on other text: in nats a token, "
    "bits a byte (which compares across tokenizers) and perplexity, beside what counting tokens and pairs of "
    "tokens in the run's training text would reach."
)
_TOKENS = 4_096  # in one forward, or one sequence
_MOST_NATS = 700.0  # nats per token; above this the perplexity overflows


@dataclass(frozen=True)
class EvalModel:
    """How the model reads it."""

    max_seq: int | None = None
    """Tokens of a sequence, at most the model's context. Default: as in training."""


@dataclass(frozen=True)
class EvalData:
    """What it reads."""

    paths: Annotated[tuple[str, ...], also("--data")] = ()
    """Files, folders or globs, as for imece train. Default: the text that the run held out; a folder that is
    no run has none."""
    format: Format | None = None
    """text; or records of which only answers count: answers (a prompt and its answer) or chat (messages).
    Default: as in the run; text of a folder that is no run."""
    field: str | None = None
    """The field of a .jsonl or .parquet record that has the text. Default: as in the run, or the usual one of
    --data.format: text; prompt,completion; messages."""
    separate: bool | None = None
    """Attention stays within a document or record. Default: as in the run; with another --data.format, or
    without a run, within a record but not within a text."""

    def instead_of(self, own: DataSection) -> DataSection:
        """own: the run's. UserError."""
        if self.format not in (None, own.format):
            own = replace(own, field=None, separate=None)
        names = ("format", "field", "separate")
        said = {name: value for name in names if (value := getattr(self, name)) is not None}
        try:
            return replace(own, **said)
        except ValueError as error:
            raise UserError(f"--{error}") from None


@dataclass(frozen=True)
class EvalOptions:
    """Options of `imece eval`."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The run folder, or a folder with a model in Hugging Face's format."""
    which: Which = "best"
    """Which checkpoint of a run: best (by validation loss), last, or the number of a step."""
    json: bool = False
    """Print JSON instead of a table."""
    data: EvalData = field(default_factory=EvalData)
    model: EvalModel = field(default_factory=EvalModel)

    def __post_init__(self) -> None:
        check_which(self.which)
        if self.model.max_seq is not None and self.model.max_seq < 1:
            raise ValueError(f"--model.max-seq {self.model.max_seq}: at least 1")
        if not self.data.paths and (self.data.format is not None or self.data.field is not None):
            raise ValueError("--data.format and --data.field say how --data is read: name text with --data")


def run(argv: Sequence[str]) -> int:
    """`imece eval ARGV`: exit status 0."""
    check_named(argv, ("--data", "--data.paths"))
    options = parse(EvalOptions, argv, PROG, DESCRIPTION)
    weights, device = open_weights(options.run, options.which), best_device()
    saved = weights.saved
    if saved is None and not options.data.paths:
        raise UserError(f"{options.run} is no run, which would have text of its own: name text with --data")
    config = weights.home.config() if saved is not None else defaults(options.run, 0)
    config = replace(config, data=options.data.instead_of(config.data))
    tokenizer, model = tokenizer_of(weights), model_of(weights, device)
    with _data(options, weights, config, tokenizer) as (part, others):
        precision = _precision(config.compute.dtype, device)
        seq = _sequence_length(options, config, model.config, part)
        with _read(part, partial(summed, model, precision)) as each:
            read = [
                evaluate(
                    model,
                    source,
                    seq,
                    max(1, _TOKENS // seq),
                    precision,
                    nats=each,
                    separate=config.data.separates,
                )
                for source in part.sources
            ]
        found = {
            "run": options.run,
            "step": saved.step if saved is not None else None,
            "precision": precision.name,
            "data": list(options.data.paths) or "held out",
            **_figures(part, read, others),
        }
    if options.json:
        print(json.dumps(found, indent=1, allow_nan=False))
    else:
        print("\n".join(_table(found)))
    return 0


def _figures(part: Part, read: Sequence[tuple[float, int]], others: TokenFiles | None) -> dict[str, Any]:
    """read: (nats, tokens) of each source of `part`. others: the run's own tokens, for the baselines."""
    nats, tokens = map(sum, zip(*read, strict=True))
    without_model = baselines(others.train, part, others.vocab_size) if others else {}
    return {
        "documents": part.documents,
        "bytes": part.text_bytes,
        "tokens": tokens,
        "model": measures(nats / tokens, tokens, part.text_bytes),
        "sources": {
            source.source: measures(nats / tokens, tokens, source.text_bytes)
            for source, (nats, tokens) in zip(part.divided, read, strict=False)
        },
        "baselines": {name: measures(loss, tokens, part.text_bytes) for name, loss in without_model.items()},
        "baselines_counted_in": counted_in(others.train, part) if others else "",
    }


def measures(nats_per_token: float, tokens: int, text_bytes: int) -> dict[str, float | None]:
    """One loss as three measures; None for a number that is not finite."""
    finite = math.isfinite(nats_per_token)
    return {
        "nats_per_token": nats_per_token if finite else None,
        "bits_per_byte": nats_per_token * tokens / text_bytes / math.log(2) if finite else None,
        "perplexity": math.exp(nats_per_token) if finite and nats_per_token < _MOST_NATS else None,
    }


def _precision(asked: Dtype, device: torch.device) -> Precision:
    """The run's precision; for a run in fp16 that is evaluated on a CPU, the one that is usual there."""
    if asked == "fp16" and device.type == "cpu":
        precision = choose_precision("auto", device)
        say(f"the run's fp16 needs a GPU: evaluated in {precision.name}")
        return precision
    return choose_precision(asked, device)


def _sequence_length(options: EvalOptions, config: TrainConfig, shape: LanguageConfig, part: Part) -> int:
    """Tokens of a sequence. Says how many records are longer. UserError if the model has fewer positions."""
    seq = options.model.max_seq or sequence_length(config, shape)
    if seq > shape.max_seq:
        raise UserError(
            f"--model.max-seq {seq}: the model of {options.run} has {shape.max_seq} positions: at most "
            f"{shape.max_seq}"
        )
    if part.learned is not None and (whole := WholeWindows(part, seq)).left_out:
        say(
            f"{whole.left_out:,} of {part.documents:,} records are left out, with more than {seq + 1:,} "
            f"tokens: --model.max-seq {whole.longest - 1} takes all"
        )
    return seq


@contextlib.contextmanager
def _read(part: Part, nats: Nats) -> Iterator[Nats]:
    """Yields `nats` so that a terminal shows how much of `part` it has read; the bar vanishes at the end."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(f"reading {si(len(part.tokens))} tokens", total=len(part.tokens))

        def counted(inputs: Tensor, targets: Tensor, begins: Tensor | None) -> Tensor:
            found = nats(inputs, targets, begins)
            bars.advance(task, targets.numel())
            return found

        yield counted


@contextlib.contextmanager
def _data(
    options: EvalOptions, weights: Weights, config: TrainConfig, tokenizer: Tokenizer
) -> Iterator[tuple[Part, TokenFiles | None]]:
    """Yields what to read, and the run's own tokens: None if there is no run or they are gone, which is
    allowed with --data."""
    own = _own_tokens(weights, config, tokenizer, needed=not options.data.paths)
    if not options.data.paths:
        assert own is not None
        if not len(own.validation.tokens):
            raise UserError(f"{weights.home.path} held out no document: name text with --data")
        yield own.validation, own
        return
    run_folders = list[Path]()
    reading = reading_of(config.data, weights.home.tokenizer_file)
    files = sources(options.data.paths, reading, run_folders)
    if run_folders:
        say(f"{many(len(run_folders), 'run folder')} left out")
    try:
        beside = tempfile.TemporaryDirectory(prefix="imece-eval-")
    except OSError as error:
        raise UserError(
            f"no folder for the tokens of --data can be made ({error.strerror}): set TMPDIR to one with room"
        ) from error
    with beside as temporary:
        made = build(temporary, [Source(files)], reading, tokenizer, share=0.0)
        if made.skipped:
            say(f"{made.skipped} of {len(files)} files are not text and were left out")
        yield replace(made.train, name="--data"), own


def _own_tokens(
    weights: Weights, config: TrainConfig, tokenizer: Tokenizer, needed: bool
) -> TokenFiles | None:
    saved = weights.saved
    if saved is None:
        return None
    try:
        own = open_tokens(weights.home.tokens(config), verify=True)
        if own.tokenizer_hash != tokenizer.hash:
            raise UserError(
                f"{own.folder}: made with another tokenizer than this run's: imece train makes them again"
            )
        if own.identity != saved.state[METRIC_ON]:
            raise UserError(
                f"{own.folder}: not of the text that step {saved.step} was trained on: imece train makes "
                "them again if that is still there, --data names other text"
            )
    except UserError as error:
        if needed:
            raise
        say(f"no baselines, for the run's own tokens cannot be used ({error})")
        return None
    return own


def _table(found: Mapping[str, Any]) -> Iterator[str]:
    data = found["data"] if isinstance(found["data"], str) else ", ".join(found["data"])
    documents = many(found["documents"], "document")
    step = f"step {found['step']}, " if found["step"] is not None else ""
    yield (
        f"{found['run']}, {step}{found['precision']}, on {data}: {documents}, "
        f"{megabytes(found['bytes'])}, {si(found['tokens'])} tokens"
    )
    yield ""
    by_source = {f"  {name}": values for name, values in found["sources"].items()}
    rows = {"model": found["model"], **by_source, **dict(reversed(found["baselines"].items()))}
    wide = max(8, *map(len, rows))
    yield f"{'':<{wide}}  {'nats a token':>12}  {'bits a byte':>11}  {'perplexity':>10}"
    for name, values in rows.items():
        yield (
            f"{name:<{wide}}  {_figure(values['nats_per_token'], '.3f'):>12}  "
            f"{_figure(values['bits_per_byte'], '.3f'):>11}  {_figure(values['perplexity'], ',.1f'):>10}"
        )
    if found["baselines_counted_in"]:
        yield f"\nwithout a model: counted in {found['baselines_counted_in']}"


def _figure(value: float | None, how: str) -> str:
    return "not finite" if value is None else format(value, how)
