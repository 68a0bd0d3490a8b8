"""Cuts a model into the stages of a pipeline.

    piece   what is never cut: a child of an nn.Sequential, a block of a Transformer, its head
    stage   consecutive pieces, run as one; each takes what the one before returns
    part    the stages of one rank: one, or several with the interleaved schedule

A part's parameters have the names that they have in the whole model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imece.listing import kind_of
from imece.models.dealing import between, layer_cost
from imece.models.transformer import Transformer, rotation_at, visible_from

Values = tuple[Tensor, ...]


class Pieces(Protocol):
    """The pieces of a model, in the order of its forward."""

    costs: list[float]
    """Cost of each piece in a step, in any unit."""
    takes_begins: bool
    """Whether stages take the `begins` of a Transformer."""

    def named(self, which: range) -> dict[str, nn.Module]:
        """The modules of these pieces, by their names in the model."""

    def stage(self, which: range, inputs: Values) -> nn.Module:
        """These pieces as one module. inputs: a micro-batch of the whole model, with or without memory."""


def pieces_of(model: nn.Module | Sequence[nn.Module], seq: int | None = None) -> Pieces:
    """The pieces of a model. seq: the length of its sequences, of a Transformer; None: as long as it allows.

    ValueError, with what to do, for a model of unknown structure, and for a seq that it cannot have.
    """
    if isinstance(model, Transformer) and type(model).forward is Transformer.forward:
        longest = model.config.max_seq
        if seq is not None and not 1 <= seq <= longest:
            raise ValueError(f"seq={seq}: this model takes sequences of 1 to {longest} positions")
        return _OfTransformer(model, longest if seq is None else seq)
    if seq is not None:
        raise ValueError(f"seq={seq} is for an imece Transformer, and this is {kind_of(model)}: leave it out")
    if type(model) is nn.ModuleList or isinstance(model, Sequence):
        modules = list(model)
        if all(isinstance(each, nn.Module) for each in modules):
            return _OfSequential(nn.Sequential(*modules))
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        return _OfSequential(model)
    own = " whose forward is its own" if isinstance(model, nn.Sequential | Transformer) else ""
    raise ValueError(
        f"{kind_of(model)}{own} cannot be cut by itself: give an imece Transformer, an "
        "nn.Sequential, or a list of modules, each of which takes what the one before returns"
    )


def dealt_by(cuts: Sequence[int], pieces: int, stages: int) -> list[range]:
    """The pieces of each stage. cuts: the first piece of each stage but the first. ValueError for impossible
    cuts."""
    are_numbers = isinstance(cuts, Sequence) and all(isinstance(each, int) for each in cuts)
    ends = [0, *cuts, pieces] if are_numbers else []
    if len(ends) != stages + 1 or any(start >= stop for start, stop in itertools.pairwise(ends)):
        raise ValueError(
            f"cuts={cuts!r}: {stages} stages need {stages - 1} rising numbers from 1 to {pieces - 1}, "
            "the pieces at which stages begin"
        )
    return between(ends)


@dataclass(frozen=True)
class Place:
    """Where a part is, for code that saves and loads the whole model."""

    pipeline: dist.ProcessGroup
    """The ranks along the axis pipeline: one for each part."""
    device: torch.device
    rank: int
    """This rank's number among the ranks with the same part."""
    ranks: int
    """The number of ranks with the same part."""
    tensor: int
    """This rank's number along the axis tensor."""
    tensors: int
    """The number of ranks along it. If nothing in a stage is divided, all of them have all of it."""
    elsewhere: frozenset[str]
    """Names of modules, parameters and buffers that only other parts have."""


class Part(nn.Module):
    """What one rank has of a model that is cut. Pipeline runs its stages; calling it computes nothing.

    So a forward of the wrapper that `parallelize` makes of it does only what the ranks with this part do
    together before a step.
    """

    def __init__(self, named: dict[str, nn.Module]) -> None:
        """named: its modules, by their names in the whole model."""
        super().__init__()
        self.place: Place | None = None
        self.owner: Callable[[], Callable[[nn.Module], None] | None] = lambda: None
        """Returns the function to call with a wrapper, or None; it holds only a weak reference."""
        for name, module in named.items():
            *path, last = name.split(".")
            home: nn.Module = self
            for each in path:
                if each not in home._modules:
                    home.add_module(each, nn.ModuleList())
                home = cast(nn.Module, home._modules[each])
            home.add_module(last, module)

    def wrapped_by(self, wrapper: nn.Module) -> None:
        """Tell the owner that `parallelize` made this wrapper."""
        if (tell := self.owner()) is not None:
            tell(wrapper)

    def forward(self) -> None:
        """Computes nothing; see the class."""


def names_in(named: Mapping[str, nn.Module]) -> Iterator[str]:
    """The names in the whole model of these modules' submodules, parameters and buffers."""
    for name, module in named.items():
        for inner, _ in (*module.named_modules(), *module.named_parameters(), *module.named_buffers()):
            yield f"{name}.{inner}" if inner else name


class _OfSequential:
    takes_begins = False

    def __init__(self, model: nn.Sequential) -> None:
        self._named = dict(model._modules)  # named_children() leaves out repeats
        self.costs = [
            float(sum(_cost_of(each) for each in module.modules())) or 1.0 for module in self._named.values()
        ]
        owners: dict[int, str] = {}
        for name, module in self._named.items():
            for inner, parameter in module.named_parameters():
                first = owners.setdefault(id(parameter), name)
                if first != name:
                    raise ValueError(
                        f"parameter {name}.{inner} is that of {first} too: modules that share parameters "
                        "must be one piece, as nobody else would sum their gradients"
                    )

    def named(self, which: range) -> dict[str, nn.Module]:
        return dict(list(self._named.items())[which.start : which.stop])

    def stage(self, which: range, inputs: Values) -> nn.Module:
        return _SequentialStage(*self.named(which).values())


class _SequentialStage(nn.Sequential):
    """An nn.Sequential that passes several arguments from another stage to its first child as one tuple."""

    def forward(self, *values: Tensor) -> Any:
        x: Any = values[0] if len(values) == 1 else values
        for each in self:
            x = each(x)
        return x


def _cost_of(module: nn.Module) -> int:
    """The number of parameters, each multiplied with once; embeddings only look up and count nothing."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return 0
    return sum(each.numel() for each in module.parameters(recurse=False))


class _OfTransformer:
    """The pieces of a Transformer: the blocks, the first with the embedding, and as the last piece the
    head."""

    takes_begins = True

    def __init__(self, model: Transformer, seq: int) -> None:
        """The model may be divided along the axis tensor: costs are those of one rank."""
        config, self._model = model.config, model
        costs = []
        for layer, block in enumerate(model.blocks):
            seen = min(config.window_of(layer) or seq, seq)
            parameters = sum(each.numel() for each in block.parameters())
            costs.append(layer_cost(parameters, len(cast(Any, block).attention.q.weight), seen))
        head = model.embed if config.tied_head else model.head
        self.costs = [*costs, float(head.weight.numel())]

    def named(self, which: range) -> dict[str, nn.Module]:
        model, layers = self._model, self._model.config.layers
        found: dict[str, nn.Module] = {}
        if 0 in which or (layers in which and model.config.tied_head):
            found["embed"] = model.embed
        found |= {f"blocks.{layer}": model.blocks[layer] for layer in which if layer < layers}
        if layers in which:
            found["norm"] = model.norm
            if not model.config.tied_head:
                found["head"] = model.head
        return found

    def stage(self, which: range, inputs: Values) -> nn.Module:
        return _TransformerStage(self._model, which, inputs[0].shape[1])


class _TransformerStage(nn.Module):
    """Tokens [B, T] or the residual [B, T, width] -> the residual, or logits [B, T, V]."""

    def __init__(self, model: Transformer, which: range, length: int) -> None:
        """length: of the sequences. The residual may be shorter, if other ranks have the other positions."""
        super().__init__()
        self._model, self._length = [model], length  # in a list, so that it is no child module
        layers = model.config.layers
        self.is_first, self.is_last = 0 in which, layers in which
        self.blocks = nn.ModuleList(model.blocks[layer] for layer in which if layer < layers)
        if self.is_first or (self.is_last and model.config.tied_head):
            self.embed = model.embed
        if self.is_last:
            self.norm = model.norm
            if not model.config.tied_head:
                self.head = model.head

    def forward(self, x: Tensor, begins: Tensor | None = None) -> Tensor:
        """begins: as for the model, on every stage."""
        model = self._model[0]
        if self.is_first:
            model.check_room(x, None)
            x = self.embed(x)
        rotation = rotation_at(model.config, torch.arange(self._length, device=x.device))
        visible = visible_from(begins) if begins is not None else None
        for block in self.blocks:
            x = model.through(block, x, rotation, None, visible)
        if not self.is_last:
            return x
        x = self.norm(x)
        return self.embed.as_head(x) if model.config.tied_head else self.head(x)
