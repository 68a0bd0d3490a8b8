"""The loss of logits divided by the vocabulary equals that of whole logits, which no rank ever has."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import imece
from imece.errors import UserError
from imece.mesh import Mesh
from imece.models import cross_entropy as pieces
from imece.models.generate import generate
from imece.models.transformer import KVCache, Transformer
from tests.model_parallel.test_tensor import NET_PLAN, TIED, Net, batch, made, ours
from tests.ranks import run_ranks

ROWS = 4, 6  # batch, positions
WIDE = replace(TIED, vocab_size=512)


def some(width: int, dtype: torch.dtype, ignored: int) -> tuple[Tensor, Tensor]:
    """Logits and targets of all ranks, the first targets `ignored`."""
    generator = torch.Generator().manual_seed(width)
    logits = 3 * torch.randn(*ROWS, width, generator=generator, dtype=torch.float64)
    targets = torch.randint(width, ROWS, generator=generator)
    targets[0, :3] = ignored
    return logits.to(dtype), targets


def both(logits: Tensor, axis: DeviceMesh, *rest: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(loss, gradient) of divided logits and of whole ones; the gradients whole."""
    whole = logits.clone().requires_grad_()
    divided = distribute_tensor(logits.clone(), axis, [Shard(2)]).requires_grad_()
    found, expected = (imece.cross_entropy(each, *rest) for each in (divided, whole))
    (mine,), (theirs,) = (
        torch.autograd.grad(2 * loss, each) for loss, each in ((found, divided), (expected, whole))
    )
    assert isinstance(mine, DTensor)
    assert mine.placements == (Shard(2),)
    assert type(found) is Tensor
    return (found, mine.full_tensor()), (expected, theirs)


def as_of_whole() -> int:
    mesh = imece.init({"tensor": 3})
    axis = mesh.device_mesh["tensor"]
    pieces._CPU_PIECE_BYTES = 3 * 4 * 7  # a few rows at a time
    compared = 0
    for width in (21, 20, 16):  # of 20 the ranks have 7, 7 and 6, of 16 they have 6, 6 and 4
        for dtype, near in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
            for ignored, reduction in ((-100, "mean"), (5, "sum"), (0, "mean")):
                logits, targets = some(width, dtype, ignored)
                found, expected = both(logits, axis, targets, ignored, reduction)
                assert found[0].dtype == torch.promote_types(dtype, torch.float32)
                for one, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(one, other, rtol=near, atol=near)
                exact = F.cross_entropy(
                    logits.double().flatten(0, 1), targets.flatten(), None, None, ignored, reduction=reduction
                )
                torch.testing.assert_close(found[0].double(), exact, rtol=10 * near, atol=near)
                compared += 1
    return compared


def test_loss_and_gradient_are_those_of_whole_logits() -> None:
    assert run_ranks(as_of_whole, 3) == [27] * 3


def edges() -> list[str]:
    mesh = imece.init({"tensor": 2})
    axis = mesh.device_mesh["tensor"]
    logits, targets = some(8, torch.float32, -100)
    (loss, gradient), _ = both(logits, axis, targets.clone().fill_(-100), -100, "sum")
    assert float(loss) == 0
    assert not gradient.any()
    # Far apart, each rank's exponentials alone would overflow, or vanish.
    far = logits.clone()
    far[..., :4], far[..., 4:] = far[..., :4] + 1000, far[..., 4:] - 1000
    for one, other in zip(*both(far, axis, targets), strict=True):
        torch.testing.assert_close(one, other)
    spoilt = logits.clone()
    spoilt[1, 1, 6] = math.nan  # what rank 1 has, all see
    assert both(spoilt, axis, targets)[0][0].isnan()
    replicated = distribute_tensor(logits, axis, [Replicate()])
    assert torch.equal(imece.cross_entropy(replicated, targets), imece.cross_entropy(logits, targets))
    loss = imece.cross_entropy(distribute_tensor(logits, axis, [Shard(2)]).requires_grad_(), targets)
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(loss, [loss], create_graph=True) and loss.backward(create_graph=True)
    said = []
    for placement, wrong in (
        (Shard(1), targets),
        (Partial(), targets),
        (Shard(2), targets[:, 1:]),
        (Shard(2), targets.clone().fill_(8)),
        (Shard(2), targets.clone().fill_(-1)),
    ):
        local = logits.chunk(2, placement.dim)[mesh.rank] if isinstance(placement, Shard) else logits
        divided = DTensor.from_local(local, axis, [placement], run_check=False)
        with pytest.raises((ValueError, RuntimeError, IndexError)) as caught:
            imece.cross_entropy(divided, wrong)
        said.append(str(caught.value))
    with pytest.raises(ValueError, match="the last of 2 ranks has none") as caught_alike:
        imece.cross_entropy(distribute_tensor(logits[..., :1], axis, [Shard(2)]), targets * 0)
    return [*said, str(caught_alike.value)]


def test_edges_and_what_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(edges, 2)
    assert "sharded along the vocabulary, dim 2 of [4, 6, 8], over one axis of ranks" in first[0]
    assert "placed as [Shard(dim=1)]" in first[0]
    assert "Partial" in first[1]
    assert "logits [4, 6, 8], the vocabulary last, want targets [4, 6], not [4, 5]" in first[2]
    assert "out of bounds" in first[3]
    assert "out of bounds" in first[4]
    assert [each.partition("index")[0] for each in first] == [each.partition("index")[0] for each in second]


def beside_torch() -> None:
    """Of a model that torch divided, and of ours with torch's loss."""
    mesh = imece.init({"tensor": 2})
    axis = mesh.device_mesh["tensor"]
    logits, targets = some(8, torch.float64, -100)
    head = nn.Linear(8, 8).double()
    for each in head.parameters():
        imece.broadcast(each.data, 0)
    plan = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(head, axis, plan)
    divided = head(logits)
    with loss_parallel():
        theirs = F.cross_entropy(divided.flatten(0, 1), targets.flatten())
        (expected,) = torch.autograd.grad(theirs, head.weight, retain_graph=True)
    found = imece.cross_entropy(divided, targets)
    gradient = cast(DTensor, torch.autograd.grad(found, head.weight)[0])
    theirs, expected = (cast(DTensor, each).full_tensor() for each in (theirs, expected))
    torch.testing.assert_close(found, theirs, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient.full_tensor(), expected, rtol=0, atol=1e-12)

    model = imece.tensor_parallel(made(ours(TIED), 0), mesh, divided_logits=True)
    tokens, targets = batch(0)
    with loss_parallel():
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
    known = [each.grad for each in model.parameters()]
    model.zero_grad()
    imece.cross_entropy(model(tokens), targets).backward()
    torch.testing.assert_close([each.grad for each in model.parameters()], known, rtol=0, atol=1e-12)


def test_torchs_own_way_gives_the_same() -> None:
    run_ranks(beside_torch, 2)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gave out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        for each in given if isinstance(given, tuple | list) else [given]:
            if type(each) is Tensor and each.is_floating_point():  # what travels is bytes too
                self.elements = max(self.elements, each.numel())
        return given


def largest(mesh: Mesh, **options: Any) -> int:
    model = imece.tensor_parallel(made(ours(WIDE), 0), mesh, **options)
    tokens, targets = batch(0)
    imece.cross_entropy(model(tokens), targets).backward()  # the backend prepares its memory
    with Largest() as seen:
        imece.cross_entropy(model(tokens), targets).backward()
    return int(seen.elements)


def never_whole() -> None:
    mesh = imece.init({"tensor": 2})
    tokens, _ = batch(0)
    logits = tokens.numel() * WIDE.vocab_size
    found = largest(mesh), largest(mesh, divided_logits=True)
    assert found == (logits, logits // 2), (found, logits)


def test_no_rank_ever_has_all_logits() -> None:
    run_ranks(never_whole, 2)


def used() -> None:
    mesh = imece.init({"tensor": 2})
    whole = made(ours(TIED), seed=0)
    assert isinstance(whole, Transformer)
    model = imece.tensor_parallel(copy.deepcopy(whole), mesh, divided_logits=True)
    tokens, targets = batch(0)
    with torch.no_grad():
        expected = whole(tokens)
        divided = model(tokens)
        assert isinstance(divided, DTensor)
        assert divided.shape == expected.shape
        torch.testing.assert_close(divided.full_tensor(), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(
            imece.cross_entropy(divided, targets), imece.cross_entropy(expected, targets), rtol=0, atol=1e-12
        )
        for options in ({"last_only": True}, {"cache": KVCache(TIED, len(tokens), dtype=torch.float64)}):
            given = model(tokens, **options)
            assert type(given) is Tensor  # as whoever chooses a token wants it
            same = expected[:, -1:] if "last_only" in options else expected
            torch.testing.assert_close(given, same, rtol=0, atol=1e-12)
    said = [list(generate(each, [1, 2, 3], 12, temperature=0)) for each in (model, whole)]
    assert said[0] == said[1]
    half, exact = copy.deepcopy(model).float(), copy.deepcopy(whole).float()
    with torch.autocast("cpu", torch.bfloat16):
        given = half(tokens)
        assert given.dtype == torch.bfloat16
        got, want = imece.cross_entropy(given, targets), imece.cross_entropy(exact(tokens), targets)
    got.backward()
    assert got.dtype == torch.float32
    assert abs(got.item() - want.item()) < 0.05
    assert all(each.grad is not None and each.grad.isfinite().all() for each in half.parameters())
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())  # no wrong loss
    headless = {name: kind for name, kind in NET_PLAN.items() if name != "head"}
    with pytest.raises(UserError, match="divides no head: name the Linear that it is as 'vocab'"):
        imece.tensor_parallel(Net(), mesh, plan=headless | {"tokens": "vocab"}, divided_logits=True)


def test_evaluation_sampling_and_bf16() -> None:
    run_ranks(used, 2)


def compiled() -> None:
    mesh = imece.init({"tensor": 2})
    logits, targets = some(8, torch.float64, -100)
    found = []
    for compiling in (False, True):
        torch.manual_seed(0)
        head = nn.Sequential(nn.Linear(8, 16, dtype=torch.float64))
        model = imece.tensor_parallel(head, mesh, plan={"0": "vocab"}, divided_logits=True)

        def loss(x: Tensor, targets: Tensor, model: nn.Module = model) -> Tensor:
            return imece.cross_entropy(model(x), targets)

        run = torch.compile(loss, backend="aot_eager", dynamic=False) if compiling else loss
        run(logits, targets).backward()
        found.append([each.grad for each in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)


def test_compiled() -> None:
    run_ranks(compiled, 2)
