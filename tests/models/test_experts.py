"""Mixtures of experts of transformers: what files have for a parameter, and products in autocast's dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from imece.errors import UserError
from imece.models.foreign import ForeignConfig
from imece.models.hugging_face import HuggingFaceModel, read_config
from imece.models.stored import Piece
from imece.train.model.origin import model_of, open_weights
from tests.models.test_foreign import saved

GATE_UP = "inner.model.layers.1.mlp.experts.gate_up_proj"


def test_an_expert_has_tensors_of_its_own_in_files(tmp_path: Path) -> None:
    theirs = saved(tmp_path, "qwen3_moe")
    config = read_config(tmp_path / "config.json")
    assert isinstance(config, ForeignConfig)
    assert config.forms(GATE_UP)[0] == tuple(
        Piece(f"model.layers.1.mlp.experts.{expert}.{name}.weight", (12, 16))
        for expert in range(4)
        for name in ("gate_proj", "up_proj")
    )
    router = "model.layers.1.mlp.gate.weight"
    assert config.forms(f"inner.{router}")[0] == (Piece(router, (4, 16)),)
    opened = HuggingFaceModel.open(tmp_path)
    whole = theirs.get_parameter(GATE_UP.removeprefix("inner.")).float().flatten()
    for start, stop in ((0, 192), (5, 7), (190, 400), (0, len(whole)), (len(whole) - 1, len(whole))):
        assert torch.equal(opened.slice(GATE_UP, start, stop), whole[start:stop]), (start, stop)


def test_files_may_have_all_experts_in_one_or_of_several_dtypes(tmp_path: Path) -> None:
    saved(tmp_path, "qwen3_moe")
    tensors: dict[str, Tensor] = {}
    for path in [*tmp_path.glob("model-*.safetensors")]:
        tensors |= load_file(path)
        path.unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    key = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file(tensors | {key: tensors[key].bfloat16()}, tmp_path / "model.safetensors")
    opened = HuggingFaceModel.open(tmp_path)
    assert opened.dtype(GATE_UP) is torch.float32
    mixed = opened.tensor(GATE_UP)
    assert torch.equal(mixed[3, 12:], tensors[key].bfloat16().float())
    assert torch.equal(mixed[3, :12], tensors[key.replace("up_proj", "gate_proj")])

    pieces = {name for name in tensors if ".1.mlp.experts." in name and "down" not in name}
    fused = {GATE_UP.removeprefix("inner."): mixed}
    save_file({name: each for name, each in tensors.items() if name not in pieces} | fused,
              tmp_path / "model.safetensors")  # fmt: skip
    assert torch.equal(HuggingFaceModel.open(tmp_path).tensor(GATE_UP), mixed)

    save_file({name: each for name, each in tensors.items() if name != key}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"there is no tensor {key}, but config\.json asks for it"):
        HuggingFaceModel.open(tmp_path)
    infinite = tensors[key].clone()
    infinite[0, 0] = torch.inf
    save_file(tensors | {key: infinite}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"{key} has numbers that are not finite"):
        model_of(open_weights(str(tmp_path)))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (lambda tensors: {name: each.mT for name, each in tensors.items()}, "in an order that is not read"),
        (
            lambda tensors: {"a": torch.cat([each.flatten() for each in tensors.values()])},
            "files have a in an order that is not",
        ),
        (lambda tensors: {name: each[1:] for name, each in tensors.items()}, "files have only a part of"),
        (lambda tensors: {}, "files have only a part of"),
    ],
)
def test_files_that_have_something_else(tmp_path: Path, written: Any, said: str) -> None:
    """One line, whatever transformers makes of its parameters when it writes them."""
    transformers = pytest.importorskip("transformers")
    content = transformers.OlmoConfig(hidden_size=16, num_attention_heads=4, num_hidden_layers=1).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(content))
    with (
        mock.patch("transformers.core_model_loading.revert_weight_conversion", lambda _, each: written(each)),
        pytest.raises(UserError, match=said) as refused,
    ):
        read_config(tmp_path / "config.json")
    assert "\n" not in str(refused.value)


class Products(TorchDispatchMode):
    """The dtypes in which the kernel for experts multiplies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "grouped_mm" in func.name():
            self.dtypes |= {args[0].dtype, args[1].dtype}
        return func(*args, **(kwargs or {}))


def test_experts_multiply_in_the_dtype_of_autocast(tmp_path: Path) -> None:
    saved(tmp_path, "mixtral")
    model = model_of(open_weights(str(tmp_path)))
    tokens, found = torch.arange(24).view(1, -1), {}
    for dtype in (torch.float32, torch.bfloat16):
        model.zero_grad()
        with Products() as products:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
                logits = model(tokens)
            logits.float().square().mean().backward()
        assert products.dtypes == {dtype}
        gradient = model.get_parameter(GATE_UP).grad
        assert gradient is not None and gradient.dtype is torch.float32
        found[dtype] = logits.float(), gradient
    for exact, rounded in zip(*found.values(), strict=True):
        assert 0 < float((exact - rounded).detach().norm()) < 0.05 * float(exact.detach().norm())
