"""A rank shows its launcher that it lives, and how far it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from imece import moments
from imece.membership.roster import Roster
from imece.membership.where import Where
from imece.mesh import Mesh
from imece.store import reach_launchers_store

_BEAT_S = 0.2


class Beating(threading.Thread):
    """Says five times a second that this process lives, and how many steps it has finished.

    The launcher ends a rank that falls silent, and gives up a run in which ranks die again and again without
    a step in between.
    """

    def __init__(
        self,
        store: Callable[[], dist.Store],
        member: int,
        steps: Callable[[], int],
        then: Callable[[Roster], None] = lambda _: None,
    ) -> None:
        """Begins. store: connects to the launcher's. steps: returns the number of finished steps; those of a
        checkpoint count from the first beat on, or they would be taken for steps made since the start. then:
        called in the same thread after each beat."""
        super().__init__(name="imece-beat", daemon=True)
        self.finished_steps = steps
        self._store, self._member, self._then = store, member, then
        self._over = threading.Event()
        self.start()
        moments.ended_last.append(self.end)  # a process that still lives must beat; one that ends must not

    def run(self) -> None:
        """The thread's work."""
        roster, beats = Roster(self._store()), 0
        while not self._over.wait(_BEAT_S if beats else 0):
            beats += 1
            try:
                roster.say_alive(self._member, beats, self.finished_steps())
                self._then(roster)
            except RuntimeError:  # the launcher is gone, and this process will be soon
                return

    def end(self) -> None:
        """No more beats."""
        self._over.set()
        self.join()


_shown: Beating | None = None


def show(mesh: Mesh, steps: Callable[[], int], model: nn.Module, optimizers: Sequence[Optimizer]) -> Where:
    """Show it to an imece launcher from a rank that it cannot replace: it starts all again instead, when one
    dies or falls silent. A script may have several loops; a process has one voice. Returns where to note that
    a step is over."""
    global _shown
    if mesh.world.member is not None:
        if _shown is None:
            _shown = Beating(reach_launchers_store, mesh.world.member, steps)
        _shown.finished_steps = steps
    where = Where(steps)
    where.watch(model, optimizers)
    return where
