"""Parameters gathered over a network arrive while the next forward begins; nobody reads half of one."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

import imece
from imece.checkpoint import TrainingState
from imece.collectives import hierarchical
from imece.collectives.pending import Pending
from imece.data_parallel.footprint import counted
from imece.data_parallel.sharded import ShardedDataParallel
from imece.data_parallel.sharding import coming as sharding_coming
from imece.data_parallel.sharding.coming import Coming, ComingParameter
from tests.ranks import run_ranks

LAYERS, WIDTH = 4, 32
CAP_MB = 0.004  # a bucket for each layer
PATIENCE_S = 30.0
whole = hierarchical.all_gather


class Held:
    """In the place of the gather over hosts: into this memory, or any, it begins when `go_on` is set."""

    def __init__(self, place: Tensor | None) -> None:
        self.go_on, self._place = threading.Event(), place

    def __call__(self, out: Tensor, *rest: Any, **more: Any) -> Any:
        if self._place is None or out.data_ptr() == self._place.data_ptr():
            assert self.go_on.wait(PATIENCE_S), "nobody went on while this was under way"
        return whole(out, *rest, **more)


@contextmanager
def held(place: Tensor | None = None) -> Iterator[Held]:
    """Inside, gathers are; when it ends they go on."""
    with mock.patch.object(hierarchical, "all_gather", Held(place)) as stand_in:
        try:
            yield stand_in
        finally:
            stand_in.go_on.set()


def last_of(model: ShardedDataParallel) -> Tensor:
    """The memory of the layer that forward uses last, whose gradients come first."""
    return model.sharding.stores[0].parameters


def model_of(
    strategy: str = "zero1", wrap: Callable[[nn.Module], None] = lambda _: None, **options: Any
) -> tuple[ShardedDataParallel, SGD]:
    torch.manual_seed(3)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    wrap(module)
    model, optimizer = imece.parallelize(
        module, SGD(module.parameters(), lr=0.1), strategy, bucket_cap_mb=CAP_MB, **options
    )
    assert isinstance(model, ShardedDataParallel) and len(model.sharding.stores) == LAYERS
    return model, optimizer


def stepped(model: nn.Module, optimizer: SGD, seed: int = 0) -> None:
    torch.manual_seed(100 * seed + dist.get_rank())
    model(torch.randn(8, WIDTH).to(next(model.parameters()).dtype)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def layers(model: nn.Module) -> list[Any]:
    return list(model.module.children())  # type: ignore[union-attr]


def coming(model: nn.Module) -> list[bool]:
    """Of each layer, whether one of its parameters is."""
    return [any(isinstance(each, ComingParameter) for each in layer.parameters()) for layer in layers(model)]


def expected() -> list[Tensor]:
    """All parameters after one step."""
    model, optimizer = model_of(overlap=False)
    stepped(model, optimizer)
    assert not any(coming(model))
    return [each.detach().clone() for each in model.parameters()]


# --- forward


def forward_goes_on() -> None:
    """The last layer comes only when the first one has run: a step or forward that waited would never end."""
    imece.init()
    x = torch.ones(4, WIDTH)
    for strategy in ("zero1", "zero2"):
        plain, optimizer = model_of(strategy, overlap=False)
        outputs = []
        for turn in range(3):
            stepped(plain, optimizer, turn)
            assert not any(coming(plain))
            outputs.append(plain(x).detach())
        model, optimizer = model_of(strategy)
        for turn, output in enumerate(outputs):
            seen: list[list[bool]] = []
            with held(last_of(model)) as last:
                stepped(model, optimizer, turn)
                assert coming(model)[-1], "the step has waited"

                def after_first(
                    *_: Any, of: nn.Module = model, at: Held = last, to: list[Any] = seen
                ) -> None:
                    to.append(coming(of))
                    at.go_on.set()

                handle = layers(model)[0].register_forward_hook(after_first)
                got = model(x)
                handle.remove()
                assert not seen[0][0] and seen[0][-1] and not any(coming(model))
                assert torch.equal(got, output)


def test_forward_begins_while_the_last_parameters_come() -> None:
    run_ranks(forward_goes_on, 4, backend=None, ranks_per_host=2)


# --- whoever looks


def of_pickle(model: ShardedDataParallel) -> list[Tensor]:
    return list(pickle.loads(pickle.dumps(list(model.parameters()))))  # noqa: S301 - our own


def averaged(model: ShardedDataParallel) -> list[Tensor]:
    average = AveragedModel(copy.deepcopy(model.module), avg_fn=lambda _old, new, _count: new)
    for _ in range(2):  # the first time it copies
        average.update_parameters(model.module)
    return list(average.parameters())


def in_one_operation(model: ShardedDataParallel) -> list[Tensor]:
    return list(torch._foreach_mul(list(model.parameters()), 1.0))


def by_functional_call(model: ShardedDataParallel) -> list[Tensor]:
    parameters = dict(model.module.named_parameters())
    eye = torch.eye(WIDTH)
    weights = []
    for at in range(LAYERS):
        names: dict[str, Tensor] = {
            name.partition(".")[2]: each for name, each in parameters.items() if name[0] == str(at)
        }
        bias = names["bias"]
        weights += [(torch.func.functional_call(layers(model)[at], names, (eye,)) - bias).t(), bias]
    return weights


def from_rank_0(model: ShardedDataParallel) -> list[Tensor]:
    for each in model.parameters():
        with torch.no_grad():
            dist.broadcast(each, 0)
    return [each.detach() for each in model.parameters()]


def through_imece(model: ShardedDataParallel) -> list[Tensor]:
    for each in model.parameters():
        with torch.no_grad():
            imece.broadcast(each, 0)
    return [each.detach() for each in model.parameters()]


def inside_gathered(model: ShardedDataParallel) -> list[Tensor]:
    with model.gathered():
        return [each.detach().clone() for each in model.parameters()]


LOOKS: dict[str, Callable[[ShardedDataParallel], list[Tensor]]] = {
    "detach": lambda model: [each.detach() for each in model.parameters()],
    "data": lambda model: [each.data for each in model.parameters()],
    "clone": lambda model: [each.clone() for each in model.parameters()],
    "numpy": lambda model: [torch.from_numpy(each.detach().numpy()) for each in model.parameters()],
    "an element": lambda model: [torch.tensor(each.tolist()) for each in model.parameters()],
    "a view": lambda model: [each[:].view_as(each) for each in model.parameters()],
    "in nested lists": lambda model: list(torch.cat([each.reshape(-1) for each in model.parameters()]).split(
        [each.numel() for each in model.parameters()]
    )),
    "storage": lambda model: [
        torch.empty(0).set_(each.untyped_storage(), each.storage_offset(), each.shape, each.stride())
        for each in model.parameters()
    ],
    "foreach": in_one_operation,
    "state dict": lambda model: list(model.state_dict().values()),
    "state dict of the module": lambda model: list(model.module.state_dict(keep_vars=True).values()),
    "deepcopy": lambda model: list(copy.deepcopy(model.module).parameters()),
    "pickle": of_pickle,
    "average of weights": averaged,
    "functional call": by_functional_call,
    "gathered": inside_gathered,
    "torch's broadcast": from_rank_0,
    "imece's broadcast": through_imece,
}  # fmt: skip


def near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, atol=1e-5)


def whoever_looks() -> list[str]:
    imece.init()
    wanted, wrong = expected(), []
    for name, look in LOOKS.items():
        model, optimizer = model_of()
        with held() as gathers:
            stepped(model, optimizer)
            assert all(coming(model)), name
            texts = [each.grad for each in model.parameters()], [each.shape for each in model.parameters()]
            assert texts[0] == [None] * 2 * LAYERS and all(coming(model)), "shapes and gradients are known"
            threading.Timer(0.05, gathers.go_on.set).start()
            got = look(model)
            for at, (mine, right) in enumerate(zip(got, wanted, strict=True)):
                close = near if name == "functional call" else torch.equal
                if not close(mine.reshape(-1), right.reshape(-1)):
                    wrong.append(f"{name}: parameter {at}")
        assert not any(coming(model)), f"{name}: some are still coming"
        assert not any(isinstance(each, ComingParameter) for each in got), name
    model, optimizer = model_of()
    with held() as gathers:
        stepped(model, optimizer)
        threading.Timer(0.05, gathers.go_on.set).start()
        assert repr(layers(model)[0].bias) == repr(nn.Parameter(wanted[1]))
    return wrong


def test_whoever_looks_at_a_parameter_waits_for_it() -> None:
    assert run_ranks(whoever_looks, 4, backend=None, ranks_per_host=2, timeout_s=200) == [[]] * 4


class Extension(nn.Linear):
    """As code in C++ does, it takes the memory of its parameters without a word."""

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return super().forward(x)


def in_an_extension() -> None:
    imece.init()
    results = []
    for overlap in (False, True):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Extension(WIDTH, WIDTH))
        module[0].weight = module[1].weight  # of both
        model, optimizer = imece.parallelize(
            module, SGD(module.parameters(), lr=0.1), "zero1", overlap=overlap
        )
        with held() as gathers:
            threading.Timer(0.0 if not overlap else 0.5, gathers.go_on.set).start()
            stepped(model, optimizer)
            assert any(coming(model)) == overlap
            with torch.no_grad():
                results.append(layers(model)[1](torch.ones(2, WIDTH)))
            assert not coming(model)[1]
        assert not any(each._forward_pre_hooks for each in model.modules()), "hooks are left behind"
    assert torch.equal(*results)


def test_modules_wait_for_what_they_have() -> None:
    run_ranks(in_an_extension, 2, backend=None, ranks_per_host=1)


# --- whoever writes what the optimizer steps, which a gather reads where it lies


def through_numpy(parts: list[Tensor]) -> None:
    for each in parts:
        each.detach().numpy()[:] *= 0.5


def through_a_vector(parts: list[Tensor]) -> None:
    nn.utils.vector_to_parameters(0.5 * nn.utils.parameters_to_vector(parts), parts)


def each_by(write: Callable[[Tensor], object]) -> Callable[[list[Tensor]], None]:
    def write_all(parts: list[Tensor]) -> None:
        for each in parts:
            write(each)

    return write_all


WRITES: dict[str, Callable[[list[Tensor]], None]] = {
    "in place": each_by(lambda part: part.mul_(0.5)),
    "clamped": each_by(lambda part: torch.clamp(part, -0.01, 0.01, out=part)),
    "data": each_by(lambda part: part.data.mul_(0.5)),
    "other data": each_by(lambda part: setattr(part, "data", 0.5 * part.data)),
    "a view": each_by(lambda part: part[:1].fill_(2.0)),
    "initialised": each_by(nn.init.zeros_),
    "foreach": lambda parts: torch._foreach_mul_(parts, 0.5),
    "numpy": through_numpy,
    "a vector": through_a_vector,
}


def written_with(write: Callable[[list[Tensor]], None], overlap: bool) -> list[list[Tensor]]:
    """All parameters, before and after the others were told."""
    model, optimizer = model_of(overlap=overlap)
    parts: list[Tensor] = optimizer.param_groups[0]["params"]
    with held() as gathers:
        if not overlap:
            gathers.go_on.set()
        stepped(model, optimizer)
        assert [isinstance(each, ComingParameter) for each in parts] == [overlap] * len(parts)
        timer = threading.Timer(0.05, gathers.go_on.set)
        timer.start()
        with torch.no_grad():
            write(parts)
        assert gathers.go_on.is_set(), "it has written what a gather was to read"
        assert not any(isinstance(each, ComingParameter) for each in parts)
    before = [each.detach().clone() for each in model.parameters()]
    model.take_over_masters()
    return [before, [each.detach().clone() for each in model.parameters()]]


def whoever_writes() -> list[str]:
    imece.init()
    wrong = []
    for name, write in WRITES.items():
        wanted, got = (written_with(write, overlap) for overlap in (False, True))
        assert not all(map(torch.equal, *wanted)), f"{name}: nothing is written"
        for when, right, mine in zip(("before", "after"), wanted, got, strict=True):
            wrong += [f"{name}: {when}"] * (not all(map(torch.equal, right, mine)))
    return wrong


def test_whoever_writes_what_is_stepped_waits_for_the_gather() -> None:
    """Else the others would get now what they are to get by take_over_masters, or half of it."""
    assert run_ranks(whoever_writes, 2, backend=None, ranks_per_host=1, timeout_s=200) == [[]] * 2


def without_a_word() -> None:
    """As compiled code writes that finds parts through their optimizer; and a tensor made before the step."""
    imece.init()
    model, optimizer = model_of()
    parts: list[Tensor] = optimizer.param_groups[0]["params"]
    before = [each.detach() for each in parts]
    for written in (before, parts):
        with held() as gathers:
            stepped(model, optimizer)
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                written[0].mul_(0.5)
            gathers.go_on.set()
            with pytest.raises(RuntimeError, match=r"this rank's part of parameter .* by code that does not"):
                model.take_over_masters()
            model.take_over_masters()
            stepped(model, optimizer)
            model.settle()
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                written[0].mul_(0.5)
            model.take_over_masters()
            model.settle()


def test_what_does_not_wait_is_refused() -> None:
    run_ranks(without_a_word, 2, backend=None, ranks_per_host=1)


def nobody_else() -> None:
    """What training does between two steps leaves parts alone, or reads them."""
    imece.init()
    for bf16 in (False, True):
        model, optimizer = model_of(precision=imece.MixedPrecision(param=torch.bfloat16) if bf16 else None)
        parts, state = optimizer.param_groups[0]["params"], TrainingState(model, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with held():
            stepped(model, optimizer)
            scheduler.step()
            optimizer.load_state_dict(optimizer.state_dict())
            nn.utils.clip_grad_norm_(parts, 1.0)
            optimizer.zero_grad(set_to_none=False)
            model.sharding.check_parts()
            assert counted(model, [optimizer])
            own = state.own()
            assert own is state.own()
            assert all(coming(model))
            assert [isinstance(each, ComingParameter) for each in parts] == [not bf16] * len(parts)
            with torch.no_grad():
                for each in parts if bf16 else ():
                    each.mul_(0.5)
            assert all(coming(model)), "masters of more bits are not what is gathered"
        model.take_over_masters()


def test_nobody_else_waits() -> None:
    run_ranks(nobody_else, 2, backend=None, ranks_per_host=1, timeout_s=200)


# --- on a GPU, which is made up


class Gpu:
    """With streams by their names; `told` is what they were told, once."""

    def __init__(self) -> None:
        self.told: dict[str, None] = {}
        self.current, self.done = "main", False

    def stream(self, _: object = None) -> Any:
        name = self.current

        def wait_event(event: Any) -> None:
            self.told[f"{name} waits for {event.of}"] = None

        def synchronize() -> None:
            self.told[f"the host waits for {name}"] = None

        event = SimpleNamespace(of=name, query=lambda: self.done, synchronize=synchronize)
        return SimpleNamespace(record_event=lambda: event, wait_event=wait_event)

    def gather(self) -> Any:
        """torch's Work of NCCL: only the stream that is current waits."""
        return SimpleNamespace(wait=lambda: self.told.update({f"{self.current} waits for the gather": None}))


def test_each_stream_that_uses_a_parameter_waits_for_it() -> None:
    """A branch of a model on another stream, or an average of weights there."""
    gpu, x = Gpu(), torch.ones(2, 4)
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    both = [*one.parameters(), *other.parameters()]
    with (
        mock.patch.object(torch.cuda, "current_stream", gpu.stream),
        mock.patch.object(sharding_coming, "has_streams", lambda _: True),
    ):
        expected = [one(x), other(x)]
        Coming(both, [one, other], Pending("all_gather", x, [gpu.gather()]))
        gpu.current = "side"
        assert torch.equal(one(x), expected[0])
        assert list(gpu.told) == ["side waits for the gather", "side waits for side"]
        gpu.current = "main"
        assert torch.equal(other(x), expected[1]) and "main waits for side" in gpu.told
        gpu.current = "third"
        looked = one.weight + other.weight
        assert "third waits for side" in gpu.told and type(looked) is Tensor
        assert all(isinstance(each, ComingParameter) for each in both)
        gpu.done = True  # from now on nobody needs to be told
        assert torch.equal(one(x), expected[0])
        assert not any(isinstance(each, ComingParameter) for each in both) and not one._forward_pre_hooks
        gpu.told.clear()
        gpu.done = False
        Coming(both, [one, other], Pending("all_gather", x, [gpu.gather()]))
        repr(one.bias)
        assert list(gpu.told) == ["third waits for the gather", "the host waits for third"]
        assert not any(isinstance(each, ComingParameter) for each in both)


# --- steps, compiled code, and the end


def steps_without_a_forward() -> None:
    """The second one writes what the first one's gathers still read: it waits for them."""
    imece.init()
    after = []
    for overlap in (False, True):
        model, optimizer = model_of(overlap=overlap)
        with held() as gathers:
            if not overlap:
                gathers.go_on.set()
            for turn in range(2):
                for part in optimizer.param_groups[0]["params"]:
                    part.grad = torch.full(part.shape, turn + 1.0)
                if turn == 1 and overlap:
                    assert all(coming(model))
                    threading.Timer(0.2, gathers.go_on.set).start()
                optimizer.step()
            assert gathers.go_on.is_set(), "the second step has not waited"
        after.append([each.detach().clone() for each in model.parameters()])
        assert not any(coming(model))
    assert all(map(torch.equal, *after))


def test_a_step_waits_for_the_one_before() -> None:
    run_ranks(steps_without_a_forward, 2, backend=None, ranks_per_host=1)


def each_waits_for_its_own() -> None:
    """Of two optimizers the second steps while what the first one stepped comes; compiled code gets all."""
    imece.init()
    torch.manual_seed(3)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    optimizers = [SGD(layer.parameters(), lr=0.1) for layer in module]
    model: imece.DistributedDataParallel
    model, _ = imece.parallelize(module, optimizers, "zero1", bucket_cap_mb=CAP_MB)
    with held() as gathers:
        model(torch.randn(4, WIDTH)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert coming(model) == [True, True]
        gathers.go_on.set()
    del model

    from torch._dynamo.utils import counters  # at the top it would cost all tests here their prepared ranks

    def by_blocks(module: nn.Module) -> None:
        imece.compile_blocks(module, backend="eager")

    model, optimizer = model_of(wrap=by_blocks)
    stepped(model, optimizer)
    model.sharding.settle()
    graphs = counters["stats"]["unique_graphs"]
    for turn in range(2):
        with held(last_of(model)) as last:
            stepped(model, optimizer, turn)
            assert coming(model)[-1], "blocks are compiled, each of which waits for its own"
            layers(model)[0](torch.ones(8, WIDTH))
            assert coming(model)[-1] and not coming(model)[0]
            last.go_on.set()
            model.module(torch.ones(8, WIDTH))
            assert not any(coming(model))
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"], "compiled anew"
    copy.deepcopy(model.module)(torch.ones(1, WIDTH))

    def inside(module: nn.Module) -> None:
        assert isinstance(module, nn.Sequential)
        module[1] = torch.compile(module[1], backend="eager")  # type: ignore[assignment]

    model, optimizer = model_of(wrap=inside)
    stepped(model, optimizer)
    assert not any(coming(model)), "one of its modules is compiled by torch.compile(module)"
    model, optimizer = model_of()
    compiled = torch.compile(model, backend="eager")
    for turn in range(2):
        compiled(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()
        assert not any(coming(model)), f"turn {turn}: all of it is compiled"
    model.sharding.settle()
    with held():
        stepped(model, optimizer)  # it saw that it was called as it is, and waits no more
        assert all(coming(model))


def test_steps_and_compiled_code() -> None:
    run_ranks(each_waits_for_its_own, 2, backend=None, ranks_per_host=1, timeout_s=200)


def let_go() -> None:
    """Ranks that leave their group wait for nobody, and parameters are ordinary ones."""
    mesh = imece.init()
    model, optimizer = model_of()
    with held() as gathers:
        stepped(model, optimizer)
        model.leave()
        assert not any(coming(model)) and not gathers.go_on.is_set()
    model.regroup(mesh)
    with held():
        stepped(model, optimizer)
        assert all(coming(model))


def test_leaving_waits_for_nothing() -> None:
    run_ranks(let_go, 2, backend=None, ranks_per_host=1)


def last_step() -> None:
    """Rank 0 looks when the others have ended, whose parts have then still to be sent."""
    mesh = imece.init()
    wanted = expected()
    model, optimizer = model_of()
    with held() as gathers:
        stepped(model, optimizer)
        threading.Timer(0.5, gathers.go_on.set).start()
        if mesh.rank == 0:
            time.sleep(1.0)
            assert all(map(torch.equal, model.parameters(), wanted))
        else:
            mesh.close()


def test_what_others_need_is_sent_before_the_end() -> None:
    run_ranks(last_step, 2, backend=None, ranks_per_host=1)
