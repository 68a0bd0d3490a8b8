"""If nobody will be replaced, by the launcher or in the mesh, rank 0 says so once, before it matters."""

from __future__ import annotations

import os
from collections.abc import Mapping

from imece.data_parallel.other_models import wrapped_beside
from imece.data_parallel.replicate import DistributedDataParallel
from imece.mesh import Mesh
from imece.saying import say

_NAMES = {"slurm": "srun", "openmpi": "Open MPI", "mpich": "MPICH"}
_said = False


def say_unwatched(mesh: Mesh, environ: Mapping[str, str] = os.environ) -> None:
    """One line on rank 0, unless it is the only rank: a rank that dies ends the run."""
    global _said
    if _said or mesh.rank != 0 or mesh.world_size == 1:
        return
    _said = True
    if mesh.world.member is not None:
        say(
            "a mesh with axes of its own cannot change its ranks: one that dies ends all, which start again "
            "under imece train, or imece launch --max-restarts N"
        )
        return
    instead = "; imece launch would replace it" if len(mesh.hosts) == 1 else ""
    by = _NAMES.get(mesh.world.launcher) or _by(environ)
    say(f"started by {by}: a rank that dies ends the run{instead}")


def say_not_carried(mesh: Mesh, model: DistributedDataParallel) -> None:
    """One line on rank 0 if there is another wrapped model: its groups would still include dead ranks."""
    if mesh.rank != 0 or mesh.world_size == 1 or not (others := wrapped_beside(model)):
        return
    kinds = " and ".join(f"the {type(each.module).__name__}" for each in others)
    say(
        f"imece.steps carries one wrapped model over a death, and {kinds} wrapped beside it is not: a rank "
        "that dies ends all. Make one nn.Module of them, and wrap that"
    )


def _by(environ: Mapping[str, str]) -> str:
    """The launcher that has set torchrun's variables."""
    run = environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return "RANK and WORLD_SIZE"
    return "imece.spawn" if run.startswith("imece-") else "torchrun"
