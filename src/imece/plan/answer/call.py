"""How imece does a plan: the call of `imece.parallelize`, and what is left to the script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from imece.footprint import DIVIDED
from imece.plan.answer.search import USUAL_BUCKET, Candidate, framework_on, judge, with_best_bucket
from imece.plan.answer.space import Question
from imece.plan.answer.words import count
from imece.plan.setup import Setup

_CPU_BUCKET = 5 * 2**20  # bytes: what parallelize takes by itself on CPUs, where gradients are sharded
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
_OPTIMIZERS = {
    "adamw-8bit": "bitsandbytes.optim.AdamW8bit: pip install 'imece[quant]'",
    "sgd": "torch.optim.SGD",
    "muon": "torch.optim.Muon for matrices and AdamW for all else: parallelize takes the list of both",
}


@dataclass(frozen=True)
class Call:
    """One way that imece.parallelize does without other software."""

    candidate: Candidate
    question: Question
    precision: str  # as --precision names it

    def text(self) -> str:
        """The call, with every argument that is not its default."""
        setup, recipe = self.candidate.setup, self.candidate.setup.recipe
        arguments = [f'strategy="{setup.parallel.strategy}"']
        if _has_masters(setup):
            dtype = _DTYPES[self.precision]
            arguments.append(f"precision=imece.MixedPrecision(param={dtype}, reduce={dtype})")
        if recipe.offload:
            arguments.append(f'offload="{recipe.offload}"')
        if self._has_buckets() and recipe.bucket_bytes != self._usual_bucket():
            arguments.append(f"bucket_cap_mb={recipe.bucket_bytes / 2**20:g}")
        return f"model, optimizer = imece.parallelize(model, optimizer, {', '.join(arguments)})"

    def left(self) -> Iterator[tuple[str, str]]:
        """(what, how) of all that is the script's own part."""
        recipe = self.candidate.setup.recipe
        if recipe.adapters != "none":
            bits = ", loaded in 4 bits," * (recipe.adapters == "qlora")
            rank = recipe.adapter_rank
            yield "adapters", f"wrap the model{bits} with peft first (rank {rank}): imece has none of its own"
        if _has_masters(self.candidate.setup):
            yield (
                "model",
                f"its trained parameters in fp32, for the masters; parallelize makes them {self.precision}",
            )
        elif self.precision == "bf16-pure":
            yield "model", "model.bfloat16() first: there are no masters"
        elif self.precision == "autocast":
            device = "cpu" if self._is_cpu() else "cuda"
            yield "forward", f'in fp32, under torch.autocast("{device}", torch.bfloat16)'
        if self.precision == "fp16":
            yield "loss", "through imece.GradScaler(), as fp16 has small gradients vanish"
        if recipe.optimizer in _OPTIMIZERS:
            yield "optimizer", _OPTIMIZERS[recipe.optimizer]
        yield "batch", self._batch()
        if recipe.recompute != "none":
            what = "forward" if recipe.recompute == "full" else "attention"
            yield (
                "recomputation",
                f"torch.utils.checkpoint.checkpoint(..., use_reentrant=False) around each layer's {what}",
            )
        if recipe.compiled:
            yield "compile", "imece.compile_blocks(model)"

    def _batch(self) -> str:
        parallel, recipe = self.candidate.setup.parallel, self.candidate.setup.recipe
        times, size = recipe.accumulation, count(recipe.micro_batch, "sequence")
        if times == 1:
            return f"{size} a GPU, one loss.backward() before each optimizer.step()"
        said = f"{size} a GPU, {times:,} times (loss / {times}).backward() before each optimizer.step()"
        if parallel.data == 1:
            return said
        if DIVIDED[parallel.strategy].gradients:
            return f"{said}; not in model.no_sync(), which would keep whole gradients"
        return f"{said}, all but the last in model.no_sync()"

    def _has_buckets(self) -> bool:
        """Whether bucket_cap_mb says how messages are cut, and not the layers."""
        parallel, cluster = self.candidate.setup.parallel, self.question.cluster
        gathered = DIVIDED[parallel.strategy].parameters and framework_on(cluster).gathers
        return parallel.data > 1 and not gathered

    def _usual_bucket(self) -> int:
        divides = DIVIDED[self.candidate.setup.parallel.strategy]
        return _CPU_BUCKET if divides.gradients and self._is_cpu() else USUAL_BUCKET

    def _is_cpu(self) -> bool:
        return self.question.cluster.gpu.multiprocessors == 1


def call_of(candidate: Candidate, question: Question, precision: str) -> Call | None:
    """How imece.parallelize does it, with buckets of the best size; None where it does not.

    There masters and offload go with sharded strategies only: on one GPU that is zero1, which has nothing to
    share out and keeps sums of gradients in the masters' dtype besides; None if those do not fit.
    """
    setup = candidate.setup
    parallel = setup.parallel
    if not parallel.tensor == parallel.pipeline == parallel.context == 1:
        return None
    if parallel.strategy == "replicate" and (_has_masters(setup) or setup.recipe.offload):
        if parallel.data > 1:
            return None
        candidate = judge(replace(setup, parallel=replace(parallel, strategy="zero1")), question.cluster)
        if candidate.needed > question.room_bytes:
            return None
    return Call(with_best_bucket(candidate, question), question, precision)


def _has_masters(setup: Setup) -> bool:
    precision = setup.recipe.precision
    return precision.masters not in (0, precision.parameters)
