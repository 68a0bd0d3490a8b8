"""What a run says of itself before its first step: the header's rows, and what is unexpected of its text."""

from __future__ import annotations

from imece.data.batches import Batches
from imece.data.prepare import Prepared
from imece.data_parallel.footprint import expected
from imece.listing import many, some
from imece.model_parallel.pipeline import Pipeline
from imece.model_parallel.schedules import ideal_bubble
from imece.observe.units import megabytes, si
from imece.train.config import TrainConfig
from imece.train.model.adapters import describe as describe_adapters
from imece.train.session import Session

_NAMED = 3  # texts named in a line
_SELDOM = 0.001  # times: digits of fewer say nothing
_OFTEN = 4  # times that a source may be read before its weight is worth a note
_FAR = 4.0  # a held-out share this many times larger or smaller than asked for is worth a note


def header(session: Session) -> list[tuple[str, str]]:
    """What is about to happen, for the display."""
    config, shape, mesh = session.config, session.model.config, session.mesh
    hosts = len(mesh.hosts)
    return [
        (
            "model",
            f"{config.model.name}, {si(shape.parameter_count)} parameters, "
            f"{shape.layers} layers x {shape.width}, vocabulary {shape.vocab_size:,}",
        ),
        *([("weights", _weights(session))] if config.model.weights else []),
        ("data", describe_data(session.prepared, config)),
        *([("mix", _mix(session.batches, config.steps))] if session.batches.part.divided else []),
        (
            "ranks",
            f"{mesh.world_size} on {many(hosts, 'host')} "
            f"({mesh.device.type}, {mesh.backend}), strategy {session.strategy}, {session.precision.name}"
            f"{f', compiled in {session.compile_s:.0f} s' if session.compile_s else ''}",
        ),
        ("batch", session.plan.describe()),
        *([("stages", _stages(session.pipeline))] if session.pipeline is not None else []),
        ("memory", _memory(session)),
        ("plan", session.prediction.describe()),
        ("steps", _steps(session)),
        ("run", str(session.folder.path)),
    ]


def _weights(session: Session) -> str:
    """Where the weights of a run come from that began from others'."""
    weights, lora = session.config.model.weights, session.config.lora
    if lora.rank:
        goes_on = f"; adapters of its own checkpoint of step {session.done:,}" if session.done else ""
        return f"of {weights}, frozen; {describe_adapters(session.model, lora)}{goes_on}"
    if session.done:
        return f"of its own checkpoint of step {session.done:,}; {weights} is not read again"
    return f"of {weights}"


def _stages(pipeline: Pipeline) -> str:
    """Which layers each stage has, and how much it idles."""
    last, texts = pipeline.stages[-1].stop - 1, []
    for pieces in pipeline.stages:
        layers = [piece for piece in pieces if piece != last]
        texts.append(
            ("embedding, " if 0 in pieces else "")
            + (
                f"layers {layers[0]} to {layers[-1]}"
                if layers[1:]
                else "".join(f"layer {at}" for at in layers)
            )
            + (", head" if layers else "head") * (last in pieces)
        )
    size = pipeline.mesh.size("pipeline")
    idle = ideal_bubble(pipeline.micro_batches, len(texts) // size, size)
    return f"{' | '.join(texts)}; {pipeline.schedule}, ranks wait {100 * idle:.0f} % of a step at least"


def _memory(session: Session) -> str:
    predicted = expected(session.wrapped, session.optimizers)
    where = "a rank" if session.pipeline is None else "a rank of the first stage"
    return f"{predicted} on {where}, and activations" if predicted is not None else "unknown optimizer"


def describe_data(prepared: Prepared, config: TrainConfig) -> str:
    """The text in one line."""
    name = some(config.data.paths, _NAMED) or "Python standard library"  # a shell's pattern may name many
    if config.data.validation:
        name += f", for validation {some(config.data.validation, _NAMED)}"
    tokens, parts = _tokens(prepared), (prepared.tokens.train, prepared.tokens.validation)
    learned = sum(part.learned_tokens for part in parts)
    answers = f", {si(learned)} of answers" if parts[0].learned is not None else ""
    skipped = (
        f", {many(prepared.tokens.skipped, 'file')} left out as not text" if prepared.tokens.skipped else ""
    )
    runs = prepared.run_folders
    left_out = f", {many(runs, 'run folder')} left out" if runs else ""
    files = f"{many(prepared.files, 'file')}, {megabytes(prepared.source_bytes)}"
    return (
        f"{name}: {files if prepared.files else 'gone, its tokens as they were made'}, "
        f"{si(tokens)} tokens{answers} ({_percent(_held_out(prepared))} of them held out){skipped}{left_out}"
    )


def _mix(batches: Batches, steps: int) -> str:
    """Each source, its share of the sequences and how many times the run reads it."""
    return "; ".join(
        f"{part.source} {100 * float(batches.turns.share(source)):.4g} %, read {_times(times)}"
        for source, (part, times) in enumerate(zip(batches.part.sources, batches.epochs(steps), strict=True))
    )


def _times(times: float) -> str:
    if times < _SELDOM:
        return f"less than {_SELDOM} times"
    return f"{times:.2g} times" if times < 10 else f"{times:,.0f} times"


def notes_on_data(prepared: Prepared, config: TrainConfig, batches: Batches | None = None) -> list[str]:
    """Surprises in the text: files that are not text, records that are too long, a source that is read too
    often, and a held-out share far from what was asked for, if there are few documents."""
    tokens, asked, found = prepared.tokens, config.data.held_out, _held_out(prepared)
    lines = [f"left out: {line}" for line in tokens.skipped_first]
    if lines and (more := tokens.skipped - len(lines)):
        lines.append(f"left out: {more:,} more")
    for whole in batches.wholes if batches is not None else ():
        if whole.left_out:
            of = f" of {whole.part.source}" if whole.part.source else ""
            lines.append(
                f"warning: {whole.left_out:,} of {whole.part.documents:,} records{of} are left out, with "
                f"more than {whole.seq + 1:,} tokens: --model.max-seq {whole.longest - 1} takes all"
            )
    times = batches.epochs(config.steps) if batches is not None else []
    for part, often in zip(tokens.train.divided, times, strict=False):
        if often > _OFTEN:
            lines.append(
                f"warning: {part.source} is read {_times(often)}: more than {_OFTEN} teach little new, "
                "and a model may learn it by heart: a lower weight or more text helps"
            )
    if not config.data.validation and not asked / _FAR <= found <= asked * _FAR:
        documents = tokens.train.documents + tokens.validation.documents
        lines.append(
            f"warning: {_percent(found)} of the text is held out for validation, --data.held-out asks for "
            f"{_percent(asked)}: documents are held out whole, and there are {documents:,}: more or shorter "
            "ones help"
        )
    return lines


def _tokens(prepared: Prepared) -> int:
    return len(prepared.tokens.train.tokens) + len(prepared.tokens.validation.tokens)


def _held_out(prepared: Prepared) -> float:
    """The held-out share of tokens, which may differ much from that of documents."""
    return len(prepared.tokens.validation.tokens) / _tokens(prepared)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _steps(session: Session) -> str:
    config = session.config
    epochs = session.batches.epoch(config.steps)
    text = f"{config.steps:,}, {si(config.steps * session.plan.tokens)} tokens, {epochs:.2g} epochs"
    return f"{text}; going on after step {session.done:,}" if session.done else text
