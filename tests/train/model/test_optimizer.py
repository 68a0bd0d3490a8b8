"""Which optimizer updates which parameter, and that states can be restored."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.optim import _muon

from imece.models.presets import PRESETS
from imece.models.transformer import Transformer
from imece.train.config import Optimizer, OptimizerSection
from imece.train.model.muon import orthogonalised
from imece.train.model.optimizer import make_optimizers

TORCHS = _muon._zeropower_via_newtonschulz
KINDS: tuple[Optimizer, ...] = ("adamw", "muon")
SECTION = OptimizerSection(lr=0.25, weight_decay=0.5, beta1=0.7, beta2=0.8, eps=1e-6)


def small(tied: bool = False) -> Transformer:
    config = dataclasses.replace(PRESETS["tiny"], width=16, mlp_width=24, vocab_size=30, tied_head=tied)
    return Transformer(config, generator=torch.Generator().manual_seed(1))


def updates(model: Transformer, optimizers: list[torch.optim.Optimizer], steps: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_once_and_decay_on_matrices(kind: Optimizer, tied: bool) -> None:
    model = small(tied)
    optimizers = make_optimizers(model, dataclasses.replace(SECTION, kind=kind))
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    found = [names[parameter] for _, group in groups for parameter in group["params"]]
    assert sorted(found) == sorted(names.values())
    for optimizer, group in groups:
        assert group["lr"] == 0.25
        for parameter in group["params"]:
            matrix = names[parameter].split(".")[-2] != "norm"
            assert group["weight_decay"] == (0.5 if matrix else 0.0), names[parameter]
            inner = matrix and names[parameter].startswith("blocks.")
            assert isinstance(optimizer, torch.optim.Muon) == (kind == "muon" and inner), names[parameter]
        if isinstance(optimizer, torch.optim.AdamW):
            assert (group["betas"], group["eps"]) == ((0.7, 0.8), 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_of_each_parameter(kind: Optimizer) -> None:
    model = small()
    optimizers = make_optimizers(model, dataclasses.replace(SECTION, kind=kind))
    updates(model, optimizers, 3, seed=1)
    kept = [set(state) for optimizer in optimizers for state in optimizer.state.values()]
    assert len(kept) == len(list(model.parameters()))
    assert all(keys in ({"exp_avg", "exp_avg_sq", "step"}, {"momentum_buffer"}) for keys in kept)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_muons_iteration_in_fp32_is_torchs_in_bf16(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    rest = ((3.4445, -4.775, 2.0315), 5, 1e-7)
    ours, theirs = orthogonalised(matrix, *rest), TORCHS(matrix, *rest).float()
    assert ours.shape == shape and ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.03 * float(theirs.abs().max()))
    singular = torch.linalg.svdvals(ours)
    assert singular.median() > 0.5 and singular.max() < 1.3


@pytest.mark.parametrize("in_hardware", [True, False])
def test_muon_is_in_fp32_where_bf16_is_emulated(monkeypatch: pytest.MonkeyPatch, in_hardware: bool) -> None:
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", TORCHS)
    monkeypatch.setattr("imece.train.model.optimizer.multiplies_bf16", lambda device: in_hardware)
    make_optimizers(small(), dataclasses.replace(SECTION, kind="muon"))
    assert _muon._zeropower_via_newtonschulz is (TORCHS if in_hardware else orthogonalised)


def test_muon_is_made_for_the_device_on_which_it_will_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is to be read from files has no memory yet when its optimizers are made."""
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", TORCHS)
    monkeypatch.setattr("imece.train.model.optimizer.multiplies_bf16", lambda device: device.type == "cuda")
    with torch.device("meta"):
        model = small()
    make_optimizers(model, dataclasses.replace(SECTION, kind="muon"), torch.device("cuda", 0))
    assert _muon._zeropower_via_newtonschulz is TORCHS
