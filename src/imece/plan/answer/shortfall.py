"""What to do if nothing fits: by how much the smallest plan misses, and the smallest changes that help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from imece.listing import many
from imece.observe.units import si
from imece.plan.answer.explain import eight_bit
from imece.plan.answer.search import Answer, Candidate, search, settled
from imece.plan.answer.space import Question
from imece.plan.answer.words import device, gb, title
from imece.plan.hardware import Cluster
from imece.plan.memory.frameworks import IMECE
from imece.plan.memory.held import held
from imece.plan.memory.memory import FOUR_BIT
from imece.plan.presets import gpus_of_a_host
from imece.plan.setup import Parallel, Recipe, Setup

_MOST_GPUS = 32_768
_MOST_RANKS = 8  # of this machine


Find = Callable[[str, int, int], Cluster]
"""(GPU's name, GPUs per host, hosts) -> the cluster with its links."""


@dataclass(frozen=True)
class Way:
    """A change with which a plan might fit."""

    name: str
    question: Question
    least: Candidate  # the winner if it fits, else the candidate that misses by least
    fits: bool

    @property
    def sentence(self) -> str:
        """The result of the change, in a sentence."""
        if self.fits:
            on_host = self.least.memory.host * self.question.cluster.gpus_per_host
            also = f" and {gb(on_host)} GB of memory in each host" if on_host else ""
            return (
                f"fits in {gb(self.least.needed)} GB{also}: {title(self.least.setup)}, "
                f"{self.least.timed.tokens_per_s:,.0f} tokens/s"
            )
        missing = self.least.needed - self.question.room_bytes
        return f"still {gb(missing)} GB short with {title(self.least.setup)}"


def least(answer: Answer) -> Candidate:
    """The candidate that needs least although it does not fit. AssertionError if there is none."""
    assert answer.missed, "no arrangement could be tried"
    return answer.missed[0]


def ways(question: Question, gpus: Sequence[str], find: Find, here: bool = False) -> list[Way]:
    """Changes that would help, the smallest first. gpus: names of available GPUs. here: only this machine is
    available, with another number of ranks."""
    found = [way for name, asked in _same_machine(question) if (way := _try(name, asked)) is not None]
    further = [_larger_gpus(question, gpus, find), _more_gpus(question, find)]
    if here:
        further = [_other_ranks(question, find)]
    if not any(way.fits and way.question.adapters != "none" for way in found):
        further.insert(0, _adapters_and_offload(question))
    for candidates in further:  # of each kind the first that fits
        for name, asked in candidates:
            way = _try(name, asked)
            if way is not None and way.fits:
                found.append(way)
                break
    return found


def state_arithmetic(question: Question) -> str:
    """ "2 + 2 + 4 + 4 + 4 = 16 bytes a parameter x 70.6B = 1,129 GB; 8 GPUs have 684 GB"."""
    precision, model, cluster = question.precision, question.model, question.cluster
    part = held(Setup(model, Parallel(), Recipe(question.seq)), 0, IMECE.stages)
    in_layers = part.layers * part.products / part.total  # matrices' share of the parameters
    # AdamW has two moments, SGD one, Muon one for matrices.
    moments = {"sgd": [1.0], "muon": [2 - in_layers]}.get(question.optimizer, [1.0, 1.0])
    sizes = [precision.parameters, precision.gradients, precision.masters]
    shown = [size for size in (*sizes, *(precision.moments * number for number in moments)) if size]
    each, added = sum(shown), f"{' + '.join(f'{size:.3g}' for size in shown)} = {sum(shown):.3g} bytes"
    if question.adapters == "none":
        state, whole = f"{added} a parameter x {si(model.parameters)}", each * model.parameters
    else:
        frozen = float(precision.parameters)
        if question.adapters == "qlora":
            frozen += in_layers * (FOUR_BIT - frozen)
        trained = model.layers * question.adapter_rank * model.adapter_parameters
        state = f"{frozen:.2g} bytes a frozen parameter x {si(model.parameters)}, and {added} each "
        state += f"for {si(trained)} of adapters"
        whole = frozen * model.parameters + each * trained
    return (
        f"{state} = {gb(whole)} GB; {many(cluster.gpus, device(cluster))} "
        f"{'has' if cluster.gpus == 1 else 'have'} {gb(cluster.gpus * cluster.gpu.memory_bytes)} GB"
    )


def _same_machine(question: Question) -> Iterator[tuple[str, Question]]:
    if question.adapters == "none":
        if question.optimizer == "adamw":
            yield "--optimizer adamw-8bit", eight_bit(question)
        yield from _offloads(question)
        yield "--adapters lora", replace(question, adapters="lora")
    if question.adapters != "qlora":
        yield "--adapters qlora", replace(question, adapters="qlora")
    if question.adapters != "none":
        yield from _offloads(question)


def _offloads(question: Question) -> Iterator[tuple[str, Question]]:
    if not question.offload and not question.cluster.gpu.is_cpu:  # a CPU has no second memory
        if question.adapters == "none":  # the optimizer's state of adapters is little
            yield "--offload optimizer", replace(question, offload="optimizer")
        yield "--offload parameters", replace(question, offload="parameters")


def _adapters_and_offload(question: Question) -> Iterator[tuple[str, Question]]:
    """What spares most on this machine."""
    if question.adapters != "qlora":
        for name, asked in _offloads(replace(question, adapters="qlora")):
            yield f"--adapters qlora {name}", asked


def _larger_gpus(question: Question, gpus: Sequence[str], find: Find) -> Iterator[tuple[str, Question]]:
    cluster = question.cluster
    found = [find(name, cluster.gpus_per_host, cluster.hosts) for name in gpus]
    for each in sorted(found, key=lambda one: (one.gpu.memory_bytes, -(one.gpu.price_per_hour or 0))):
        larger = each.gpu.memory_bytes > cluster.gpu.memory_bytes
        same = each.gpu.bf16 >= cluster.gpu.bf16  # another precision would be a change of its own
        if larger and same and (each.gpu.fp8 or not question.precision.fp8):
            yield _on(each, question)


def _more_gpus(question: Question, find: Find) -> Iterator[tuple[str, Question]]:
    """Twice as many GPUs and so on: first in the host, then more hosts."""
    name, inside, hosts = question.cluster.gpu.name, question.cluster.gpus_per_host, question.cluster.hosts
    while inside * hosts < _MOST_GPUS:
        if inside < (full := gpus_of_a_host(name)):
            inside = min(full, 2 * inside)
        else:
            hosts *= 2
        yield _on(find(name, inside, hosts), question)


def _other_ranks(question: Question, find: Find) -> Iterator[tuple[str, Question]]:
    """Half as many ranks and so on, which leaves each more memory; then twice as many, which may each have a
    GPU."""
    cluster, ranks = question.cluster, question.cluster.gpus_per_host
    for number in [ranks >> half for half in range(1, ranks.bit_length())] + [
        ranks << double for double in range(1, _MOST_RANKS) if ranks << double <= _MOST_RANKS
    ]:
        yield f"--gpus {number}", replace(question, cluster=find(cluster.gpu.name, number, 1))


def _on(cluster: Cluster, question: Question) -> tuple[str, Question]:
    hosts = f" --hosts {cluster.hosts}" if cluster.hosts > 1 else ""
    return f"--gpus {cluster.gpus_per_host}x{cluster.gpu.name}{hosts}", replace(question, cluster=cluster)


def _try(name: str, question: Question) -> Way | None:
    answer = settled(search(question))
    if answer.winner is not None:
        return Way(name, question, answer.winner, True)
    return Way(name, question, answer.missed[0], False) if answer.missed else None
