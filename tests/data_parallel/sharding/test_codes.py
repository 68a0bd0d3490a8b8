"""Frozen parameters that are codes (tensor subclasses with more data beside them), sharded as bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from imece import MixedPrecision
from imece.checkpoint import TrainingState
from imece.data_parallel.footprint import counted, expected
from imece.data_parallel.sharding.freed import FreedParameter
from imece.data_parallel.sharding.trained import can_lie_flat
from tests.data_parallel.checks import Check, Job, jobs, passed
from tests.data_parallel.sharding.blocks import Block, Small, made, plain, units_of, wrap
from tests.data_parallel.sharding.test_frozen import Adapter, adamw
from tests.data_parallel.sharding.test_offload import all_of, late

FP16 = torch.float16


class Codes(nn.Parameter):
    """int8, which lie in the bits of float16, and a scale for each row beside them."""

    scale: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor) -> Codes:
        scale = values.detach().abs().amax(1, keepdim=True) / 127
        codes = (values.detach() / scale).round().to(torch.int8)
        made = cls(codes.view(-1).view(FP16), requires_grad=False)
        made.scale = scale
        return made

    def unpacked(self, rows: int) -> torch.Tensor:
        return self.view(torch.int8).view(rows, -1) * self.scale


class CodedLinear(nn.Module):
    """nn.Linear whose matrix is unpacked in forward, and again in backward."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = like.in_features, like.out_features
        self.weight = Codes.of(like.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Unpacked.apply(x, self.weight, self.out_features)  # type: ignore[no-untyped-call]
        return out


class Unpacked(torch.autograd.Function):
    """As bitsandbytes' product: it keeps the parameter itself for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Codes, rows: int) -> torch.Tensor:
        ctx.codes, ctx.rows = weight, rows
        return x @ weight.unpacked(rows).to(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient @ ctx.codes.unpacked(ctx.rows).to(gradient.dtype), None, None


def coded() -> Small:
    """Adapters beside matrices in codes."""
    return with_codes(CodedLinear)


def four_bits() -> Small:
    from bitsandbytes.nn import Linear4bit, Params4bit

    def of(like: nn.Linear) -> nn.Module:
        made = Linear4bit(
            like.in_features, like.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
        )
        made.weight = Params4bit(like.weight.detach(), requires_grad=False, quant_type="nf4", module=made)
        made.weight = made.weight.to("cpu")
        return made  # type: ignore[no-any-return]

    return with_codes(of)


def with_codes(layer: Callable[[nn.Linear], nn.Module]) -> Small:
    model = Small()
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.up = layer(block.up)  # type: ignore[assignment]
        block.down = Adapter(layer(block.down))  # type: ignore[arg-type, assignment]
    return model


def is_code(parameter: torch.Tensor) -> bool:
    return type(parameter) not in (nn.Parameter, FreedParameter)


def same_as_replicate(make: Callable[[], nn.Module]) -> Check:
    def check(group: dist.ProcessGroup) -> None:
        found, states = [], []
        for strategy, gather in (("replicate", False), ("zero3", False), ("zero3", True)):
            inner = made(make)
            names = {name for name, each in inner.named_parameters() if is_code(each)}
            kinds = {type(inner.get_parameter(name)) for name in names}
            assert names and len(kinds) == 1
            model, optimizer = wrap(inner, group, strategy, gather=gather, make=adamw)
            assert strategy == "replicate" or names <= {*model.frozen_names}
            found.append(torch.stack(list(plain(model, optimizer, 3))))
            if gather:
                assert all(isinstance(inner.get_parameter(name), FreedParameter) for name in names)
            with model.gathered():
                assert {type(inner.get_parameter(name)) for name in names} == kinds
            # As bytes: codes may be NaN in the dtype that they lie in.
            state = model.state_dict().items()
            states.append({name: each.reshape(-1).view(torch.uint8).clone() for name, each in state})
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]), found
        for other in states[1:]:
            assert list(other) == list(states[0])
            assert all(torch.equal(each, states[0][name]) for name, each in other.items())

    return check


def in_halves(make: Callable[[], nn.Module]) -> Check:
    """Each rank keeps its part of the codes, predicted and counted alike; with offload none on the device."""

    def check(group: dist.ProcessGroup) -> None:
        codes = sum(each.nbytes for each in made(make).parameters() if is_code(each))
        for offload in (None, late("parameters")):
            model, optimizer = wrap(made(make), group, make=adamw, offload=offload)
            list(plain(model, optimizer, 1))
            said, found = expected(model, [optimizer]), counted(model, [optimizer])
            assert said is not None and said.parameters == found.parameters
            assert offload is None or found.parameters == 0
            dtypes = {each.dtype for each in made(make).parameters() if is_code(each)}
            held = sum(store.own.nbytes for store in model.sharding.frozen if store.own.dtype in dtypes)
            assert codes <= group.size() * held <= codes + 128 * group.size() * len(units_of(model))

    return check


def not_cast(group: dist.ProcessGroup) -> None:
    """What is in the bits of a float stays, whatever dtype parameters are to have."""
    before = {name: each.view(torch.int8) for name, each in made(coded).named_parameters() if is_code(each)}
    for strategy, gather in (("zero1", False), ("zero3", False), ("zero3", True)):
        half = MixedPrecision(param=torch.bfloat16)
        model, _ = wrap(made(coded), group, strategy, gather=gather, make=adamw, precision=half)
        state = model.state_dict()
        assert all(
            torch.equal(state[f"module.{name}"].view(torch.int8), each) for name, each in before.items()
        )


def kept(make: Callable[[], nn.Module]) -> Check:
    """Pieces of all ranks go into a model that has other codes, and to another group."""

    def check(group: dist.ProcessGroup) -> None:
        model, optimizer = wrap(made(make), group, make=adamw)
        list(plain(model, optimizer, 1))
        state = TrainingState(model, [optimizer])
        saved = all_of({**state.own(), **state.still()}, group)
        wanted = torch.stack(list(plain(model, optimizer, 2)))
        inner, other = made(make), dist.new_group()
        model, optimizer = wrap(inner, group, make=adamw)
        with model.gathered(write=True):
            for each in inner.parameters():
                if is_code(each):
                    each.data.view(torch.uint8).fill_(7)
                    torch.autograd.graph.increment_version(each)
        model.regroup(other)
        TrainingState(model, [optimizer]).load(saved)
        assert torch.equal(torch.stack(list(plain(model, optimizer, 2))), wanted)
        model.leave()
        dist.destroy_process_group(other)

    return check


def written(group: dist.ProcessGroup) -> None:
    """Outside of `gathered`: an error that says what it is, and what to do."""
    model, _ = wrap(made(coded), group, make=adamw)
    inner = model.module
    said = r"parameter {} of {} is freed: .* use it inside of `with model.gathered\(\):`; to write into it, "
    for write, name, unit in (
        (lambda: inner.blocks[1].up.weight.copy_(torch.zeros(1)), "blocks.1.up.weight", "unit blocks.1"),
        (lambda: inner.blocks[1].up.weight.data.zero_(), "blocks.1.up.weight", "unit blocks.1"),
        (lambda: nn.init.ones_(inner.first.weight), "first.weight", "the root unit"),
        (lambda: inner.first.weight.__setitem__(0, 1.0), "first.weight", "the root unit"),
        (lambda: setattr(inner.first.weight, "data", torch.zeros(2)), "first.weight", "the root unit"),
        (lambda: torch._foreach_mul_([inner.first.weight], 2.0), "first.weight", "the root unit"),
    ):
        with pytest.raises(RuntimeError, match=said.format(name, unit)):
            write()
    state = {name: torch.zeros_like(each) for name, each in made(coded).state_dict().items()}
    with pytest.raises(RuntimeError, match=r"parameter .* is freed: .*model.load_state_dict"):
        inner.load_state_dict(state)
    model.load_state_dict({f"module.{name}": each for name, each in state.items()})
    assert not any(bool(each.any()) for each in model.state_dict().values())


def test_what_another_tensor_lies_in_stays() -> None:
    """As bitsandbytes' matrices in 8 bits, which their parameter has twice."""
    codes = Codes.of(torch.randn(4, 4))
    assert can_lie_flat(codes)
    codes.other = codes.data.view(torch.int8)  # type: ignore[attr-defined]
    assert not can_lie_flat(codes)
    assert not can_lie_flat(nn.parameter.UninitializedParameter())


CHECKS: dict[str, Check] = {
    "codes": same_as_replicate(coded),
    "in halves": in_halves(coded),
    "not cast": not_cast,
    "kept": kept(coded),
    "written": written,
}
FOUR_BITS: dict[str, Check] = {
    "4 bits": same_as_replicate(four_bits),
    "4 bits in halves": in_halves(four_bits),
    "4 bits, kept": kept(four_bits),
}
CHECKS |= FOUR_BITS
JOBS = [
    *jobs(__name__, ["codes", "in halves", "not cast", "kept", "written"], (2, "shm")),
    *jobs(__name__, ["codes", "kept"], (2, "gloo")),
]


@pytest.mark.parametrize("job", JOBS)
def test_codes(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)


@pytest.mark.parametrize("job", jobs(__name__, FOUR_BITS, (2, "gloo")))
def test_codes_of_bitsandbytes(job: Job, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("bitsandbytes")
    passed(job, request)
