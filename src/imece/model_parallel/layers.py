"""The layers that `tensor_parallel` divides: which parameters are parts, and what their forward does.

    column    a Linear's output features are divided: W = [W_0; W_1; ...], dim 0 of weight and bias
    row       a Linear's input features: W = [W_0, W_1, ...], dim 1; the ranks' outputs are summed, then the
              bias, which is whole, is added
    vocab     an Embedding's or a head's rows; an embedding's ranks look up what they have and add zeros, a
              head's logits are made whole unless they are to stay divided
    heads     whole parameters that each rank uses only for its heads, such as norms of queries and keys
    sequence  whole parameters that each rank uses only for its positions; with sequence=True
    scatter   from this module's output on each rank holds its positions; with sequence=True
    gather    this module's input is made whole; with sequence=True

A module keeps its class and its names. The instance gets another forward, which calls that of the class.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize
from torch import Tensor, nn

from imece.model_parallel.divided import Divided, mark

if TYPE_CHECKING:  # torch's DTensor takes a second to import, and who only checks a plan needs none
    from imece.model_parallel.boundary import Boundary

Kind = Literal["column", "row", "vocab", "heads", "sequence", "scatter", "gather"]
KINDS: tuple[Kind, ...] = get_args(Kind)
OF_SEQUENCE: tuple[Kind, ...] = ("sequence", "scatter", "gather")

Forward = Callable[..., Tensor]


def dims_of(kind: Kind) -> dict[str, int]:
    """parameter name -> the dim along which it is divided."""
    if kind == "row":
        return {"weight": 1}
    return {"weight": 0, "bias": 0} if kind in ("column", "vocab") else {}


def wrong_with(module: nn.Module, kind: Kind) -> str | None:
    """Why a module cannot be divided in this way; None if it can."""
    if kind in ("scatter", "gather"):
        return None
    own = dict(module.named_parameters(recurse=False))
    if kind in ("heads", "sequence"):
        return None if own else "has no parameters of its own"
    expected = (nn.Linear, nn.Embedding) if kind == "vocab" else (nn.Linear,)
    if not isinstance(module, expected):
        return f"is no {' or '.join(each.__name__ for each in expected)}"
    if kind == "row" and type(module).forward is not nn.Linear.forward:
        return "has a forward of its own, which may do more than multiply"
    if nn.utils.parametrize.is_parametrized(module):
        return "makes its parameters of others (parametrizations): leave these out"
    if other := own.keys() - {"weight", "bias"}:
        return f"has {', '.join(sorted(other))} too"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        return "has max_norm or scale_grad_by_freq, which look at other rows"
    return None


def is_head(module: nn.Module, kind: Kind) -> bool:
    """Whether the module's output is logits."""
    return kind == "vocab" and (not isinstance(module, nn.Embedding) or hasattr(type(module), "as_head"))


def begins_parts(module: nn.Module, kind: Kind) -> bool:
    """Whether, with sequence=True, a rank holds only its positions after this module, and all before it."""
    return kind == "scatter" or (kind == "vocab" and isinstance(module, nn.Embedding))


def divide(module: nn.Module, kind: Kind, boundary: Boundary, done: dict[int, Divided]) -> None:
    """Cut the module's whole parameters in place, and change its forward.

    done: the parameters that were already cut, by id; a tied parameter is cut once.
    """
    own = dict(module.named_parameters(recurse=False))
    for name, dim in dims_of(kind).items():
        if name not in own:
            continue
        divided = Divided(dim, boundary.index, boundary.size)
        if id(own[name]) not in done:
            own[name].data = divided.of(own[name].data).contiguous().clone()
            own[name].grad = None
            done[id(own[name])] = divided
        mark(module, name, divided)
    _tell_sizes(module, boundary)
    if kind in ("heads", "sequence") or (kind == "row" and boundary.sequence):
        for name, parameter in own.items():
            if name not in dims_of(kind):
                _when_gradient_comes(parameter, boundary.summed)
    make = _FORWARDS.get((kind, nn.Embedding if isinstance(module, nn.Embedding) else nn.Module))
    if make is not None:
        _bind(module, "forward", make(boundary, type(module).forward))
    as_head: Forward | None = getattr(type(module), "as_head", None)  # an embedding that is also the head
    if kind == "vocab" and as_head is not None:
        _bind(module, "as_head", _head(boundary, as_head))


def _when_gradient_comes(parameter: nn.Parameter, hook: Callable[[Tensor], Tensor]) -> None:
    """Call `hook` on the parameter's gradient, even if it is frozen now: it may be trained later."""
    wanted = parameter.requires_grad
    parameter.requires_grad_(True).register_hook(hook)
    parameter.requires_grad_(wanted)


def _tell_sizes(module: nn.Module, boundary: Boundary) -> None:
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Embedding) and len(module.weight) < module.num_embeddings:
        module.num_embeddings = len(module.weight)
        if module.padding_idx is not None:
            at = module.padding_idx - boundary.index * len(module.weight)
            module.padding_idx = at if 0 <= at < len(module.weight) else None


def _bind(module: nn.Module, name: str, method: Forward) -> None:
    """Replace a method of the instance."""
    setattr(module, name, _Bound(method, module))


class _Bound:
    """A method of one module. Like a bound method it becomes its copy's in a copy of the module, but it does
    not keep the module: that would be a cycle, and a dropped model would keep its memory until the garbage
    collector comes."""

    def __init__(self, method: Forward, module: nn.Module) -> None:
        self._method, self._module = method, weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._method(self._module(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Bound:
        module = self._module()
        assert module is not None
        return _Bound(self._method, copy.deepcopy(module, memo))


def _column(boundary: Boundary, forward: Forward) -> Forward:
    def run(self: nn.Module, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return forward(self, boundary.enter(input), *args, **kwargs)

    return run


def _row(boundary: Boundary, forward: Forward) -> Forward:
    def run(self: nn.Linear, input: Tensor) -> Tensor:
        whole = boundary.leave(F.linear(input, self.weight))
        return whole if self.bias is None else whole + self.bias.to(whole.dtype)

    return run


def _head(boundary: Boundary, forward: Forward) -> Forward:
    def run(self: nn.Module, input: Tensor) -> Tensor:
        return boundary.logits(forward(self, boundary.enter(input)))

    return run


def _lookup(boundary: Boundary, forward: Forward) -> Forward:
    def run(self: nn.Embedding, input: Tensor) -> Tensor:
        boundary.check_same(input)
        rows = len(self.weight)
        at = input - boundary.index * rows
        # A token outside the whole vocabulary stays, so that the lookup refuses it.
        elsewhere = ((at < 0) | (at >= rows)) & (input >= 0) & (input < boundary.size * rows)
        found = forward(self, torch.where(elsewhere, 0, at))
        return boundary.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0))

    return run


def _scatter(boundary: Boundary, forward: Forward) -> Forward:
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return boundary.scatter(forward(self, *args, **kwargs))

    return run


def _gather(boundary: Boundary, forward: Forward) -> Forward:
    def run(self: nn.Module, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return forward(self, boundary.gather(input), *args, **kwargs)

    return run


_FORWARDS: dict[tuple[Kind, type[nn.Module]], Callable[[Boundary, Forward], Forward]] = {
    ("column", nn.Module): _column,
    ("row", nn.Module): _row,
    ("vocab", nn.Module): _head,
    ("vocab", nn.Embedding): _lookup,
    ("scatter", nn.Module): _scatter,
    ("scatter", nn.Embedding): _scatter,
    ("gather", nn.Module): _gather,
}
