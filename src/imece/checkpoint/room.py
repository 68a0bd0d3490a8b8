"""Room on the disk for a checkpoint: which older ones are removed for a new one, and what people are told."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from imece.checkpoint import commit, files
from imece.checkpoint.manifest import MANIFEST, Kind
from imece.errors import UserError


class Room:
    """The room of one folder, on rank 0.

    session: the beginning of the names of this job's attempts.
    """

    def __init__(self, folder: Path, keep: int, session: str, alarm: Callable[[str], None]) -> None:
        self._folder, self._keep, self._session, self._alarm = folder, keep, session, alarm
        self._newest: int | None = None  # the step of the last checkpoint that was put in place
        self._told = False

    def make(self, partial: Path) -> None:
        """Remove older checkpoints until the disk has room for one more; never the newest, nor the best.

        Only once this job has one in place: nobody here knows which of the earlier ones can be read.
        """
        if self._newest is None:
            return
        with contextlib.suppress(OSError, UserError):  # if it matters, the save itself will say so
            newest = files.step_folder(self._folder, self._newest)
            # Until the manifest is there, the files of all ranks' parts are too.
            needed = files.taken(newest) + (newest / MANIFEST).stat().st_size
            for keep in range(self._keep - 1, 0, -1):
                # Ask for free space first: what other ranks write meanwhile then counts twice, so nothing is
                # removed in vain.
                if shutil.disk_usage(self._folder).free + files.taken(partial) >= needed:
                    return
                self._prune(self._newest, keep)
                if not self._told:
                    self._told = True
                    self._alarm(f"no room for {self._keep} checkpoints: older ones make room for new ones")

    def taken_by(self, step: int, keep_all: bool) -> None:
        """The checkpoint of this step is on the disk: remove surplus ones. OSError, UserError."""
        self._newest = step
        self._prune(step, sys.maxsize if keep_all else self._keep)

    def lacking(self, kinds: Mapping[str, Kind], partial: Path) -> str:
        """For a save that has failed: how much room is lacking, and what takes it. "" if there is enough."""
        needed = sum(kind.numel * kind.itemsize for kind in kinds.values())
        try:
            free = shutil.disk_usage(self._folder).free + files.taken(partial)
            stays = commit.what_stays(self._folder)
        except (OSError, UserError):
            return ""
        if free >= needed:
            return ""
        beside = f" beside {stays}" if stays else ""
        return f" ({needed / 1e6:.1f} MB are needed, {free / 1e6:.1f} MB are free{beside})"

    def _prune(self, step: int, keep: int) -> None:
        if (aside := commit.prune(self._folder, step, keep, self._session)) is not None:
            self._alarm(aside)
