"""On GPUs: the stream on which a device's gradients are written, whichever streams forward used.

    node      writes a parameter's gradient in backward, then calls the hooks, on a stream that it remembers
    home      the stream that was current when the nodes were made: one for all nodes of a device

If nobody keeps a node, torch makes a new one in each forward, on the stream that is current just then. If a
branch of a model runs on another stream, its gradients would be written there, beside the rest, and a bucket
with both kinds leaves from one stream only. So nodes are kept, as in torch's own DDP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from imece.device import has_streams, is_current

_NOTHING = contextlib.nullcontext()


class Home:
    """The home streams of one model's parameters. On a CPU, where everything has one order, there
    are none."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        there = [each for each in parameters if has_streams(each)]
        self._nodes = [_node(each) for each in there]
        self._streams = {each.device: torch.cuda.current_stream(each.device) for each in there}

    @property
    def is_needed(self) -> bool:
        """Whether any parameter is on a GPU. In backward each GPU has a thread of its own."""
        return bool(self._streams)

    def of(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Inside, work is queued behind what the home stream and the current stream of `device` have so
        far, on the home stream. Later work on the current stream comes behind it. `device` must be the
        current one.
        """
        stream = self._streams.get(device)
        return _NOTHING if stream is None or is_current(stream) else _on(stream)

    def leave(self) -> None:
        """Drop the nodes, which keep their parameters alive."""
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
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():  # it may be freed now
        leaf = parameter.view_as(parameter).grad_fn
        assert leaf is not None
        return leaf.next_functions[0][0]
