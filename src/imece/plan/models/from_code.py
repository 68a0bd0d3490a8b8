"""The shape of a model made by a user's own code, on torch's meta device, so that it takes no memory.

A transformers model brings its config. For others the widths are read off the tensors: the embedding with
most rows, the largest list of modules of one class, and the matrices in its first module. The result is
compared with the model's real number of parameters.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imece.errors import UserError
from imece.listing import kind_of
from imece.plan.models.from_config import from_content, is_known, unplanned
from imece.plan.models.model import Model, from_shape

if TYPE_CHECKING:
    from torch import nn

_CLOSE = 0.02  # of the parameters may be of kinds that the planner does not know
_HEADS = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads")
_HEAD_WIDTHS = ("head_width", "head_dim")


def read_code(path: Path, function: str) -> Model:
    """The model that `function` in the file at `path` returns, called without arguments.

    UserError if there is no such file or function, it fails, or its result is no decoder-only transformer.
    """
    import torch
    from torch import nn

    made = _function(path, function)
    try:
        with torch.device("meta"):
            module = made()
    except (Exception, SystemExit) as error:  # any error of the user's code
        raise UserError(f"{path}:{function} failed on the meta device: {error!r}") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"{path}:{function} returned {kind_of(module)}, not a torch.nn.Module")
    try:
        found = of_module(module, f"{path.stem}:{function}")
    except ValueError as error:
        raise UserError(f"{path}:{function}: {error}; a config.json or a size (7B) does too") from error
    return found


def of_module(module: nn.Module, name: str) -> Model:
    """The shape of a module. ValueError, with what is missing, if it is no decoder-only transformer."""
    from torch import nn

    from imece.models.transformer import Transformer

    has = sum(each.numel() for each in module.parameters())
    if isinstance(module, Transformer) and (own := from_shape(name, module.config)).parameters == has:
        return own
    if (told := _as_its_config_says(module, name)) is not None and (
        told.name != name or _is_close(told.parameters, has)  # its encoders of images or sound are left out
    ):
        return told
    tables = [each for each in module.modules() if isinstance(each, nn.Embedding)]
    if not tables:
        raise ValueError("it has no nn.Embedding")
    table = max(tables, key=lambda each: each.num_embeddings)
    vocab_size, width = table.num_embeddings, table.embedding_dim
    blocks = _blocks(module)
    matrices = {key: each for key, each in blocks[0].named_parameters() if each.ndim == 2}
    out = [each.shape[1] for each in matrices.values() if each.shape[0] == width]
    rows = sum(each.shape[0] for each in matrices.values() if each.shape[1] == width)
    if not out:
        raise ValueError(f"its first block has no matrix of {width} rows")
    mlp_width = max(out)
    inner = min(out)  # of attention; all square matrices of a block count as rows, so its output does too
    rows -= width if inner == width else 0
    gated = rows - inner >= 2 * mlp_width
    kv_width = (rows - inner - (2 if gated else 1) * mlp_width) // 2
    head_width = _head_width(blocks[0], inner)
    if kv_width < 1 or inner % head_width or kv_width % head_width:
        heads = inner // head_width
        raise ValueError(f"its matrices are not those of attention with {heads} heads and an MLP")
    norms = [each for each in blocks[0].modules() if "norm" in type(each).__name__.lower()]
    over_residual = [each for each in norms if sum(one.shape[0] == width for one in each.parameters())]
    in_blocks = {id(each) for block in blocks for each in block.parameters()}
    found = Model(
        name, len(blocks), width, inner // head_width, kv_width // head_width, head_width, mlp_width, gated,
        vocab_size,
        tied_head=not any(
            isinstance(each, nn.Linear) and each.out_features == vocab_size
            and each.weight is not table.weight for each in module.modules()
        ),
        learned_positions=sum(each.num_embeddings for each in tables if each is not table),
        biases=any(key.endswith("bias") for key, _ in blocks[0].named_parameters()),
        norm="layer" if any(isinstance(each, nn.LayerNorm) for each in blocks[0].modules()) else "rms",
        norms=len(over_residual) or 2,
        head_norms=any(0 < one.shape[0] < width for each in norms for one in each.parameters()),
        ours=False,
    ).with_vectors(
        sum(each.numel() for each in blocks[0].parameters() if each.ndim == 1),
        sum(each.numel() for each in module.parameters() if each.ndim == 1 and id(each) not in in_blocks),
    )  # fmt: skip
    if not _is_close(found.parameters, has):
        raise ValueError(f"it has {has:,} parameters, and a transformer of its widths {found.parameters:,}")
    return found


def _as_its_config_says(module: nn.Module, name: str) -> Model | None:
    """The shape by its config; None without a transformers config, or if only the tensors can tell.
    ValueError if the config describes a model that cannot be planned."""
    to_dict = getattr(getattr(module, "config", None), "to_dict", None)
    content = to_dict() if callable(to_dict) else None
    if not isinstance(content, dict) or (not is_known(content) and unplanned(content) is None):
        return None
    try:
        return from_content(content, "its config", name)
    except UserError as error:
        raise ValueError(str(error)) from error


def _is_close(parameters: int, has: int) -> bool:
    return abs(parameters - has) <= _CLOSE * has


def _function(path: Path, function: str) -> Any:
    if not os.path.isfile(path):
        raise UserError(f"{path}: no such file, or none that you may read: name one as file.py:function")
    spec = importlib.util.spec_from_file_location(f"_planned_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # dataclasses look up their module there
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(loaded)
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} cannot be imported: {error!r}") from error
    finally:
        sys.path.pop(0)
        del sys.modules[spec.name]
    found = getattr(loaded, function, None)
    if not callable(found):
        names = [key for key, each in vars(loaded).items() if callable(each) and not key.startswith("_")]
        raise UserError(f"{path} has no function {function!r}; it has {', '.join(names) or 'none'}")
    return found


def _blocks(module: nn.Module) -> list[nn.Module]:
    from torch import nn

    lists = [
        list(each.children())
        for each in module.modules()
        if isinstance(each, nn.ModuleList | nn.Sequential)
        and len({type(one) for one in each.children()}) == 1
    ]
    if not lists:
        raise ValueError("it has no nn.ModuleList or nn.Sequential of blocks of one class")
    return max(lists, key=lambda each: sum(one.numel() for part in each for one in part.parameters()))


def _head_width(block: nn.Module, inner: int) -> int:
    """By an attribute of the block, a part of it or its config; else 64. inner: channels of all heads."""
    for part in block.modules():
        for holder in (part, getattr(part, "config", None)):
            for name in (*_HEAD_WIDTHS, *_HEADS):
                value = getattr(holder, name, None)
                if isinstance(value, int) and value > 0 and inner % value == 0:
                    return value if name in _HEAD_WIDTHS else inner // value
    return min(64, inner)
