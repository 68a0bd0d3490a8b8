"""`imece export RUN DIR`: writes a trained model for transformers, or its adapters for peft."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

import tokenizers
import torch
import tyro
from tokenizers.processors import TemplateProcessing

from imece.checkpoint.state.names import MODEL
from imece.cli.export.adapter import FOUR_BITS, write_adapter
from imece.cli.export.card import CARD, write_card
from imece.cli.options import parse
from imece.data.chats import TEMPLATE, Chats
from imece.data.tokenizer import CONFIG as TOKENIZER_CONFIG
from imece.data.tokenizer import Tokenizer
from imece.errors import UserError
from imece.models.hugging_face import (
    CONFIG,
    INSTEAD,
    TOKENIZER_FILES,
    generation_config,
    hugging_face_shapes,
    to_hugging_face,
    tokenizer_config,
)
from imece.models.hugging_face_files import write_weights
from imece.observe.run_files import as_argument
from imece.observe.units import gigabytes, megabytes, si
from imece.reading import json_object
from imece.train.model.origin import Weights, tokenizer_of, weights_of
from imece.train.run.folder import Which, check_which, find_run
from imece.writing import lock as lock_file
from imece.writing import other_place, sync, sync_folder

PROG = "imece export"
DESCRIPTION = (
    "Write a trained model for other programs. --to hf: a folder with config.json, model.safetensors and the "
    "tokenizer, which transformers and what builds on it load as a Llama model, or as the kind of model that "
    "the run began with; adapters are in its weights. --to adapter: of a run with --lora.rank the adapters "
    "alone, for peft. README.md there is a card for the Hub."
)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GENERATION_CONFIG = "generation_config.json"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # names in config.json


@dataclass(frozen=True)
class ExportOptions:
    """Options of `imece export`."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """The folder to write: it must not exist yet, or be empty."""
    to: Literal["hf", "adapter"] = "hf"
    """hf: a model in Hugging Face's format; adapter: only the adapters, in peft's format."""
    which: Which = "best"
    """Which checkpoint: best (by validation loss), last, or the number of a step."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of the weights in the file. They are trained in fp32."""
    max_shard: str = "50GB"
    """Largest file of weights. A bigger model is written to several files with an index, as transformers
    does."""

    def __post_init__(self) -> None:
        check_which(self.which)


def run(argv: Sequence[str]) -> int:
    """`imece export ARGV`: exit status 0 when the whole folder is there."""
    options = parse(ExportOptions, argv, PROG, DESCRIPTION)
    folder, which = find_run(options.run, options.which)
    if not os.path.exists(folder.config_file) and os.path.exists(folder.path / CONFIG):
        raise UserError(
            f"{options.run} is no run, but a model in Hugging Face's format already: nothing to export"
        )
    config = folder.config()
    most_bytes = read_bytes(options.max_shard)
    target = free_folder(options.folder)
    saved, dtype = folder.saved(which), _DTYPES[options.dtype]
    if options.to == "adapter" and not config.lora.rank:
        raise UserError(f"{options.run} has trained all of the model, and no adapters: take --to hf")
    with _whole(target) as partial:
        if options.to == "adapter":
            parameters = write_adapter(partial, saved, config, dtype)
        else:
            parameters = write_hugging_face(partial, weights_of(folder, saved), dtype, most_bytes)
        write_card(partial, folder, saved, parameters, options.dtype, adapter=options.to == "adapter")
    size = sum(path.stat().st_size for path in target.iterdir())
    told = gigabytes(size) if size >= 1e9 else megabytes(size)
    print(f"{options.folder}: step {saved.step}, {si(parameters)} parameters, {options.dtype}, {told}")
    if options.to == "adapter":
        print(f"load  peft.PeftModel.from_pretrained(model, {options.folder!r})")
        base, which = find_run(config.model.weights)
        only = f" --which {which}" if which != "best" else ""
        first = f"what imece export {as_argument(base.path)} DIR{only} writes"
        loaded = first if base.config_file.exists() else str(base.path)
        print(f"      with the model that transformers loads from {loaded}")
        if config.lora.quantize != "none":
            # Weights of 16 bits or more are others than those that the adapters were trained beside.
            print(f"      by from_pretrained(..., quantization_config={FOUR_BITS})")
    else:
        print(f"load  transformers.AutoModelForCausalLM.from_pretrained({options.folder!r})")
    print(f"card  {os.path.join(options.folder, CARD)}: before you publish it, say the license there")
    return 0


def write_hugging_face(folder: Path, weights: Weights, dtype: torch.dtype, most_bytes: int) -> int:
    """Write all files into an existing folder and return the number of parameters. OSError if that fails;
    UserError if the weights cannot be read.

    If the run began from a folder, that folder's tokenizer is copied unchanged, and so is the chat template
    of a run's that others began from, which has no tokenizer_config.json. Memory holds one tensor at a
    time. config.json is written last: without it nobody reads the rest.
    """
    shape, tokenizer, origin = weights.config, tokenizer_of(weights), weights.home.origin
    stored = ((name.removeprefix(MODEL), weights.tensor(name)) for name in weights.names())
    began = json_object(origin / CONFIG, INSTEAD) if (origin / CONFIG).exists() else {}
    config, tensors = to_hugging_face(
        shape, stored, dtype=dtype, end=tokenizer.end, like=began.get("model_type")
    )
    write_weights(folder, hugging_face_shapes(shape), tensors, dtype=dtype, most_bytes=most_bytes)
    ends = _ends(weights, tokenizer)
    kept = {path.name: path for path in map(origin.joinpath, TOKENIZER_FILES) if path.exists()}
    if TOKENIZER_CONFIG in kept:
        ids = {key: value for key, value in began.items() if key in _TOKENS}
        _write_json(folder / CONFIG, _stopping(config | ids, ends))
        for name, path in kept.items():
            shutil.copyfile(path, folder / name)
        said = json_object(kept[GENERATION_CONFIG], INSTEAD) if GENERATION_CONFIG in kept else {}
        if said and (all_of_it := _stopping(said, ends)) != said:
            _write_json(folder / GENERATION_CONFIG, all_of_it)
        return shape.parameter_count
    # The tokenizer's post-processor would add tokens around each text, with which the model was not trained.
    plain = {**json.loads(tokenizer.to_json()), "post_processor": None}
    written = tokenizers.Tokenizer.from_str(json.dumps(plain))
    end, before = (written.id_to_token(token) for token in (tokenizer.end, tokenizer.before))
    assert end is not None and before is not None, (tokenizer.end, tokenizer.before)
    if tokenizer.begin is not None:
        around = TemplateProcessing([before, "$A"], special_tokens=[(before, tokenizer.begin)])
        written.post_processor = around
        plain = json.loads(written.to_str())
    first = {"bos_token_id": tokenizer.before}
    _write_json(folder / CONFIG, _stopping(config | first, ends))
    generation = generation_config(tokenizer.end) | first
    _write_json(folder / GENERATION_CONFIG, _stopping(generation, ends))
    if TEMPLATE in kept:
        shutil.copyfile(kept[TEMPLATE], folder / TEMPLATE)
    _write_json(folder / "tokenizer.json", plain)
    _write_json(folder / "tokenizer_config.json", tokenizer_config(shape, end) | {"bos_token": before})
    return shape.parameter_count


def _ends(weights: Weights, tokenizer: Tokenizer) -> set[int]:
    """The tokens at which the model has learned to stop."""
    data = weights.home.config().data
    if data.format == "chat":
        with contextlib.suppress(UserError):  # a template that refuses a question and its answer alone
            return Chats.of(data.fields, weights.home.tokenizer_file).ends()
    return {tokenizer.end}


def _stopping(content: dict[str, Any], ends: set[int]) -> dict[str, Any]:
    """The content of a file that says where a model stops, with these tokens beside those that it names: a
    base model's are not those that end an answer."""
    said = content.get("eos_token_id")
    every = said if isinstance(said, list) else [] if said is None else [said]
    every = [*every, *sorted(ends - {*every})]
    return content | {"eos_token_id": every if len(every) > 1 else every[0]}


def read_bytes(text: str) -> int:
    """ "5GB" -> 5_000_000_000, "2GiB" -> 2_147_483_648. UserError for anything else."""
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([kmgt]?)(i?)b", text.strip().lower())
    size = (
        int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " ")) if found else 0
    )
    if not size:
        raise UserError(f"--max-shard {text!r} is not a size like 5GB or 500MB")
    return size


def free_folder(name: str) -> Path:
    """The path of a new folder, with links resolved. UserError if something is there already."""
    if not name:
        raise UserError("DIR is empty: name a folder that does not exist yet")
    target = Path(os.path.realpath(name))
    try:
        if target.is_dir() and any(target.iterdir()):
            raise UserError(f"{name} is not empty: name a folder that does not exist yet")
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror}): name another folder") from error
    if target.exists() and not target.is_dir():
        raise UserError(f"{name} is a file: name a folder that does not exist yet")
    if target == Path.cwd():  # replacing it would leave whoever is in it in the old folder
        raise UserError(f"{name} is the current folder: name one that does not exist yet")
    return target


@contextlib.contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """Yields a folder beside `target` that is renamed to it at the end. On an error it is removed, and so are
    the folders around it that were made for it.

    This process holds a lock on it. If it is killed, the next process sees by the free lock that the folder
    is left over.
    """
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    made = list(takewhile(lambda folder: not os.path.lexists(folder), target.parents))
    lock: int | None = None
    try:
        partial.mkdir(parents=True)
        lock = _lock(partial)
        _clean(target)
        yield partial
        for path in partial.iterdir():
            with path.open("rb") as file:
                sync(file)
        sync_folder(partial)
        os.rename(partial, target)  # succeeds if the target is missing or an empty folder
        sync_folder(target.parent)
    except OSError as error:
        do = other_place(error, "folder")
        raise UserError(f"{target}: cannot be written ({error.strerror}): {do}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):  # above all if it is not empty: the model is in it
            for folder in made:
                folder.rmdir()
        if lock is not None:
            os.close(lock)


def _clean(target: Path) -> None:
    """Remove what killed processes left beside `target`. OSError if its folder cannot be read."""
    leftover = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.partial")
    for path in target.parent.iterdir():
        if leftover.fullmatch(path.name) and path.is_dir():
            with contextlib.suppress(OSError):  # somebody is writing it, or another user owns it
                lock = _lock(path)
                try:
                    shutil.rmtree(path)
                finally:
                    os.close(lock)


def _lock(folder: Path) -> int:
    """A descriptor that holds the folder's lock; the kernel frees it when the process ends. OSError if the
    lock is held."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock_file(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
