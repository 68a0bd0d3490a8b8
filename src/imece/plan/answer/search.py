"""Finds every plan that fits, ranked by the time of a step; and the memory that the others would need."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from imece.buckets import default_cap_bytes, most_under_way, units_at_once
from imece.footprint import DIVIDED
from imece.plan.answer.space import Question, setups
from imece.plan.hardware import Cluster
from imece.plan.memory.frameworks import IMECE, IMECE_CPU, IMECE_HOSTS, Framework
from imece.plan.memory.held import held, trained_elements
from imece.plan.memory.memory import Memory, memory
from imece.plan.setup import Parallel, Recomputation, Setup
from imece.plan.speed.step_time import StepTime, step_time

# Plans within this part of a step count as equally fast: predictions are no more exact. Then the simpler plan
# is taken, i.e. the one with fewer kinds of parallelism, and of its micro-batches the one that needs least
# memory.
SAME = 0.01
BUCKETS = tuple(size * 2**20 for size in (1, 5, 10, 25, 50, 100, 200, 400))  # bytes
_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Candidate:
    """One plan, the memory it needs and the time of its step; no time if it does not fit."""

    setup: Setup
    memory: Memory
    needed: int  # bytes per GPU, including those outside the framework's allocator
    time: StepTime | None = None

    @property
    def timed(self) -> StepTime:
        """Its time. AssertionError if it does not fit."""
        assert self.time is not None, f"{self.setup} does not fit"
        return self.time

    @property
    def seconds(self) -> float:
        """Per step. AssertionError if it does not fit."""
        return self.timed.total


@dataclass(frozen=True)
class Answer:
    """What the search found. `ranked[0]` is the one to take."""

    question: Question
    ranked: tuple[Candidate, ...]  # those that fit: the winner, then by time
    missed: tuple[Candidate, ...]  # by bytes: the smallest of each arrangement in which nothing fits
    considered: int

    @property
    def winner(self) -> Candidate | None:
        """The candidate to take; None if nothing fits."""
        return self.ranked[0] if self.ranked else None

    @property
    def best(self) -> Candidate:
        """The winner. AssertionError if nothing fits."""
        assert self.ranked, "nothing fits"
        return self.ranked[0]


def search(question: Question) -> Answer:
    """Try every setup. Setups that do not fit are not timed, and their larger micro-batches, which need more
    memory, are skipped; but not the one without accumulation, whose sums of gradients come later."""
    fits: list[Candidate] = []
    least: dict[Parallel, Candidate] = {}
    fitting: set[Parallel] = set()
    considered = 0
    for line in setups(question):
        considered += len(line)
        missed = False
        for setup in line:
            if missed and setup.recipe.accumulation > 1:
                continue
            setup = with_usual_buckets(setup, question.cluster)
            candidate = weigh(setup, question.cluster)
            if candidate.needed > question.room_bytes:
                before = least.get(setup.parallel)
                if before is None or candidate.needed < before.needed:
                    least[setup.parallel] = candidate
                missed = True
                continue
            fitting.add(setup.parallel)
            fits.append(replace(candidate, time=step_time(setup, question.cluster)))
    fits.sort(key=lambda each: each.seconds)
    misses = [each for parallel, each in least.items() if parallel not in fitting]
    return Answer(
        question, tuple(_winner_first(fits)), tuple(sorted(misses, key=lambda each: each.needed)), considered,
    )  # fmt: skip


def weigh(setup: Setup, cluster: Cluster) -> Candidate:
    """A candidate with memory but without time."""
    found = memory(setup, framework=framework_on(cluster, setup.parallel))
    return Candidate(setup, found, found.total + cluster.gpu.overhead_bytes)


def framework_on(cluster: Cluster, parallel: Parallel) -> Framework:
    """Which software's memory to predict: imece's, whose CPU ranks keep in shared memory what a host
    shares."""
    if not cluster.gpu.is_cpu:
        return IMECE
    one_host = cluster.hosts == 1
    in_common = one_host or parallel.tensor * parallel.shard <= cluster.gpus_per_host
    is_hybrid = parallel.is_hybrid
    over_hosts = _sums_over_hosts(cluster, parallel)
    replicas = is_hybrid and parallel.shard < parallel.peers
    under_way = most_under_way(
        overlap=not one_host,  # alone on their host, ranks take all of its cores
        over_hosts=over_hosts,
        in_common=in_common,
        replicas=replicas,
    )
    base = IMECE_CPU if one_host else IMECE_HOSTS
    return replace(
        base,
        name=f"{base.name} {in_common} {over_hosts} {under_way}",  # another name: see Framework.__hash__
        gathers=not in_common,
        grown_units=1 + under_way,
        units_at_once=units_at_once(over_hosts=over_hosts and not is_hybrid),
    )


def _sums_over_hosts(cluster: Cluster, parallel: Parallel) -> bool:
    """Whether gradients are summed inside hosts of CPU ranks first, and then between them."""
    if not cluster.gpu.is_cpu or cluster.hosts == 1 or parallel.tensor * parallel.pipeline > 1:
        return False
    return not parallel.is_hybrid or parallel.shard == cluster.gpus_per_host


def judge(setup: Setup, cluster: Cluster) -> Candidate:
    """A candidate with memory and time, whether it fits or not."""
    return replace(weigh(setup, cluster), time=step_time(setup, cluster))


def settled(answer: Answer) -> Answer:
    """The same answer, with the best buckets in each candidate that might win by them, so that the winner is
    the fastest of all. All others are slower even at best, and keep the usual buckets."""
    tuned, rest = tune(answer.ranked, answer.question)
    fits = sorted([*tuned, *rest], key=lambda each: each.seconds)
    return replace(answer, ranked=tuple(_winner_first(fits)))


def fastest(candidates: Iterable[Candidate], question: Question) -> Candidate:
    """The fastest of those that fit (at least one must), each with its best buckets."""
    tuned, _ = tune(candidates, question)
    return min(tuned, key=lambda each: each.seconds)


def tune(candidates: Iterable[Candidate], question: Question) -> tuple[list[Candidate], list[Candidate]]:
    """Those that fit, as two lists: with their best buckets; and unchanged, because no buckets bring them
    within 1 % of the fastest."""
    waiting = sorted(candidates, key=_at_best)
    tuned: list[Candidate] = []
    most = math.inf
    for place, each in enumerate(waiting):
        if _at_best(each) > (1 + SAME) * most:
            return tuned, waiting[place:]
        tuned.append(with_best_bucket(each, question))
        most = min(most, tuned[-1].seconds)
    return tuned, []


def _at_best(candidate: Candidate) -> float:
    """Seconds of a step if summing gradients took no time: buckets cannot make it faster."""
    return candidate.seconds - candidate.timed.exposed["gradients"]


def with_best_bucket(candidate: Candidate, question: Question) -> Candidate:
    """A candidate that fits, with the best buckets: of the sizes within 0.1 % of the fastest that fits, the
    one nearest to the usual."""
    setup = candidate.setup
    usual = max(usual_buckets(setup, question.cluster))
    sizes = (replace(setup.recipe, bucket_bytes=size) for size in {*BUCKETS, usual})
    found = [judge(replace(setup, recipe=recipe), question.cluster) for recipe in sizes]
    fits = [each for each in found if each.needed <= question.room_bytes]
    most = 1.001 * min(each.seconds for each in fits)
    return min(
        (each for each in fits if each.seconds <= most),
        key=lambda each: abs(math.log(each.setup.recipe.bucket_bytes / usual)),
    )


def usual_buckets(setup: Setup, cluster: Cluster) -> set[int]:
    """Bytes of the buckets that parallelize makes by default, on each stage of a pipeline."""
    parallel, on_cpu = setup.parallel, cluster.gpu.is_cpu
    divides, framework = DIVIDED[parallel.strategy], framework_on(cluster, parallel)
    over_hosts = _sums_over_hosts(cluster, parallel)
    if not divides.optimizer or on_cpu:
        return {default_cap_bytes(on_cpu=on_cpu, over_hosts=over_hosts, borrows=divides.gradients)}
    size = setup.recipe.precision.parameters
    parts = (held(setup, stage, framework.stages) for stage in range(parallel.pipeline))
    return {default_cap_bytes(gradients_bytes=int(size * trained_elements(setup, part))) for part in parts}


def with_usual_buckets(setup: Setup, cluster: Cluster) -> Setup:
    """The same setup with the buckets that parallelize makes of it by default; the largest, if those of
    stages differ."""
    usual = max(usual_buckets(setup, cluster))
    return replace(setup, recipe=replace(setup.recipe, bucket_bytes=usual))


def pareto(candidates: tuple[Candidate, ...]) -> list[Candidate]:
    """Candidates for which no other is both faster and smaller, from the smallest."""
    front: list[Candidate] = []
    for each in sorted(candidates, key=lambda one: (one.needed, one.seconds)):
        if not front or each.seconds < front[-1].seconds:
            front.append(each)
    return front


def hours_for(tokens: float, candidate: Candidate) -> float:
    """Hours to train on this many tokens."""
    return tokens / candidate.timed.tokens_per_s / _PER_HOUR


def complexity(setup: Setup) -> tuple[int, int]:
    """Larger means more to understand, and more that can go wrong."""
    parallel = setup.parallel
    kinds = sum(size > 1 for size in (parallel.tensor, parallel.pipeline, parallel.context))
    return kinds, parallel.interleave


def _winner_first(fits: list[Candidate]) -> list[Candidate]:
    if not fits:
        return fits
    near = [each for each in fits if each.seconds <= (1 + SAME) * fits[0].seconds]
    simplest = min(near, key=lambda each: (*complexity(each.setup), each.seconds))
    alike = (each for each in near if _but_for_micro_batch(each) == _but_for_micro_batch(simplest))
    winner = min(alike, key=lambda each: (each.needed, each.seconds))
    return [winner, *(each for each in fits if each is not winner)]


def _but_for_micro_batch(candidate: Candidate) -> tuple[Parallel, Recomputation]:
    return candidate.setup.parallel, candidate.setup.recipe.recompute
