"""The units of a model: modules whose parameters are gathered and freed as one.

    own      this rank's shard of a bucket, in separate memory; in the host's, if parameters are offloaded. On
             a GPU it is the masters, if these have more bits, and each gather casts them
    full     the whole bucket; the parameters are views of it, for good
    freed    the storage of `full` has size 0, and the parameters are FreedParameters
    coming   `full` has memory again, and an all-gather fills it
    gathered the parameters can be used

A freed storage that gets memory again is the same storage: views, and what autograd saved of them, stay
valid. While it is freed the versions of its parameters are others than those that autograd saved: a backward
that comes then is torch's error, and does not read memory that is gone.

On a GPU the current stream waits for a gather, and torch's allocator reuses memory in the order of the stream
that took it. If branches of a model run on several streams, each that comes to a unit waits, and tells the
allocator.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from imece.collectives import ops
from imece.collectives.fingerprint import SameLabel
from imece.collectives.pending import Pending
from imece.data_parallel.sharding import freed
from imece.data_parallel.sharding.offload import Lane
from imece.device import has_streams
from imece.listing import kind_of

Wanted = Sequence[type[nn.Module]] | int | None
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # nobody calls them
_CALLS_NONE = nn.MultiheadAttention  # takes the parameters of its children without calling these


class State(enum.Enum):
    """How far a unit is."""

    FREED = enum.auto()
    COMING = enum.auto()
    GATHERED = enum.auto()


@dataclass(eq=False)
class Flat:
    """One bucket of a unit."""

    full: torch.Tensor  # 1D, padded
    own: torch.Tensor  # [shard]
    named: list[tuple[str, torch.Tensor]]
    lane: Lane | None = None  # copies or casts `own`, if it lies elsewhere than `full` or has more bits
    is_frozen: bool = False  # no gradients come to it
    _versions: list[int] = field(default_factory=list)  # of each parameter, when it was gathered
    _are_shifted: bool = False  # those that autograd compares with what it saved
    _taken_on: torch.cuda.Stream | None = None  # None: freed, or on a CPU
    _came: torch.cuda.Event | None = None  # recorded on the first stream that waited

    def take(self) -> None:
        """Give `full` memory again, with any contents."""
        self.full.untyped_storage().resize_(self.full.nbytes)
        if not self.is_frozen:  # else a hook on gradients names what a backward uses before it has come
            self._shift_versions(False)
        if has_streams(self.full):
            self._taken_on, self._came = torch.cuda.current_stream(self.full.device), None

    def come(self) -> None:
        """It has come for the current stream, if it has for the stream that first came here after the
        gather's `wait`."""
        if self._taken_on is None:
            return
        here = torch.cuda.current_stream(self.full.device)
        if self._came is None:
            self._came = here.record_event()
        else:
            here.wait_event(self._came)
        if here != self._taken_on:
            self.full.record_stream(here)

    def give_back(self) -> None:
        """Give its memory back; it is reused once all streams that came here have done their work
        until now."""
        self._shift_versions(True)
        self.full.untyped_storage().resize_(0)
        self._taken_on = None

    @contextlib.contextmanager
    def own_here(self, rank: int) -> Iterator[torch.Tensor]:
        """`own` on the device of `full`; what is begun inside comes behind the copy."""
        if self.lane is None:
            yield self.own
            return
        here = self.full[rank * self.own.numel() :][: self.own.numel()]
        self.lane.copy(here, self.own)
        with self.lane.within():
            yield here

    def revive(self) -> None:
        """`full` holds the right values."""
        for _, parameter in self.named:
            freed.revive(parameter)
        self._shift_versions(False)
        self.note_versions()

    def _shift_versions(self, shift: bool) -> None:
        """Let the parameters' versions be 1 more than they are, or no more."""
        if shift == self._are_shifted:
            return
        self._are_shifted, more = shift, 1 if shift else -1
        parameters = tuple(parameter for _, parameter in self.named)
        with torch._C.DisableTorchFunctionSubclass():  # freed ones refuse to be asked
            versions = tuple(parameter._version + more for parameter in parameters)
            torch._C._autograd._unsafe_set_version_counter(parameters, versions)

    def note_versions(self) -> None:
        """Accept all writes into parameters until now: they are in `own` too, or need not stay."""
        self._versions = [parameter._version for _, parameter in self.named]

    def written(self) -> str | None:
        """The name of a parameter that was written into since then."""
        for (name, parameter), version in zip(self.named, self._versions, strict=True):
            if parameter._version != version:
                return name
        return None

    def free(self, unit: str) -> None:
        """Free its memory."""
        for name, parameter in self.named:
            freed.free(parameter, name, unit)
        self.give_back()


@dataclass(eq=False)
class Unit:
    """A module and the buckets of its parameters."""

    number: int  # 0: the root, which has all parameters of no other unit
    name: str
    known: weakref.ref[nn.Module]  # the module's hooks keep this unit, which must not keep the module
    flats: list[Flat] = field(default_factory=list)
    state: State = State.FREED
    left: int = 0  # buckets that left in this backward
    earlier: tuple[Unit, ...] = ()  # units that ran before it in the latest forward, the last one first
    calls: dict[int, int] = field(default_factory=dict)
    """Forwards that wait for their backward: {when it was entered: when it was left}; see gathering.py."""
    depth: int = 0  # of calls under way: a module may call itself
    entered: int = 0  # its latest forward
    kept: bool = False  # stays gathered after its forward, as a backward may soon come through it
    awaited: bool = True  # a backward may come through the output of its latest forward
    pinned: bool = False  # a backward may come through an output that hides its tensors
    _works: list[Pending] = field(default_factory=list)

    def __str__(self) -> str:
        return f"unit {self.name}" if self.number else "the root unit"

    @property
    def module(self) -> nn.Module:
        """The module of this unit."""
        module = self.known()
        assert module is not None, "it keeps this"
        return module

    @property
    def is_there(self) -> bool:
        """Whether it takes memory."""
        return self.state is not State.FREED

    @property
    def has_frozen(self) -> bool:
        """Whether some of its parameters are frozen. Backward uses these until it is over, and no gradient of
        theirs tells when."""
        return any(flat.is_frozen for flat in self.flats)

    @property
    def nbytes(self) -> int:
        """Its bytes when gathered."""
        return sum(flat.full.nbytes for flat in self.flats)

    def add(self, flat: Flat) -> None:
        """Add one more bucket, which is freed."""
        assert self.state is State.FREED
        flat.free(str(self))
        self.flats.append(flat)

    def start(self, group: dist.ProcessGroup, schedule: str | None = None) -> None:
        """Begin to gather it. schedule: as for ops.all_gather."""
        if self.state is not State.FREED:
            return
        self.state = State.COMING
        for flat in self.flats:
            flat.take()
            with flat.own_here(group.rank()) as own:
                full, label = flat.full, SameLabel(f"parameters of {self}")
                work = ops.all_gather(full, own, group=group, schedule=schedule, async_op=True, label=label)
            self._works.append(work)

    def gather(self, group: dist.ProcessGroup, schedule: str | None = None) -> None:
        """When this returns, its parameters can be used."""
        self.start(group, schedule)
        self.settle()
        if self.state is State.COMING:
            for flat in self.flats:
                flat.revive()
            self.state = State.GATHERED

    def free(self) -> str | None:
        """Keep only the own shards. Returns the name of a parameter that was written into, which is lost."""
        self.settle()
        lost = None
        for flat in self.flats:
            if self.state is State.GATHERED:
                lost = lost or flat.written()
                flat.free(str(self))
            elif self.state is State.COMING:
                flat.give_back()
        self.state, self.kept = State.FREED, False
        return lost

    def let_go(self) -> None:
        """Let go of its buckets, whatever is under way."""
        while self._works:
            self._works.pop().give_up()
        self.flats.clear()

    def settle(self) -> None:
        """What is coming has come, for the current stream."""
        while self._works:
            self._works.pop().wait()
        for flat in self.flats:
            flat.come()


def check_wanted(wanted: object) -> None:
    """TypeError for what is neither classes of modules nor a number; ValueError for a number below 1."""
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        if wanted < 1:
            raise ValueError(f"units={wanted}: a unit has at least 1 element")
        return
    if isinstance(wanted, type):
        raise TypeError(f"units={wanted.__name__}: a tuple of classes, ({wanted.__name__},)")
    given = wanted if isinstance(wanted, Collection) and not isinstance(wanted, str) else [wanted]
    for each in () if wanted is None else given:
        if not (isinstance(each, type) and issubclass(each, nn.Module)):
            odd = each.__name__ if isinstance(each, type) else kind_of(each)
            raise TypeError(f"units: a tuple of classes of modules, or a number of elements, not {odd}")


def find_units(model: nn.Module, wanted: Wanted = None) -> list[Unit]:
    """The units: the root first, then the others in the order of the model's modules.

    wanted: None: the children of the outermost lists (nn.ModuleList, nn.Sequential) whose children share a
    class, and instead of experts, of which each rank may run others, the module with the list of them;
    classes: their outermost modules; a number: the smallest modules with at least so many elements.

    TypeError, ValueError as for `check_wanted`; ValueError for classes that the model does not have.
    """
    check_wanted(wanted)
    if wanted is None:
        chosen = list(_repeated(model))
    elif isinstance(wanted, int):
        chosen = []
        _of_size(model, wanted, chosen)
    else:
        chosen = list(_of_class(model, tuple(wanted)))
        if not chosen:
            names = ", ".join(each.__name__ for each in wanted)
            raise ValueError(f"units=({names}): the model has no such module with parameters")
    picked = {id(each) for each in chosen if each is not model}
    named = [(name, each) for name, each in model.named_modules() if id(each) in picked]
    return [
        Unit(0, "", weakref.ref(model)),
        *(Unit(number, name, weakref.ref(each)) for number, (name, each) in enumerate(named, 1)),
    ]


def unit_numbers(model: nn.Module, units: Sequence[Unit], parameters: Iterable[torch.Tensor]) -> list[int]:
    """The number of the innermost unit that has each parameter; the root's if several have it."""
    of_module = {id(unit.module): unit.number for unit in units[1:]}
    # By all names: a shared module has several.
    of_name = {name: of_module.get(id(each), 0) for name, each in model.named_modules(remove_duplicate=False)}
    found: dict[int, set[int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        prefix = name.rpartition(".")[0]
        while prefix and not of_name[prefix]:
            prefix = prefix.rpartition(".")[0]
        found.setdefault(id(parameter), set()).add(of_name.get(prefix, 0))
    return [numbers.pop() if len(numbers := found[id(each)]) == 1 else 0 for each in parameters]


def owners_of(model: nn.Module) -> dict[int, list[nn.Module]]:
    """For each parameter, by its id, the modules that have it directly."""
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    return owners


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _repeated(module: nn.Module) -> Iterable[nn.Module]:
    named = {name: each for name, each in module.named_children() if _has_parameters(each)}
    alike = len({type(each) for each in named.values()}) == 1
    if isinstance(module, nn.ModuleList | nn.Sequential) and alike and not _are_lists(named.values()):
        yield from named.values()
        return
    others = [each for name, each in named.items() if not _are_experts(name, each)]
    if len(others) < len(named) and not isinstance(module, _CONTAINERS):
        yield module
    for child in others:
        yield from _repeated(child)


def _are_lists(modules: Iterable[nn.Module]) -> bool:
    return any(isinstance(each, _CONTAINERS) for each in modules)


def _are_experts(name: str, module: nn.Module) -> bool:
    """Whether these are modules of which each rank may run others."""
    kinds = {type(each).__name__ for each in module.children()}
    return isinstance(module, _CONTAINERS) and "expert" in " ".join([name, *kinds]).lower()


def _of_class(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> Iterable[nn.Module]:
    for child in module.children() if not isinstance(module, _CALLS_NONE) else ():
        if isinstance(child, classes) and _has_parameters(child):
            yield child
        else:
            yield from _of_class(child, classes)


def _of_size(module: nn.Module, elements: int, chosen: list[nn.Module]) -> int:
    """Adds units to `chosen`; returns the elements of `module` that are in none of them."""
    whole = isinstance(module, _CALLS_NONE)
    left = sum(each.numel() for each in module.parameters(recurse=whole))
    left += sum(_of_size(child, elements, chosen) for child in module.children() if not whole)
    if left < elements or isinstance(module, _CONTAINERS):
        return left
    chosen.append(module)
    return 0
