"""What the search tries uses all GPUs and the whole batch; mistakes name numbers that would work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from imece.errors import UserError
from imece.plan.answer.space import Question, arrangements, check, recipes, setups
from imece.plan.models.model import Model
from imece.plan.presets import find_cluster

ALONE = {"tensor": 1, "pipeline": 1, "context": 1}  # each GPU has sequences of its own
SMALL = Model("small", 12, 768, 12, 4, 64, 2048, True, 32000)


def question(gpus: int = 8, hosts: int = 1, batch: int = 64, **changes: Any) -> Question:
    base = Question(SMALL, find_cluster("A100-40", gpus, hosts), batch, 2048)
    return replace(base, **changes)


@pytest.mark.parametrize("hosts", [1, 3, 16])
def test_every_way_uses_all_gpus_and_the_whole_batch(hosts: int) -> None:
    asked = question(8, hosts, 48 * hosts)
    found = [setup for line in setups(asked) for setup in line]
    assert len({(each.parallel, each.recipe) for each in found}) == len(found) > 100
    for each in found:
        assert each.parallel.ranks == asked.cluster.gpus
        assert each.global_batch == asked.global_batch
        assert each.parallel.pipeline * each.parallel.interleave <= SMALL.layers
        assert SMALL.heads % each.parallel.tensor == 0 and each.parallel.tensor <= 8


def test_shards_are_over_all_ranks_or_those_of_a_host() -> None:
    wide = replace(SMALL, heads=16, kv_heads=8)  # whose layers a whole host can share
    found = list(arrangements(question(8, 4, 64, model=wide)))
    assert {each.tensor for each in found} == {1, 2, 4, 8}
    for each in found:
        ranks = each.data * each.context
        shard = {"replicate": 1, "hybrid": 8 // each.tensor, "hybrid_zero2": 8 // each.tensor}.get(
            each.strategy, ranks
        )
        assert each.shard == shard, each
        assert not each.strategy.startswith("hybrid") or 1 < each.shard < ranks
    assert {each.strategy for each in found} == {
        "replicate", "zero1", "zero2", "zero3", "hybrid", "hybrid_zero2",
    }  # fmt: skip
    assert not any(each.strategy.startswith("hybrid") for each in arrangements(question(8, 1, 64)))


@pytest.mark.parametrize(
    ("gpus", "hosts", "found"), [(1, 4, {1, 2, 4}), (1, 6, {1, 2}), (1, 1, {1}), (2, 4, {1, 2})]
)
def test_hosts_of_one_gpu_divide_matrices_with_each_other(gpus: int, hosts: int, found: set[int]) -> None:
    assert {each.tensor for each in arrangements(question(gpus, hosts, 24))} == found


def test_a_strategy_that_is_asked_for_has_ranks_to_share_with_if_any_way_has() -> None:
    asked = question(8, strategy="zero3")
    assert {each.data for each in arrangements(asked)} == {2, 4, 8}
    assert 1 in {each.data for each in arrangements(replace(asked, strategy=None))}
    assert [each.data for each in arrangements(replace(asked, tensor=4, pipeline=2, interleave=1))] == [1]
    alone = question(8, batch=2, strategy="zero3", interleave=2)  # with two groups too few to go round
    assert {line[0].parallel.data for line in setups(alone)} == {1}


def test_micro_batches_grow_in_each_line() -> None:
    asked = question()
    parallel = next(each for each in arrangements(asked) if each.data == 8)
    lines = list(recipes(asked, parallel))
    assert [line[0].recompute for line in lines] == ["none", "full"]
    for line in lines:
        assert [each.micro_batch for each in line] == [1, 2, 4, 8]
    plain = list(recipes(replace(asked, attention="plain"), parallel))
    assert [line[0].recompute for line in plain] == ["none", "selective", "full"]


@pytest.mark.parametrize(("seq", "most"), [(64, 4096), (128, 2048), (4096, 64), (131072, 64)])
def test_of_short_sequences_more_are_computed_at_once(seq: int, most: int) -> None:
    asked = question(1, 1, 2**14, seq=seq)
    sizes = [each.recipe.micro_batch for each in next(setups(asked))]
    assert sizes == [2**n for n in range(most.bit_length())]


def test_an_interleaved_pipeline_has_whole_rounds_of_micro_batches() -> None:
    found = [s for line in setups(question(8, 1, 96)) for s in line if s.parallel.interleave > 1]
    assert found
    assert all(each.recipe.accumulation % each.parallel.pipeline == 0 for each in found)


@pytest.mark.parametrize(
    ("layers", "pipeline", "expected"),
    [(32, 4, {1, 2, 4, 8}), (126, 16, {1, 2, 4}), (126, 32, {1, 2}), (30, 8, {1, 2}), (31, 2, {1, 2, 4, 8})],
)
def test_layers_that_stages_cannot_share_evenly_are_interleaved_too(
    layers: int, pipeline: int, expected: set[int]
) -> None:
    asked = question(8, 8, 1024, model=replace(SMALL, layers=layers), pipeline=pipeline)
    assert {each.interleave for each in arrangements(asked)} == expected


def test_long_sequences_are_shared() -> None:
    contexts = {each.context for each in arrangements(question(seq=32768))}
    assert contexts == {1, 2, 4, 8}
    assert {each.context for each in arrangements(question())} == {1}
    assert {each.context for each in arrangements(question(context=4))} == {4}


def test_short_sequences_are_shared_where_there_are_fewer_than_gpus() -> None:
    for batch, found in ((7, {1, 2, 4}), (8, {1})):
        assert {each.context for each in arrangements(question(8, 1, batch, seq=4096))} == found


def test_positions_are_divided_where_they_can_be() -> None:
    for seq, divided in ((2048, {2, 4}), (2046, {2}), (2047, set())):
        tensors = [each for each in arrangements(question(seq=seq)) if each.tensor > 1]
        assert {each.tensor for each in tensors} == {2, 4}
        assert {each.tensor for each in tensors if each.sequence} == divided
    shared = [each for each in arrangements(question(seq=8200)) if each.context * each.tensor > 1]
    assert {(each.context, each.tensor): each.sequence for each in shared if each.context == 4} == {
        (4, 1): True, (4, 2): True,
    }  # fmt: skip


def test_what_can_be_offloaded() -> None:
    """As the engine has it; on one GPU nothing has to be sharded for it."""
    one, eight = question(1, 1, 64), question(8, 1, 64, tensor=1, pipeline=1)

    def strategies(asked: Question) -> set[str]:
        return {each.strategy for each in arrangements(asked)}

    assert strategies(replace(eight, offload="optimizer")) == {"zero1", "zero2", "zero3"}
    assert strategies(replace(eight, offload="parameters")) == {"zero3"}
    assert strategies(replace(one, offload="optimizer")) == strategies(one) == {"replicate"}
    assert strategies(replace(one, offload="parameters")) == {"zero3"}
    for strategy, offload, message in (
        ("replicate", "optimizer", "is for a sharded strategy, such as zero1, not for --strategy replicate"),
        ("zero2", "parameters", "is for zero3 or hybrid, not for --strategy zero2"),
    ):
        with pytest.raises(UserError, match=f"--offload {offload} {message}"):
            check(question(8, 1, 64, tensor=1, pipeline=1, strategy=strategy, offload=offload))


@pytest.mark.parametrize("name", ["tensor", "pipeline", "context", "micro_batch", "strategy", "recompute"])
def test_what_is_asked_for_is_kept(name: str) -> None:
    value: Any = {"strategy": "zero2", "recompute": "full"}.get(name, 2)
    found = [s for line in setups(question(**{name: value})) for s in line]
    assert found
    for each in found:
        assert (
            getattr(each.parallel, name) if hasattr(each.parallel, name) else getattr(each.recipe, name)
        ) == value


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"batch": 30, "gpus": 4, "micro_batch": 4},
            "30 cannot be divided by any arrangement of 4 GPUs x micro-batch 4; the nearest are 16 and 32",
        ),
        ({"batch": 30, **ALONE}, "30 cannot be divided by 8 ranks; the nearest are 24 and 32"),
        (
            {"batch": 30, "micro_batch": 4, **ALONE},
            "30 cannot be divided by 8 ranks x micro-batch 4; the nearest are 32 and 64",
        ),
        (
            {"batch": 31, "tensor": 2, "pipeline": 1},
            "31 cannot be divided by 4 ranks; the nearest are 28 and 32",
        ),
        (
            {"gpus": 1, "hosts": 4, "strategy": "hybrid_zero2"},
            "here no host has several GPUs with a part of the model that other hosts have too: use zero2",
        ),
        (
            {"batch": 2, "pipeline": 4, "interleave": 2},
            "--global-batch 2 gives none: say a multiple of 8, or leave it out",
        ),
        ({"tensor": 3}, "--tensor 3 cannot divide 12 heads, 4 heads of keys and values"),
        ({"pipeline": 16}, "--pipeline 16 x --interleave 1 are more parts than small has layers (12)"),
        ({"pipeline": 6}, "context 1 = 6 does not divide 8 GPUs; the nearest numbers of GPUs are 6 and 12"),
        ({"pipeline": 1, "interleave": 2}, "--interleave 2 is for a pipeline"),
        ({"context": 4, "seq": 2050}, "--seq 2050 cannot be divided by 2 x --context 4"),
        ({"gpus": 1, "wire": "int8"}, "--wire int8 is for gradients between GPUs equally far from each"),
        ({"hosts": 2, "wire": "bf16", "strategy": "zero1", **ALONE}, "between hosts, and here are none"),
        ({"batch": 0}, "--global-batch is 0: at least 1"),
        ({"seq": -1}, "--seq is -1: at least 1"),
        ({"reserve": 1.0}, "--reserve is 1.0"),
        (
            {"model": replace(SMALL, learned_positions=2047)},
            "--seq 2048: small has learned positions for 2,047 tokens, no more",
        ),
        (
            {"model": replace(SMALL, max_seq=2047)},
            "--seq 2048: small has positions for 2,047 tokens, no more",
        ),
    ],
)  # fmt: skip
def test_mistakes_name_what_would_do(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        check(question(**changes))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_batch_is_a_mistake_only_where_no_arrangement_divides_it() -> None:
    for batch, groups in ((2, {1, 2}), (30, {1, 2}), (31, {1}), (36, {1, 2, 4})):
        asked = question(batch=batch)
        check(asked)
        assert {each.data for each in arrangements(asked)} == groups
        with pytest.raises(UserError, match=f"--global-batch {batch} cannot be divided by 8 ranks"):
            check(question(batch=batch, **ALONE))
    check(question(8, 3, 64))  # three stages


def test_what_is_frozen_is_shared_out() -> None:
    for adapters in ("lora", "qlora"):
        found = {setup.parallel.strategy for line in setups(question(8, adapters=adapters)) for setup in line}
        assert found == {"replicate", "zero1", "zero2", "zero3"}
        check(question(8, adapters=adapters, strategy="zero3"))
        check(question(8, adapters=adapters, offload="parameters"))
