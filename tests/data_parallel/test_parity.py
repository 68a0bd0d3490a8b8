"""imece's DistributedDataParallel trains like torch's: bit-equal on "shm", equal up to rounding on Gloo.

Both train the same model on the same group, one after the other. All gradients, parameters and buffers are
compared after every step. The ranks begin with different parameters, which tests the first broadcast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from imece import DistributedDataParallel
from imece.bench.reference_model import Block, Decoder, Shape, batch
from imece.collectives.pending import Pending
from imece.data_parallel.reducing.buckets import Bucket
from imece.data_parallel.reducing.leaving import Leaving
from imece.data_parallel.reducing.posting import Posting
from tests.data_parallel.checks import Check, Job, gathered, jobs, passed, slow

SHAPE = Shape(vocabulary=32, width=16, layers=2, heads=2, length=8)
THREE_BLOCKS = replace(SHAPE, layers=3)
TOKENS = 16  # of a rank's micro-batch
STEPS = 50
FEW = 10
CAP_MB = 0.007  # the decoder's 29 kB make four buckets
_TAKEN = signature(nn.parallel.DistributedDataParallel).parameters
# The older name in torch 2.11.
SYNCS_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _TAKEN else "broadcast_buffers"

State = dict[str, torch.Tensor | None]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, fused=True)


def tokens(step: int, micro: int = 0) -> torch.Tensor:
    """What this rank predicts, int64[2, 9]."""
    return batch(SHAPE, TOKENS, seed=(step * 10 + micro) * 10 + dist.get_rank())


def plain(model: Any, step: int) -> None:
    model(tokens(step)).backward()


@dataclass(frozen=True)
class Case:
    """One way to train."""

    build: Callable[[], nn.Module] = lambda: Decoder(SHAPE)
    backwards: Callable[[Any, int], None] = plain
    """All forwards and backwards of one step."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    steps: int = STEPS
    both: dict[str, Any] = field(default_factory=dict)
    """Arguments of both wrappers."""
    torch_only: dict[str, Any] = field(default_factory=dict)
    set_to_none: bool = True
    zero_every: int = 1
    prepare: Callable[[Any, dist.ProcessGroup], None] = lambda model, group: None
    """What is done to the wrapped model before the first step."""
    dtype: torch.dtype = torch.float32

    def wrapped(self, ours: bool, group: dist.ProcessGroup, build: Callable[[], nn.Module]) -> Any:
        torch.manual_seed(1 + dist.get_rank())
        module = build()
        if self.dtype != torch.float32:
            module.to(self.dtype)
        options: dict[str, Any] = {"process_group": group, "bucket_cap_mb": CAP_MB} | self.both
        if ours:
            return DistributedDataParallel(module, **options)
        return nn.parallel.DistributedDataParallel(module, **options, **self.torch_only)

    def train(self, ours: bool, group: dist.ProcessGroup) -> Iterator[State]:
        """The state after each step."""
        model = self.wrapped(ours, group, self.build)
        self.prepare(model, group)
        optimizer = self.optimizer(model)
        for step in range(self.steps):
            if step % self.zero_every == 0:
                optimizer.zero_grad(self.set_to_none)
            self.backwards(model, step)
            optimizer.step()
            yield state_of(model)


def state_of(model: nn.Module) -> State:
    grads: State = {
        f"gradient of {name}": None if each.grad is None else each.grad.clone()
        for name, each in model.named_parameters()
    }
    return grads | {name: each.detach().clone() for name, each in model.state_dict().items()}


def first_difference(case: Case, group: dist.ProcessGroup) -> str | None:
    """The first step and tensor in which ours is not torch's, None if there is none."""
    theirs, ours = list(case.train(False, group)), list(case.train(True, group))
    assert len(theirs) == len(ours) and theirs, "nobody trained"
    for step, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        assert one.keys() == other.keys()
        for name in one:
            expected, got = one[name], other[name]
            if expected is None or got is None:
                if expected is not got:
                    return f"step {step}: {name} is {got}, expected {expected}"
            elif not equal(got, expected, case.dtype):
                apart = (got - expected).abs().max().item()
                return f"step {step}: {name} is off by up to {apart}; expected up to {expected.abs().max()}"
    return None


def equal(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Bit for bit; in float64, which is for backends that sum in another order, to 1e-9."""
    if dtype == torch.float64:
        return torch.allclose(got, expected, rtol=1e-9, atol=1e-9)
    return torch.equal(got, expected)


# Models and steps.


class Untied(Decoder):
    def __init__(self) -> None:
        super().__init__(SHAPE)
        self.head.weight = nn.Parameter(torch.randn_like(self.head.weight) * 0.02)


def partly_frozen() -> nn.Module:
    model = Decoder(SHAPE)
    model.positions.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    return model


class Routed(Decoder):
    """A decoder of which only the picked blocks are used."""

    def __init__(self) -> None:
        super().__init__(THREE_BLOCKS)

    def forward(self, tokens: torch.Tensor, picked: Any = (0, 1, 2)) -> torch.Tensor:
        hidden = self.tokens(tokens[:, :-1]) + self.positions(torch.arange(tokens.shape[1] - 1))
        for index in picked:
            hidden = self.blocks[index](hidden)
        return functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), tokens[:, 1:].flatten())


def picks(step: int, rank: int) -> list[int]:
    """Changes with the step; block 1 is used by all ranks, by some, by none."""
    return [index for index in range(3) if (step * (index + 1) + rank * index) % 4 < 2]


def routed(model: Any, step: int) -> None:
    model(tokens(step), picks(step, dist.get_rank())).backward()


def accumulated(model: Any, step: int) -> None:
    with model.no_sync():
        model(tokens(step, 0)).backward()
    model(tokens(step, 1)).backward()


def accumulated_elsewhere(model: Any, step: int) -> None:
    """Block 0 is used inside no_sync only, on rank 0 only in every other step; block 2 only outside."""
    with model.no_sync():
        model(tokens(step, 0), [0, 1] if step % 2 or dist.get_rank() == 0 else [1]).backward()
    model(tokens(step, 1), [1, 2]).backward()


def partly_synchronised(model: Any, step: int) -> None:
    """Whole steps without synchronisation: every third one has it."""
    with model.no_sync() if step % 3 != 2 else contextlib.nullcontext():
        model(tokens(step)).backward()


def forwards_then_backward(model: Any, step: int) -> None:
    losses = [model(tokens(step, micro)) for micro in range(3)]
    torch.stack(losses).sum().backward()


def lonely_branch(model: Any, step: int) -> None:
    """The same in each step, but not on each rank: block 2 is rank 0's alone, block 0 is nobody's."""
    model(tokens(step), [1, 2] if dist.get_rank() == 0 else [1]).backward()


def autocast(model: Any, step: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens(step))
    loss.backward()


def keeping_the_graph(model: Any, step: int) -> None:
    """torch's own backward would raise: the gradients of this step are the same without the graph."""
    model(tokens(step)).backward(create_graph=isinstance(model, DistributedDataParallel))


def evaluating_between(model: Any, step: int) -> None:
    model.eval()
    with torch.no_grad():
        model(images(step + 1000))
    model.train()
    image_step(model, step)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, (2, 1), bias=False),
            nn.BatchNorm2d(6, momentum=None), nn.Flatten(), nn.Linear(6 * 4 * 5, 4),
        )  # fmt: skip
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen += images.mean()
        images = images.to(next(self.parameters()).dtype)
        return self.net(images).square().mean()  # type: ignore[no-any-return]


def images(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 10 + dist.get_rank())
    return torch.randn(3, 3, 5, 5, generator=generator).to(memory_format=torch.channels_last)


def image_step(model: Any, step: int) -> None:
    model(images(step)).backward()


@dataclass
class Told:
    """A dataclass that models return."""

    loss: torch.Tensor
    more: list[Any]


class Opaque:
    """An object that models return, in which nobody finds tensors."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class Checkpointed(Untied):
    """A decoder that computes its blocks twice, and the loss with them."""

    def __init__(self, reentrant: bool, wrap: Callable[[torch.Tensor], Any] = lambda loss: loss) -> None:
        super().__init__()
        self.reentrant, self.wrap = reentrant, wrap

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden = self.tokens(tokens[:, :-1]) + self.positions(torch.arange(tokens.shape[1] - 1))
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)

        def end(hidden: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.norm(hidden))
            return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

        return self.wrap(checkpoint(end, hidden, use_reentrant=self.reentrant))


def loss_within(model: Any, step: int) -> None:
    model(tokens(step)).loss.backward()


def loss_within_second(model: Any, step: int) -> None:
    model(tokens(step))[1].loss.backward()


class MixedTypes(nn.Module):
    """Parameters of three dtypes, one of them a scalar, one empty."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder(THREE_BLOCKS)
        self.decoder.blocks[1].mlp.double()
        self.scale = nn.Parameter(torch.tensor(0.5 + dist.get_rank(), dtype=torch.bfloat16))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.decoder.tokens(tokens[:, :-1])
        first, second, third = self.decoder.blocks
        hidden = first(hidden) * self.scale
        mlp: Any = second.mlp
        hidden = hidden + mlp(hidden.double()).float()
        logits = self.decoder.head(self.decoder.norm(third(hidden)))
        return (
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            + self.decoder.positions.weight.mean()
            + sum_of_all(second) * 1e-3
            + self.nothing.sum()
        )


def sum_of_all(module: nn.Module) -> torch.Tensor:
    return torch.stack([each.float().sum() for each in module.parameters()]).sum()


def compiled() -> nn.Module:
    model = Decoder(SHAPE)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.compile(backend="aot_eager")
    return model


# Communication hooks: torch's own, not changed.


def with_hook(hook: Any, state: Callable[[dist.ProcessGroup], Any] = lambda group: group) -> Any:
    def prepare(model: Any, group: dist.ProcessGroup) -> None:
        model.register_comm_hook(state(group), hook)

    return prepare


def power_sgd(group: dist.ProcessGroup) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=3)


def local_sgd(group: dist.ProcessGroup) -> post_localSGD_hook.PostLocalSGDState:
    return post_localSGD_hook.PostLocalSGDState(group, group, start_localSGD_iter=4)


HOOKS = {
    "allreduce": with_hook(default_hooks.allreduce_hook),
    "fp16": with_hook(default_hooks.fp16_compress_hook),
    # By its own name, torch's class refuses it where there is no CUDA.
    "bf16": with_hook(lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)),
    "no-op": with_hook(debugging_hooks.noop_hook),
    "PowerSGD": with_hook(powerSGD_hook.powerSGD_hook, power_sgd),
    "PowerSGD in fp16": with_hook(
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), power_sgd
    ),
    "post-local SGD": with_hook(post_localSGD_hook.post_localSGD_hook, local_sgd),
}

# With flags that torch needs to be told.
UNUSED = {"find_unused_parameters": True}

CASES: dict[str, Case] = {
    "plain": Case(Untied),
    "plain, momentum": Case(Untied, optimizer=momentum, steps=FEW),
    "tied": Case(),
    "tied, momentum": Case(optimizer=momentum, steps=FEW),
    "frozen": Case(partly_frozen, steps=FEW),
    "frozen, momentum": Case(partly_frozen, optimizer=momentum, steps=FEW),
    "unused": Case(Routed, routed, torch_only=UNUSED),
    "unused, momentum": Case(Routed, routed, momentum, torch_only=UNUSED, steps=FEW),
    "unused, zeroed in place": Case(Routed, routed, torch_only=UNUSED, set_to_none=False, steps=FEW),
    "unused, zeroed now and then": Case(Routed, routed, momentum, torch_only=UNUSED, zero_every=5, steps=FEW),
    "accumulated": Case(backwards=accumulated, steps=FEW),
    "accumulated, momentum": Case(backwards=accumulated, optimizer=momentum, steps=FEW),
    "accumulated over steps": Case(backwards=partly_synchronised, zero_every=3, steps=FEW),
    "accumulated elsewhere": Case(Routed, accumulated_elsewhere, torch_only=UNUSED, steps=FEW),
    "accumulated elsewhere, zeroed in place": Case(
        Routed, accumulated_elsewhere, torch_only=UNUSED, set_to_none=False, steps=FEW
    ),
    "zeroed in place": Case(set_to_none=False, steps=FEW),
    "zeroed now and then": Case(zero_every=4, steps=FEW),
    "one bucket": Case(both={"bucket_cap_mb": None}, steps=FEW),
    "static graph": Case(both={"static_graph": True}, steps=FEW),
    "static graph, lonely branch": Case(Routed, lonely_branch, both={"static_graph": True}, steps=FEW),
    "lonely branch": Case(Routed, lonely_branch, torch_only=UNUSED, steps=FEW),
    "several forwards, one backward": Case(backwards=forwards_then_backward, steps=FEW),
    "autocast": Case(backwards=autocast, steps=FEW),
    "buffers and channels_last": Case(Convolutions, image_step, steps=FEW),
    "buffers, one per rank": Case(Convolutions, image_step, steps=FEW, both={SYNCS_BUFFERS: False}),
    "buffers, evaluation between": Case(Convolutions, evaluating_between, steps=FEW),
    "checkpoint": Case(lambda: Checkpointed(False), steps=FEW),
    "checkpoint, re-entrant": Case(lambda: Checkpointed(True), steps=FEW),
    "checkpoint, in a dataclass": Case(
        lambda: Checkpointed(False, lambda loss: Told(loss, [1])), loss_within, steps=FEW
    ),
    "checkpoint, re-entrant, in a dataclass": Case(
        lambda: Checkpointed(True, lambda loss: Told(loss, [1])), loss_within, steps=FEW
    ),
    "checkpoint, re-entrant, static graph": Case(
        lambda: Checkpointed(True), steps=FEW, both={"static_graph": True}
    ),
    "mixed types": Case(MixedTypes, steps=FEW),
    "compiled blocks": Case(compiled, steps=5, both={"bucket_cap_mb": None}),
    "create_graph": Case(backwards=keeping_the_graph, steps=3),
}
HOOK_CASES = {
    # One bucket: of several, PowerSGD's collectives would come in any order.
    f"hook: {name}": Case(prepare=prepare, steps=FEW, optimizer=momentum, both={"bucket_cap_mb": None})
    for name, prepare in HOOKS.items()
}
LONG = ("plain, momentum", "frozen", "unused, momentum", "accumulated")
LONG_CASES = {f"{name}, long": replace(CASES[name], steps=STEPS) for name in LONG}
# One forward's output is not a thing in which tensors are found.
HIDDEN_OUTPUTS: dict[str, Case] = {
    "checkpoint, in an object": Case(lambda: Checkpointed(False, Opaque), loss_within, steps=5),
    "checkpoint, re-entrant, in an object": Case(lambda: Checkpointed(True, Opaque), loss_within, steps=5),
    "an object beside a tensor": Case(
        lambda: Checkpointed(False, lambda loss: (loss * 2, Opaque(loss))), loss_within_second, steps=5
    ),
}
# Those that matter with more ranks, and on Gloo.
CORE = ["plain", "tied, momentum", "unused", "accumulated elsewhere", "buffers and channels_last"]


def parity(case: Case) -> Check:
    def check(group: dist.ProcessGroup) -> None:
        # Two numbers have one sum: only with more ranks does Gloo's order matter.
        exact = group.name() == "shm" or group.size() == 2
        here = case if exact else replace(case, dtype=torch.float64)
        if group.size() > 2 and case is not CASES["plain"]:
            here = replace(here, steps=FEW)
        found = first_difference(here, group)
        assert found is None, found

    return check


# Several models, and ranks that run out.


def adversaries(ours: bool, group: dist.ProcessGroup) -> Iterator[State]:
    """Two models with two optimizers; the judge is called twice before one backward."""
    case = Case(both={"bucket_cap_mb": 0.001})
    maker = case.wrapped(
        ours, group, lambda: nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    )
    judge = case.wrapped(
        ours, group, lambda: nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))
    )
    for_maker, for_judge = adamw(maker), momentum(judge)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        real, noise = torch.randn(5, 8, generator=generator), torch.randn(5, 4, generator=generator)
        for_judge.zero_grad()
        made = maker(noise)
        loss = functional.softplus(-judge(real)).mean() + functional.softplus(judge(made.detach())).mean()
        loss.backward()
        for_judge.step()
        for_maker.zero_grad()
        functional.softplus(-judge(made)).mean().backward()
        for_maker.step()
        yield {f"maker, {name}": each for name, each in state_of(maker).items()} | {
            f"judge, {name}": each for name, each in state_of(judge).items()
        }


LENGTHS = [[4, 7, 5], [0, 3, 1], [6, 2, 4]]  # of each epoch, by rank


def uneven(
    ours: bool, group: dist.ProcessGroup, case: Case, divide: bool, inputs: Callable[[int], Any]
) -> Iterator[State]:
    """Epochs in which ranks run out at different times, with common steps between them.

    Not with buffers: after a join torch's takes them from the last rank, by an oversight.
    """
    between = 0 if case.build is Convolutions else 2
    model = case.wrapped(ours, group, case.build)
    optimizer = case.optimizer(model)
    step = 0

    def one_step() -> None:
        nonlocal step
        optimizer.zero_grad(case.set_to_none)
        model(*inputs(step)).backward()
        optimizer.step()
        step += 1

    for lengths in LENGTHS:
        for _ in range(between):
            one_step()
            yield state_of(model)
        with model.join(divide_by_initial_world_size=divide):
            for _ in range(lengths[dist.get_rank()]):
                one_step()
                yield state_of(model)
        yield {name: each for name, each in state_of(model).items() if not name.startswith("gradient")}


def uneven_case(
    case: Case, divide: bool, inputs: Callable[[int], Any]
) -> Callable[[dist.ProcessGroup], None]:
    def check(group: dist.ProcessGroup) -> None:
        # torch's asks "shm" for what it does not give, once ranks count or parameters stay unused.
        own = divide and not case.torch_only
        reference = group if own else dist.new_group(backend="gloo")
        exact = (group.name() == "shm" and own) or group.size() == 2
        here = case if exact else replace(case, dtype=torch.float64)
        same_states(
            list(uneven(False, reference, here, divide, inputs)),
            list(uneven(True, group, here, divide, inputs)),
            here.dtype,
        )

    return check


def same_states(theirs: list[State], ours: list[State], dtype: torch.dtype = torch.float32) -> None:
    assert len(theirs) == len(ours) and theirs
    for step, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        for name, expected in one.items():
            got = other[name]
            if expected is None or got is None:
                assert got is expected, f"state {step}: {name} is {got}, expected {expected}"
            else:
                assert equal(got, expected, dtype), f"state {step}: {name} is {got}, expected {expected}"


def two_models(group: dist.ProcessGroup) -> None:
    same_states(list(adversaries(False, group)), list(adversaries(True, group)))


def two_forwards_then_two_backwards(group: dist.ProcessGroup) -> None:
    """torch leaves the second backward on its rank; ours synchronises both: the sum of both means."""
    case = Case(dtype=torch.float64)
    theirs, ours = case.wrapped(False, group, case.build), case.wrapped(True, group, case.build)
    for step in range(4):
        (theirs(tokens(step, 0)) + theirs(tokens(step, 1))).backward()
        first, second = ours(tokens(step, 0)), ours(tokens(step, 1))
        second.backward()
        first.backward()
        for (name, expected), got in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            assert got.grad is not None and expected.grad is not None
            assert torch.allclose(got.grad, expected.grad, rtol=1e-12, atol=1e-14), name
        theirs.zero_grad()
        ours.zero_grad()


UNEVEN = {
    f"uneven{', by those present' if not divide else ''}{more}": uneven_case(case, divide, inputs)
    for divide in (True, False)
    for more, case, inputs in (
        ("", Case(), lambda step: (tokens(step),)),
        (", momentum", Case(optimizer=momentum), lambda step: (tokens(step),)),
        (
            ", unused",
            # torch goes by what a rank used before it ran out: zeros for None, to plain SGD the same.
            Case(Routed, optimizer=plain_sgd, torch_only=UNUSED, set_to_none=False),
            lambda step: (tokens(step), picks(step, dist.get_rank())),
        ),
    )
} | {"uneven, buffers": uneven_case(Case(Convolutions), True, lambda step: (images(step),))}

# The parity tests notice when something is missing.


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def not_reduced(self: Leaving, bucket: Bucket) -> Pending:
    return Pending("nothing", bucket.flat, [])


def notices_gradients_that_stay(group: dist.ProcessGroup) -> None:
    for case in (CASES["plain"], CASES["unused"], CASES["accumulated"]):
        posted = replaced(Posting, "finish", lambda self: None)
        with posted, replaced(Leaving, "_reduce", not_reduced):
            found = first_difference(replace(case, steps=1), group)
        assert found and found.startswith("step 0: gradient"), found


def notices_a_missing_first_broadcast(group: dist.ProcessGroup) -> None:
    class Unsynchronised(Case):
        def wrapped(self, ours: bool, group: dist.ProcessGroup, build: Callable[[], nn.Module]) -> Any:
            here = replace(self, both=self.both | {"init_sync": not ours})
            return Case.wrapped(here, ours, group, build)

    found = first_difference(Unsynchronised(steps=1), group)
    by_rank = gathered(found, group)
    assert all(by_rank), by_rank


def notices_buffers_of_its_own(group: dist.ProcessGroup) -> None:
    case = CASES["buffers and channels_last"]
    with replaced(DistributedDataParallel, "sync_buffers", lambda self, joining: None):
        found = first_difference(replace(case, steps=3), group)
    by_rank = gathered(found, group)
    assert by_rank[0] is None and all(by_rank[1:]), by_rank


def notices_an_ignored_hook(group: dist.ProcessGroup) -> None:
    def zeros(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(torch.zeros_like(bucket.buffer()))
        return future

    case = replace(CASES["tied"], prepare=with_hook(zeros), steps=1)
    (state,) = case.train(True, group)
    grads = [each for name, each in state.items() if name.startswith("gradient")]
    assert grads and all(each is not None and not each.any() for each in grads)
    for name in ("bf16", "no-op"):
        with replaced(DistributedDataParallel, "register_comm_hook", lambda self, state, hook: None):
            assert first_difference(replace(HOOK_CASES[f"hook: {name}"], steps=5), group), name


def the_routes_differ(group: dist.ProcessGroup) -> None:
    """Blocks that no rank, some rank and all ranks use: all three come, so that the cases mean something."""
    seen = set()
    for step in range(FEW):
        for index in range(3):
            users = sum(index in picks(step, rank) for rank in range(group.size()))
            seen.add((index, "none" if not users else "all" if users == group.size() else "some"))
    assert {kind for _, kind in seen} == {"none", "some", "all"}, seen


CONTROLS = {
    "gradients that stay": notices_gradients_that_stay,
    "a missing first broadcast": notices_a_missing_first_broadcast,
    "buffers of its own": notices_buffers_of_its_own,
    "an ignored hook": notices_an_ignored_hook,
    "routes": the_routes_differ,
}

CHECKS: dict[str, Check] = (
    {name: parity(case) for name, case in (CASES | LONG_CASES | HIDDEN_OUTPUTS | HOOK_CASES).items()}
    | UNEVEN
    | {"two models": two_models, "two forwards, two backwards": two_forwards_then_two_backwards}
    | {f"notices {name}": check for name, check in CONTROLS.items()}
)
SLOW = ["compiled blocks", *LONG_CASES]
OF_THREE_ON_GLOO = ["tied, momentum", "unused", "uneven, unused"]
MORE = ["uneven", "uneven, by those present", "two forwards, two backwards"]


@pytest.mark.parametrize(
    "job",
    jobs(__name__, [name for name in CHECKS if name not in SLOW], (2, "shm"))
    + jobs(__name__, CORE, (3, "shm"))
    + jobs(__name__, OF_THREE_ON_GLOO, (3, "gloo"))
    + slow(
        jobs(__name__, SLOW, (2, "shm"))
        + jobs(__name__, [name for name in CORE if name not in OF_THREE_ON_GLOO], (3, "gloo"))
        + jobs(__name__, [*MORE, "uneven, unused"], (3, "shm"))
        + jobs(__name__, MORE, (3, "gloo"))
    ),
)
def test_parity(job: Job, request: pytest.FixtureRequest) -> None:
    passed(job, request)
