"""How to run a plan with imece: the calls up to `imece.parallelize`, and what is left to the script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from imece.footprint import DIVIDED
from imece.listing import many
from imece.plan.answer.explain import unpinned
from imece.plan.answer.search import (
    Answer,
    Candidate,
    fastest,
    framework_on,
    judge,
    search,
    settled,
    usual_buckets,
    with_best_bucket,
)
from imece.plan.answer.space import Question
from imece.plan.answer.words import compared, device, gb, title
from imece.plan.memory.frameworks import Framework
from imece.plan.memory.memory import more_with_torchs_loss
from imece.plan.setup import Parallel, Setup

_WHOLE = "the schedule of a pipeline keeps gradients whole"
_FEW = "with fewer micro-batches than stages the schedule is gpipe, which keeps the logits of all"
_SUMS = "it keeps masters in sharded strategies alone, which sum gradients in the masters' dtype besides"
_MENTIONED = 10**7  # bytes, 0.01 GB: smaller gains are not mentioned
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp8": "torch.bfloat16"}
_FP8 = (  # without the head, as usual: logits need the precision
    "torchao.float8.convert_to_float8_training(model, module_filter_fn=lambda module, name: "
    '"head" not in name) before imece.parallelize'
)
_CLASS = (
    "imece.models.transformer.Transformer, into which imece.models.hugging_face.from_hugging_face reads "
    "Hugging Face's files; how others are divided: docs/model-parallel.md"
)
_OPTIMIZERS = {
    "adamw-8bit": "bitsandbytes.optim.AdamW8bit: pip install 'imece[quant]'",
    "sgd": "torch.optim.SGD",
    "muon": "torch.optim.Muon for matrices and AdamW for all else: parallelize takes the list of both",
}


@dataclass(frozen=True)
class Call:
    """A plan that imece can run without other software."""

    candidate: Candidate
    question: Question
    precision: str  # as --precision names it

    def text(self) -> str:
        """The calls, one per line, with every argument that is not its default."""
        return "\n".join([*self._divided(), self._parallelized()])

    def _divided(self) -> Iterator[str]:
        """The calls before `parallelize`, for ranks that share a model or a sequence."""
        parallel = self.candidate.setup.parallel
        if not _divides_models(parallel):
            return
        shard = parallel.shard if parallel.strategy == "hybrid" else 1
        sizes = {
            "pipeline": parallel.pipeline, "replicate": parallel.data // shard, "shard": shard,
            "context": parallel.context, "tensor": parallel.tensor,
        }  # fmt: skip
        axes = ", ".join(f'"{axis}": {size}' for axis, size in sizes.items() if size > 1)
        yield f"mesh = imece.init({{{axes}}})"
        if parallel.tensor > 1:
            more = ", sequence=True" * parallel.sequence + ", divided_logits=True"
            yield f"model = imece.tensor_parallel(model, mesh{more})"
        if parallel.pipeline > 1:
            setup = self.candidate.setup
            arguments = [f"micro_batches={setup.recipe.accumulation}"]
            if parallel.interleave > 1:
                arguments.append(f'schedule="interleaved", chunks={parallel.interleave}')
            elif parallel.schedule != "1f1b":
                arguments.append(f'schedule="{parallel.schedule}"')
            if (setup.model.positions or setup.model.made_for) != setup.recipe.seq:
                arguments.append(f"seq={setup.recipe.seq}")
            yield f"pipeline = imece.Pipeline(model, mesh, {', '.join(arguments)}, loss=loss)"

    def _parallelized(self) -> str:
        setup, recipe = self.candidate.setup, self.candidate.setup.recipe
        parallel = setup.parallel
        arguments = [f'strategy="{parallel.strategy}"']
        if _has_masters(setup):
            dtype = _DTYPES[self.precision]
            arguments.append(f"precision=imece.MixedPrecision(param={dtype}, reduce={dtype})")
        if recipe.offload:
            arguments.append(f'offload="{recipe.offload}"')
        if recipe.wire:
            arguments.append(f'wire="{recipe.wire}"')
        if self._has_buckets() and usual_buckets(setup, self.question.cluster) != {recipe.bucket_bytes}:
            arguments.append(f"bucket_cap_mb={recipe.bucket_bytes / 2**20:g}")
        result, model = ("stage", "pipeline.part") if parallel.pipeline > 1 else ("model", "model")
        return f"{result}, optimizer = imece.parallelize({model}, optimizer, {', '.join(arguments)})"

    def left(self) -> Iterator[tuple[str, str]]:
        """(what, how) for everything that is left to the script."""
        recipe = self.candidate.setup.recipe
        if recipe.adapters != "none":
            is_4_bit = recipe.adapters == "qlora"
            bits, quantize = ", loaded in 4 bits," * is_4_bit, " --lora.quantize nf4" * is_4_bit
            rank = recipe.adapter_rank
            yield (
                "adapters",
                f"wrap the model{bits} with peft first (rank {rank}), or imece train "
                f"--lora.rank {rank}{quantize}",
            )
        if _has_masters(self.candidate.setup):
            yield (
                "model",
                "its trained parameters in fp32, for the masters; parallelize makes them "
                f"{'fp16' if self.precision == 'fp16' else 'bf16'}",
            )
        elif self.precision == "bf16-pure":
            yield "model", "model.bfloat16() first: there are no masters"
        elif self.precision == "autocast":
            kind = "cpu" if self.question.cluster.gpu.is_cpu else "cuda"
            yield "forward", f'in fp32, under torch.autocast("{kind}", torch.bfloat16)'
        if self.precision == "fp8":
            yield "FP8", _FP8
        if self.candidate.setup.parallel.tensor * self.candidate.setup.parallel.pipeline > 1:
            yield "class", _CLASS
        more = more_with_torchs_loss(self.candidate.setup, self._framework)
        if self.candidate.setup.parallel.tensor > 1:
            yield "loss", "imece.cross_entropy(logits, targets), which takes logits that ranks have parts of"
        elif more >= _MENTIONED:
            yield (
                "loss",
                f"imece.cross_entropy(logits, targets): torch's of fp32 logits needs {gb(more)} GB more",
            )
        if self.precision == "fp16":
            yield "backward", "through imece.GradScaler(), as fp16 has small gradients vanish"
        if recipe.optimizer in _OPTIMIZERS:
            yield "optimizer", _OPTIMIZERS[recipe.optimizer]
        if self.candidate.setup.parallel.context > 1:
            yield (
                "sequences",
                "imece.ContextParallel(mesh): inputs and targets through its part, and forward and backward "
                "inside of it",
            )
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
        times, size = recipe.accumulation, many(recipe.micro_batch, "sequence")
        each = device(self.question.cluster)
        if parallel.pipeline > 1:
            share = many(times * recipe.micro_batch, "sequence")
            return (
                f"{share} a pipeline, {size} at once: pipeline.step(inputs, targets), then optimizer.step()"
            )
        if (shared := parallel.tensor * parallel.context) > 1:
            each = f"group of {shared} {each}s"
        if times == 1:
            return f"{size} a {each}, one loss.backward() before each optimizer.step()"
        said = f"{size} a {each}, {times:,} times (loss / {times}).backward() before each optimizer.step()"
        if parallel.peers == 1:
            return said
        if DIVIDED[parallel.strategy].gradients:
            return f"{said}; not in model.no_sync(), which would keep whole gradients"
        return f"{said}, all but the last in model.no_sync()"

    @property
    def _framework(self) -> Framework:
        return framework_on(self.question.cluster, self.candidate.setup.parallel)

    def _has_buckets(self) -> bool:
        """Whether bucket_cap_mb decides how messages are cut, instead of the layers."""
        parallel = self.candidate.setup.parallel
        gathered = DIVIDED[parallel.strategy].parameters and self._framework.gathers
        return parallel.peers > 1 and not gathered


@dataclass(frozen=True)
class Next:
    """How to go on from the answer."""

    call: Call | None
    says: str  # how the call differs from the plan, or why there is none; empty if it is the plan


def next_of(answer: Answer, precision: str) -> Next:
    """The call for the plan, or for the fastest one that imece can run, possibly without the arrangement that
    was asked for. precision: as --precision names it."""
    winner, question = answer.best, answer.question
    call, says = _call_of(answer, precision), "what imece does by itself"
    if call is None and (found := unpinned(question)) is not None:
        pins, free = found
        call, says = _call_of(free, precision), f"{says}, without {pins} ({_why_not(winner, question)})"
    if call is None:
        says = f"no way fits that imece does by itself: {_why_not(winner, question)}"
        offloaded = replace(question, offload="parameters")
        if not question.offload and not question.cluster.gpu.is_cpu:
            call = _call_of(settled(search(offloaded)), precision)
        if call is not None:
            says += f"; with --offload parameters it does {title(call.candidate.setup)}"
        return Next(None, says)
    ours, each = call.candidate, device(question.cluster)
    if _is_same(call, winner):
        is_as_large = gb(ours.needed) == gb(winner.needed)
        why = _how_else(winner.setup)
        return Next(call, "" if is_as_large else f"{gb(ours.needed)} GB a {each} in imece: {why}")
    more = ours.seconds / winner.seconds - 1
    than = compared(more) if more else "as fast"
    return Next(call, f"{says}, {than}, {gb(ours.needed)} GB a {each}: {title(ours.setup)}")


def _is_same(call: Call, winner: Candidate) -> bool:
    """Whether ranks do the same work, whatever memory imece needs for it. A strategy of one rank shards
    nothing, and its name is in no title; nor is the schedule."""
    ours, wanted = call.candidate.setup, winner.setup
    strategy, schedule = wanted.parallel.strategy, wanted.parallel.schedule
    parallel = replace(ours.parallel, strategy=strategy, schedule=schedule)
    return (parallel, title(ours)) == (wanted.parallel, title(wanted))


def _call_of(answer: Answer, precision: str) -> Call | None:
    question = answer.question
    if answer.winner is None:
        return None
    if (first := _ours(answer.winner, question)) is not None:
        return Call(with_best_bucket(first, question), question, precision)
    found = [mine for each in answer.ranked if (mine := _ours(each, question)) is not None]
    return Call(fastest(found, question), question, precision) if found else None


def _ours(candidate: Candidate, question: Question) -> Candidate | None:
    """The candidate as imece runs it; None if it cannot, or if that does not fit."""
    if _stands_against(candidate.setup) is not None:
        return None
    if (ours := _as_ours(candidate.setup)) == candidate.setup:
        return candidate
    found = judge(ours, question.cluster)
    return found if found.needed <= question.room_bytes else None


def _as_ours(setup: Setup) -> Setup:
    """The same work in imece, which may take more memory: see `_how_else`."""
    parallel, recipe = setup.parallel, setup.recipe
    if _keeps_gradients(setup):
        recipe = replace(recipe, accumulates_whole=True)
    if _has_few(setup):
        parallel = replace(parallel, schedule="gpipe")
    if _has_sums(setup):  # on one rank zero1 shards nothing, and may have masters
        parallel = replace(parallel, strategy="zero1")
    return replace(setup, parallel=parallel, recipe=recipe)


def _how_else(setup: Setup) -> str:
    """What imece does otherwise than planned, so that it may need more memory."""
    several = setup.recipe.accumulation > 1
    found = {_WHOLE: _keeps_gradients(setup), _FEW: _has_few(setup) and several, _SUMS: _has_sums(setup)}
    return "; ".join(how for how, is_so in found.items() if is_so)


def _keeps_gradients(setup: Setup) -> bool:
    """Whether a schedule keeps whole what the strategy shards."""
    return setup.parallel.pipeline > 1 and DIVIDED[setup.parallel.strategy].gradients


def _has_few(setup: Setup) -> bool:
    """Whether there are too few micro-batches for 1f1b."""
    return setup.recipe.accumulation < setup.parallel.pipeline


def _has_sums(setup: Setup) -> bool:
    """Whether parallelize has what the optimizer needs in sharded strategies alone, also on one rank."""
    return setup.parallel.strategy == "replicate" and (
        _has_masters(setup) or setup.recipe.offload is not None
    )


def _why_not(winner: Candidate, question: Question) -> str:
    if (reason := _stands_against(winner.setup)) is not None:
        return reason
    needed = judge(_as_ours(winner.setup), question.cluster).needed
    return f"{_how_else(winner.setup)}, and that needs {gb(needed)} of {gb(question.room_bytes)} GB"


def _divides_models(parallel: Parallel) -> bool:
    return not parallel.tensor == parallel.pipeline == parallel.context == 1


def _stands_against(setup: Setup) -> str | None:
    """Why imece does not combine these kinds of parallelism, or not for this model (docs/model-parallel.md
    has the reasons). None: it does."""
    model, parallel, recipe = setup.model, setup.parallel, setup.recipe
    tensor, gathers, adapts = (
        parallel.tensor,
        DIVIDED[parallel.strategy].parameters,
        recipe.adapters != "none",
    )
    if (
        (parallel.pipeline > 1 and (gathers or adapts or parallel.context > 1))
        or (parallel.strategy == "hybrid" and parallel.context > 1)
        or (tensor > 1 and (recipe.precision.fp8 or adapts or recipe.optimizer == "muon"))
    ):
        return "it does not do all of that together"
    if tensor * parallel.pipeline > 1 and not model.ours:
        return f"of models like {model.name} it divides no matrices and cuts no stages"
    if model.kv_heads % tensor:
        return f"it cannot divide {model.kv_heads} heads of keys and values among {tensor} ranks"
    if model.tied_head and model.vocab_size % tensor:
        return f"it cannot divide a tied vocabulary of {model.vocab_size:,} among {tensor} ranks"
    if parallel.context > 1 and model.scores_part(recipe.seq) < 1:
        return f"it shares no sequence of {recipe.seq:,} tokens of which one sees {model.window:,}"
    if parallel.peers > 1 and _has_sums(setup):
        return "it keeps masters, or what is offloaded, in sharded strategies alone, such as zero1"
    return None


def _has_masters(setup: Setup) -> bool:
    precision = setup.recipe.precision
    return precision.masters not in (0, precision.parameters)
