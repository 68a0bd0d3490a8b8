"""What rank 0 does when all ranks have written their parts: compare, put together, put in place, prune."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imece.checkpoint import files
from imece.checkpoint.manifest import (
    MANIFEST,
    MOST_BYTES,
    File,
    Kind,
    Manifest,
    decode,
    encode,
    file_from_json,
    file_name,
    file_to_json,
    kinds_from_json,
    kinds_to_json,
    seal,
    unseal,
)
from imece.checkpoint.states import as_json, from_json
from imece.reading import Json
from imece.writing import write_whole

# Keys of a state: which text the metric was measured on, and how much of it.
METRIC_ON, METRIC_OVER = "metric_on", "metric_over"


@dataclass(frozen=True)
class Part:
    """What one rank tells besides its tensors' bytes."""

    kinds: dict[str, Kind]  # of all tensors that it knows
    sliced: frozenset[str]  # names of tensors that are spread over ranks
    file: File
    rank_state: Any


def note_name(rank: int) -> str:
    """The file in which a rank says that its part is on the disk, or why it never will be."""
    return f"rank-{rank:05d}.json"


def write_part(partial: Path, rank: int, part: Part) -> None:
    note = {
        "kinds": kinds_to_json(part.kinds),
        "sliced": sorted(part.sliced),
        "file": file_to_json(part.file),
        "rank_state": as_json(part.rank_state, "rank_state"),
    }
    write_whole(partial / note_name(rank), seal(note))
    # Nothing that may fail may follow: rank 0 may have seen it already, and counts on this rank's file.


def write_excuse(partial: Path, rank: int, why: str) -> None:
    partial.mkdir(parents=True, exist_ok=True)
    write_whole(partial / note_name(rank), seal({"error": why}))


def read_part(partial: Path, rank: int) -> Part | str | None:
    """What `rank` wrote: its part, a string that says why it has none, or None if nothing is there yet."""
    try:
        content = (partial / note_name(rank)).read_bytes()
    except FileNotFoundError:
        return None
    note = unseal(content)
    if "error" in note:
        return str(note["error"])
    kinds = kinds_from_json(note["kinds"])
    file, rank_state = file_from_json(note["file"], kinds), from_json(note["rank_state"])
    return Part(kinds, frozenset(note["sliced"]), file, rank_state)


def put_together(
    step: int, attempt: str, metric: float | None, state: Json, parts: Sequence[Part]
) -> Manifest:
    """The manifest. ValueError, with a tensor's name, if ranks disagree on what is to be saved."""
    first = parts[0]
    for rank, part in enumerate(parts):
        for name in sorted(first.kinds.keys() | part.kinds.keys()):
            ours, theirs = (_describe(name, of) for of in (first, part))
            if ours != theirs:
                raise ValueError(
                    f"tensor {name!r} is {ours} on rank 0 and {theirs} on rank {rank}; "
                    "all ranks must save the same tensors"
                )
    return Manifest(
        step=step,
        attempt=attempt,
        metric=metric,
        state=state,
        rank_states=tuple(part.rank_state for part in parts),
        kinds=first.kinds,
        files=tuple(part.file for part in parts),
    )


def commit(partial: Path, final: Path, manifest: Manifest) -> None:
    """Make a checkpoint of the partial folder. OSError, ValueError: `final` is unchanged.

    An older checkpoint of that name steps aside but stays: `prune` removes it.
    """
    for rank, file in enumerate(manifest.files):
        if (found := (partial / file_name(rank)).stat().st_size) != file.nbytes:
            raise ValueError(
                f"{file_name(rank)}: rank {rank} wrote {file.nbytes} bytes, but {found} are there"
            )
    text = encode(manifest)
    if len(text) > MOST_BYTES:
        raise ValueError(f"{MANIFEST} would have {len(text)} bytes, and may have {MOST_BYTES}")
    decode(text)  # an unreadable one would replace a readable one
    write_whole(partial / MANIFEST, text, durable=True)  # and the names of all ranks' files
    for rank in range(len(manifest.files)):  # the manifest has all that they say
        (partial / note_name(rank)).unlink()
    files.put_in_place(partial, final)


def prune(folder: Path, step: int, keep: int, session: str) -> str | None:
    """Remove all but the `keep` newest and the one with the lowest metric. OSError.

    That of `step` was written just now, and is on the disk. Checkpoints of later steps are from a course of
    training that was left when this one began at an earlier step; they would be taken for the newest. Those
    written in this session are removed. Others, perhaps of a training that was not continued by mistake, are
    set aside; then this returns a line that says so, else None. Checkpoints that cannot be read are not
    touched: they may be of another version.
    """
    found = list(whole_checkpoints(folder))
    ours = [(path, manifest) for path, manifest in found if manifest.step <= step]
    kept = {path for path, _ in ours[:keep]}
    kept.update(path for path, _ in by_metric(ours)[:1])
    others = [
        path for path, manifest in found if manifest.step > step and not manifest.attempt.startswith(session)
    ]
    for path, _ in found:
        if path not in kept and path not in others:
            files.remove(path)
    if not others:
        return None
    aside = files.set_aside(folder, others)
    names = ", ".join(path.name for path in reversed(others))
    before = "written before this run began or was taken up again"
    return f"{names}: of later steps than {step}, {before}: set aside in {aside}"


def what_stays(folder: Path) -> str:
    """Names what takes room there and stays, even if a new checkpoint needs room. OSError, UserError."""
    found = list(whole_checkpoints(folder))
    notes = {path.name: "" for path in sorted(folder.iterdir()) if not files.is_passing(path)}
    for path, _ in found[:1]:
        notes[path.name] += " (the newest)"
    for path, _ in by_metric(found)[:1]:
        notes[path.name] += " (the best)"
    return ", ".join(name + note for name, note in notes.items())


def whole_checkpoints(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """The checkpoints that look complete, the newest first."""
    for _, path in files.step_folders(folder):
        if (manifest := glance(path)) is not None:
            yield path, manifest


def by_metric(found: Iterable[tuple[Path, Manifest]]) -> list[tuple[Path, Manifest]]:
    """Those that have a metric, the lowest first; of equal ones the newest.

    found: the newest first. A state may say with METRIC_ON and METRIC_OVER what the metric was measured on:
    checkpoints measured on something else than the newest do not count.
    """
    found = list(found)
    newest = found[0][1].state if found else {}
    measured = [
        (path, manifest)
        for path, manifest in found
        if manifest.metric is not None
        and all(manifest.state.get(key, (of := newest.get(key))) == of for key in (METRIC_ON, METRIC_OVER))
    ]
    return sorted(measured, key=lambda entry: (entry[1].metric or 0.0, -entry[1].step))


def glance(path: Path) -> Manifest | None:
    """The manifest of a checkpoint whose files all exist with the right sizes; None otherwise.

    Tensors are not read: `open_checkpoint` looks at every byte.
    """
    try:
        data = path / MANIFEST
        if not data.is_file() or data.stat().st_size > MOST_BYTES:
            return None
        manifest = decode(data.read_bytes())
        sizes = [os.stat(path / file_name(rank)).st_size for rank in range(len(manifest.files))]
    except (OSError, ValueError):
        return None
    return manifest if sizes == [file.nbytes for file in manifest.files] else None


def finite(metric: float | None) -> float | None:
    """The metric, or None if it is NaN or infinite, which says nothing about which checkpoint is best."""
    return float(metric) if metric is not None and math.isfinite(metric) else None


def _describe(name: str, part: Part) -> str:
    if name not in part.kinds:
        return "missing"
    return f"{part.kinds[name]}{' in slices' if name in part.sliced else ''}"
