"""Products in FP8: their time beside bf16, hardware without them, and what is said about them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from imece.cli.main import main
from imece.errors import UserError
from imece.plan.accuracy import memory as accuracy_memory
from imece.plan.accuracy import steps as accuracy_time
from imece.plan.answer.call import next_of
from imece.plan.answer.explain import _fp8
from imece.plan.answer.search import search, settled
from imece.plan.answer.shortfall import ways
from imece.plan.answer.space import Question, why_no_fp8
from imece.plan.memory.memory import memory
from imece.plan.models.model import Model
from imece.plan.presets import find_cluster, find_gpu, gpu_names, gpus_with_fp8
from imece.plan.setup import Parallel, Precision, Recipe, Setup
from imece.plan.speed.communication import along, collective_s
from imece.plan.speed.compute import flops_a_token, layer_time, product_s
from imece.plan.speed.manner import IMECE, TORCHTITAN, Manner
from imece.plan.speed.stage import stage_time
from imece.plan.speed.step_time import step_time
from tests.plan.asked import LLAMA_70B, ask
from tests.plan.test_step_time import CLUSTER, MODEL, few, manners, setups

FP8 = Precision(fp8=True)
H100 = find_gpu("H100")
FEW: dict[str, Any] = {"tensor": 1, "pipeline": 1, "batch": 128}  # ways, for they are all tried


def said_of(question: Question) -> list[str]:
    """What would be gained with FP8, or without."""
    return list(_fp8(settled(search(question))))


def in_fp8(setup: Setup) -> Setup:
    return replace(setup, recipe=replace(setup.recipe, precision=FP8))


@few
@given(setups(), manners)
def test_no_step_in_fp8_beats_the_roofline(setup: Setup, manner: Manner) -> None:
    found = step_time(in_fp8(setup), CLUSTER, manner)
    seq, layers = setup.recipe.seq, MODEL.layers * MODEL.layer_parameters
    in_layers = flops_a_token(MODEL, seq) - 6 * (MODEL.parameters - layers)
    in_layers -= 12 * MODEL.layers * MODEL.heads * MODEL.head_width * seq  # of attention, which is in bf16
    rest = 6 * MODEL.table_parameters + 6 * MODEL.layers * MODEL.heads * MODEL.head_width * seq  # causal
    tokens = setup.tokens_a_step / (H100.reachable * setup.parallel.ranks)
    least = tokens * (
        0.99 * in_layers / (H100.fp8 * H100.peak) + rest / H100.peak
    )  # norms are under 1 % of a layer
    assert found.total > least


@few
@given(setups(), manners)
def test_slower_hardware_is_not_faster_in_fp8(setup: Setup, manner: Manner) -> None:
    found = step_time(in_fp8(setup), CLUSTER, manner).total
    for name, peak, bandwidth in (("less FP8", 0.5, 1.0), ("less GB/s", 1.0, 0.5)):
        gpu = replace(
            H100, name=name, fp8=peak * H100.fp8, memory_bandwidth=bandwidth * H100.memory_bandwidth
        )
        assert step_time(in_fp8(setup), replace(CLUSTER, gpu=gpu), manner).total >= 0.96 * found


@few
@given(setups(), manners)
def test_bf16_takes_what_it_takes_without_fp8_units(setup: Setup, manner: Manner) -> None:
    without = replace(CLUSTER, gpu=replace(H100, name="H100 without FP8", fp8=0.0))
    assert step_time(setup, CLUSTER, manner) == step_time(setup, without, manner)


def test_the_wider_the_more_is_gained_and_narrow_layers_lose() -> None:
    gained = []
    for width in (128, 512, 1024, 2048, 4096, 8192):
        model = Model("a", 1, width, width // 64, width // 64, 64, 4 * width, True, 32000)
        bf16, fp8 = (
            layer_time(H100, model, IMECE, Recipe(4096, 4, compiled=True, precision=each), 1, 1, False)
            for each in (Precision(), FP8)
        )
        assert bf16.core == fp8.core and bf16.core_backward == fp8.core_backward
        gained.append(
            1 - sum((fp8.forward, fp8.inputs, fp8.weights)) / sum((bf16.forward, bf16.inputs, bf16.weights))
        )
    assert gained == sorted(gained) and gained[1] < 0 < gained[2] and 0.2 < gained[-1] < 0.5


def test_a_product_is_at_most_as_much_faster_as_the_units_are() -> None:
    at_most = H100.fp8
    for rows, columns, terms in ((64, 64, 64), (512, 4096, 512), (4096, 14336, 4096), (16384, 28672, 8192)):
        ratio = product_s(H100, rows, columns, terms) / product_s(H100, rows, columns, terms, 1)
        assert 1 <= ratio <= at_most
    assert ratio > 0.95 * at_most


def test_casts_that_are_not_compiled_cost_more_than_fp8_saves() -> None:
    """As torchao says of its own: without torch.compile there is nothing to gain."""
    parallel, recipe = Parallel("zero2", 8, 8), Recipe(4096, 2)
    cluster = find_cluster("H100", 8, 1)
    bf16, fp8 = (
        step_time(Setup(MODEL, parallel, replace(recipe, precision=each)), cluster).compute
        for each in (Precision(), FP8)
    )
    assert fp8 > 1.2 * bf16
    compiled = replace(recipe, compiled=True, precision=FP8)
    assert step_time(Setup(MODEL, parallel, compiled), cluster).compute < 0.6 * fp8


def test_what_is_kept_is_what_bf16_keeps() -> None:
    """torchao.float8 keeps what was read, in bf16, for backward."""
    setup = Setup(MODEL, Parallel("zero3", 8, 8), Recipe(4096, 2))
    assert memory(setup) == memory(in_fp8(setup))


def test_gpus_that_multiply_it() -> None:
    names = gpus_with_fp8()
    assert {"H100", "H200", "B200", "L40S", "RTX-4090", "RTX-5090"} <= set(names)
    for name in names:
        assert 1.7 < find_gpu(name).fp8 <= 2, name
    assert all(find_gpu(name).bf16 for name in names)
    for name in set(gpu_names()) - {*names}:  # of Ampere, and older
        assert re.match(r"(A|V|T|P)\d|RTX-3|CPU", name), name
    assert not [name for name in names if re.match(r"(A|V|T|P)\d|RTX-3|CPU", name)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("7B --gpus 8xA100-80", "A100-80 multiplies no FP8; H100, H200, "),
        ("7B --gpus 8xV100", "V100 multiplies no FP8; "),
        ("7B --gpus 2xRTX-3090", "RTX-3090 multiplies no FP8; "),
        ("tiny --gpus 2xCPU", "CPU multiplies no FP8; "),
        ("7B --gpus 8xH100 --adapters lora", "leave out --adapters lora"),
        ("7B --gpus 8xH100 --seq 1000", "multiples of 16, and here one is 1000"),
    ],
)
def test_refused_in_a_line(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words.split(), "--precision", "fp8"]) == 2
    shown = capsys.readouterr()
    assert not shown.out and shown.err.count("\n") == 1
    assert shown.err.startswith("imece: --precision fp8: ") and says in shown.err


def test_experts_are_not_multiplied_in_it() -> None:
    model = Model("moe", 32, 4096, 32, 8, 128, 14336, True, 32000, experts=8, active_experts=2)
    why = why_no_fp8(ask(model, "H100", precision=FP8))
    assert why is not None and "moe has 8 a layer" in why
    assert not said_of(ask(model, "H100", gpus=64, **FEW))


def test_a_file_says_whether_its_gpu_has_it(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    for line, ratio in (("", H100.fp8), ("fp8 = 0", 0), ("peak = 800e12", H100.fp8)):
        file.write_text(f'[gpu]\nlike = "H100"\n{line}\n')
        cluster = find_cluster("H100", 8, 1, hardware=file)
        assert cluster.gpu.fp8 == ratio
        why = why_no_fp8(replace(ask(precision=FP8), cluster=cluster))
        assert (why is None) == (ratio > 0)
    file.write_text('[gpu]\nlike = "H100"\nfp8 = 1979e12\n')
    with pytest.raises(
        UserError, match=r"fp8 is 1979.*how many times as fast as products in bf16, at most 4"
    ):
        find_cluster("H100", 8, 1, hardware=file)
    file.write_text('[gpu]\nlike = "H100"\nfp8 = true\n')
    with pytest.raises(UserError, match="fp8 is True; a number is needed"):
        find_cluster("H100", 8, 1, hardware=file)


def test_proposed_where_it_helps_and_taken_only_when_asked_for() -> None:
    question = ask(gpu="H100", **FEW)
    answer = settled(search(question))
    assert answer.winner is not None and not answer.winner.setup.recipe.precision.fp8
    (said,) = said_of(question)
    both, alone = (
        settled(search(replace(question, compiled=True, precision=each))).winner
        for each in (FP8, Precision())
    )
    assert both is not None and alone is not None
    by, compiled = (100 * (1 - each.seconds / answer.winner.seconds) for each in (both, alone))
    assert said == (
        f"--precision fp8 --compile: {by:.0f} % faster, the layers' products in FP8 (--compile alone: "
        f"{compiled:.0f} %)"
    )
    (said,) = said_of(replace(question, compiled=True))
    assert said.startswith("--precision fp8: ") and "alone" not in said


def test_not_proposed_where_it_does_not() -> None:
    narrow = Model("narrow", 12, 512, 8, 8, 64, 2048, True, 32000)
    for question in (
        ask(gpu="A100-80", **FEW), ask(narrow, "H100", **FEW), ask(gpu="H100", adapters="lora", **FEW),
        ask(gpu="H100", precision=Precision(4, 4, 0, 0, 4, 4), **FEW),
    ):  # fmt: skip
        assert not said_of(question)


def test_without_compile_it_is_said_what_that_costs() -> None:
    question = ask(gpu="H100", precision=FP8, **FEW)
    compiled, bf16 = said_of(question)
    assert compiled.startswith("--compile: ") and bf16.startswith("--precision bf16: ")
    assert not said_of(replace(question, compiled=True))


def test_next_says_how() -> None:
    answer = settled(search(ask(gpu="H100", precision=FP8, compiled=True, **FEW)))
    call = next_of(answer, "fp8").call
    assert call is not None and "param=torch.bfloat16" in call.text()
    left = dict(call.left())
    assert left["FP8"].startswith("torchao.float8.convert_to_float8_training(model, ")
    assert "head" in left["FP8"] and left["FP8"].endswith("before imece.parallelize")
    assert "makes them bf16" in left["model"] and "compile_blocks" in left["compile"]
    assert list(left).index("FP8") < list(left).index("compile")


def test_larger_gpus_multiply_it_too() -> None:
    def find(name: str, gpus: int, hosts: int):  # type: ignore[no-untyped-def]
        return find_cluster(name, gpus, hosts)

    question = ask(LLAMA_70B, "RTX-4090", gpus=8, batch=128, precision=FP8)
    for way in ways(question, gpu_names(), find):
        assert way.question.cluster.gpu.fp8, way.name


def test_torchtitan_gathers_in_it_what_it_multiplies_in_it() -> None:
    cluster, parallel = find_cluster("H100", 8, 4), Parallel("zero3", 4, 4, tensor=8)
    setup = Setup(MODEL, parallel, Recipe(4096, 2, compiled=True))
    size = 2.0 * 2 * 4096 * MODEL.width
    whole, half = (
        collective_s(cluster, "all_gather", part * size, along(cluster, 8, 1)) for part in (1, 0.5)
    )
    for manner, spared in ((TORCHTITAN, 4 * MODEL.layers * (whole - half)), (IMECE, 0.0)):
        bf16, fp8 = (stage_time(each, cluster, manner) for each in (setup, in_fp8(setup)))
        assert bf16.tensor - fp8.tensor == pytest.approx(spared)
    alone = Setup(LLAMA_70B, Parallel("zero3", 32, 32), Recipe(4096, compiled=True))
    slow = find_cluster("H100", 8, 4, "ethernet-10g")
    for manner, share in ((TORCHTITAN, 0.5), (IMECE, 1.0)):
        bf16_s, fp8_s = (
            step_time(each, slow, manner).exposed["parameters"] for each in (alone, in_fp8(alone))
        )
        assert fp8_s / bf16_s == pytest.approx(share, rel=0.1)


def test_published_steps_in_fp8() -> None:
    """Of the same model, sequences and GPUs, as in bf16; held out. The others: docs/planner-accuracy.md."""
    rows = [row for row in accuracy_time.rows("torchtitan_float8") if row.cell.endswith(" 8192")]
    beside = [row for row in rows if row.cell.startswith("8B")]
    assert len(beside) == 2 and len(rows) == 3 and all(row.held_out for row in rows)
    assert all(abs(row.error) < 0.05 for row in beside)
    in_bf16 = {row.cell: row for row in accuracy_time.rows("torchtitan") if "compiled" in row.name}
    for row in beside:
        faster = in_bf16[row.cell].predicted / row.predicted
        assert faster == pytest.approx(in_bf16[row.cell].measured / row.measured, abs=0.02)
    for row in accuracy_time.rows("torchtitan_h200"):
        assert row.held_out and abs(row.error) < 0.08


def test_published_memory_in_fp8() -> None:
    rows = accuracy_memory.rows("torchtitan_float8_memory")
    assert len(rows) == 7 and all(row.held_out for row in rows)
    assert all(abs(row.error) < 0.07 for row in rows)
    assert rows[0].predicted == accuracy_memory.rows("torchtitan_memory")[1].predicted
