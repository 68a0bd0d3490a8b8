"""`imece.ContextParallel`: a model trains on parts of sequences as one rank does on whole ones."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import imece
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.errors import UserError
from imece.mesh import Mesh
from imece.model_parallel.context import ContextParallel
from imece.models.cross_entropy import cross_entropy
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer
from tests.dropped import left_of
from tests.ranks import run_ranks

CONFIG = TransformerConfig(
    vocab_size=40, layers=2, width=16, heads=4, kv_heads=2, mlp_width=24, max_seq=32, tied_head=True
)
LENGTH = 32
STEPS, BATCH = 4, 4
EXACT = 1e-12


def model_of(config: TransformerConfig = CONFIG) -> Transformer:
    return Transformer(config, generator=seeded()).double()


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def batch_of(step: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """The global batch [BATCH, length]; some targets do not count, on some ranks more than on others."""
    tokens = torch.randint(40, (BATCH, length + 1), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].clone()
    targets[: step + 1, : length // 4] = -100
    return tokens[:, :-1], targets


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def on_one_rank() -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the steps and the parameters after them."""
    model = model_of()
    optimizer, losses = optimizer_of(model), []
    for step in range(STEPS):
        inputs, targets = batch_of(step)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def trained(
    mesh: imece.Mesh, strategy: str, recompute: bool, sequence: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """sequence: along an axis tensor too."""
    context = imece.ContextParallel(mesh)
    model = model_of()
    if mesh.size("tensor") > 1:
        imece.tensor_parallel(model, mesh, sequence=sequence)
    model.checkpoint_blocks = recompute
    wrapped, optimizer = imece.parallelize(model, optimizer_of(model), strategy, mesh, average="tokens")
    losses = []
    share = BATCH // mesh.batch_ranks
    rows = slice(mesh.batch_rank * share, (mesh.batch_rank + 1) * share)
    for step in range(STEPS):
        inputs, targets = (context.part(each[rows]) for each in batch_of(step))
        optimizer.zero_grad()
        with context:
            logits = wrapped(inputs, positions=context.positions(LENGTH))
            count = int((targets != -100).sum())
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            wrapped.weigh(loss, count).backward()
        optimizer.step()
        both = torch.tensor([loss.item() * count, count], dtype=torch.float64)
        imece.all_reduce(both, group=mesh.data_group)
        losses.append((both[0] / both[1]).item())
    with wrapped.gathered():
        return losses, {name: each.detach().clone() for name, each in model.named_parameters()}


def train_alike(shapes: list[dict[str, int]], backend: str) -> list[list[float]]:
    """For each mesh, strategy and recomputation: how far losses and parameters are from those of one rank."""
    losses, parameters = on_one_rank()
    away = []
    for shape in shapes:
        mesh = imece.init(shape, backend=backend)
        for strategy, recompute in (("replicate", True), ("zero1", False), ("zero3", True), ("zero3", False)):
            found, reached = trained(mesh, strategy, recompute)
            far = [abs(one - other) for one, other in zip(found, losses, strict=True)]
            far += [float((reached[name] - each).abs().max()) for name, each in parameters.items()]
            away.append(far)
        mesh.close()
    return away


@pytest.mark.parametrize(
    ("shapes", "backend"),
    [([{"replicate": 2, "context": 2}, {"context": 4}], "shm"), ([{"shard": 2, "context": 2}], "gloo")],
)
def test_a_model_trains_as_on_one_rank(shapes: list[dict[str, int]], backend: str) -> None:
    by_rank = run_ranks(train_alike, 4, args=(shapes, backend), backend=None)
    assert len(by_rank[0]) == 4 * len(shapes)
    assert max(far for found in by_rank for each in found for far in each) < EXACT


def train_divided() -> list[list[float]]:
    """Matrices and positions both divided: how far losses are from those of one rank."""
    losses, _ = on_one_rank()
    mesh = imece.init({"context": 2, "tensor": 2})
    found = [
        trained(mesh, "zero1", recompute, sequence)[0]
        for recompute, sequence in ((False, False), (True, True))
    ]
    return [[abs(one - other) for one, other in zip(each, losses, strict=True)] for each in found]


def test_matrices_may_be_divided_too() -> None:
    by_rank = run_ranks(train_divided, 4, backend=None)
    assert max(far for found in by_rank for each in found for far in each) < EXACT


def attention_within() -> dict[str, Any]:
    """Of two ranks: what the mode reaches, and what it must not; by how much they are off."""
    mesh = imece.init({"context": 2})
    context = imece.ContextParallel(mesh)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 16, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    q, k, v = (context.part(each, dim=2).requires_grad_() for each in (q, k, v))
    expected = context.part(whole, dim=2)
    threads: list[int] = []

    def attend(q: Tensor) -> Tensor:
        threads.append(threading.get_ident())
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def twice(q: Tensor) -> Tensor:
        return 2 * F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def recomputed(backward: Callable[[Tensor, Tensor], object]) -> float:
        """How far the gradient is that backward gives with recomputation."""
        leaf = q.detach().requires_grad_()
        with context:
            backward(checkpoint(attend, leaf, use_reentrant=False).square().sum(), leaf)
        assert leaf.grad is not None
        return float((leaf.grad - gradient).abs().max())

    def by_grad(loss: Tensor, leaf: Tensor) -> None:
        (leaf.grad,) = torch.autograd.grad(loss, [leaf])

    def in_another_thread(loss: Tensor, leaf: Tensor) -> None:
        """Inside of more backwards than torch lets one thread nest: as with a GPU's, which have their own."""
        threads.clear()
        nested = _Nested.apply(torch.ones((), requires_grad=True), [loss], 70)  # type: ignore[no-untyped-call]
        nested.backward()
        assert len(threads) == 1 and threads[0] != threading.get_ident()

    before = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with context:
        inside = attend(q)
        with torch.autocast("cpu", torch.bfloat16):
            narrow = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
        compiled = torch.compile(twice, backend="eager")(q)
    after = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    (gradient,) = torch.autograd.grad(inside.square().sum(), q)  # the ring itself needs no mode for it
    return {
        "inside": float((inside - expected).abs().max()),
        "outside": float((before - expected).abs().max()),
        "left": torch.equal(before, after),
        "whole": float((context.whole(inside, dim=2) - whole).abs().max()),
        "compiled": float((compiled - 2 * expected).abs().max()),
        "narrow": [str(narrow.dtype), float((narrow - expected).abs().max())],
        "recomputed": [
            recomputed(lambda loss, leaf: loss.backward()),
            recomputed(lambda loss, leaf: loss.backward(inputs=leaf)),
            recomputed(lambda loss, leaf: torch.autograd.backward([loss], [torch.ones_like(loss)])),
            recomputed(by_grad),
            recomputed(in_another_thread),
        ],
    }


class _Nested(torch.autograd.Function):
    """(x, loss, depth) -> x, whose backward is so many backwards deep, and the innermost is that of loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: list[Tensor], depth: int) -> Tensor:
        ctx.loss, ctx.depth = loss, depth
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        inner = ctx.loss[0]
        if ctx.depth:
            with torch.enable_grad():
                x = torch.ones((), requires_grad=True)
                inner = _Nested.apply(x, ctx.loss, ctx.depth - 1)  # type: ignore[no-untyped-call]
        inner.backward()
        return gradients[0], None, None


def test_what_the_mode_reaches() -> None:
    for found in run_ranks(attention_within, 2, backend=None):
        assert found["inside"] < EXACT and found["whole"] < EXACT and found["left"]
        assert found["outside"] > 0.1 and found["compiled"] < EXACT
        assert found["narrow"][0] == "torch.bfloat16" and found["narrow"][1] < 0.02
        assert max(found["recomputed"]) < EXACT and len(found["recomputed"]) == 5


def dropped() -> None:
    """Its group is free, and a group keeps connections open."""
    mesh = imece.init({"context": 2})

    def attended() -> list[Any]:
        context = imece.ContextParallel(mesh)
        tokens = context.part(batch_of(0)[0])
        model = model_of()
        with context:
            model(tokens, positions=context.positions(LENGTH)).square().sum().backward()
        return [context, *model.parameters()]

    assert left_of(attended) == []


def test_a_dropped_one_is_gone() -> None:
    run_ranks(dropped, 2, backend=None)


def without_the_ring() -> list[float]:
    """What the losses of `trained` are compared with must differ where each rank sees only its own."""
    mesh = imece.init({"replicate": 2, "context": 2})
    losses, _ = on_one_rank()
    with mock.patch.object(ContextParallel, "__enter__"), mock.patch.object(ContextParallel, "__exit__"):
        found, _ = trained(mesh, "replicate", recompute=False)
    return [abs(one - other) for one, other in zip(found, losses, strict=True)]


def test_parts_alone_are_not_the_sequence() -> None:
    assert min(min(found) for found in run_ranks(without_the_ring, 4, backend=None)) > 1e-6


def with_messages_of_its_own() -> float:
    """As over NCCL, which runs the calls on a group one after the other: a thread beside may begin a sum
    before these messages on one rank, and behind them on another. How far off the losses are."""
    mesh = imece.init({"context": 2})
    assert mesh.messages_group("context") is mesh.group("context")
    messages = dist.new_group(backend="gloo")
    refused = mock.Mock(side_effect=AssertionError("a message in the group of sums"))
    losses, _ = on_one_rank()
    with (
        mock.patch.object(Mesh, "messages_group", return_value=messages),
        mock.patch.object(SharedMemoryGroup, "send", refused),
        mock.patch.object(SharedMemoryGroup, "recv", refused),
    ):
        found, _ = trained(mesh, "zero1", recompute=True)
    return max(abs(one - other) for one, other in zip(found, losses, strict=True))


def test_messages_go_beside_sums() -> None:
    assert max(run_ranks(with_messages_of_its_own, 2, backend=None)) < EXACT


def refusals() -> list[str]:
    mesh = imece.init({"context": 2})
    context = imece.ContextParallel(mesh)
    q, odd = torch.zeros(1, 4, 8, 16), torch.zeros(1, 4, 7, 16)
    kv = q[:, :2]
    attend = F.scaled_dot_product_attention
    module = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.zeros(1, 8, 16)
    windowed = Transformer(replace(CONFIG, window=8))
    tried: list[Callable[[], object]] = [
        lambda: context.part(torch.zeros(1, 10)),
        lambda: context.positions(2),
        lambda: attend(q, q, q, attn_mask=torch.ones(8, 8, dtype=torch.bool)),
        lambda: attend(q, q, q, dropout_p=0.1, is_causal=True),
        lambda: attend(q, q[:, :, :6], q[:, :, :6]),
        lambda: attend(odd, odd, odd, is_causal=True),
        lambda: attend(q, kv, kv),
        lambda: attend(q, q[:, :3], q[:, :3], enable_gqa=True),
        lambda: attend(q[0], q[0], q[0]),
        lambda: attend(q, q, q[..., :8]),
        lambda: attend(q, q[..., :8], q[..., :8]),
        lambda: module(x, x, x, need_weights=False),
        lambda: module.eval().requires_grad_(False)(x, x, x, need_weights=False),
        lambda: windowed(torch.zeros(1, 8, dtype=torch.int64), positions=context.positions(16)),
    ]
    said = []
    for each in tried:
        with pytest.raises(ValueError) as caught, context:
            each()
        said.append(str(caught.value))
    with pytest.raises(ValueError) as caught, context:
        torch.zeros(2).sum()
    said.append(str(caught.value))
    context.part(torch.full((1, 8), mesh.rank))
    with pytest.raises(UserError) as different, context:
        attend(q, q, q)
    said.append(str(different.value))
    with pytest.raises(RuntimeError) as graphless, context:
        torch.zeros(()).backward()
    return [*said, str(graphless.value)]


def test_what_cannot_be() -> None:
    expected = [
        r"10 positions cannot be divided by 2 x 2 ranks along context, .* the nearest are 8 and 12$",
        "2 positions cannot be .* the nearest are 4 and 8$",
        r"attn_mask of shape \[8, 8\]",
        "dropout_p=0.1",
        "of the same positions",
        "7 positions on this rank",
        "4 heads of queries and 2 of keys cannot be matched; enable_gqa=True",
        "4 heads of queries and 3 of keys cannot be matched$",
        r"query \[4, 8, 16\].* the ring takes \[batch",
        "values alike",
        "another batch or width of heads",
        "nn.MultiheadAttention",
        "nn.MultiheadAttention",
        "positions for layers with a window of 8",
        "no attention went round the ring",
        "the ranks of a context group have different inputs, and need the same",
        "does not require grad",
    ]
    for said in run_ranks(refusals, 2, backend=None):
        for line, pattern in zip(said, expected, strict=True):
            assert "\n" not in line or line == said[-1]
            assert re.search(pattern, line), (pattern, line)


def without_positions() -> list[list[str]]:
    """What a first attention warns of: nothing; tokens alone; tokens and positions; embeddings."""
    mesh = imece.init({"context": 2})
    q, tokens = torch.zeros(1, 4, 8, 16), torch.zeros(1, 8, dtype=torch.int64)
    asked: list[Callable[[ContextParallel], object]] = [
        lambda context: None,
        lambda context: context.part(tokens),
        lambda context: (context.part(tokens), context.positions(8)),
        lambda context: context.part(q, dim=2),
    ]
    said = []
    for ask in asked:
        context = imece.ContextParallel(mesh)
        ask(context)
        with warnings.catch_warnings(record=True) as caught, context:
            warnings.simplefilter("always")
            for _ in range(2):
                F.scaled_dot_product_attention(q, q, q)
        said.append([str(each.message) for each in caught])
    return said


def test_a_model_that_is_told_no_positions() -> None:
    for nothing, tokens, both, embedded in run_ranks(without_positions, 2, backend=None):
        assert nothing == both == embedded == []
        assert len(tokens) == 1 and "nobody asked for context.positions(T)" in tokens[0]


def kept_for_backward(ranks: int, dtype: str) -> int:
    """Bytes that a forward of a long sequence leaves on this rank, besides parameters."""
    mesh = imece.init({"context": ranks})
    context, length = imece.ContextParallel(mesh), 256
    config = replace(CONFIG, max_seq=length, vocab_size=8)
    model = Transformer(config)
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)  # or another one would come to lie there
        return tensor

    held: list[Tensor] = []
    tokens = torch.zeros(1, length, dtype=torch.int64)
    with context, torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            logits = model(context.part(tokens), positions=context.positions(length))
        logits.float().square().sum().backward()
    return sum(kept.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_rank_keeps_its_share_of_the_activations(dtype: str) -> None:
    alone, *_ = run_ranks(kept_for_backward, 1, args=(1, dtype), backend=None)
    for ranks in (2, 4):
        found = run_ranks(kept_for_backward, ranks, args=(ranks, dtype), backend=None)
        assert len(set(found)) == 1
        # Under autocast also matrices in bf16, of which each rank has all.
        assert found[0] == pytest.approx(alone / ranks, rel=0.06), (alone, found)


def narrow_losses() -> list[float]:
    mesh = imece.init({"context": 2})
    context, model = imece.ContextParallel(mesh), Transformer(CONFIG, generator=seeded())
    inputs, targets = batch_of(0)
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model(inputs), targets, reduction="sum")
        found.append(loss.item())
        whole = torch.autograd.grad(loss, list(model.parameters()))
        with context:
            logits = model(context.part(inputs), positions=context.positions(LENGTH))
            loss = cross_entropy(logits, context.part(targets), reduction="sum")
            parts = torch.autograd.grad(loss, list(model.parameters()))
    total = torch.tensor([loss.item()])
    found.append(imece.all_reduce(total).item())
    for one, other in zip(whole, parts, strict=True):
        imece.all_reduce(other)
        found.append(float((one - other).norm() / one.norm()))
    return found


def test_bf16_is_as_near_as_bf16_is() -> None:
    for whole, parts, *gradients in run_ranks(narrow_losses, 2, backend=None):
        assert parts == pytest.approx(whole, rel=1e-3)
        assert max(gradients) < 0.03


def on_one() -> list[bool]:
    """Along an axis of one rank nothing is different, to the bit."""
    context, model = imece.ContextParallel(imece.init()), model_of()
    inputs, _ = batch_of(0)
    whole = model(inputs)
    with context:
        part = model(context.part(inputs), positions=context.positions(LENGTH))
    for of_part in (context.part, context.whole):
        with pytest.raises(ValueError, match=r"a tensor \[32\] has no dim 1 of positions"):
            of_part(inputs[0])
    return [torch.equal(part, whole), torch.equal(context.whole(part), whole)]


def test_one_rank_needs_no_ring() -> None:
    assert run_ranks(on_one, 1, backend=None) == [[True, True]]
