"""What was promised for a training step, and whether it was met."""

from __future__ import annotations

from imece.bench.step.step import Memory, Results
from imece.bench.step.ways import OURS
from imece.bench.targets import Verdict, at_least, at_most


def judged(results: Results) -> list[Verdict]:
    """The targets of strategies if any is measured, else those of DistributedDataParallel."""
    chosen = _STRATEGIES if "replicate" in results.plan.every else _DDP
    return [judge(results, tokens, way, against, bound) for judge, tokens, way, against, bound in chosen]


def _adds(results: Results, tokens: int, way: str, against: str, bound: float) -> Verdict:
    """What `way` adds to a step without synchronisation, beside what `against` adds."""
    found = results.share(tokens, way, against) if _timed(results, tokens, way, against) else None
    return at_most(
        f"{_who(tokens, way)}adds at most {bound:.0%} of what {against} adds", found, bound, "{:.0%}"
    )


def _speed(results: Results, tokens: int, way: str, against: str, bound: float) -> Verdict:
    found = results.speed(tokens, way, against) if _timed(results, tokens, way, against) else None
    return at_least(f"{_who(tokens, way)}at least {bound:g} x the tokens/s of {against}", found, bound)


def _time(results: Results, tokens: int, way: str, against: str, bound: float) -> Verdict:
    found = 1 / results.speed(tokens, way, against) if _timed(results, tokens, way, against) else None
    return at_most(f"{_who(tokens, way)}at most {bound:g} x the time of {against}", found, bound)


def _memory(results: Results, tokens: int, way: str, against: str, bound: float) -> Verdict:
    """Resident after a backward, with pages that ranks share divided among them."""
    pair = _measured(results, tokens, way, against)
    found = pair[0].parts_bytes / max(1, pair[1].parts_bytes) if pair else None
    return at_most(f"{_who(tokens, way)}resident memory at most {bound:g} x that of {against}", found, bound)


def _peak(results: Results, tokens: int, way: str, against: str, bound: float) -> Verdict:
    pair = _measured(results, tokens, way, against)
    found = pair[0].peak_bytes / max(1, pair[1].peak_bytes) if pair else None
    return at_most(
        f"{_who(tokens, way)}peak resident memory at most {bound:g} x that of {against}", found, bound
    )


def _who(tokens: int, way: str) -> str:
    return f"{tokens} tokens a rank: {'' if way == OURS else f'{way}: '}"


def _timed(results: Results, tokens: int, *ways: str) -> bool:
    return all(results.seconds.get(tokens, {}).get(way) for way in ways)


def _measured(results: Results, tokens: int, way: str, against: str) -> tuple[Memory, Memory] | None:
    memory = results.memory.get(tokens, {})
    return (memory[way], memory[against]) if way in memory and against in memory else None


_DDP = (
    (_adds, 128, OURS, "torch-gloo", 0.2),
    (_adds, 512, OURS, "torch-gloo", 0.2),
    (_adds, 128, OURS, "torch-shm", 1.0),
    (_adds, 512, OURS, "torch-shm", 1.0),
    (_speed, 128, OURS, "no-sync", 0.97),
    (_speed, 512, OURS, "no-sync", 0.97),
    (_speed, 128, OURS, "torch-gloo", 1.2),
    (_speed, 128, OURS, "accelerate", 1.2),
    (_speed, 128, OURS, "fabric", 1.2),
    (_memory, 128, OURS, "torch-gloo-view", 1.0),
    (_memory, 512, OURS, "torch-gloo-view", 1.0),
)
_STRATEGIES = (
    *(
        (_time, tokens, way, "replicate", bound)
        for way, bound in (("zero1", 1.0), ("zero2", 1.05), ("zero3", 1.15))
        for tokens in (128, 512)
    ),
    (_speed, 128, "zero3", "fully-shard", 1.9),
    (_speed, 512, "zero3", "fully-shard", 1.2),
    (_speed, 128, "zero3", "deepspeed-zero3", 1.5),
    (_speed, 512, "zero3", "deepspeed-zero3", 1.5),
    (_speed, 128, "zero1", "torch-zero1", 1.4),
    (_speed, 512, "zero1", "torch-zero1", 1.1),
    *(
        (_peak, tokens, way, against, 1.0)
        for way, against in (("zero1", "torch-zero1"), ("zero3", "fully-shard"))
        for tokens in (128, 512)
    ),
)
"""(judge, tokens, ours, the other, bound)."""
