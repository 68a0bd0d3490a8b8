"""Finds a model to plan for by its name: a preset, a size, a config.json, or code that makes it."""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from imece.errors import UserError
from imece.models.presets import PRESETS
from imece.observe.units import si
from imece.plan.models.from_code import read_code
from imece.plan.models.from_config import CONFIG, read_config
from imece.plan.models.model import Model, from_shape
from imece.plan.models.published import published

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([mbt])", re.IGNORECASE)
_NUMBER = re.compile(r"\d[\d_]*(?:\.\d+)?(?:e\d+)?", re.IGNORECASE)
_OWNER = re.compile(r"(?:[\w.-]+/)?(?:meta-(?=llama))?")
_KINDS = re.compile(r"-(?:instruct|chat|base|hf|it|pt)(?=-|$)")  # of the same shape
_VERSION = re.compile(r"-(?:\d{4}|v\d+(?:\.\d+)?|\d+k)$")
_LLAMA_3 = re.compile(r"llama-3(?:\.[13])?-(?=(?:8|70|405)b$)")  # all of the same shapes, unlike 3.2
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
_LEAST, _MOST = 1e6, 20e12  # parameters
_NEAR = 0.06  # a size means a published model if it is no further off
_MLP_STEP = 64  # of which the width of an MLP is a multiple, for ranks and for tiles of products
_ASPECT = 100  # width over layers: 60 to 130 in published models

_OF_A_SIZE = re.compile(r"(llama|gpt-3|megatron)-.+")  # what a size may mean, beside presets

MODELS: Mapping[str, Model] = MappingProxyType(
    {name: from_shape(name, shape) for name, shape in PRESETS.items()} | published()
)
_SIZES = [each for name, each in MODELS.items() if name in PRESETS or _OF_A_SIZE.fullmatch(name)]


def find_model(text: str) -> Model:
    """A preset or published model by its name ("llama-8b", or "meta-llama/Llama-3.1-8B-Instruct"), a size
    ("7B"), a config.json or its folder, or "file.py:function".

    UserError, with the nearest names, for anything else, and for a file that cannot be used.
    """
    file, colon, function = text.rpartition(":")
    if colon and file.endswith(".py"):
        return read_code(Path(file), function)
    if text.endswith(".py"):
        raise UserError(f"{text}: which function of it builds the model? Say {text}:function")
    path = Path(text)
    if path.suffix == ".json" or path.is_absolute() or os.path.isfile(path / CONFIG):
        return read_config(path if path.suffix == ".json" else path / CONFIG)
    name = text.strip().lower()
    if not os.path.exists(path):
        name = _LLAMA_3.sub("llama-", _KINDS.sub("", _OWNER.sub("", name)))
    while name not in MODELS and (version := _VERSION.search(name)):
        name = name[: version.start()]
    if name in MODELS:
        return MODELS[name]
    size = _SIZE.fullmatch(text.strip())
    if size:
        return of_size(float(size[1]) * _UNITS[size[2].lower()], text.strip())
    if _NUMBER.fullmatch(text.strip()):
        return of_size(float(text), si(float(text)))
    if os.path.isdir(path):
        raise UserError(f"{text}: a folder without a {CONFIG}, which says what model it is: name another")
    near = difflib.get_close_matches(name, MODELS, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(_listed())}."
    raise UserError(
        f"unknown model {text!r}: {hint} A size (7B), a Hugging Face {CONFIG} and file.py:function do too"
    )


def _listed() -> list[str]:
    """All names, those of a family in one: llama-3.2-1b|3b."""
    families = itertools.groupby(MODELS, lambda name: name.rpartition("-")[:2])
    return [
        f"{family}{dash}{'|'.join(name.rpartition('-')[2] for name in names)}" if dash else ", ".join(names)
        for (family, dash), names in families
    ]


def of_size(parameters: float, name: str) -> Model:
    """The published model with about this many parameters, or a shape like theirs. UserError outside 1M to
    20T."""
    if not _LEAST <= parameters <= _MOST:
        raise UserError(f"a model of {name} parameters: from 1M to 20T can be planned for")
    of_its_size = [each for each in _SIZES if each.name.endswith(f"-{name.lower()}")]
    nearest = min(of_its_size or _SIZES, key=lambda each: _apart(each, parameters))
    return nearest if of_its_size or _apart(nearest, parameters) <= _NEAR else _like(parameters, name)


def _apart(model: Model, parameters: float) -> float:
    return abs(math.log(model.parameters / parameters))


def _like(parameters: float, name: str) -> Model:
    """A shape with heads of 128 (64 below 1B), an MLP of about 8/3 of the width, and 8 heads of keys and
    values from 8B on.

    The number of heads is a multiple of eight (of two below 1B), so that ranks can divide them.
    """
    head, step = (128, 8) if parameters >= 1e9 else (64, 2)
    vocabulary = 128256 if parameters >= 8e9 else 32000
    tied = parameters < 2e9
    best: tuple[float, Model] | None = None
    for layers in (*range(4, 32, 2), *range(32, 256, 4)):
        guess = math.sqrt(parameters / (12 * layers)) / head
        for heads in range(step, int(1.4 * guess) + step + 1, step):
            width = heads * head
            kv_heads = 8 if parameters >= 8e9 and heads % 8 == 0 else heads
            mlp_width = -(-8 * width // (3 * 256)) * 256
            model = Model(
                name, layers, width, heads, kv_heads, head, mlp_width, gated=True, vocab_size=vocabulary,
                tied_head=tied,
            )  # fmt: skip
            # Of the shapes of the right size, the one with the most usual proportions.
            off = _apart(model, parameters) + 0.1 * abs(math.log(width / layers / _ASPECT))
            if best is None or off < best[0]:
                best = off, model
    assert best is not None
    return _widened(best[1], parameters)


def _widened(model: Model, parameters: float) -> Model:
    """The model with the MLP that brings it next to so many parameters."""
    each = (model.parameters - replace(model, mlp_width=1).parameters) / (model.mlp_width - 1)
    steps = round((parameters - model.parameters) / each / _MLP_STEP)
    return replace(model, mlp_width=max(_MLP_STEP, model.mlp_width + steps * _MLP_STEP))
