"""The backward under way: one of autograd's graph tasks, which may run inside of each other."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

NO_TASK = -1
Edges = tuple[tuple[Any, int], ...]  # from a node of a graph to what follows it in backward
_Tell = TypeVar("_Tell", bound=Callable[[], None])
_Called = TypeVar("_Called", bound=Callable[..., Any])


def uncompiled(function: _Called) -> _Called:
    """For what autograd calls: torch.compile of a whole step, with its backward, would compile that too.

    Not torch._disable_dynamo, which takes 3 us in each call, and puts a closure into a cycle.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def current() -> int:
    """The number of the backward that the caller is inside of."""
    return torch._C._current_graph_task_id()


def is_running() -> bool:
    """Whether the caller is inside of a backward."""
    return torch._C._current_graph_task_id() != NO_TASK


def at_end(tell: _Tell) -> weakref.ref[_Tell]:
    """Call `tell` when the backward that the caller is inside of is over, unless it raises.

    Only autograd may hold a strong reference to `tell`; it does so as long as that backward runs. If the weak
    reference is dead and `tell` was not called, the backward has raised.

    RuntimeError under compiled autograd, which calls no such thing: gradients would stay on their rank.
    """
    dynamo = sys.modules.get("torch._dynamo.compiled_autograd")  # to import it takes seconds
    if dynamo is not None and dynamo.in_compiled_autograd_region:
        raise RuntimeError(
            "torch's compiled autograd runs this backward and tells nobody when it is over, so gradients "
            "would stay on their rank: leave torch._dynamo.config.compiled_autograd False; torch.compile "
            "compiles backward without it too"
        )
    torch.autograd.Variable._execution_engine.queue_callback(tell)
    return weakref.ref(tell)


def behind(output: torch.Tensor) -> Edges:
    """Where the gradient of an output goes on. For a view, that of its base, as the view may get
    another history.

    A hook on the output may keep this. If it kept the node of the output itself, neither would ever be freed.
    """
    base = output._base
    node: Any = output.grad_fn if base is None or base.grad_fn is None else base.grad_fn
    return node.next_functions  # type: ignore[no-any-return]


def writes(edges: Edges) -> bool:
    """Whether the backward under way writes a `.grad` behind these edges; autograd.grad() does not.

    In an ordinary backward the nearest leaf tells, and the search ends there.
    """
    if not is_running():
        return True
    some_only, seen, nodes = False, set[Any](), deque(node for node, _ in edges)
    while nodes:
        node = nodes.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        try:
            runs = torch._C._will_engine_execute_node(node)
        except RuntimeError:  # a leaf whose gradient autograd.grad() is to return
            return False
        further = node.next_functions
        if runs and not further:
            return True
        some_only = some_only or not runs
        nodes.extend(node for node, _ in further if runs)
    return not some_only
