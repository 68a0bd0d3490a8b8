"""One rank of a test: `python _rank_main.py DIRECTORY RANK`, or `main` in a fork of tests/_zygote_main.py.

DIRECTORY/job.json says what to run:
    path      list of str, sys.path of the test
    module, qualname   the function: module-level, of a test module
    args      list, its arguments
    backend   str or null: open the process group before the function, close it after
    group_timeout_s    number, for the process group
    parent    int, process id that this rank must not outlive
What comes of it is written to DIRECTORY/<rank>.json: {"value": ..., "error": traceback or ""}. The empty
file DIRECTORY/<rank>.entered says that the function was really called.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import operator
import os
import resource
import signal
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def main(directory: Path, rank: str) -> int:
    """The exit status."""
    job: dict[str, Any] = json.loads((directory / "job.json").read_text())
    die_with(job["parent"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a SIGABRT is for the stacks, not for a core file
    faulthandler.enable(all_threads=True)  # the parent's SIGABRT then shows where this rank hangs
    sys.path[:] = job["path"]
    value, error = None, ""
    try:
        value = _call(job, directory / f"{rank}.entered")
        text = json.dumps({"value": value, "error": ""})
    except BaseException:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are failures of the test too
        error = traceback.format_exc()
        text = json.dumps({"value": None, "error": error})
    half = directory / f"{rank}.half"
    half.write_text(text)
    half.rename(directory / f"{rank}.json")  # a rank killed while it writes leaves no half result
    return 1 if error else 0


def die_with(parent: int) -> None:
    """Ask for SIGKILL when `parent` ends. It may have ended before the request: then go at once."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: str) -> None:
    """What ps shows beside the command (Linux); the children of this process have it too."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _call(job: dict[str, Any], entered: Path) -> Any:
    """The function's value. The process group, when one was asked for, is open around the call."""
    backend: str | None = job["backend"]
    if backend is not None:
        import torch.distributed as dist

        if "shm" in backend:
            import imece  # noqa: F401 - registers the backend

        dist.init_process_group(backend, timeout=timedelta(seconds=job["group_timeout_s"]))
    function = operator.attrgetter(job["qualname"])(importlib.import_module(job["module"]))
    entered.touch()
    value = function(*job["args"])
    # Not in a `finally`: after an error the other ranks may hang, and closing the group would wait for them.
    if backend is not None and dist.is_initialized():
        dist.destroy_process_group()
    return value


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
