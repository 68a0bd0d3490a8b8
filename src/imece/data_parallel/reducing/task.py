"""The backward that is under way: one of autograd's graph tasks, which may run inside of each other."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

NO_TASK = -1
Edges = tuple[tuple[Any, int], ...]  # of a node of a graph, to what comes after it in backward
_Tell = TypeVar("_Tell", bound=Callable[[], None])


def current() -> int:
    """The number of the backward that this is inside of."""
    return torch._C._current_graph_task_id()


def at_end(tell: _Tell) -> weakref.ref[_Tell]:
    """Call `tell` when the backward that this is inside of is over, unless it raises.

    Autograd alone is to keep it, and keeps it as long as that backward: where nobody holds it any more and it
    was not called, the backward has raised.
    """
    torch.autograd.Variable._execution_engine.queue_callback(tell)
    return weakref.ref(tell)


def behind(output: torch.Tensor) -> Edges:
    """Where the gradient of an output goes on: of the base of a view, as that may get another history.

    A hook on the output may keep this. If it kept the node of the output itself, neither would ever go.
    """
    base = output._base
    node: Any = output.grad_fn if base is None or base.grad_fn is None else base.grad_fn
    return node.next_functions  # type: ignore[no-any-return]


def writes(edges: Edges) -> bool:
    """Whether the backward that is under way writes a `.grad` behind these edges; autograd.grad() does not.

    Of an ordinary one the nearest leaf tells, and nobody looks further.
    """
    if current() == NO_TASK:
        return True
    some_only, seen, nodes = False, set[Any](), deque(node for node, _ in edges)
    while nodes:
        node = nodes.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        try:
            runs = torch._C._will_engine_execute_node(node)
        except RuntimeError:  # a leaf of which autograd.grad() is to return the gradient
            return False
        further = node.next_functions
        if runs and not further:
            return True
        some_only = some_only or not runs
        nodes.extend(node for node, _ in further if runs)
    return not some_only
