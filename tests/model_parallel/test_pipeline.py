"""A pipeline trains like one rank, with every schedule, cut and strategy over the data axes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

import imece
from imece import Pipeline, parallelize
from imece.collectives.shared_memory.group import SharedMemoryGroup
from imece.errors import UserError
from imece.mesh import Mesh
from imece.model_parallel import pipeline as pipeline_module
from imece.model_parallel import shared
from imece.model_parallel.divided import divided_parameters
from imece.model_parallel.shared import Shared
from imece.models.transformer import Transformer
from tests.data_parallel.checks import Check, Job, jobs, passed, slow
from tests.dropped import left_of
from tests.live import Live
from tests.meshes import FakeMesh
from tests.model_parallel.test_cutting import config
from tests.ranks import run_ranks

EXACT = 1e-12
STEPS = 3
BATCH, LENGTH = 8, 6  # of each data rank

Batch = tuple[Tensor, Tensor]


def tokens_of(step: int, size: int) -> Batch:
    drawn = torch.randint(11, (size, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1], drawn[:, 1:]


def numbers_of(step: int, size: int) -> Batch:
    x, y = torch.randn(2, size, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x, y


def transformer(tied: bool = False, layers: int = 4, checkpoint: bool = False) -> nn.Module:
    model = Transformer(
        config(tied_head=tied, layers=layers), generator=torch.Generator().manual_seed(3)
    ).double()
    model.checkpoint_blocks = checkpoint
    return model


def tied_and_frozen() -> nn.Module:
    """The optimizer would step the embedding by decay alone, if it had a gradient of zeros."""
    model = transformer(tied=True)
    model.get_parameter("embed.weight").requires_grad_(False)
    return model


def even() -> nn.Module:
    """What can be halved."""
    shape = config(vocab_size=12, kv_heads=2, tied_head=True)
    return Transformer(shape, generator=torch.Generator().manual_seed(3)).double()


class Both(nn.Module):
    """Takes a pair, or one tensor, and returns a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.scale: Tensor
        self.register_buffer("scale", torch.full((5,), 0.5))

    def forward(self, given: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, left = given if isinstance(given, tuple) else (given, given)
        return torch.tanh(self.layer(x)), left * self.scale


class Joined(nn.Module):
    """Of a pair."""

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return given[0] + given[1]


def sequence() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, 7), nn.GELU(), nn.Linear(7, 7)]
    return nn.Sequential(*layers, nn.Linear(7, 6), nn.Linear(6, 5), nn.LayerNorm(5)).double()


def pairs() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(Both(), Both(), Both(), Joined()).double()


class Tied(nn.Module):
    """Two modules that have one weight, and one module that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight, self.third = self.first.weight, self.second

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.third(torch.tanh(self.second(self.first(x)))))


def tied_within_stages() -> nn.Module:
    torch.manual_seed(3)
    layer = nn.Linear(5, 5)
    return nn.Sequential(nn.Sequential(layer, nn.Tanh(), layer), Tied()).double()


@dataclass(frozen=True)
class Case:
    """What is trained, and by whom."""

    axes: dict[str, int]
    schedule: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch] = tokens_of
    strategy: str | None = "replicate"  # None: no wrapper
    options: dict[str, Any] = field(default_factory=dict)
    clip: float | None = None  # norms are compared too
    sequence: bool = False  # where there is an axis tensor

    def loss(self, output: Any, targets: Tensor) -> Tensor:
        if self.batch is tokens_of:
            return F.cross_entropy(output.flatten(0, 1), targets.flatten())
        return F.mse_loss(output, targets)


def optimizer_of(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=1e-2, weight_decay=0.1)


def one_rank(case: Case, ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters after all steps, of one process on the batches of all data ranks."""
    model = case.make()
    optimizer, losses = optimizer_of(model.parameters()), []
    for step in range(STEPS):
        inputs, targets = case.batch(step, BATCH * ranks)
        optimizer.zero_grad()
        loss = case.loss(model(inputs), targets)
        loss.backward()
        if case.clip is not None:
            norm = torch.nn.utils.get_total_norm(
                each.grad for each in model.parameters() if each.grad is not None
            )
            for each in model.parameters():
                assert each.grad is not None
                each.grad.mul_(min(1.0, case.clip / norm.item()))
            losses.append(norm.item())
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def mine(batch: Batch, mesh: Mesh) -> Batch:
    inputs, targets = (each.chunk(mesh.batch_ranks)[mesh.batch_rank] for each in batch)
    return inputs, targets


def piped(case: Case, mesh: Mesh) -> tuple[list[float], dict[str, Tensor], Pipeline]:
    model = case.make()
    if mesh.size("tensor") > 1:
        model = imece.tensor_parallel(model, mesh, sequence=case.sequence)
    pipeline = Pipeline(model, mesh, micro_batches=4, schedule=case.schedule, loss=case.loss, **case.options)
    part: Any = pipeline.part
    optimizer: Any = optimizer_of(part.parameters())
    if case.strategy is not None:
        part, optimizer = parallelize(part, optimizer, case.strategy, mesh)
    losses = []
    for step in range(STEPS):
        loss = pipeline.step(*mine(case.batch(step, BATCH * mesh.batch_ranks), mesh))
        if case.clip is not None:
            losses.append(part.clip_grad_norm_(case.clip).item())
        optimizer.step()
        optimizer.zero_grad()
        imece.all_reduce(loss, "avg", group=mesh.data_group)
        losses.append(loss.item())
    return losses, pipeline.part.state_dict(), pipeline


def differs(case: Case) -> float:
    """From one rank, at most: losses and parameters."""
    with contextlib.closing(imece.init(case.axes)) as mesh:
        losses, parameters, pipeline = piped(case, mesh)
        expected, whole = one_rank(case, mesh.batch_ranks)
        assert parameters
        inputs, targets = mine(case.batch(99, BATCH * mesh.batch_ranks), mesh)
        model = case.make()
        model.load_state_dict(whole)
        with torch.no_grad():
            losses.append(pipeline.evaluate(inputs, targets).item())
            expected.append(case.loss(model(inputs), targets).item())
        divided = divided_parameters(pipeline.part)
        return max(
            max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
            *(
                (each - (divided[name].of(whole[name]) if name in divided else whole[name]))
                .abs()
                .max()
                .item()
                for name, each in parameters.items()
            ),
        )


def trains_as_one_rank(case: Case, group: dist.ProcessGroup) -> None:
    assert differs(case) < EXACT


SCHEDULES = ("gpipe", "1f1b", "interleaved")
TWO, FOUR, BOTH = {"pipeline": 2}, {"pipeline": 4}, {"pipeline": 2, "replicate": 2}
THREE = {"pipeline": 2, "tensor": 2}
tied = partial(transformer, tied=True)

OF_TWO = {
    **{f"tied {each}": Case(TWO, each, tied) for each in SCHEDULES},
    **{f"untied {each}": Case(TWO, each, transformer, strategy=None) for each in SCHEDULES},
    "clipped": Case(TWO, "1f1b", tied, strategy="zero1", clip=0.05),
    "recomputed": Case(TWO, "1f1b", partial(transformer, checkpoint=True)),
    "uneven": Case(TWO, "1f1b", tied, options={"cuts": [1]}),
    "tied and frozen": Case(TWO, "1f1b", tied_and_frozen, strategy=None),
    "tied and frozen zero1": Case(TWO, "1f1b", tied_and_frozen, strategy="zero1"),
    "head alone": Case(TWO, "gpipe", tied, options={"cuts": [4]}),
    "sequence": Case(TWO, "interleaved", sequence, numbers_of, options={"cuts": [1, 4, 5]}),
    "three chunks": Case(TWO, "interleaved", sequence, numbers_of, options={"chunks": 3}),
    "pairs": Case(TWO, "1f1b", pairs, numbers_of),
    "tied within stages": Case(TWO, "1f1b", tied_within_stages, numbers_of),
}
OF_FOUR = {
    **{
        f"{schedule} {strategy}": Case(BOTH, schedule, tied, strategy=strategy)
        for schedule in SCHEDULES
        for strategy in ("replicate", "zero1", "zero2")
    },
    "tensor too": Case(THREE, "1f1b", even, strategy="zero1", clip=0.05),
    "tensor and sequence too": Case(THREE, "interleaved", even, sequence=True, clip=0.05),
    "four stages 1f1b": Case(FOUR, "1f1b", tied),
    "four stages interleaved": Case(FOUR, "interleaved", sequence, numbers_of, strategy=None),
    "four stages gpipe": Case(
        FOUR, "gpipe", sequence, numbers_of, strategy=None, options={"cuts": [1, 3, 7]}
    ),
}
NOT_ALWAYS = ("tied gpipe", "untied 1f1b", "untied interleaved", "three chunks", "uneven")
ALWAYS_ON_GLOO = ("tied interleaved", "untied 1f1b", "pairs")
ALWAYS_ON_FOUR = (
    "gpipe replicate",
    "1f1b zero1",
    "interleaved zero2",
    "tensor and sequence too",
    "four stages 1f1b",
    "without the sum over data",
    "steps add up",
    "keeps activations of",
    "an unwrapped part is refused",
)


# Negative controls: what is there to make it right, taken away.


def without_the_sum_of_the_shared(group: dist.ProcessGroup) -> None:
    with mock.patch.object(Shared, "sum"):
        assert differs(Case(TWO, "1f1b", tied)) > 1e-4


def without_the_sum_over_data(group: dist.ProcessGroup) -> None:
    untold = mock.patch.object(Pipeline, "_take", lambda self, wrapper: None)
    with untold, mock.patch.object(Pipeline, "_check_wrapped"):
        assert differs(Case(BOTH, "1f1b", transformer, strategy="replicate")) > 1e-4


def shared_parameters_stay_equal(group: dist.ProcessGroup) -> None:
    with contextlib.closing(imece.init(TWO)) as mesh:
        _, parameters, _ = piped(Case(TWO, "1f1b", partial(transformer, tied=True)), mesh)
        embed = parameters["embed.weight"]
        other = imece.broadcast(embed.clone(), 0, group=mesh.group("pipeline"))
        assert torch.equal(embed, other)


def shared_parameters_begin_equal(group: dist.ProcessGroup) -> None:
    with contextlib.closing(imece.init(TWO)) as mesh:
        model = Transformer(config(tied_head=True))  # by each rank's own random state
        part = Pipeline(model, mesh, micro_batches=2, loss=F.cross_entropy).part
        embed = part.state_dict()["embed.weight"]
        assert torch.equal(embed, imece.broadcast(embed.clone(), 0))


def shared_parameters_may_be_frozen_later(group: dist.ProcessGroup) -> None:
    """Not earlier: then no stage sums what it brings."""
    for strategy in (None, "zero1"):
        with contextlib.closing(imece.init(TWO)) as mesh:
            case = Case(TWO, "1f1b", tied)
            whole, pipeline = case.make(), Pipeline(case.make(), mesh, micro_batches=4, loss=case.loss)
            part: nn.Module = pipeline.part
            steppers: list[Any] = [optimizer_of(whole.parameters()), optimizer_of(part.parameters())]
            if strategy is not None:
                part, steppers[1] = parallelize(part, steppers[1], strategy, mesh)
            for step in range(2):
                inputs, targets = case.batch(step, BATCH)
                case.loss(whole(inputs), targets).backward()
                pipeline.step(inputs, targets)
                for each in steppers:
                    each.step()
                    each.zero_grad()
                for model in (whole, pipeline.part):
                    model.get_parameter("embed.weight").requires_grad_(False)
            expected = whole.state_dict()
            for name, found in pipeline.part.state_dict().items():
                assert (found - expected[name]).abs().max() < EXACT, (strategy, name)
            frozen = Pipeline(tied_and_frozen(), mesh, micro_batches=4, loss=case.loss)
            frozen.part.get_parameter("embed.weight").requires_grad_(True)
            with pytest.raises(ValueError, match=r"embed\.weight, which several stages have, was frozen"):
                frozen.step(*case.batch(0, BATCH))


# Gradients that stay for a while.


def steps_add_up(group: dist.ProcessGroup) -> None:
    """Inside of no_sync and after it, and without zero_grad, as with any wrapped model."""
    case = Case(BOTH, "1f1b", tied)
    for strategy in ("replicate", "zero1"):
        with contextlib.closing(imece.init(case.axes)) as mesh:
            pipeline = Pipeline(case.make(), mesh, micro_batches=4, loss=case.loss)
            part, optimizer = parallelize(pipeline.part, optimizer_of, strategy, mesh)
            batches = [case.batch(step, BATCH * mesh.batch_ranks) for step in range(3)]
            pipeline.step(*mine(batches[0], mesh))
            with part.no_sync():
                pipeline.step(*mine(batches[1], mesh))
            pipeline.step(*mine(batches[2], mesh))
            optimizer.step()
            model = case.make()
            whole = optimizer_of(model.parameters())
            for inputs, targets in batches:
                case.loss(model(inputs), targets).backward()
            whole.step()
            expected = model.state_dict()
            for name, each in pipeline.part.state_dict().items():
                assert (each - expected[name]).abs().max() < EXACT, (strategy, name)


class Sum(nn.Module):
    """The gradient of each element is that of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


def half_adds_up_in_fp32(group: dist.ProcessGroup) -> None:
    """Stages in bf16 send bf16, and micro-batches are summed in fp32: in bf16 256 + 1 is 256."""
    with contextlib.closing(imece.init(TWO)) as mesh:
        pipeline = Pipeline(
            nn.Sequential(Sum(), Sum()), mesh, micro_batches=4, loss=lambda found, by: (found * by).sum()
        )
        precision = imece.MixedPrecision(torch.bfloat16, torch.float32)
        part: Any = parallelize(pipeline.part, optimizer_of, "zero1", mesh, precision=precision)[0]
        first, last = torch.tensor([256.0, 1, 1, 1]), torch.ones(4)
        inputs = torch.zeros(4, 3, dtype=torch.bfloat16)
        pipeline.step(inputs, first.view(4, 1))
        with part.no_sync():
            pipeline.step(inputs, first.view(4, 1))
        pipeline.step(inputs, last.view(4, 1))
        (held,) = part.sharding.parts
        assert held.parameter.grad is not None
        assert set(held.parameter.grad.tolist()) == {(2 * first.sum() + last.sum()).item() / 4}


def evaluates_before_and_after_precision(group: dist.ProcessGroup) -> None:
    """Stages send bf16 where they sent fp32 before."""
    with contextlib.closing(imece.init(TWO)) as mesh:
        pipeline = Pipeline(nn.Sequential(Sum(), Sum()), mesh, micro_batches=2, loss=F.mse_loss)
        inputs, targets = torch.ones(4, 3, dtype=torch.bfloat16), torch.zeros(4, 3)
        assert pipeline.evaluate(inputs, targets).item() == 1.0
        precision = imece.MixedPrecision(torch.bfloat16, torch.float32)
        parallelize(pipeline.part, optimizer_of, "zero1", mesh, precision=precision)
        assert pipeline.evaluate(inputs, targets).item() == 1.0


# Schedules, batches and memory.


def in_flight(pipeline: Pipeline) -> int:
    """Most micro-batches of which a stage keeps activations, all stages of this rank together."""
    most = now = 0
    for span in pipeline.spans:
        now += 1 if span.what == "forward" else -1
        most = max(most, now)
    assert now == 0 and most
    return most


def keeps_activations_of(group: dist.ProcessGroup) -> None:
    with contextlib.closing(imece.init(FOUR)) as mesh:
        rank, found = mesh.coordinate("pipeline"), {}
        for schedule in ("gpipe", "1f1b"):
            case = Case(FOUR, schedule, sequence, numbers_of, strategy=None)
            pipeline = Pipeline(
                case.make(), mesh, micro_batches=8, schedule=schedule, loss=case.loss, **case.options
            )
            pipeline.step(*case.batch(0, 8))
            found[schedule] = in_flight(pipeline)
        assert found == {"gpipe": 8, "1f1b": 4 - rank}


def batches_of_other_sizes(group: dist.ProcessGroup) -> None:
    case = Case(TWO, "1f1b", transformer)
    with contextlib.closing(imece.init(TWO)) as mesh:
        model = case.make()
        pipeline = Pipeline(case.make(), mesh, micro_batches=2, loss=case.loss)
        for size, length in ((4, 6), (2, 6), (6, 1), (4, 6)):
            inputs, targets = (each[:, :length] for each in tokens_of(size, size))
            expected = case.loss(model(inputs), targets).item()
            assert abs(pipeline.evaluate(inputs, targets).item() - expected) < EXACT
            assert abs(pipeline.step(inputs, targets).item() - expected) < EXACT
        with pytest.raises(ValueError, match="a batch of 3 cannot be split into micro_batches=2"):
            pipeline.step(*tokens_of(0, 3))
        with pytest.raises(ValueError, match="inputs of a batch of 2, and targets of one of 4"):
            pipeline.step([inputs[:2]], targets)
        pipeline.part.requires_grad_(False)
        with pytest.raises(
            ValueError, match=r"stage . \(.*\) had parameters to train when .* and is frozen now"
        ):
            pipeline.step(inputs, targets)
        pipeline.part.requires_grad_(True)
        assert abs(pipeline.step([inputs], targets).item() - expected) < EXACT


def autocast_is_foreseen(group: dist.ProcessGroup) -> None:
    """Stages hand on bf16 where they would fp32, and the ranks know it."""
    with contextlib.closing(imece.init(TWO)) as mesh:
        model, whole = sequence().float(), sequence().float()
        pipeline = Pipeline(model, mesh, micro_batches=2, loss=F.mse_loss, cuts=[1])
        x, y = (each.float() for each in numbers_of(0, 4))
        plain = pipeline.evaluate(x, y).item()
        with torch.autocast("cpu", torch.bfloat16):
            assert pipeline.evaluate(x, y).item() != plain
            loss = pipeline.step(x, y).item()
            expected = F.mse_loss(whole(x), y).item()
        assert loss == pytest.approx(expected, abs=1e-6)
        assert plain != loss


def frozen_stages_have_no_gradients(group: dist.ProcessGroup) -> None:
    with contextlib.closing(imece.init(TWO)) as mesh:
        model, whole = sequence(), sequence()
        for frozen in (*model[:4].parameters(), *whole[:4].parameters()):
            frozen.requires_grad = False
        x, y = numbers_of(0, 4)
        F.mse_loss(whole(x), y).backward()
        with (
            mock.patch.object(Mesh, "batch_ranks", 2),  # whose gradients nobody would sum
            pytest.raises(ValueError, match=r"rank 0 of the pipeline would train nothing.* than at \[2\]"),
        ):
            Pipeline(model, mesh, micro_batches=2, loss=F.mse_loss, cuts=[2])
        pipeline = Pipeline(model, mesh, micro_batches=2, loss=F.mse_loss, cuts=[2])
        pipeline.step(x, y)
        expected = {name: each.grad for name, each in whole.named_parameters()}
        for name, each in pipeline.part.named_parameters():
            gradient = expected[name]
            if each.grad is None or gradient is None:
                assert each.grad is gradient
            else:
                assert (each.grad - gradient).abs().max() < EXACT


def others_lose_their_memory(group: dist.ProcessGroup) -> None:
    with contextlib.closing(imece.init(TWO)) as mesh:
        model = sequence()
        part = Pipeline(model, mesh, micro_batches=2, loss=F.mse_loss).part
        names = set(part.state_dict())
        assert {name for name, each in model.named_parameters() if not each.is_meta} == names
        assert 0 < len(names) < len(model.state_dict())


def stages_see_one_document(group: dist.ProcessGroup) -> None:
    """In each schedule, forward and backward."""
    with contextlib.closing(imece.init(TWO)) as mesh:
        inputs, targets = tokens_of(0, 8)
        begins = torch.tensor([[0, 0, 0, 3, 3, 3], [0, 1, 1, 1, 1, 5]]).repeat_interleave(4, dim=0)
        whole, loss = transformer(), Case(TWO, "1f1b", transformer).loss
        expected = loss(whole(inputs, begins=begins), targets)
        assert abs(expected - loss(whole(inputs), targets)) > 1000 * EXACT
        expected.backward()
        gradients = {name: each.grad for name, each in whole.named_parameters()}
        for schedule in SCHEDULES:
            pipeline = Pipeline(transformer(), mesh, micro_batches=4, schedule=schedule, loss=loss)
            for run in (pipeline.evaluate, pipeline.step):
                assert abs(run(inputs, targets, begins=begins) - expected) < EXACT, schedule
            for name, each in pipeline.part.named_parameters():
                own, one = each.grad, gradients[name]
                assert own is not None and one is not None
                assert (own - one).abs().max() < EXACT, (schedule, name)
        with pytest.raises(ValueError, match=r"begins has shape \[2, 5\]; targets have"):
            pipeline.step(inputs, targets, begins=begins[:2, :5])
        with pytest.raises(ValueError, match="begins are for an imece Transformer"):
            Pipeline(sequence(), mesh, micro_batches=4, loss=F.mse_loss).step(
                *numbers_of(0, 8), begins=begins
            )


# What is refused.


def what_cannot_be_is_refused(group: dist.ProcessGroup) -> None:
    """On all ranks, before one waits for another."""
    with contextlib.closing(imece.init(TWO)) as mesh:
        make = partial(Pipeline, sequence(), mesh, loss=F.mse_loss)
        wrong: dict[str, dict[str, Any]] = {
            "schedule='zb': one of gpipe, 1f1b, interleaved": {"micro_batches": 4, "schedule": "zb"},
            "micro_batches=0: a whole number, at least 1": {"micro_batches": 0},
            "micro_batches='4': a whole number": {"micro_batches": "4"},
            "micro_batches=1: 1f1b needs at least one for each of 2 stages": {"micro_batches": 1},
            "take 4": {"micro_batches": 5, "schedule": "interleaved"},
            "only 'interleaved' has more than 1": {"micro_batches": 4, "chunks": 2},
            "chunks=0: a whole number": {"micro_batches": 4, "chunks": 0, "schedule": "interleaved"},
            "need 1 rising numbers from 1 to 8": {"micro_batches": 4, "cuts": [1.5]},
            r"cuts=1: 2 stages need": {"micro_batches": 4, "cuts": 1},
            "a model of 9 pieces cannot be cut into 10 stages": {
                "micro_batches": 4,
                "chunks": 5,
                "schedule": "interleaved",
            },
        }
        for message, options in wrong.items():
            with pytest.raises(ValueError, match=message):
                make(**options)
        with pytest.raises(ValueError, match="on the meta device, or was cut before"):
            imece.Pipeline(
                nn.Sequential(*(nn.Linear(2, 2, device="meta") for _ in range(2))),
                mesh,
                micro_batches=2,
                loss=F.mse_loss,
            )
        with pytest.raises(ValueError, match=r"rank 1 of the pipeline would have no parameters.* at \[1\]"):
            Pipeline([nn.Linear(2, 2), nn.Tanh()], mesh, micro_batches=2, loss=F.mse_loss)
        pipeline = make(micro_batches=4)
        for strategy in ("zero3", "full_shard"):
            with pytest.raises(
                ValueError, match="'zero3' would gather the parts of a pipeline anew for each"
            ):
                parallelize(pipeline.part, optimizer_of, strategy, mesh)
        with pytest.raises(ValueError, match="divided along the axis pipeline, and ranks of the group have"):
            imece.DistributedDataParallel(pipeline.part)
        with pytest.raises(ValueError, match="average='tokens': a pipeline's gradient is the mean"):
            parallelize(pipeline.part, optimizer_of, "zero1", mesh, average="tokens")
        x, y = numbers_of(0, 8)
        for given in ((x, None), (x, y[0, 0]), ("text", y), (x[:0], y[:0]), (x[:5], y[:5])):
            with pytest.raises(
                ValueError, match=r"first dim is the batch, not|a batch of [05] cannot be split"
            ):
                pipeline.step(*given)
        inputs, targets = numbers_of(mesh.rank, 8), numbers_of(0, 8)
        with pytest.raises(UserError, match="the ranks of a pipeline group have different inputs, and need"):
            pipeline.evaluate(inputs[0], targets[1])


class Told(nn.Linear):
    """Gives out what nobody can send."""

    def forward(self, x: Tensor) -> Any:
        return {"x": super().forward(x)}


class Chosen(nn.Linear):
    """By values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[: 1 + int(x.sum().item() > 0)]


class Lost(nn.Linear):
    """With an error whose text says nothing without its type."""

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("bias")


def stages_that_do_not_fit_are_named(group: dist.ProcessGroup) -> None:
    """On all ranks, before one of them computes anything."""
    line = partial(nn.Linear, 3, 3)
    wrong = {
        r"^stage 0 \(0 \.\. 1\), given torch.float32 \[2, 3\]: .*\[2, 5\] X \[3, 3\]": [
            nn.Linear(3, 5),
            line(),
        ],
        r"^stage 0 \(0 \.\. 1\), given .* a stage returns a tensor .* and this one a dict$": [
            line(),
            Told(3, 3),
        ],
        r"^stage 0 \(0 \.\. 1\) asks for values .*: what stages send .* shapes alone$": [
            line(),
            Chosen(3, 3),
        ],
        r"^stage 0 \(0 \.\. 1\), given .*: KeyError\('bias'\)$": [line(), Lost(3, 3)],
    }
    with contextlib.closing(imece.init(TWO)) as mesh:
        for message, first in wrong.items():
            pipeline = Pipeline([*first, line(), line()], mesh, micro_batches=2, loss=F.mse_loss)
            with pytest.raises(RuntimeError, match=message):
                pipeline.step(torch.ones(4, 3), torch.ones(4, 3))


def ranks_that_share_a_gpu_are_refused(group: dist.ProcessGroup) -> None:
    """Before one asks another for anything, and before the model is taken apart."""
    with contextlib.closing(imece.init(TWO)) as mesh:
        model, device = sequence(), mesh.device
        mesh.device, mesh.backend = torch.device("cuda"), "gloo"
        with pytest.raises(ValueError, match=r"^Gloo, .*: start one rank for each GPU .* device='cpu'$"):
            Pipeline(model, mesh, micro_batches=2, loss=F.mse_loss)
        mesh.device = device
        Pipeline(model, mesh, micro_batches=2, loss=F.mse_loss)


def an_unwrapped_part_is_refused(group: dist.ProcessGroup) -> None:
    with contextlib.closing(imece.init(BOTH)) as mesh:
        pipeline = Pipeline(sequence(), mesh, micro_batches=4, loss=F.mse_loss)
        with pytest.raises(RuntimeError, match="2 ranks have this part of the model, and nobody sums"):
            pipeline.step(*numbers_of(0, 4))


CHECKS: dict[str, Check] = {
    **{name: partial(trains_as_one_rank, case) for name, case in (OF_TWO | OF_FOUR).items()},
    **{
        each.__name__.replace("_", " "): each
        for each in (
            without_the_sum_of_the_shared,
            without_the_sum_over_data,
            shared_parameters_stay_equal,
            shared_parameters_begin_equal,
            shared_parameters_may_be_frozen_later,
            steps_add_up,
            half_adds_up_in_fp32,
            evaluates_before_and_after_precision,
            keeps_activations_of,
            batches_of_other_sizes,
            stages_see_one_document,
            autocast_is_foreseen,
            frozen_stages_have_no_gradients,
            others_lose_their_memory,
            what_cannot_be_is_refused,
            stages_that_do_not_fit_are_named,
            ranks_that_share_a_gpu_are_refused,
            an_unwrapped_part_is_refused,
        )
    },
}
_OF_FOUR = {*OF_FOUR, *ALWAYS_ON_FOUR}
ALWAYS_ON_TWO = [name for name in CHECKS if name not in (*_OF_FOUR, *NOT_ALWAYS)]


def _found(names: Collection[str], always: Collection[str], world_size: int, backend: str) -> list[Any]:
    place = world_size, backend
    rest = [name for name in names if name not in always]
    return [*jobs(__name__, always, place), *slow(jobs(__name__, rest, place))]


@pytest.mark.parametrize(
    "job",
    [
        *_found([name for name in CHECKS if name not in _OF_FOUR], ALWAYS_ON_TWO, 2, "shm"),
        *_found(OF_TWO, ALWAYS_ON_GLOO, 2, "gloo"),
        *_found([name for name in CHECKS if name in _OF_FOUR], ALWAYS_ON_FOUR, 4, "shm"),
        *_found(OF_FOUR, ("1f1b zero2", "interleaved replicate"), 4, "gloo"),
    ],
)
def test_pipeline(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)


def losses_that_are_none() -> list[str]:
    mesh, told = imece.init({"pipeline": 1}), []
    wrong: tuple[Any, ...] = (lambda a, b: a - b, lambda a, b: 1.0, lambda a, b: F.mse_loss(a.detach(), b))
    for loss in wrong:
        model = nn.Sequential(nn.Linear(3, 3))
        with pytest.raises(ValueError, match=r"^loss returned") as caught:
            Pipeline(model, mesh, micro_batches=2, loss=loss).step(torch.ones(4, 3), torch.ones(4, 3))
        told.append(str(caught.value))
    return told


@pytest.mark.parametrize("pipeline", [1, 2])
def test_ranks_that_divide_sequences_are_refused(pipeline: int) -> None:
    mesh = FakeMesh({"pipeline": pipeline, "context": 2})
    with pytest.raises(ValueError, match="with 2 ranks along context: stages take no positions"):
        Pipeline(nn.Sequential(nn.Linear(2, 2)), mesh, micro_batches=2, loss=imece.cross_entropy)


def test_a_loss_that_trains_nothing_is_refused() -> None:
    ((vector, number, cut),) = run_ranks(losses_that_are_none, 1, backend=None)
    assert vector.startswith("loss returned a tensor [2, 3]: it returns the mean")
    assert number.startswith("loss returned a float: it returns the mean")
    assert cut.endswith("no gradient, so nothing would be trained")


# An error in a stage ends all ranks.


class Failing(nn.Linear):
    """In its second micro-batch."""

    def forward(self, x: Tensor) -> Tensor:
        calls = getattr(self, "calls", 0)
        if calls == 2:  # the first call is where its shapes are found
            raise ValueError("too hot")
        self.calls = calls + 1
        return super().forward(x)


def fails_in_a_stage(backend: str, schedule: str) -> None:
    mesh = imece.init({"pipeline": 2}, backend=backend)
    layers: Sequence[nn.Module] = [nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), Failing(3, 3)]
    pipeline = Pipeline(layers, mesh, micro_batches=4, schedule=schedule, loss=F.mse_loss)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch.distributed.pipelining.schedules").addHandler(handler)
    try:
        pipeline.step(torch.ones(8, 3), torch.ones(8, 3))
    except Exception as error:
        error.add_note(f"{len(told)} lines of torch's")
        raise


@pytest.mark.parametrize(("backend", "schedule"), [("shm", "1f1b"), ("gloo", "interleaved")])
def test_an_error_in_a_stage_ends_all_ranks_and_names_it(backend: str, schedule: str) -> None:
    waiting, failing = run_ranks(
        fails_in_a_stage,
        2,
        args=[backend, schedule],
        backend=None,
        timeout_s=60,
        after_failure_s=20,
        expect=r"stage \d .* of \d, rank \d",
    )
    last = 1 if schedule == "1f1b" else 3
    assert f", rank 1: forward of micro-batch 1 in stage {last}: too hot" in failing
    assert "too hot" not in waiting
    assert all("\n0 lines of torch's" in each for each in (failing, waiting))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def on_one_rank() -> list[float]:
    """Loss of two stages of a rank: evaluated, trained, and by the whole model."""
    inputs, targets = numbers_of(0, 4)
    with contextlib.closing(imece.init({"pipeline": 1})) as mesh:
        whole = F.mse_loss(sequence()(inputs), targets)
        pipeline = Pipeline(sequence(), mesh, micro_batches=2, loss=F.mse_loss, schedule="interleaved")
        found = [each(inputs, targets) for each in (pipeline.evaluate, pipeline.step, pipeline.evaluate)]
    return [each.item() for each in (*found, whole)]


def test_stages_of_one_rank() -> None:
    (found,) = run_ranks(on_one_rank, 1, backend=None)
    assert len(found) == 4 and found == pytest.approx([found[-1]] * 4, abs=EXACT)


def dropped() -> None:
    mesh = imece.init({"pipeline": 2})

    def trained() -> list[Any]:
        model = transformer()
        pipeline = Pipeline(model, mesh, micro_batches=2, loss=imece.cross_entropy)
        part, optimizer = parallelize(pipeline.part, AdamW, "zero1", mesh)
        pipeline.step(*tokens_of(0, BATCH))
        optimizer.step()
        pipeline.evaluate(*tokens_of(0, BATCH))
        return [pipeline, part, optimizer, *model.modules(), *pipeline.part.parameters()]

    assert left_of(trained) == []


def test_a_dropped_pipeline_gives_its_memory_back() -> None:
    run_ranks(dropped, 2, backend=None)


def with_messages_in_another_group() -> tuple[float, list[bool]]:
    """As on GPUs beside shm, where torch makes no batch of messages in a group of ours: how far off it is,
    and which groups were connected first, all ranks of each."""
    with contextlib.closing(imece.init(TWO)):
        messages = dist.new_group(backend="gloo")
        connect = mock.patch.object(pipeline_module, "connect", wraps=shared.connect)
        refused = mock.Mock(side_effect=AssertionError("a message in the group that makes no batches"))
        with (
            mock.patch.object(Mesh, "messages_group", return_value=messages),
            mock.patch.object(SharedMemoryGroup, "send", refused),
            mock.patch.object(SharedMemoryGroup, "recv", refused),
            connect as connected,
            mock.patch.object(pipeline_module, "Shared", side_effect=Shared) as made,
        ):
            order = mock.Mock()
            order.attach_mock(connected, "connect")
            order.attach_mock(made, "shared")  # its messages are between some ranks
            far = differs(Case(TWO, "1f1b", transformer))
        assert [name for name, *_ in order.mock_calls] == ["connect", "connect", "shared"]
        return far, [call.args[0] is messages for call in connected.mock_calls]


def test_messages_go_where_torch_makes_batches_of_them() -> None:
    for far, connected in run_ranks(with_messages_in_another_group, 2):
        assert far < EXACT and connected == [False, True]


def in_a_batch() -> list[float]:
    """What comes from the other rank, in a group for messages of a mesh on GPUs; Gloo plays NCCL."""
    with contextlib.closing(imece.init(TWO)) as mesh:
        assert mesh.messages_group("pipeline") is mesh.group("pipeline")
        make, backends = dist.new_group, []

        def played(backend: str, **options: Any) -> Any:
            backends.append(backend)
            return make(backend="gloo", **options)

        on_gpu = mock.patch.object(mesh, "backend", "nccl")
        with on_gpu, mock.patch.object(dist, "new_group", played):
            messages = mesh.messages_group("pipeline")
            assert messages is mesh.messages_group("pipeline") and backends == ["nccl"]
        assert type(messages) is dist.ProcessGroup
        other, came = 1 - mesh.rank, torch.zeros(())
        sent = dist.P2POp(dist.isend, torch.tensor(float(mesh.rank)), other, messages)
        received = dist.P2POp(dist.irecv, came, other, messages)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()
        return [came.item()]


def test_a_group_for_batches_of_messages() -> None:
    assert run_ranks(in_a_batch, 2) == [[1.0], [0.0]]


def received_at_once(schedule: str, chunks: int | None, micro_batches: int) -> tuple[int, int, int]:
    """The most activations and gradients of one stage that have memory while it computes, and how many have
    it after a step and an evaluation."""
    from imece.model_parallel.stages import TimedStage

    made: list[TimedStage] = []
    most = [0, 0]

    def living(stage: TimedStage) -> list[int]:
        buffers = [
            [getattr(info, "buffer", None) for infos in table.values() for info in infos]
            for table in (stage.args_recv_info, stage.grad_recv_info)
        ]
        return [sum(each is not None and each.numel() > 0 for each in kind) for kind in buffers]

    def watched(compute: Callable[..., Any]) -> Callable[..., Any]:
        def computing(stage: TimedStage, *args: Any, **kwargs: Any) -> Any:
            made.append(stage)
            most[:] = map(max, most, living(stage))
            return compute(stage, *args, **kwargs)

        return computing

    with contextlib.closing(imece.init(TWO)) as mesh:
        case = Case(TWO, schedule, transformer)
        pipeline = Pipeline(
            case.make(), mesh, micro_batches=micro_batches, loss=case.loss, schedule=schedule, chunks=chunks
        )
        batch = tokens_of(0, micro_batches)
        pipeline.step(*batch)  # before the first, torch makes memory for all
        with (
            mock.patch.object(TimedStage, "forward_one_chunk", watched(TimedStage.forward_one_chunk)),
            mock.patch.object(TimedStage, "backward_one_chunk", watched(TimedStage.backward_one_chunk)),
        ):
            pipeline.step(*batch)
            pipeline.evaluate(*batch)
        return most[0], most[1], sum(sum(living(stage)) for stage in set(made))


def test_what_comes_of_a_micro_batch_has_memory_until_its_backward_is_over() -> None:
    """Of 1F1B on two ranks: one activation, and one gradient."""
    first, last = run_ranks(received_at_once, 2, args=("1f1b", None, 8))
    assert first == [0, 1, 0] and last == [1, 0, 0]
    for activations, gradients, left in run_ranks(received_at_once, 2, args=("interleaved", 2, 8)):
        assert activations <= 4 and gradients <= 2 and left == 0


def most_living(schedule: str, chunks: int | None) -> list[int]:
    """Bytes of a step at its peak, with few micro-batches and with many."""
    found = []
    with contextlib.closing(imece.init(TWO)) as mesh:
        case = Case(TWO, schedule, transformer)
        for micro_batches in (8, 20):
            pipeline = Pipeline(
                case.make(),
                mesh,
                micro_batches=micro_batches,
                loss=case.loss,
                schedule=schedule,
                chunks=chunks,
            )
            batch = tokens_of(0, micro_batches)
            pipeline.step(*batch)
            with Live() as live:
                pipeline.step(*batch)
            found.append(live.most)
    return found


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", None), ("interleaved", 2)])
def test_a_step_needs_no_more_for_more_micro_batches(schedule: str, chunks: int | None) -> None:
    for few, many in run_ranks(most_living, 2, args=(schedule, chunks)):
        assert many - few <= 12 * 100  # losses alone
