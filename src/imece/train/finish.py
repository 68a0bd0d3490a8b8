"""The end of a run: validates, compares with baselines, samples, and says how to go on."""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from imece.checkpoint.commit import by_metric, whole_checkpoints
from imece.data.baselines import baselines, counted_in
from imece.data_parallel.footprint import counted
from imece.footprint import Footprint
from imece.listing import many
from imece.models.generate import LogitsError, generate
from imece.observe.loss_plot import write_loss_plot
from imece.observe.report import write_report
from imece.observe.run_files import BY_SOURCE, CHECKPOINT, ENDED, as_argument, write_json
from imece.observe.units import duration, si
from imece.reading import json_if_any
from imece.train.loop import Loop
from imece.train.model.origin import trained_model
from imece.train.prediction import compared, keep, measured
from imece.train.session import Session
from imece.train.watch.watching import Watching

_SAMPLE_TOKENS = 160
_SAMPLE_SEED = 1
_TEMPERATURE = 0.6


def finish(session: Session, loop: Loop, watching: Watching) -> None:
    """Validate on everything held out; rank 0 compares, samples, and writes summary.json and the report."""
    held_out = session.prepared.tokens.validation
    val_loss, by_source = None, dict[str, float]()
    if len(held_out.tokens):
        watching.under_way("validating on all held-out text")
        val_loss, by_source = loop.validate(most_tokens=0)
    saved = session.finish_save()
    watching.pass_on()
    with session.wrapped.gathered():
        alone = session.mesh.rank == 0  # which samples
        summary = _summary(session, val_loss, by_source) if alone else None
    if summary is None:
        return
    _write(session, summary)
    rows = _rows(summary, saved)
    rows[1:1] = _early(session)
    rows.append(("", _keep_plan(session, Footprint(**summary["memory"]))))
    sample = summary["sample"]
    watching.done(rows, sample and sample["text"], next_commands(session, saved, usable=sample is not None))


def end_early(session: Session, why: str) -> None:
    """Write the same files for a run that ends early, without what would need more steps or other ranks. Rank
    0 does it, if the run made a step. why: for the report, "stopped by SIGTERM"."""
    if session.mesh.rank == 0 and session.counted > session.first:
        summary = _figures(session) | {ENDED: why}
        _write(session, summary)
        _keep_plan(session, Footprint(**summary["memory"]))


def _keep_plan(session: Session, counted: Footprint) -> str:
    """Write what was predicted and what was measured into plan.json; returns both in a line."""
    prediction, path = session.prediction, session.folder.path
    came = measured(path, counted, session.first)
    keep(path, prediction, came)
    return compared(prediction, came)


def is_finished(session: Session) -> bool:
    """Whether all files that `finish` makes for these steps exist: it may have been killed on the way."""
    report, summary = session.folder.path / "report.html", session.folder.path / "summary.json"
    said = json_if_any(summary)
    same = (said.get("steps"), said.get(ENDED, "")) == (session.done, session.why_early)
    with contextlib.suppress(OSError):
        return same and session.is_over and report.stat().st_mtime >= summary.stat().st_mtime
    return False


def next_commands(session: Session, saved: bool, usable: bool = True) -> list[tuple[str, str]]:
    """Commands that the user may want next. saved: the last checkpoint is on the disk. usable: the model
    is."""
    path = session.folder.path
    run = as_argument(path)
    if not saved:
        kept = newest_kept(session)
        where = "no checkpoint: " if kept is None else f"the checkpoint of step {kept:,}: "
        how = "begins anew" if kept is None else "goes on from there"
        again = f"imece train --run {run}"
        return [("kept", f"{where}once the disk takes files again, the command below {how}"), ("next", again)]
    report = ("open", str(path / "report.html"))
    if not usable:
        return [report]
    config = session.config
    longer = f"--epochs {2 * config.epochs:g}" if config.epochs else f"--steps {2 * config.steps}"
    if session.why_early:
        longer = f"--validate.patience {2 * config.validate.patience}"
    prompt = "" if config.data.paths else ' --prompt "class Queue("'
    if config.data.format == "chat":
        prompt = ' --prompt "Hello"'
    return [
        ("next", f"imece sample {run}{prompt}"),
        ("longer", f"imece train --run {run} {longer}"),
        report,
    ]


def newest_kept(session: Session) -> int | None:
    """The step of the newest checkpoint on the disk."""
    return next((manifest.step for _, manifest in whole_checkpoints(session.folder.checkpoints)), None)


def _early(session: Session) -> list[tuple[str, str]]:
    """Of a run that validation has ended: why, and what it was for."""
    if not session.why_early:
        return []
    rows = [("", f"ended before step {session.config.steps:,}: {session.why_early}")]
    measured = by_metric(whole_checkpoints(session.folder.checkpoints))
    if measured:
        path, manifest = measured[0]
        name = f"{session.folder.checkpoints.name}/{path.name}"
        rows.append(
            ("best", f"{name}, validation {manifest.metric:.3f}: imece sample, eval and export take it")
        )
    return rows


def _figures(session: Session) -> dict[str, Any]:
    return {
        "steps": session.done,
        "tokens": session.tokens,
        "seconds": session.seconds,
        "tokens_per_s": session.tokens / session.seconds,
        "parameters": session.model.config.parameter_count,
        "best_val_loss": session.best_val_loss,
        "memory": asdict(counted(session.wrapped, session.optimizers)),
        CHECKPOINT: newest_kept(session),
    }


def _summary(session: Session, val_loss: float | None, by_source: dict[str, float]) -> dict[str, Any]:
    tokens = session.prepared.tokens
    summary = _figures(session) | {"sample": _sample(session, _prompt(session))}
    if session.why_early:
        summary[ENDED] = session.why_early
    if val_loss is not None and math.isfinite(val_loss):
        held_out = tokens.validation
        bits_a_byte = val_loss / math.log(2) * held_out.targets / held_out.text_bytes
        summary |= {
            "val_loss": val_loss,
            "val_bits_per_byte": bits_a_byte,
            "baselines": baselines(tokens.train, held_out, tokens.vocab_size),
            "baselines_counted_in": counted_in(tokens.train, held_out),
        }
        if by_source:
            summary[BY_SOURCE] = by_source
    return summary


def _rows(summary: dict[str, Any], saved: bool) -> list[tuple[str, str]]:
    steps = summary["steps"]
    rows = [
        (
            "done",
            f"{many(steps, 'step')} in {duration(summary['seconds'])}, {si(summary['tokens'])} tokens, "
            f"{summary['tokens_per_s']:,.0f} tokens/s",
        )
    ]
    if "val_loss" in summary:
        others = ", ".join(f"{name} {loss:.3f}" for name, loss in summary["baselines"].items())
        rows.append(
            (
                "",
                f"validation {summary['val_loss']:.3f} nats a token = "
                f"{summary['val_bits_per_byte']:.3f} bits a byte",
            )
        )
        if by_source := summary.get(BY_SOURCE):
            rows.append(("", "of " + ", ".join(f"{name} {loss:.3f}" for name, loss in by_source.items())))
        some = f" (counted in {where})" if (where := summary["baselines_counted_in"]) else ""
        rows.append(("", f"without a model it would be {others}{some}"))
    state = Footprint(**summary["memory"])
    rows.append(("", f"state of this rank, counted: {state}"))
    if summary["sample"] is None:
        rows.append(
            (
                "",
                "no sample: what the model computes is not finite any more, so its training went wrong; the "
                "usual cure is a new run with a lower --optimizer.lr",
            )
        )
    if not saved:
        rows.append(("", "the last checkpoint is not on the disk: see the warning above"))
    return rows


@dataclass(frozen=True)
class _Question:
    """The beginning of a record."""

    ids: list[int]  # the tokens before its first answer
    end: int  # the token that ends this


def _prompt(session: Session) -> str | _Question:
    """The beginning of a held-out document, or of the text if none is held out; for Python's library, of a
    class; of a record, what comes before its answer."""
    tokens = session.prepared.tokens
    if not session.config.data.paths:
        return "class Queue:\n    def __init__(self"
    part = tokens.validation if tokens.validation.documents else tokens.train
    if part.learned is not None:
        first = int(part.learned.argmax())
        ids, after = part.document(0).tolist(), np.flatnonzero(~part.learned[first : part.offsets[1]])
        return _Question(ids[:first], ids[first + int(after[0]) - 1] if len(after) else ids[-1])
    tokenizer = session.prepared.tokenizer
    first = part.document(0)[:8].tolist()[:-1]
    return tokenizer.decode([token for token in first if token != tokenizer.begin]) or " "


def _sample(session: Session, prompt: str | _Question) -> dict[str, str] | None:
    """The prompt, alone and with the model's continuation; None if the model's outputs are not finite."""
    tokenizer, model = session.prepared.tokenizer, session.model
    if isinstance(prompt, str):
        ids = [tokenizer.before, *tokenizer.encode(prompt)]  # training puts this token before each document
        stop = tokenizer.end
    else:
        ids, stop = prompt.ids, prompt.end
        prompt = tokenizer.decode(ids[ids[0] == tokenizer.before :])
    if session.plan.mesh.deals:  # this rank has only a part of the model
        if newest_kept(session) is None:
            return {"prompt": prompt, "text": f"{prompt} (no checkpoint is on the disk to sample from)"}
        model, _ = trained_model(session.folder, device=session.mesh.device)
    generator = torch.Generator(session.mesh.device).manual_seed(_SAMPLE_SEED)
    tokens = generate(
        model,
        ids[-model.config.max_seq :],
        _SAMPLE_TOKENS,
        temperature=_TEMPERATURE,
        top_p=0.95,
        generator=generator,
        stop={stop},
        entries=tokenizer.vocab_size,
    )
    model.eval()
    try:
        with session.precision.autocast():
            return {"prompt": prompt, "text": prompt + tokenizer.decode(list(tokens))}
    except LogitsError:
        return None


def _write(session: Session, summary: dict[str, Any]) -> None:
    path = session.folder.path
    write_json(path / "summary.json", summary)
    with contextlib.suppress(OSError):  # as for that file
        write_loss_plot(path)
        write_report(path)
