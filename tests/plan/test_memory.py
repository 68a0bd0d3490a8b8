"""Bytes of a rank: the papers' formulae, the engine's own layout, and laws for any model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import imece
from imece.bench.reference_model import LARGE, REFERENCE, Decoder, Shape
from imece.data_parallel.footprint import LaidOut
from imece.data_parallel.strategy import STRATEGIES
from imece.footprint import Sizes, footprint
from imece.layout import Item, build
from imece.plan.answer.search import framework_on
from imece.plan.memory import frameworks
from imece.plan.memory.activations import whole_layer, working_bytes
from imece.plan.memory.frameworks import (
    IMECE,
    IMECE_CPU,
    LLM_FOUNDRY,
    MEGATRON,
    NANOTRON,
    TORCH_LOSS_BYTES,
    TORCHTITAN,
    Framework,
)
from imece.plan.memory.held import held, stage_layers
from imece.plan.memory.memory import Memory, memory, more_with_torchs_loss
from imece.plan.models.by_name import find_model
from imece.plan.models.from_code import of_module
from imece.plan.models.model import Model
from imece.plan.presets import find_cluster, find_gpu
from imece.plan.setup import Parallel, Precision, Recipe, Setup, Strategy
from imece.plan.speed.compute import head_time
from imece.plan.speed.manner import IMECE as IMECE_MANNER
from imece.plan.speed.step_time import step_time
from tests.ranks import run_ranks

MODEL = find_model("llama-8b")
N = MODEL.parameters
FRAMEWORKS = [each for each in vars(frameworks).values() if isinstance(each, Framework)]


def of(strategy: Strategy = "replicate", shard: int = 1, **recipe: object) -> Memory:
    made = Recipe(seq=4096, **recipe)  # type: ignore[arg-type]
    return memory(Setup(MODEL, Parallel(strategy, shard, shard), made))


@pytest.mark.parametrize("shard", [8, 64])
def test_states_are_16_bytes_a_parameter_or_the_part_of_them_that_is_left(shard: int) -> None:
    for strategy, expected in (
        ("replicate", 16.0),
        ("zero1", 4 + 4 / shard + 12 / shard),  # gradients are stepped in the masters' dtype
        ("zero2", 2 + 4 / shard + 12 / shard),
        ("zero3", 4 / shard + 12 / shard),  # parameters are gathered from their masters
    ):
        found = of(strategy, shard)  # type: ignore[arg-type]
        states = found.parameters + found.gradients + found.optimizer + found.masters
        assert states / N == pytest.approx(expected, rel=1e-3), strategy


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_micro_batches_in_no_sync_have_sharded_gradients_whole_besides(strategy: Strategy) -> None:
    summed, whole = (of(strategy, 8, accumulation=2, accumulates_whole=each) for each in (False, True))
    more = 2 * N if STRATEGIES[strategy].gradients else 0
    assert whole.gradients == pytest.approx(summed.gradients + more, rel=1e-3)
    same = replace(whole, gradients=summed.gradients, late=summed.late, notes=summed.notes)
    assert same == summed
    assert of(strategy, 8, accumulates_whole=True) == of(strategy, 8), "one micro-batch is the last one"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_earlier_micro_batches_sums_lie_beside_those_of_the_next_one(strategy: Strategy) -> None:
    """In the host's memory; a device lets go of them bucket by bucket."""
    more = 4 * N / 8 if STRATEGIES[strategy].gradients else 0

    def added(name: str, framework: Framework = IMECE, **changes: Any) -> int:
        """What a second micro-batch adds to a category."""
        of_one, of_two = (
            memory(
                Setup(MODEL, Parallel(strategy, 8, 8), Recipe(4096, accumulation=times, **changes)),
                framework=framework,
            )
            for times in (1, 2)
        )
        return int(getattr(of_two, name) - getattr(of_one, name))

    assert added("host", offload="optimizer") == pytest.approx(more, rel=1e-3)
    assert added("gradients", IMECE_CPU, precision=IMECE_CPU.precision) == 0
    assert added("gradients") == added("host") == added("gradients", offload="optimizer") == 0
    whole = {"precision": IMECE_CPU.precision, "accumulates_whole": True}
    assert added("gradients", IMECE_CPU, **whole) == pytest.approx(8 * more, rel=1e-3)


def test_the_formulae_of_deepspeed_and_megatron() -> None:
    n, d = 1e9, 16
    # runtime/zero/stage_1_and_2.py and stage3.py of microsoft/DeepSpeed: 2N + 18N/n and 18N/n.
    deepspeed = Framework("deepspeed", Precision(2, 2, 4, 4, 4, 2), sums_as_masters=False)
    zero2 = Setup(MODEL, Parallel("zero2", d, d), Recipe(4096, precision=deepspeed.precision))
    zero3 = replace(zero2, parallel=replace(zero2.parallel, strategy="zero3"))
    for setup, expected in ((zero2, 2 + 18 / d), (zero3, 20 / d)):  # stage 3 keeps a bf16 part beside its 18
        found = memory(setup, framework=deepspeed)
        states = found.parameters + found.gradients + found.optimizer + found.masters
        assert states / N == pytest.approx(expected, rel=1e-3)
    megatron = Setup(MODEL, Parallel("zero1", d, d), Recipe(4096, precision=MEGATRON.precision))
    found = memory(megatron, framework=MEGATRON)
    states = found.parameters + found.gradients + found.optimizer + found.masters
    assert states / N == pytest.approx(6 + 12 / d, rel=1e-3)
    plain = footprint(
        Sizes(n, n / d), STRATEGIES["zero3"], parameter_bytes=2, reduce_bytes=2, master_bytes=4,
        state_bytes=8 * n / d, sum_bytes=2,
    )  # fmt: skip
    assert plain.total == 16 * n / d


@pytest.mark.parametrize("shape", [REFERENCE, LARGE], ids=["10.9M", "97M"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", ["replicate", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("gathers", [False, True])
def test_of_our_engine_it_is_what_the_engine_lays(
    shape: Shape, ranks: int, strategy: Strategy, gathers: bool
) -> None:
    """Within 2 %: the engine's own items, in the arguments of data_parallel/sharding/trained.py."""
    with torch.device("meta"):
        module = Decoder(shape)
    units = {f"blocks.{at}.": at + 1 for at in range(shape.layers)}
    divides, by_unit = STRATEGIES[strategy], gathers and strategy == "zero3"
    items = [
        Item(name, tuple(each.shape), "float32", 4,
             group=next((at for key, at in units.items() if name.startswith(key)), 0) if by_unit else 0)
        for name, each in module.named_parameters()
    ]  # fmt: skip
    laid = build(
        items, cap_bytes=2**62 if by_unit else 5 * 2**20, shards=ranks if divides.optimizer else 1,
        align_bytes=128, modules_whole=True,
    )  # fmt: skip
    root = [bucket.index for bucket in laid.buckets if bucket.group == 0]
    others = [bucket.index for bucket in laid.buckets if bucket.group]
    largest = [max(laid.buckets, key=lambda bucket: bucket.numel).index] if not by_unit else root + others[:1]
    laid_out = LaidOut(
        laid, divides, dict.fromkeys(range(len(laid.buckets)), 8), parameter_bytes=4, reduce_bytes=4,
        filling=largest if divides.gradients else [],
        gathered=sum(laid.buckets[at].nbytes for at in root + others[:2]) if by_unit else 0,
    )  # fmt: skip
    expected = laid_out.footprint(0)
    model = of_module(module, "reference")
    recipe = Recipe(256, precision=IMECE_CPU.precision, bucket_bytes=5 * 2**20)
    shard = ranks if divides.optimizer else 1
    framework = replace(IMECE_CPU, name=f"cpu-{gathers}", gathers=gathers)
    found = memory(Setup(model, Parallel(strategy, ranks, shard), recipe), framework=framework)
    assert found.parameters == pytest.approx(expected.parameters, rel=0.001)
    assert found.gradients == pytest.approx(expected.gradients, rel=0.001)
    assert found.optimizer + found.masters == pytest.approx(expected.optimizer, rel=0.001)
    assert found.gathered + found.communication == pytest.approx(
        expected.communication, abs=0.02 * expected.total
    )


@given(
    st.sampled_from(["zero1", "zero2", "zero3"]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]),
    st.integers(1, 8), st.sampled_from(["none", "selective", "full"]), st.sampled_from(FRAMEWORKS),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_memory_falls_as_shards_grow_and_grows_with_the_micro_batch(
    strategy: Strategy, tensor: int, pipeline: int, micro: int, recompute: str, framework: Framework
) -> None:
    recipe = Recipe(2048, micro, 8, recompute=recompute, precision=framework.precision)  # type: ignore[arg-type]

    def total(shard: int, **changes: object) -> int:
        parallel = Parallel(strategy, shard, shard, tensor, pipeline=pipeline)
        return memory(Setup(MODEL, parallel, replace(recipe, **changes)), framework=framework).total  # type: ignore[arg-type]

    totals = [total(shard) for shard in (1, 2, 8, 64)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[-1]
    assert total(8, micro_batch=micro + 1) > totals[2]
    if recompute != "none":
        assert total(8, recompute="none") > totals[2]
    assert total(8, seq=4096) > totals[2]


def test_the_total_is_the_sum_of_its_categories() -> None:
    found = of("zero3", 8, recompute="full")
    assert found.total == sum(found.by_category().values())
    others = {"notes", "host", "received", "late"}
    assert list(found.by_category()) == [each.name for each in fields(Memory) if each.name not in others]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_summed_gradients_come_as_activations_go(strategy: Strategy) -> None:
    """Only the larger of both counts, unless a micro-batch adds to sums that are there."""
    sums = 4 * N / 8 if STRATEGIES[strategy].optimizer else 0.0
    few, many = of(strategy, 2, recompute="full"), of(strategy, 8)
    kept = few.activations + few.logits
    assert kept < 4 * N / 2 and many.activations + many.logits > 4 * N / 8
    assert many.late == pytest.approx(sums, rel=1e-3)
    assert few.late == (kept if sums else 0)
    assert many.by_category()["gradients"] == many.gradients - many.late
    added = of(strategy, 8, accumulation=2)
    assert added.late == (0 if STRATEGIES[strategy].gradients else many.late)
    assert of(strategy, 8, accumulation=2, accumulates_whole=True).late == many.late
    kept_whole = of(strategy, 2, recompute="full", accumulation=2, accumulates_whole=True)
    goes = 2 * N if STRATEGIES[strategy].gradients else 0  # whole gradients, as their sums come
    assert kept_whole.late == pytest.approx(min(sums * 4, kept + goes), rel=1e-3)
    assert any("of summed gradients come" in note for note in many.notes) == bool(sums)
    assert of(strategy, 8, offload="optimizer").late == 0
    setup = Setup(MODEL, Parallel(strategy, 8, 8), Recipe(seq=4096))
    hosts = memory(setup, framework=framework_on(find_cluster("CPU", 4, 2), setup.parallel))
    assert hosts.late == memory(setup, framework=IMECE_CPU).late == 0, "there memory is kept"
    assert hosts.parameters == pytest.approx(2 * N / (8 if STRATEGIES[strategy].parameters else 1), rel=1e-3)


def test_what_eight_bits_adapters_and_the_host_save() -> None:
    whole, less = of(), of(optimizer="adamw-8bit")
    assert whole.optimizer == 8 * N
    assert less.optimizer == pytest.approx(2 * N * (1 + 4 / 256), rel=1e-6)
    off = of(offload="optimizer")
    assert (off.optimizer, off.masters) == (0, 0)
    assert off.total == whole.total - whole.optimizer - whole.masters
    assert off.host == 16 * N  # masters, two moments, and the gradients as they are stepped
    lora, qlora = of(adapters="lora"), of(adapters="qlora")
    assert 2 * N < lora.parameters < 2.02 * N  # frozen in bf16; nothing else of them is kept
    assert lora.gradients + lora.optimizer + lora.masters < 0.1 * N
    matrices = 32 * held(Setup(MODEL, Parallel(), Recipe(4096)), 0, NANOTRON.stages).products
    assert qlora.parameters == pytest.approx(lora.parameters - matrices * (2 - 0.5159), rel=1e-3)
    assert qlora.gathered > 0  # a matrix is unpacked to be multiplied with
    divided, scales = of("zero3", 8, adapters="qlora"), matrices * 0.0159
    trained = of("zero3", 8, adapters="lora").parameters - (2 * N) / 8
    assert divided.parameters - trained == pytest.approx(scales + (2 * N - 1.5 * matrices) / 8, rel=1e-3)
    assert of("zero3", 8, adapters="qlora", offload="parameters").parameters == pytest.approx(
        scales, rel=0.05
    )
    assert lora.notes and not whole.notes
    assert of(optimizer="sgd").optimizer == 4 * N


@pytest.mark.parametrize(("activations", "each"), [(2, 4), (4, 8)])
def test_logits_and_their_gradient_are_in_the_dtype_of_activations(activations: int, each: int) -> None:
    found = of(precision=Precision(4, 4, 0, 4, 4, activations))
    assert found.logits == each * 4096 * MODEL.vocab_size + 2**28  # of them a piece in fp32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_loss_takes_what_is_counted_of_logits(dtype: torch.dtype) -> None:
    """imece's and torch's, at their peak; 2 % are targets and sums of rows."""
    rows, words = 512, 4096
    activations = dtype.itemsize
    model = replace(MODEL, vocab_size=words, width=8)
    setup = Setup(model, Parallel(), Recipe(rows, precision=Precision(activations=activations)))
    targets = torch.randint(words, (rows,))

    def peak(loss: Callable[[torch.Tensor], torch.Tensor]) -> int:
        hidden, head = (torch.randn(size, 8, dtype=dtype, requires_grad=True) for size in (rows, words))
        with (live := Live()):
            loss(hidden @ head.T).backward()
        return live.most

    ours = memory(setup, framework=IMECE_CPU).logits
    found = peak(lambda logits: imece.cross_entropy(logits, targets))
    assert found == pytest.approx(ours, rel=0.02)
    theirs = ours + more_with_torchs_loss(setup, IMECE_CPU)
    found = peak(lambda logits: functional.cross_entropy(logits.float(), targets))
    assert found == pytest.approx(theirs, rel=0.02)


def _bytes_of_a_part() -> float:
    """For each logit of this rank's part of a vocabulary, at the peak of torch's loss."""
    rows, words = 512, 2048
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    targets = torch.randint(words, (rows,))
    hidden, head = (torch.randn(size, 8, requires_grad=True) for size in (rows, words))
    with (live := Live()), loss_parallel():
        whole = DTensor.from_local((hidden @ head.T).float(), mesh, [Shard(1)])
        loss = functional.cross_entropy(whole, targets, reduction="sum")
        del whole
        loss.backward()
    return live.most / (rows * words)


def test_torchs_loss_of_parts_takes_what_is_counted_of_torchtitan() -> None:
    counted = TORCHTITAN.of_logits(1, Precision(), parts=2)
    assert run_ranks(_bytes_of_a_part, 2, backend="gloo") == pytest.approx([counted] * 2, rel=0.02)
    assert TORCHTITAN.of_logits(1, Precision()) == TORCH_LOSS_BYTES < counted


class Live(TorchDispatchMode):
    """Bytes of tensors made under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most: int = 0
        self._now: int = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in self._seen:
                storage = each.untyped_storage()
                self._seen.add(storage._cdata)
                self._now += storage.nbytes()
                self.most = max(self.most, self._now)
                weakref.finalize(storage, self._let_go, storage._cdata, storage.nbytes())
        return made

    def _let_go(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self._now -= nbytes


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "hybrid", "hybrid_zero2"])
def test_what_is_offloaded_is_in_one_memory_or_the_other(strategy: Strategy) -> None:
    """On the device are whole parameters and gradients alone; all else only moves, but for a second sum."""
    whole, off = of(strategy, 8), of(strategy, 8, offload="optimizer")
    kept = (whole.gathered, whole.communication, whole.activations, whole.logits)
    assert (off.gathered, off.communication, off.activations, off.logits) == kept
    dealt = 2 * N / 8 if STRATEGIES[strategy].parameters else 0  # else each gather casts masters
    assert off.parameters == pytest.approx(whole.parameters + dealt, rel=1e-3) and (
        off.optimizer,
        off.masters,
    ) == (0, 0)
    assert off.host == pytest.approx(16 * N / 8, rel=1e-3)
    if strategy == "zero1":
        assert off.gradients == pytest.approx(2 * N, rel=1e-3)
    else:
        assert off.gradients == 0
        assert whole.states + dealt - off.states == pytest.approx(off.host, rel=1e-3)
    if STRATEGIES[strategy].parameters:
        more = of(strategy, 8, offload="parameters")
        assert more.parameters == 0 and more.host - off.host == pytest.approx(2 * N / 8, rel=1e-3)
        assert more.total == off.total - off.parameters
        fp32 = of(strategy, 8, offload="parameters", precision=Precision(4, 4, 0, 0, 4, 4))
        assert fp32.host == pytest.approx(16 * N / 8, rel=1e-3)  # parts are their own masters


def test_fsdp_deals_masters_and_gathers_units_in_fewer_bits() -> None:
    d = 16
    for framework in (LLM_FOUNDRY, TORCHTITAN):
        setup = Setup(MODEL, Parallel("zero3", d, d), Recipe(4096, precision=framework.precision))
        found = memory(setup, framework=framework)
        assert found.parameters == 0  # of what is dealt, the masters are all there is
        states = found.gradients + found.optimizer + found.masters
        assert states / N == pytest.approx(16 / d, rel=1e-3)
        unit = held(setup, 0, framework.stages).layer
        assert found.gathered == pytest.approx(2 * (3 * unit + 2 * MODEL.table_parameters), rel=1e-3)
    pure = replace(setup, recipe=replace(setup.recipe, precision=Precision(2, 2, 0, 0, 2, 2)))
    assert memory(pure, framework=LLM_FOUNDRY).parameters == pytest.approx(2 * N / d, rel=1e-3)


def test_autocast_keeps_a_copy_of_every_matrix() -> None:
    plain = of(precision=Precision(4, 4, 0, 0, 4, 4))
    cast = of(precision=Precision(4, 4, 0, 0, 4, 2))
    matrices = N - MODEL.table_parameters - MODEL.width * (2 * MODEL.layers + 1)
    assert cast.parameters - plain.parameters == 2 * matrices
    assert 0.5 < cast.activations / plain.activations < 0.9  # the residual stays in fp32


def test_axes_divide_what_they_should() -> None:
    recipe = Recipe(8192, 1, 8)
    alone = memory(Setup(MODEL, Parallel(), recipe))
    context = memory(Setup(MODEL, Parallel(context=4), recipe))
    tensor = memory(Setup(MODEL, Parallel(tensor=4), recipe))
    assert context.parameters == alone.parameters
    assert context.logits - 2**28 == (alone.logits - 2**28) / 4  # beside a piece in fp32
    assert context.activations == pytest.approx(alone.activations / 4)
    assert context.communication > alone.communication  # keys and values of a neighbour
    assert tensor.parameters == pytest.approx(alone.parameters / 4, rel=1e-3)
    assert tensor.logits - 2**28 == (alone.logits - 2**28) / 4
    odd = replace(MODEL, vocab_size=MODEL.vocab_size + 1)  # which cannot be divided
    assert memory(Setup(odd, Parallel(tensor=4), recipe)).logits > alone.logits
    plain, casts = (replace(recipe, precision=Precision(4, 4, 0, 0, 4, size)) for size in (4, 2))

    def copied(model: Model) -> int:
        """By autocast, which copies the head."""
        of = [memory(Setup(model, Parallel(tensor=4), each)).parameters for each in (casts, plain)]
        return of[0] - of[1]

    assert copied(odd) - copied(MODEL) == pytest.approx(2 * 3 / 4 * MODEL.table_parameters, rel=1e-3)
    times = [head_time(find_gpu("a100"), each, IMECE_MANNER, recipe, 8192, 4) for each in (MODEL, odd)]
    assert times[1].forward > 3 * times[0].forward
    dividing = replace(IMECE, name="dividing", gathered_inputs=False)
    divided = memory(Setup(MODEL, Parallel(tensor=4), recipe), framework=dividing)
    assert divided.activations == pytest.approx(alone.activations / 4)
    read = 2 * MODEL.layers * 8192 * MODEL.width * 2  # bytes: by attention's products and by the MLP's
    assert tensor.activations - divided.activations == pytest.approx(read * 3 / 4)
    whole = memory(Setup(MODEL, Parallel(tensor=4, sequence=False), recipe))
    assert whole.activations > tensor.activations


def test_a_pipeline_keeps_the_micro_batches_of_its_schedule() -> None:
    recipe = Recipe(4096, 1, 16)

    def kept(**changes: object) -> float:
        """By the first stage, without gradients of the layer whose backward runs."""
        parallel = Parallel(pipeline=4, **changes)  # type: ignore[arg-type]
        found = memory(Setup(MODEL, parallel, recipe), 0)
        layer = whole_layer(MODEL, parallel, recipe, IMECE).total
        return found.activations - working_bytes(MODEL, parallel, recipe, IMECE) + layer

    first = kept()
    assert first == pytest.approx(MODEL.layers * whole_layer(MODEL, Parallel(), recipe, IMECE).total)
    assert kept(interleave=2) == pytest.approx(first * (1 + 3 / 8))  # Korthikanti et al., section 4.2.3
    assert kept(schedule="gpipe") == pytest.approx(4 * first)
    last = memory(Setup(MODEL, Parallel(pipeline=4), recipe), 3)
    assert last.logits and last.activations < first
    both = memory(Setup(MODEL, Parallel(pipeline=4), recipe))
    assert both.total == max(last.total, memory(Setup(MODEL, Parallel(pipeline=4), recipe), 0).total)


def test_stages_by_cost_have_all_layers_and_count_the_head() -> None:
    for model in (MODEL, find_model("1.3b")):
        for pipeline in (2, 3, 4, 8, 16):
            counts = stage_layers(Setup(model, Parallel(pipeline=pipeline), Recipe(2048)), NANOTRON.stages)
            assert len(counts) == pipeline and sum(counts) == model.layers
            assert counts[0] >= counts[-1]
    cut = Setup(MODEL, Parallel(pipeline=4), Recipe(2048))
    parts = [held(cut, stage, NANOTRON.stages) for stage in range(4)]
    assert sum(part.total for part in parts) == MODEL.parameters  # no table twice
    large = Setup(find_model("llama-405b"), Parallel(pipeline=16), Recipe(2048))
    assert stage_layers(large, MEGATRON.stages)[0] == 8


def test_experts_are_dealt_and_only_the_chosen_ones_work() -> None:
    mixture = Model(
        "moe", 32, 4096, 32, 8, 128, 14336, True, 32000, tied_head=False, experts=8, active_experts=2
    )
    recipe = Recipe(4096, 1, 4)
    alone = memory(Setup(mixture, Parallel("zero1", 8, 8), recipe))
    dealt = memory(Setup(mixture, Parallel("zero1", 8, 8, expert=8), recipe))
    assert alone.parameters == pytest.approx(2 * mixture.parameters, rel=1e-6)
    experts = 32 * 8 * 3 * 4096 * 14336
    assert dealt.parameters == pytest.approx(2 * (mixture.parameters - experts * 7 / 8), rel=1e-6)
    assert dealt.optimizer == pytest.approx(alone.optimizer, rel=1e-3)  # a part of the ranks has each expert
    dense = memory(Setup(replace(mixture, experts=0, active_experts=0), Parallel("zero1", 8, 8), recipe))
    assert dense.activations < alone.activations < 2 * dense.activations


def test_gradients_of_experts_grow_too() -> None:
    """Two layers of them at a time under ZeRO-3; under ZeRO-2 two buckets, whatever is in them."""
    mixture = Model("moe", 4, 4096, 32, 8, 128, 14336, True, 32000, False, experts=8, active_experts=2)
    experts = 8 * 3 * 4096 * 14336
    sharded, plain = (
        memory(Setup(model, Parallel("zero3", 8, 8), Recipe(4096)))
        for model in (mixture, replace(mixture, experts=0, active_experts=0))
    )
    grown = sharded.communication - plain.communication
    assert grown == pytest.approx(2 * 2 * (experts - 3 * 4096 * 14336 + 8 * 4096), rel=1e-6)
    two = memory(Setup(mixture, Parallel("zero2", 8, 8), Recipe(4096)))
    assert two.communication == 2 * 2 * 32000 * 4096  # the table is the largest tensor


def test_a_bucket_is_no_smaller_than_the_largest_tensor() -> None:
    """With tensor parallelism as without, where buckets are laid."""
    laid, summed = (
        memory(Setup(find_model("70B"), Parallel("zero2", 16, 16, tensor), Recipe(4096))) for tensor in (1, 2)
    )
    table = 128256 * 8192
    assert laid.communication == pytest.approx(2 * 2 * table, rel=1e-3)
    received = 2 * 4096 * 8192 * 2
    assert summed.communication == pytest.approx(2 * 2 * table / 2 + received, rel=1e-3)
    inner = memory(Setup(find_model("70B"), Parallel("zero2", 16, 16, pipeline=4), Recipe(4096)), 1)
    # of the only micro-batch an output, and a gradient of it
    assert inner.communication == pytest.approx(2 * 2 * 8192 * 28672 + received, rel=1e-3)


def test_ranks_beyond_the_heads_of_keys_and_values_have_copies_of_them() -> None:
    """2 heads among 8 ranks that divide matrices: each has one, so 8 in all."""
    few, many = (replace(MODEL, kv_heads=heads) for heads in (2, 8))
    setups = [Setup(each, Parallel("replicate", tensor=8), Recipe(seq=4096)) for each in (few, many)]
    assert memory(setups[0]) == memory(setups[1])
    times = [step_time(each, find_cluster("A100-80", 8, 1)) for each in setups]
    assert times[0].total == times[1].total and times[0].mfu < times[1].mfu, "copies are no useful work"


def test_qlora_unpacks_fused_matrices_as_one() -> None:
    """Of Phi-3 gate and up together; Megatron-like ranks have a part of it."""
    model = replace(MODEL, fused_queries=True, fused_gate=True)
    recipe = Recipe(4096, adapters="qlora")
    for tensor in (1, 2):
        plain, fused = (memory(Setup(each, Parallel(tensor=tensor), recipe)) for each in (MODEL, model))
        assert fused.gathered - plain.gathered == 2 * MODEL.width * MODEL.mlp_width // tensor
    wide = replace(MODEL, kv_heads=MODEL.heads, mlp_width=2 * MODEL.width, fused_queries=True)
    assert wide.largest_matrix == 3 * MODEL.width * MODEL.q_width
