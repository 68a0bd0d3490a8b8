"""A parameter whose new values are still on their way: whoever uses it waits for them first.

After an optimizer's step a rank has the new values of its own part, and an all-gather for each bucket brings
the others'. Over a network these come while the next forward goes on with what it uses first (Megatron-LM
calls it overlap-param-gather). Until a bucket has come its parameters are ComingParameters: any operation on
one of them, in a forward or anywhere else, waits for that bucket, and finds an ordinary parameter. Code in
C++ may take a tensor without a word: so the modules that have them wait too, before their forward.

What cannot see it is a tensor made from a parameter before the step, `parameter.detach()` say, and read after
it: it shares the memory and does not wait.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from imece.collectives.pending import Pending
from imece.data_parallel.sharding import freed

# Their answers do not depend on values. What is asked of a tensor before its memory is taken, without torch
# being told (strides, whether it is contiguous or complex), is not among them.
_KNOWN = freed.KNOWN - {
    getattr(torch.Tensor, name)
    for name in ("element_size", "is_complex", "is_contiguous", "storage_offset", "stride")
}


class Coming:
    """The parameters of one bucket while an all-gather fills it."""

    def __init__(
        self, parameters: Iterable[torch.Tensor], modules: Iterable[nn.Module], work: Pending
    ) -> None:
        """From now on whoever uses one of them waits. modules: those that have them."""
        self._work = work
        self._handles = [each.register_forward_pre_hook(self._before, prepend=True) for each in modules]
        self._kinds = [(each, type(each)) for each in parameters]
        for each, _ in self._kinds:
            each._imece_coming = self  # type: ignore[attr-defined]
            each.__class__ = ComingParameter

    def settle(self) -> None:
        """They have come when this returns. What `Pending.wait` raises, again each time."""
        self._work.wait()
        self._show()

    def give_up(self) -> None:
        """Nobody will wait for them: their group is gone."""
        self._work.give_up()
        self._show()

    @torch._disable_dynamo(recursive=True)
    def _before(self, module: nn.Module, _inputs: object) -> None:
        self.settle()

    def _show(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        while self._kinds:
            parameter, kind = self._kinds.pop()
            del parameter.__dict__["_imece_coming"]
            parameter.__class__ = kind


class ComingParameter(nn.Parameter):
    """What a parameter's class is while it is coming."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        settle(_pytree.tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return repr(_settle(self))

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(_settle(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _settle(self).__reduce_ex__(protocol)


def settle(parameters: Iterable[torch.Tensor]) -> None:
    """All of them have come."""
    for each in parameters:
        if isinstance(each, ComingParameter):
            _settle(each)


@torch._disable_dynamo(recursive=True)
def _settle(parameter: torch.Tensor) -> torch.Tensor:
    """It, of its own class again."""
    coming: Coming = parameter.__dict__["_imece_coming"]
    coming.settle()
    return parameter
