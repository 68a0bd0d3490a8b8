"""Memory that the network has not freed yet.

If collectives run on their own stream, the memory that they read may be reused only when the device has
finished them. The CPU, which allocates memory, is ahead of the device by as many launches as fit into its
queue, about a thousand. In tensor parallelism one hidden state, not divided by the ranks, waits for each
product that is split by rows in forward and for each one split by columns in backward. A pipeline's receives
make the CPU wait, so there only the warm-up counts.
"""

from __future__ import annotations

from imece.plan.memory.activations import tokens
from imece.plan.memory.frameworks import Framework
from imece.plan.memory.held import Held
from imece.plan.setup import Setup

_KEPT_UP = 1e12  # FLOP of a layer's forward on one rank with which a CPU keeps up: about 2 ms of an H100
_FEW = 4  # hidden states that wait if the CPU is not ahead
_MOST_TENSOR = 16  # ranks: with more, over several hosts, no waiting was seen in pipelines (ultrascale)


def waiting_bytes(setup: Setup, stage: int, part: Held, framework: Framework) -> float:
    """Bytes of waiting hidden states on one rank; 0 for frameworks without them."""
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
