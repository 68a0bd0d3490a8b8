"""Explains a plan: for each plan that lost, the figure that decided; and what would change the answer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from imece.listing import many
from imece.plan.answer.search import (
    SAME,
    Answer,
    Candidate,
    complexity,
    fastest,
    judge,
    search,
    settled,
    with_best_bucket,
)
from imece.plan.answer.space import STRATEGIES, Question, why_no_fp8
from imece.plan.answer.words import CAUSES, compared, device, gb, seconds, share, strategy_name, title
from imece.plan.hardware import Cluster
from imece.plan.setup import FP32, WIRE_BYTES, Parallel, Setup
from imece.plan.speed.communication import along
from imece.plan.speed.step_time import StepTime
from imece.plan.speed.synchronise import reductions

_WORTH = 0.02  # of the step's time: smaller gains are not mentioned
_PINS = ("strategy", "tensor", "pipeline", "interleave", "context")  # a question's fields that fix the ranks
_NEAR_PART = 0.25  # of the missing memory: two categories closer than that are both named
_STATE = ("parameters", "gradients", "optimizer", "masters")


@dataclass(frozen=True)
class Other:
    """A plan that lost."""

    name: str
    sentence: str
    candidate: Candidate


def others(answer: Answer) -> list[Other]:
    """The plans that people would ask about: each strategy alone, and the best of each other kind."""
    winner = answer.best
    shown: list[Candidate] = []
    for wanted in _families():
        fits = [each for each in answer.ranked if wanted(each.setup.parallel)]
        misses = (each for each in answer.missed if wanted(each.setup.parallel))
        best = fastest(fits, answer.question) if fits else next(misses, None)
        if best is not None and _arranged(best) != _arranged(winner):
            shown.append(best)
    shown.sort(key=lambda each: (each.time is None, each.seconds if each.time else each.needed))
    return [Other(strategy_name(each.setup.parallel), verdict(each, answer), each) for each in shown]


def verdict(other: Candidate, answer: Answer) -> str:
    """One sentence with the figure that decided. `answer` is settled: only plans that are as good and less
    simple may be faster than its winner."""
    if other.time is None:
        return why_not(other, answer.question)
    winner = answer.best
    ratio = other.seconds / winner.seconds - 1
    assert ratio >= -SAME, f"{title(other.setup)} is {-ratio:.1%} faster than the winner"
    fits = f"fits in {gb(other.needed)} GB"
    if ratio <= SAME:
        more = other.needed - winner.needed
        size = (
            f", {gb(abs(more))} GB {'more' if more > 0 else 'less'}"
            if abs(more) > 0.02 * winner.needed
            else ""
        )
        simple = ", but less simple" if complexity(other.setup) > complexity(winner.setup) else ""
        return f"{fits}{size}, as fast within {100 * SAME:.0f} %{simple}"
    return f"{fits}, {compared(ratio)}: {_where(other, answer)}"


def why_not(candidate: Candidate, question: Question) -> str:
    """One sentence: what the plan needs, and which part of it is too much."""
    room = question.room_bytes
    sizes = sorted(candidate.memory.by_category().items(), key=lambda item: -item[1])
    state = sum(size for name, size in sizes if name in _STATE)
    needs = f"does not fit: needs {gb(candidate.needed)} of {gb(room)} GB"
    if state > room:  # at most three parts are not named, together smaller than what is missing
        large = {name: size for name, size in sizes if name in _STATE and size >= _NEAR_PART * (state - room)}
        whole = "whole " * (candidate.setup.parallel.strategy == "replicate")
        where = f"{whole}on each {device(question.cluster)}"
        return f"{needs}; {gb(sum(large.values()))} GB of {_and([*large])} {where}"
    largest = [f"{name} {gb(size)}" for name, size in sizes[:2]]
    return f"{needs}; the largest are {_and(largest)}"


def gains(answer: Answer) -> list[str]:
    """Changes that would make a step at least 2 % faster, each with its gain."""
    found = [
        *_recompute(answer),
        *_micro_batch(answer),
        *_in_no_sync(answer),
        *_unpinned(answer),
        *_optimizer(answer),
        *_precision(answer),
        *_fp8(answer),
        *_batch(answer),
        *_wire(answer),
        *_network(answer),
    ]
    return found or ["nothing that was tried makes a step 2 % faster"]


def parts(time: StepTime) -> dict[str, float]:
    """Seconds of a step by what they are spent on; they add up to the whole."""
    named = {
        "compute": time.compute - time.recompute,
        "recomputation": time.recompute,
        "waiting": time.waiting,
        **{f"exposed: {cause}": spent for cause, spent in time.exposed.items()},
        "bubble": time.bubble,
        "optimizer": time.optimizer,
        "data": time.data,
    }
    return {name: spent for name, spent in named.items() if spent > 0}


def _families() -> list[Callable[[Parallel], bool]]:
    """One test of an arrangement for each line that a person may ask for."""

    def plain(strategy: str) -> Callable[[Parallel], bool]:
        return lambda p: p.strategy == strategy and p.tensor == p.pipeline == p.context == 1

    return [
        *(plain(strategy) for strategy in STRATEGIES),
        lambda p: p.tensor > 1 and p.pipeline == p.context == 1,
        lambda p: p.pipeline > 1 and p.tensor == p.context == 1,
        lambda p: p.pipeline > 1 and p.tensor > 1 and p.context == 1,
        lambda p: p.context > 1,
    ]


def grown(candidate: Candidate, than: Candidate, cluster: Cluster) -> str:
    """In words, the part of the step that grew most. AssertionError if one candidate does not fit."""
    cause, more = _grown(candidate, than)
    own, parallel, recipe = candidate.timed, candidate.setup.parallel, candidate.setup.recipe
    if cause == "compute":
        if recipe.micro_batch < than.setup.recipe.micro_batch:
            why = f"with {recipe.micro_batch} at once instead of {than.setup.recipe.micro_batch}"
        else:
            why = "on smaller parts of each matrix" if parallel.tensor > 1 else "on these shapes"
        return f"{seconds(more)} more computing, products are less efficient {why}"
    if cause == "recompute":
        return f"{seconds(more)} more recomputation"
    if cause == "bubble":
        return (
            f"{seconds(own.bubble)} a step in which stages wait for the pipeline to fill and empty "
            f"({many(recipe.accumulation, 'micro-batch')} over {parallel.pipeline} stages)"
        )
    if cause == "waiting":
        return f"{seconds(own.waiting)} in which the GPU waits for the CPU, its kernels are so small"
    if cause == "optimizer":
        part = f"{_owned(candidate.setup)} of the parameters"
        if recipe.offload and reductions(candidate.setup) > 1:
            part += " and adds up what micro-batches bring"
        return f"each {device(cluster)} updates {part}, {seconds(own.optimizer)}"
    spent = f"{seconds(own.exposed[cause])} exposed {CAUSES[cause]}"
    return f"{spent} {_over(cause, candidate.setup, cluster)}"


def _where(other: Candidate, answer: Answer) -> str:
    """The same for a plan that lost."""
    cause, more = _grown(other, answer.best)
    if cause == "recompute":
        return f"{_recomputed(other, answer)}, {seconds(more)} more work"
    return grown(other, answer.best, answer.question.cluster)


def _grown(candidate: Candidate, than: Candidate) -> tuple[str, float]:
    """(the part that grew most, by how many seconds)."""
    own, best = candidate.timed, than.timed
    more = {
        "compute": own.compute - own.recompute - best.compute + best.recompute,
        "recompute": own.recompute - best.recompute,
        "waiting": own.waiting - best.waiting,
        "bubble": own.bubble - best.bubble,
        "optimizer": own.optimizer - best.optimizer,
        **{cause: own.exposed.get(cause, 0.0) - best.exposed.get(cause, 0.0) for cause in own.exposed},
    }
    most = max(more, key=lambda name: more[name])
    return most, more[most]


def _recomputed(other: Candidate, answer: Answer) -> str:
    """Why it recomputes more than the winner."""
    kind = other.setup.recipe.recompute
    if kind == answer.best.setup.recipe.recompute:
        return f"its {kind} recomputation takes longer"
    alike = (each for each in answer.ranked if _arranged(each) == _arranged(other))
    only = all(each.setup.recipe.recompute == kind for each in alike)
    return f"it fits only with {kind} recomputation" if only else f"it is fastest with {kind} recomputation"


def _arranged(candidate: Candidate) -> Parallel:
    """The arrangement without model chunks."""
    return replace(candidate.setup.parallel, interleave=1)


def _over(cause: str, setup: Setup, cluster: Cluster) -> str:
    """The link that matters: between hosts if the ranks that communicate are on several; to the host's memory
    if data from there takes longer."""
    parallel = setup.parallel
    ranks, stride = parallel.peers, parallel.tensor
    if cause == "tensor":
        ranks, stride = parallel.tensor, 1
    elif cause == "context":
        ranks = parallel.context
    elif cause == "pipeline":
        ranks, stride = parallel.pipeline, parallel.ranks // parallel.pipeline
    elif cause == "parameters" and parallel.is_hybrid:
        ranks = parallel.shard
    hosts = along(cluster, ranks, stride).hosts
    link = cluster.between if hosts > 1 else cluster.inside
    hosted = cause == "parameters" and setup.recipe.offload == "parameters"
    if hosted and (ranks - 1) / link.rate < 1 / cluster.host.rate:  # both sides: s per byte of a rank's part
        return f"from the host's memory, {gb(cluster.host.bandwidth)} GB/s a {device(cluster)}"
    if hosts > 1:
        return f"over {hosts:,} hosts, {gb(link.bandwidth)} GB/s a {device(cluster)}"
    return f"in the host, {gb(link.bandwidth)} GB/s"


def _owned(setup: Setup) -> str:
    shard = setup.parallel.shard
    return "all" if shard == 1 else f"1/{shard}"


def _recompute(answer: Answer) -> Iterator[str]:
    winner, cluster = answer.best, answer.question.cluster
    if winner.setup.recipe.recompute == "none":
        return
    without = judge(replace(winner.setup, recipe=replace(winner.setup.recipe, recompute="none")), cluster)
    missing = without.needed - answer.question.room_bytes
    if missing > 0 and without.seconds < winner.seconds:
        yield (
            f"without recomputation it would be {_percent(1 - without.seconds / winner.seconds)} faster, but "
            f"needs {gb(missing)} GB more than there is"
        )


def _micro_batch(answer: Answer) -> Iterator[str]:
    """Why the next larger micro-batch is not taken."""
    winner, question = answer.best, answer.question
    recipe = winner.setup.recipe
    factor = next((n for n in range(2, recipe.accumulation + 1) if recipe.accumulation % n == 0), None)
    if factor is None:
        return
    micro = recipe.micro_batch * factor
    larger = replace(recipe, micro_batch=micro, accumulation=recipe.accumulation // factor)
    found = judge(replace(winner.setup, recipe=larger), question.cluster)
    missing = found.needed - question.room_bytes
    if missing <= 0:
        return
    gain = 1 - found.seconds / winner.seconds
    if gain >= _WORTH:
        yield (
            f"micro-batch {micro} would be {_percent(gain)} faster, but needs {gb(missing)} GB more than "
            "there is"
        )
    if recipe.recompute != "full":
        smaller = judge(replace(winner.setup, recipe=replace(larger, recompute="full")), question.cluster)
        if smaller.needed <= question.room_bytes:
            smaller = with_best_bucket(smaller, question)
            slower = compared(smaller.seconds / winner.seconds - 1)
            yield f"micro-batch {micro} would fit with full recomputation, and is {slower}"


def _in_no_sync(answer: Answer) -> Iterator[str]:
    """Whole gradients until the last micro-batch, instead of a sum with each: more memory, fewer messages.
    The search leaves it out: unless a strategy or offload is asked for, ZeRO-1 is faster wherever these fit.
    """
    winner, question = answer.best, answer.question
    if reductions(winner.setup) == 1 or winner.setup.parallel.pipeline > 1:
        return
    recipe = replace(winner.setup.recipe, accumulates_whole=True)
    found = judge(replace(winner.setup, recipe=recipe), question.cluster)
    gain = 1 - found.seconds / winner.seconds
    if gain >= _WORTH and found.needed <= question.room_bytes:
        yield (
            f"all but the last micro-batch in model.no_sync(): {_percent(gain)} faster, keeps whole "
            f"gradients and fits in {gb(found.needed)} GB"
        )


def _unpinned(answer: Answer) -> Iterator[str]:
    found = unpinned(answer.question)
    if found is None or found[1].winner is None:
        return
    pins, winner = found[0], found[1].winner
    if (gain := 1 - winner.seconds / answer.best.seconds) >= _WORTH:
        fits = f"{title(winner.setup)} fits in {gb(winner.needed)} GB"
        yield f"without {pins}: {_percent(gain)} faster, for {fits}"


def _optimizer(answer: Answer) -> Iterator[str]:
    question = answer.question
    if question.optimizer != "adamw" or question.adapters != "none":
        return
    for gain, found in _faster(eight_bit(question), answer):
        yield (
            f"--optimizer adamw-8bit: {_percent(gain)} faster, for {title(found.setup)} fits in "
            f"{gb(found.needed)} GB"
        )


def _precision(answer: Answer) -> Iterator[str]:
    """What fp32 would bring where products in fewer bits are slower, as on many CPUs."""
    question, gpu = answer.question, answer.question.cluster.gpu
    if question.precision.activations == 4 or question.adapters == "qlora" or gpu.peak_fp32 <= gpu.peak:
        return
    precision = replace(FP32, moments=1) if question.optimizer == "adamw-8bit" else FP32
    for gain, _ in _faster(replace(question, precision=precision), answer):
        yield f"--precision fp32: {_percent(gain)} faster, its products are faster here than in fewer bits"


def _fp8(answer: Answer) -> Iterator[str]:
    """What FP8 would bring: faster products, unless casting in separate kernels costs more than they gain."""
    question, winner = answer.question, answer.best
    precision, compiled = question.precision, replace(question, compiled=True)
    if precision.fp8:
        for option, asked in (
            ("--compile", compiled),
            ("--precision bf16", replace(question, precision=replace(precision, fp8=False))),
        ):
            for gain, _ in _faster(asked, answer):
                yield f"{option}: {_percent(gain)} faster, as casting to FP8 takes long here"
        return
    in_bf16 = (precision.parameters, precision.masters, precision.activations) == (2, 4, 2)
    if not in_bf16 or why_no_fp8(question) is not None:
        return
    found = settled(search(replace(compiled, precision=replace(precision, fp8=True)))).winner
    without = winner if question.compiled else settled(search(compiled)).winner
    if found is None or without is None or found.seconds > (1 - _WORTH) * without.seconds:
        return
    alone = (
        "" if question.compiled else f" (--compile alone: {_percent(1 - without.seconds / winner.seconds)})"
    )
    yield (
        f"--precision fp8{'' if question.compiled else ' --compile'}: "
        f"{_percent(1 - found.seconds / winner.seconds)} faster, the layers' products in FP8{alone}"
    )


def _batch(answer: Answer) -> Iterator[str]:
    question, rate = answer.question, answer.best.timed.tokens_per_s
    batch, gpus = question.global_batch, question.cluster.gpus
    even = -(-batch // gpus) * gpus  # which GPUs can divide, each with its own sequences
    for size in sorted({even, 2 * batch} - {batch}):
        found = settled(search(replace(question, global_batch=size))).winner
        if found is not None and (gain := found.timed.tokens_per_s / rate - 1) >= _WORTH:
            yield f"a global batch of {size:,}: {_percent(gain)} more tokens a second"


def _wire(answer: Answer) -> Iterator[str]:
    """What fewer bytes of gradients would bring: bf16, unless int8 brings clearly more."""
    question, best, said, most = answer.question, answer.best, "", 0.0
    if question.wire is not None or best.timed.exposed.get("gradients", 0.0) < _WORTH * best.seconds:
        return
    for wire in WIRE_BYTES:
        for gain, found in _faster(replace(question, wire=wire), answer):
            if found.setup.recipe.wire and gain >= most + _WORTH:
                most, said = gain, f"--wire {wire}: {_percent(gain)} faster, for {title(found.setup)}"
    if said:
        yield said


def _network(answer: Answer) -> Iterator[str]:
    question, winner, cluster = answer.question, answer.best, answer.question.cluster
    if sum(winner.timed.exposed.values()) < _WORTH * winner.seconds:
        return
    several = cluster.hosts > 1
    link = cluster.between if several else cluster.inside
    faster = replace(link, bandwidth=2 * link.bandwidth)
    cluster = replace(cluster, between=faster) if several else replace(cluster, inside=faster)
    for gain, _ in _faster(replace(question, cluster=cluster), answer):
        where = "between hosts" if several else f"between the {device(cluster)}s of a host"
        yield (
            f"links of {gb(2 * link.bandwidth)} instead of {gb(link.bandwidth)} GB/s {where}: "
            f"{_percent(gain)} faster"
        )


def _faster(question: Question, than: Answer) -> Iterator[tuple[float, Candidate]]:
    """(the part of a step saved, the best candidate) for another question, if it is worth mentioning."""
    found = settled(search(question)).winner
    if found is not None and (gain := 1 - found.seconds / than.best.seconds) >= _WORTH:
        yield gain, found


@functools.lru_cache(maxsize=1)
def unpinned(question: Question) -> tuple[str, Answer] | None:
    """("--tensor 2 and --strategy zero1", the best answer without them); None if nothing was pinned."""
    names = [name for name in _PINS if getattr(question, name) is not None]
    if not names:
        return None
    free = replace(question, strategy=None, tensor=None, pipeline=None, interleave=None, context=None)
    return _and([f"--{name} {getattr(question, name)}" for name in names]), settled(search(free))


def eight_bit(question: Question) -> Question:
    """The same question with an 8-bit optimizer."""
    return replace(question, optimizer="adamw-8bit", precision=replace(question.precision, moments=1))


def _percent(ratio: float) -> str:
    return share(ratio, 1.0)


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
