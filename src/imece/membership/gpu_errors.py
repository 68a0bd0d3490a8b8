"""Errors of a call on GPUs that torch notices: NCCL's, such as a network's, or a timeout.

The kernel of such a call waits forever. torch would end the process; under `imece launch` it is told not to
(meeting.py). A process that goes on without dead ranks aborts the call, as if a rank were gone (member.py).
Any other process ends here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from torch._C._distributed_c10d import ErrorType

from imece import mesh as meshes
from imece.membership import aborting
from imece.saying import say

_LOOK_S = 1.0

_watching: threading.Event | None = None  # once set, a Member watches instead


def error_on_gpus() -> str:
    """torch's text of the error; "" if there is none."""
    for backend in aborting.device_backends():
        asked = getattr(backend, "get_error", None)  # only NCCL's has it
        if asked is not None and (found := asked()) != ErrorType.SUCCESS:
            return str(found.name)
    return ""


def end_process(error: str) -> None:
    """End at once: the thread that could end in order is waiting for the GPU."""
    say(f"a call on GPUs failed in NCCL, or took longer than its timeout ({error}): this rank ends")
    os._exit(1)


def watch(environ: Mapping[str, str] = os.environ) -> None:
    """Watch for such errors where torch leaves them to us, until a Member does."""
    global _watching
    mesh = meshes.current()
    is_ours = mesh.world.member is not None and environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0"
    if mesh.device.type == "cpu" or not is_ours or _watching is not None:
        return
    _watching = threading.Event()
    threading.Thread(target=_look, args=(_watching,), name="imece-gpu-errors", daemon=True).start()


def leave_to_member() -> None:
    """The Member watches from now on."""
    if _watching is not None:
        _watching.set()


def _look(over: threading.Event) -> None:
    while not over.wait(_LOOK_S):
        if error := error_on_gpus():
            end_process(error)
