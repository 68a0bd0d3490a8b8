"""The zygote: `python _zygote_main.py PARENT`, started by tests/zygote.py. It forks ranks that have torch.

It imports what tests of ranks import, then reads requests from stdin, a line of JSON each:
    directory  what tests/_rank_main.py is told, and where RANK.output is
    cwd        str, the test's own
    environ    rank (a str) -> its whole environment
and answers with a line of JSON on stdout: the pids, in the order of `environ`. The first line of all is
the list of str for sys.path.

Words: the zygote lives as long as the tests; for each request it forks a *midwife*, which forks the ranks
and leaves at once. So the ranks become children of PARENT, which has asked to be given orphans ("subreaper"
in prctl(2)): it can wait for them, be told of their signal, and they end when it ends, not when we do.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import random
import signal
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any, NoReturn

# Whatever takes long to import and is used by ranks of more than one test. None of it starts a thread, opens
# CUDA or a process group. torch._dynamo comes with the first optimizer, FSDP with the sharding of torch,
# torch.distributed.optim (0.25 s) with modules of tests that compare with it, all of imece that a rank may
# use with its `train` and, where a model is divided, with the last two of it.
_MODULES = (
    "torch",
    "numpy",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "imece.cli.train",
    "imece.model_parallel.tensor",
    "imece.model_parallel.stages",
    "tensorboard.summary.writer.record_writer",
    "pytest",
    "hypothesis",
)


def main() -> int:
    parent = int(sys.argv[1])
    sys.path[:] = json.loads(sys.stdin.buffer.readline())
    from tests import _rank_main

    _rank_main.name_process("imece-zygote")
    _rank_main.die_with(parent)
    ctrl_c = signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the tests; we end when they do
    gc.disable()  # or a third of the time goes to what imports make and nothing of which is garbage
    for name in _MODULES:
        importlib.import_module(name)
    _parse_once()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's, for its libraries: nothing that a rank needs, and 0.04 s for each
    gc.enable()
    gc.collect()
    gc.freeze()  # a collection in a rank would write to every page that ranks share with us
    for line in iter(sys.stdin.buffer.readline, b""):
        request: dict[str, Any] = json.loads(line)
        told, tell = os.pipe()
        assert_no_threads()
        midwife = os.fork()
        if midwife == 0:
            os.close(told)
            rank = _fork_ranks(list(request["environ"]), tell, parent)
            os.close(tell)
            signal.signal(signal.SIGINT, ctrl_c)
            _become(rank, request)
            _leave(_rank_main.main(Path(request["directory"]), rank))
        os.close(tell)
        os.waitpid(midwife, 0)
        with os.fdopen(told, "rb") as pids:
            os.write(1, json.dumps([int(pid) for pid in pids]).encode() + b"\n")
    return 0


def _parse_once() -> None:
    """The first command line of a process takes twice as long as others: each rank of a run has one."""
    from imece.cli.options import parse
    from imece.train.config import TrainConfig

    parse(TrainConfig, [], "imece train", "")


def assert_no_threads() -> None:
    """A fork copies the thread that forks and no other: a lock which another one holds would stay locked."""
    threads, tasks = threading.enumerate(), os.listdir("/proc/self/task")
    assert len(threads) == len(tasks) == 1, f"the zygote has threads: {threads}, {len(tasks)} tasks"


def _fork_ranks(ranks: list[str], tell: int, parent: int) -> str:
    """Called by the midwife, returns in each rank, with its number, once that is a child of `parent`."""
    from tests import _rank_main

    _rank_main.name_process("imece-ranks")
    midwife = os.getpid()
    for rank in ranks:
        pid = os.fork()
        if pid == 0:
            while os.getppid() == midwife:
                time.sleep(0.0005)
            return rank
        os.write(tell, b"%d\n" % pid)
    os._exit(0)


def _become(rank: str, request: dict[str, Any]) -> None:
    """Put in order what a fork copies and a fresh interpreter would have of its own."""
    import numpy as np
    import torch

    output = str(Path(request["directory"]) / f"{rank}.output")
    for target, path, how in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY)):
        fd = os.open(path, how)
        os.dup2(fd, target)
        os.close(fd)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(request["environ"][rank])
    os.chdir(request["cwd"])
    sys.argv[1:] = [request["directory"], rank]
    random.seed()
    np.random.seed()
    torch.default_generator.seed()
    torch.set_num_threads(torch.get_num_threads())  # tests/train/command.py, _as_rank, says why


def _leave(status: int) -> NoReturn:
    """End as an interpreter does, in its order, but for the taking apart of all modules: that would write to
    every page that ranks share with us, 0.3 s of CPU time a rank. Fresh ranks and real commands do it too.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for all threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
