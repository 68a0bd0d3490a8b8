"""From a config to a run: checks and preparations before any rank starts, and what each rank does."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from pathlib import Path
from signal import Signals

import torch

from imece import opening
from imece.collectives import ops
from imece.collectives.texts import gather_texts
from imece.data.prepare import Prepared, TextSource, prepare
from imece.data_parallel.sharding.offload import check_strategy
from imece.data_parallel.strategy import find_strategy
from imece.device import best_device, usable_gpus
from imece.errors import UserError
from imece.launchers import read_world
from imece.membership.recovery import Recovered
from imece.observe.environment import environment
from imece.observe.run_files import as_argument, write_json
from imece.system.control_groups import usable_cores
from imece.system.open_files import TRAIN, check_open_files
from imece.train.agreeing import together
from imece.train.alike import check_same_folder, check_same_start
from imece.train.config import TrainConfig
from imece.train.dividing import axes_of
from imece.train.finish import end_early, finish, is_finished, newest_kept
from imece.train.header import header, notes_on_data
from imece.train.inputs import read_inputs, shape_and_plan
from imece.train.loop import Loop, NotFiniteError
from imece.train.model.adapters import check_libraries
from imece.train.model.origin import open_base
from imece.train.model.precision import choose_precision
from imece.train.opening import open_session
from imece.train.prediction import keep
from imece.train.run.folder import RunFolder
from imece.train.run.lock import RunLock
from imece.train.session import Session
from imece.train.watch.drift import DriftError
from imece.train.watch.stopping import Stop
from imece.train.watch.watching import Watching

Progress = Callable[[str, int, int], None]


def make_ready(config: TrainConfig, progress: Progress | None, lock: RunLock) -> int:
    """Check and prepare everything that needs no ranks; returns the number of ranks to start.

    lock: of the run folder. UserError for anything that would stop the ranks; nothing is left of a new folder
    then.
    """
    ranks = config.ranks or default_ranks()
    check_open_files(ranks, TRAIN)
    kind = best_device()
    choose_precision(config.compute.dtype, kind)
    _check_strategy(config.strategy)
    _check_offload(config, kind)
    shape_and_plan(config, config.data.vocab_size, ranks)
    check_libraries(config.lora)
    folder = RunFolder(config.folder)
    with folder.begun(config, lock):
        if config.lora.rank:
            open_base(config, folder)

        def get(source: TextSource, tokenizer: Path, tokens: Path) -> Prepared:
            return prepare(source, tokenizer, tokens, progress)

        read_inputs(config, ranks, get)
    return ranks


def _check_strategy(name: str) -> None:
    """UserError for a strategy that ranks of one host, as started here, cannot have."""
    if name != "auto" and find_strategy(name).hybrid:
        raise UserError(
            f"--strategy {name}: it shards inside hosts and replicates between them, and these ranks are all "
            "on this host: use zero3, or start it on several with torchrun or SLURM"
        )


def _check_offload(config: TrainConfig, kind: torch.device) -> None:
    """UserError if this device or the strategy cannot offload."""
    if config.offload is None:
        return
    if kind.type != "cuda":
        raise UserError(
            f"--offload {config.offload} moves to the host's memory what is in a GPU's, and there is no GPU "
            "here: leave it out"
        )
    if config.strategy != "auto":
        try:
            check_strategy(config.offload, find_strategy(config.strategy))
        except ValueError as error:
            raise UserError(f"--offload {config.offload}: {error}") from None


def _check_cache() -> None:
    """UserError if torch cannot make the folder that its compiler keeps things in: any optimizer makes it."""
    try:
        importlib.import_module("torch._dynamo")
    except OSError as error:
        raise UserError(
            f"torch cannot make a folder for what it compiles ({error}): set TMPDIR or "
            "TORCHINDUCTOR_CACHE_DIR to a folder that can be written"
        ) from None


def default_ranks() -> int:
    """One for each GPU; without GPUs two, if there are two cores."""
    return usable_gpus() or min(2, usable_cores())


def run_rank(config: TrainConfig, stop: Stop) -> int:
    """Train as one of the ranks that a launcher started, to the end. Returns the exit status: 128 + the
    signal that ended it, 1 if the last checkpoint is not on the disk, else 0.

    stop: listens for signals; ranks still meet if one came, so that they end together.
    UserError on one rank for a wrong config, data or checkpoint; SystemExit(2) on the others. NotFiniteError,
    DriftError on rank 0; SystemExit(1) on the others.
    """
    folder = RunFolder(config.folder)
    with RunLock(folder.path) as lock:
        mesh = opening.init(axes_of(config.mesh, read_world().world_size), ranks=config.ranks or None)
        check_same_start(config, mesh)
        together(mesh, lambda: check_libraries(config.lora))
        together(mesh, _check_cache)
        with contextlib.ExitStack() as until_open:
            first = mesh.rank == 0 and not mesh.world.joining
            begun = folder.begun(config, lock) if first else contextlib.nullcontext()
            together(mesh, lambda: until_open.enter_context(begun))
            if not mesh.world.joining:
                check_same_folder(folder.path, mesh)
            lock.join()
            session = open_session(config, mesh)
        joined = session.begin()
        if joined is None and _is_finished(session):
            if mesh.rank == 0:
                print(f"{folder.path} {_finished(session)} goes on")
            return 0
        return _train(session, stop, joined)


def _is_finished(session: Session) -> bool:
    """Whether rank 0 finds the run finished. It decides, because ranks must not disagree on what comes
    next."""
    mesh = session.mesh
    mine = ["finished"] if mesh.rank == 0 and is_finished(session) else []
    return bool(gather_texts(mine, mesh.world_group, mesh.device, "whether the run is finished")[0])


def _finished(session: Session) -> str:
    if why := session.why_early:
        return f"ended after step {session.done:,}, as {why}: a larger --validate.patience"
    longer = "--epochs" if session.config.epochs else "--steps"
    return f"has its {session.config.steps} steps: a larger {longer}"


def _train(session: Session, stop: Stop, joined: Recovered | None) -> int:
    """Returns the exit status. joined: how this rank came to others, who are in mid-run and do not wait."""
    config, mesh, path = session.config, session.mesh, session.folder.path
    watching = Watching(path, mesh.rank, config.steps, session.done, session.alarms)
    try:
        if mesh.rank == 0:
            write_json(path / "environment.json", environment())
            if joined is None:  # before any step, because a rank that joins reads it
                keep(path, session.prediction)
        if joined is None:
            watching.header(header(session))
            lacks = [session.prediction.lacks] if session.prediction.lacks else []
            for line in [*lacks, *notes_on_data(session.prepared, config, session.batches)]:
                watching.note(line)
            ops.barrier(group=mesh.world_group)  # so that all ranks measure their speed at the same time
        loop = Loop(session, watching, stop)
        signal = _run(session, loop, watching, joined)
        saved = session.checkpoints.finish()
        if signal:
            if saved:
                run = as_argument(path)
                watching.note(f"saved after step {session.done}; go on with: imece train --run {run}")
            end_early(session, f"stopped by {Signals(signal).name}")
        return 128 + signal if signal else 0 if saved else 1
    except (NotFiniteError, DriftError) as error:  # raised on all ranks
        session.checkpoints.finish()  # let a save under way finish
        kept = newest_kept(session)
        watching.note("nothing was saved" if kept is None else f"the newest checkpoint is of step {kept}")
        end_early(session, str(error))
        if mesh.rank != 0:
            raise SystemExit(1) from None
        raise
    except Exception as error:
        if session.recovery is None:  # otherwise the others wait for this rank's end
            end_early(session, f"{type(error).__name__}: {error}")
        raise
    finally:
        session.checkpoints.close()  # before `watching` closes, which shows its messages
        watching.close()


def _run(session: Session, loop: Loop, watching: Watching, joined: Recovered | None) -> int:
    """Make all steps and finish the run, even if other ranks die. Returns the signal that ended it, or 0."""
    error: RuntimeError | None = None
    failed: RuntimeError | None = None
    if session.recovery is not None:
        session.recovery.go_on()
    while True:
        try:
            if error is not None:
                failed, error = error, None
                joined = session.recover(failed)
            if joined is not None:
                recovered, joined = joined, None
                loop.recovered(recovered)
            signal = loop.run()
            if not signal:
                finish(session, loop, watching)
                ops.barrier(group=session.mesh.world_group)  # a rank that leaves early looks lost
            else:
                session.finish_save()
            if session.recovery is not None:
                session.recovery.end()
            return signal
        except RuntimeError as another:
            if another is failed:  # no rank's end explains it
                raise
            error = another
