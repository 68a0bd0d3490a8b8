"""Ranks that load the same checkpoint: each verifies a share of its files, and tells the others.

seen    identifies the files: ranks that see other files, as when each host has its own disk, share nothing
reader  one of the ranks that see the same files, and so come to the same verdict about them
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch
import torch.distributed as dist

from imece.checkpoint import files
from imece.checkpoint.load import Saved, first_whole, identity, what_is_wrong
from imece.collectives.mistakes import tried
from imece.collectives.texts import gather_json
from imece.errors import UserError

_REPLACED = ""  # a verdict: the files have been replaced since they were opened


def newest_of_all(
    folder: Path, damaged: Callable[[str], None], group: dist.ProcessGroup, device: torch.device
) -> Saved | None:
    """`newest`, for ranks that load together. All ranks of `group` call this; together they read each
    file once.

    Ranks that see the same files get the same checkpoint. UserError, on all ranks, as `newest`.
    """
    lines: dict[str, None] = {}  # each once, in order
    refused: set[object] = set()  # identities of folders
    whole: Saved | None = None

    def look() -> tuple[Saved | None, str]:
        return (None, "") if whole is not None else _newest_complete(folder, refused, lines.setdefault)

    while True:  # until nobody has anything to verify; a rank that is done still listens to the others
        found, seen = tried(look, group, device, "looking for a checkpoint").on_all()
        every = gather_json(seen, group, device, "which checkpoint each rank sees")
        if not any(every):
            break
        readers = [rank for rank, each in enumerate(every) if each == seen]
        verdict = None
        if found is not None:
            verdict = _verdict(found, seen, readers.index(group.rank()), len(readers))
        verdicts = gather_json(verdict, group, device, "whether a checkpoint is whole")
        if found is not None:
            against = [verdicts[rank] for rank in readers if verdicts[rank] is not None]
            if not against:
                whole = found
            elif _REPLACED not in against:
                lines.setdefault(against[0])
                refused.add(identity(found.folder))
    for line in lines:
        damaged(line)
    return whole


def _newest_complete(
    folder: Path, refused: Collection[object], damaged: Callable[[str], None]
) -> tuple[Saved | None, str]:
    """The newest that looks complete, and its `seen`. refused: identities of folders that are passed over."""

    def paths() -> list[Path]:
        return [path for _, path in files.step_folders(folder) if identity(path) not in refused]

    while (found := first_whole(paths, damaged, verify=False)) is not None:
        if seen := found.seen():  # else it was removed just now
            return found, seen
    return None, ""


def _verdict(saved: Saved, seen: str, share: int, shares: int) -> str | None:
    """What is wrong with this share of the files; None if nothing is."""
    try:
        saved.check(True, share, shares)
    except UserError as error:
        return what_is_wrong(error) if saved.seen() == seen else _REPLACED
    return None
