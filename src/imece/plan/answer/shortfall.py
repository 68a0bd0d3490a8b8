"""Nothing fits: by how much the least plan misses, and the least changes with which one would fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from imece.plan.answer.explain import eight_bit
from imece.plan.answer.search import Answer, Candidate, search
from imece.plan.answer.space import Question
from imece.plan.answer.words import count, gb, title
from imece.plan.hardware import Cluster, Gpu

_MOST_GPUS = 32_768
_FULL_HOST = 8


@dataclass(frozen=True)
class Way:
    """A change with which it might fit."""

    name: str
    question: Question
    least: Candidate  # the winner if it fits, else what misses by the least
    fits: bool

    @property
    def sentence(self) -> str:
        """What comes of it."""
        if self.fits:
            assert self.least.time is not None
            return (
                f"fits in {gb(self.least.needed)} GB: {title(self.least.setup)}, "
                f"{self.least.time.tokens_per_s:,.0f} tokens/s"
            )
        missing = self.least.needed - self.question.room_bytes
        return f"still {gb(missing)} GB short with {title(self.least.setup)}"


def least(answer: Answer) -> Candidate:
    """Of what does not fit, that which needs the least. AssertionError if there is nothing at all."""
    assert answer.missed, "no arrangement could be tried"
    return answer.missed[0]


def ways(question: Question, larger: Sequence[Gpu]) -> list[Way]:
    """What would help, the smallest changes first. larger: other GPUs that may be had, with more memory."""
    found = [way for name, asked in _same_machine(question) if (way := _try(name, asked)) is not None]
    # One that needs several changes is not told where a single one is enough.
    for candidates in (_larger_gpus(question, larger), _more_gpus(question)):
        for name, asked in candidates:
            way = _try(name, asked)
            if way is not None and way.fits:
                found.append(way)
                break
    return found


def state_arithmetic(question: Question) -> str:
    """ "2 + 2 + 4 + 4 + 4 = 16 bytes a parameter x 70.6B = 1,129 GB; 8 GPUs have 684 GB"."""
    precision, model, cluster = question.precision, question.model, question.cluster
    # parameter, gradient, master, and two moments of Adam
    sizes = [
        precision.parameters,
        precision.gradients,
        precision.masters,
        precision.moments,
        precision.moments,
    ]
    shown = [size for size in sizes if size]
    whole = sum(shown) * model.parameters
    return (
        f"{' + '.join(map(str, shown))} = {sum(shown)} bytes a parameter x {model.parameters / 1e9:.1f}B = "
        f"{gb(whole)} GB; {count(cluster.gpus, 'GPU')} "
        f"{'has' if cluster.gpus == 1 else 'have'} {gb(cluster.gpus * cluster.gpu.memory_bytes)} GB"
    )


def _same_machine(question: Question) -> Iterator[tuple[str, Question]]:
    if question.adapters == "none":
        if question.optimizer == "adamw":
            yield "--optimizer adamw-8bit", eight_bit(question)
        if not question.offload:
            yield "--offload optimizer", replace(question, offload="optimizer")
            yield "--offload parameters", replace(question, offload="parameters")
        yield "--adapters lora", replace(question, adapters="lora")
    if question.adapters != "qlora":
        yield "--adapters qlora", replace(question, adapters="qlora")


def _larger_gpus(question: Question, gpus: Sequence[Gpu]) -> Iterator[tuple[str, Question]]:
    cluster = question.cluster
    for gpu in sorted(gpus, key=lambda each: (each.memory_bytes, -(each.price_per_hour or 0))):
        if gpu.memory_bytes > cluster.gpu.memory_bytes:
            yield (
                f"--gpus {cluster.gpus_per_host}x{gpu.name}",
                replace(question, cluster=replace(cluster, gpu=gpu)),
            )


def _more_gpus(question: Question) -> Iterator[tuple[str, Question]]:
    """Twice as many, and so on: first in the host, then more hosts."""
    cluster: Cluster = question.cluster
    while cluster.gpus < _MOST_GPUS:
        if cluster.gpus_per_host < _FULL_HOST:
            cluster = replace(cluster, gpus_per_host=min(_FULL_HOST, 2 * cluster.gpus_per_host))
        else:
            cluster = replace(cluster, hosts=2 * cluster.hosts)
        hosts = f" --hosts {cluster.hosts}" if cluster.hosts > 1 else ""
        yield f"--gpus {cluster.gpus_per_host}x{cluster.gpu.name}{hosts}", replace(question, cluster=cluster)


def _try(name: str, question: Question) -> Way | None:
    answer = search(question)
    if answer.winner is not None:
        return Way(name, question, answer.winner, True)
    return Way(name, question, answer.missed[0], False) if answer.missed else None
