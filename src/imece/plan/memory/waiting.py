"""Memory that the network has not let go yet.

Where collectives run on a stream of their own, what they have read may be used again only when the device has
got there, and the CPU, which asks for memory, is ahead of it: by as many launches as fit into the device's
queue, about a thousand. In tensor parallelism that is one hidden state for each product that is split by rows
in forward, and for each one split by columns in backward; not divided by the ranks. A pipeline's receives let
the CPU wait, so there it is the warm-up alone.
"""

from __future__ import annotations

from imece.plan.memory.activations import tokens
from imece.plan.memory.frameworks import Framework
from imece.plan.memory.held import Held
from imece.plan.setup import Setup

_KEPT_UP = 1e12  # FLOP of a layer's forward on one rank that a CPU keeps up with: about 2 ms of an H100
_FEW = 4  # hidden states: where the CPU is not ahead
_MOST_TENSOR = 16  # ranks; of more, over several hosts, none were seen to wait in pipelines (ultrascale)


def waiting_bytes(setup: Setup, stage: int, part: Held, framework: Framework) -> float:
    """Of hidden states that wait, on one rank; 0 for frameworks that have none."""
    parallel, recipe = setup.parallel, setup.recipe
    if not framework.waiting or parallel.tensor == 1:
        return 0.0
    count = tokens(recipe, parallel)
    if parallel.pipeline == 1:
        states = (4 if recipe.accumulation > 1 else 2) * part.layers
    else:
        states = 2 * part.layers * (min(parallel.pipeline - stage, recipe.accumulation) - 1)
        kept_up = parallel.pipeline == 2 and 2 * part.products * count < _KEPT_UP
        if kept_up or parallel.tensor > _MOST_TENSOR:
            states = min(states, _FEW)
    states = min(states, framework.waiting)
    return states * count * setup.model.width * recipe.precision.activations
