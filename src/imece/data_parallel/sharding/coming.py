"""Parameters whose new values are still being gathered: any use of one waits for them first.

After a step a rank has the new values of its own parts, and an all-gather for each bucket brings the others'.
Over a network, the next forward begins meanwhile with what it uses first (Megatron-LM calls this
overlap-param-gather). Until a bucket has come, its parameters are ComingParameters: any operation on one, in
a forward or elsewhere, waits for that bucket, and then finds an ordinary parameter. C++ code may take a
tensor unnoticed; so the modules that have the parameters also wait, before their forward.

The same holds for this rank's parts if the gather reads them in place: an early write into one would change
what other ranks get from the step. Readers of parts do not wait (Part.values).

On a GPU the current stream waits. A branch of a model, or an average of weights, may run on another stream:
until the GPU has filled the bucket, each operation on its parameters makes its own stream wait.

Two cases escape. A tensor made from a parameter before the step, such as `parameter.detach()`, and read after
it, shares the memory and does not wait. And compiled code takes parameters as they are: only the stream that
runs the first block with a parameter of a bucket waits for that bucket. Compiled code that finds parts
through their optimizer does not wait at all. Store.settle notices if either has written into parts.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from imece.collectives.pending import Pending
from imece.data_parallel.sharding import freed
from imece.device import has_streams

# Their answers do not depend on values. Questions that come before somebody takes the tensor's memory without
# telling torch (strides, contiguous, complex) are not among them.
_KNOWN = freed.KNOWN - {
    getattr(torch.Tensor, name)
    for name in ("element_size", "is_complex", "is_contiguous", "storage_offset", "stride")
}


class Coming:
    """The parameters of one bucket while an all-gather fills it, and the parts that the gather reads."""

    def __init__(
        self, parameters: Iterable[torch.Tensor], modules: Iterable[nn.Module], work: Pending
    ) -> None:
        """From now on whoever uses one of the parameters waits. modules: those that have the parameters."""
        self._work = work
        self._came: torch.cuda.Event | None = None  # recorded on the first stream that waited
        self._handles = [each.register_forward_pre_hook(self._before, prepend=True) for each in modules]
        self._kinds = {each: type(each) for each in parameters}
        self._device = next((each.device for each in self._kinds if has_streams(each)), None)
        for each in self._kinds:
            each._imece_coming = self  # type: ignore[attr-defined]
            each.__class__ = ComingParameter

    @property
    def nobody_waited(self) -> bool:
        """Whether nobody has waited for any of them so far."""
        return self._came is None and bool(self._kinds)

    def wait(self) -> None:
        """When this returns, they have come for the current stream. Raises what `Pending.wait` raises,
        each time."""
        if self._came is None:
            self._work.wait()
            if self._device is not None:
                self._came = torch.cuda.current_stream(self._device).record_event()
        else:
            torch.cuda.current_stream(self._device).wait_event(self._came)
        if self._came is None or self._came.query():
            self._show()

    def settle(self) -> None:
        """As `wait`, and nobody waits afterwards: later uses come behind the current stream."""
        self.wait()
        self._show()

    def finish(self) -> None:
        """As `wait`, for all streams: on a GPU the host waits."""
        self.wait()
        if self._came is not None:
            self._came.synchronize()
        self._show()

    @contextlib.contextmanager
    def shown(self, parameter: torch.Tensor) -> Iterator[None]:
        """Inside, the parameter has come for the current stream, and is an ordinary one."""
        self.wait()
        if kind := self._kinds.get(parameter):
            parameter.__class__ = kind
        try:
            yield
        finally:
            if parameter in self._kinds:
                parameter.__class__ = ComingParameter

    def give_up(self) -> None:
        """Nobody will wait for them: their group is gone."""
        self._work.give_up()
        self._show()

    @torch._disable_dynamo(recursive=True)
    def _before(self, module: nn.Module, _inputs: object) -> None:
        self.wait()

    def _show(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        while self._kinds:
            parameter, kind = self._kinds.popitem()
            del parameter.__dict__["_imece_coming"]
            parameter.__class__ = kind


class ComingParameter(nn.Parameter):
    """The class of a parameter while it is coming."""

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
        with _shown(_pytree.tree_leaves((args, kwargs))):
            return func(*args, **(kwargs or {}))

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return repr(_finished(self))

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(_finished(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _finished(self).__reduce_ex__(protocol)


@torch._disable_dynamo(recursive=True)
def settle(parameters: Iterable[torch.Tensor]) -> None:
    """Make sure that all of them have come, as by Coming.settle."""
    for each in parameters:
        if isinstance(each, ComingParameter):
            _of(each).settle()


def _of(parameter: torch.Tensor) -> Coming:
    found: Coming = parameter.__dict__["_imece_coming"]
    return found


@torch._disable_dynamo(recursive=True)
def _shown(given: Iterable[object]) -> contextlib.ExitStack:
    """Inside, those that were coming have come, and are ordinary parameters."""
    inside = contextlib.ExitStack()
    for each in given:
        if isinstance(each, ComingParameter):
            inside.enter_context(_of(each).shown(each))
    return inside


@torch._disable_dynamo(recursive=True)
def _finished(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter, with its own class again."""
    _of(parameter).finish()
    return parameter
