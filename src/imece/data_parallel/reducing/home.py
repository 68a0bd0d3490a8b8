"""On GPUs: the stream on which a device's gradients are written, whichever streams forward used.

    node      what writes a parameter's gradient in backward, then calls the hooks, on a stream that it knows
    home      the stream that was current when the nodes were made: all those of one device have one

torch makes a node anew in each forward if nobody keeps it, on the stream that is current just there. Where a
branch of a model runs on another one, its gradients would be written beside those of the rest, and a bucket
that has both leaves from one stream only. So nodes are kept, as torch's own DDP keeps them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from imece.device import has_streams, is_current

_NOTHING = contextlib.nullcontext()


class Home:
    """Of the parameters of one model. Those on the CPU, where all has one order, have none."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        there = [each for each in parameters if has_streams(each)]
        self._nodes = [_node(each) for each in there]
        self._streams = {each.device: torch.cuda.current_stream(each.device) for each in there}

    @property
    def is_needed(self) -> bool:
        """Whether any is on a GPU. Each GPU has a thread of its own in backward."""
        return bool(self._streams)

    def of(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """What is queued inside comes behind what the device's home and current stream have, on the former;
        the device is the current one. What is queued after it on the latter comes behind that.
        """
        stream = self._streams.get(device)
        return _NOTHING if stream is None or is_current(stream) else _on(stream)

    def leave(self) -> None:
        """Nodes keep their parameters."""
        self._nodes.clear()


@contextlib.contextmanager
def _on(home: torch.cuda.Stream) -> Iterator[None]:
    here = torch.cuda.current_stream(home.device)
    if here != home:
        home.wait_stream(here)
    with torch.cuda.stream(home):
        yield
    if here != home:
        here.wait_stream(home)


def _node(parameter: torch.Tensor) -> Any:
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():  # its memory may be gone for now
        leaf = parameter.view_as(parameter).grad_fn
        assert leaf is not None
        return leaf.next_functions[0][0]
