"""Each loser has its figure, each gain is true when tried, and advice is given if nothing fits."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from imece.plan.answer.explain import _over, eight_bit, gains, others, parts, verdict, why_not
from imece.plan.answer.search import Answer, judge, search, settled, weigh
from imece.plan.answer.shortfall import least, state_arithmetic, ways
from imece.plan.answer.space import Question, setups
from imece.plan.answer.words import NAMES, compared, gb, meanings, seconds, share, strategy_name, title
from imece.plan.memory.memory import memory
from imece.plan.models.by_name import find_model
from imece.plan.presets import find_cluster, gpu_names
from imece.plan.setup import Adapters, Optimizer, Parallel, Recipe, Setup
from tests.plan.asked import LLAMA_70B, ask

STATE = ("parameters", "gradients", "optimizer", "masters")


@pytest.fixture(scope="module")
def answer() -> Answer:
    return search(ask(gpu="A100-40", batch=128, pipeline=1))


@pytest.fixture(scope="module")
def too_large() -> Question:
    return ask(LLAMA_70B, "H100", batch=128)


def test_each_strategy_has_a_line_with_its_figure(answer: Answer) -> None:
    assert answer.winner is not None
    found = others(answer)
    plain = [strategy_name(each.candidate.setup.parallel) for each in found]
    assert {"DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"} <= {*plain, strategy_name(answer.winner.setup.parallel)}
    assert len(set(plain)) == len(plain)
    for each in found:
        assert re.search(r"\d", each.sentence) and "\n" not in each.sentence
        assert gb(each.candidate.needed) in each.sentence
        if each.candidate.time is None:
            assert each.sentence.startswith("does not fit: needs ")
        elif each.candidate.seconds > 1.02 * answer.winner.seconds:
            slower = re.search(r"(\d+) % slower: ", each.sentence)
            assert slower, each.sentence
            assert int(slower[1]) == round(100 * (each.candidate.seconds / answer.winner.seconds - 1))


def test_none_that_lost_is_faster_but_what_is_less_simple() -> None:
    for gpus, hosts in (("H100", 4), ("H200", 8)):
        found = settled(search(ask(gpu=gpus, hosts=hosts)))
        winner = found.winner
        assert winner is not None
        timed = [each for each in others(found) if each.candidate.time is not None]
        assert len(timed) > 4
        for each in timed:
            assert "under 1 %" not in each.sentence
            if each.candidate.seconds < winner.seconds:
                assert each.sentence.endswith("as fast within 1 %, but less simple")


def test_ddp_does_not_fit_because_of_its_state(answer: Answer) -> None:
    ddp = next(each for each in others(answer) if each.name == "DDP")
    named = (4 + 4 + 4) * answer.question.model.parameters
    assert ddp.sentence.endswith(f"; {gb(named)} GB of optimizer and masters whole on each GPU"), ddp.sentence


def test_no_state_is_named_that_would_fit() -> None:
    """What it needs is more than there is, what lasts of it is less."""
    asked = ask(strategy="zero3", tensor=1, pipeline=1, micro_batch=1, recompute="full")
    found = weigh(next(setups(asked))[0], asked.cluster)
    sizes = found.memory.by_category()
    room = sum(sizes[name] for name in STATE) + asked.cluster.gpu.overhead_bytes // 2
    tight = replace(asked, reserve=1 - room / asked.cluster.gpu.memory_bytes)
    first, second, *_ = sorted(sizes, key=lambda name: -sizes[name])
    said = f"; the largest are {first} {gb(sizes[first])} and {second} {gb(sizes[second])}"
    assert why_not(found, tight).endswith(said)


def test_recomputation_is_the_only_way_or_the_fastest() -> None:
    for name, hosts, strategy in (("13B", 1, "ZeRO-2"), ("7B", 4, "ZeRO-3")):
        cluster = find_cluster("A100-80", 8, hosts, "ethernet-100g")
        tensor = None if hosts == 1 else 1  # the winner at one host has two
        asked = Question(find_model(name), cluster, 256 * hosts, 4096, tensor=tensor, pipeline=1)
        found = settled(search(asked))
        other = next(each for each in others(found) if each.name == strategy)
        kinds = {
            each.setup.recipe.recompute
            for each in found.ranked
            if each.setup.parallel == other.candidate.setup.parallel
        }
        assert kinds == ({"full"} if hosts == 1 else {"none", "full"})
        how = "fits only" if hosts == 1 else "is fastest"
        assert f"slower: it {how} with full recomputation, " in other.sentence, other.sentence


def test_recomputing_more_than_the_winner_says_how_much_more() -> None:
    asked = ask(batch=128, recompute="full", tensor=1, pipeline=1)
    found = search(asked)
    winner, *rest = found.ranked
    assert winner.time is not None
    time = replace(winner.time, recompute=winner.time.recompute + 3, compute=winner.time.compute + 3)
    time = replace(time, total=time.total + 3)
    said = verdict(replace(rest[-1], time=time), found)
    assert said.endswith("slower: its full recomputation takes longer, 3.00 s more work"), said


def test_the_hosts_of_those_that_talk_are_named() -> None:
    """Hybrid ways gather in the host; with tensor parallelism and a pipeline a group is on some hosts."""
    cluster = find_cluster("A100-80", 8, 8)
    inside, over = "in the host, 300 GB/s", "over {} hosts, 25.0 GB/s a GPU"
    for cause, parallel, said in (
        ("parameters", Parallel("zero3", 64, 64), over.format(8)),
        ("parameters", Parallel("hybrid", 64, 8), inside),
        ("gradients", Parallel("hybrid", 64, 8), over.format(8)),
        ("parameters", Parallel("hybrid", 32, 4, tensor=2), inside),
        ("parameters", Parallel("hybrid_zero2", 64, 8), inside),
        ("gradients", Parallel("zero1", 16, 16, pipeline=4), over.format(2)),
        ("gradients", Parallel("zero1", 2, 2, tensor=4, pipeline=8), inside),
        ("gradients", Parallel("zero1", 8, 16, context=2, tensor=2, pipeline=2), over.format(4)),
        ("tensor", Parallel("zero1", 8, 8, tensor=8), inside),
        ("context", Parallel("zero1", 16, 64, context=4), inside),
        ("context", Parallel("zero1", 4, 32, context=8, tensor=2), over.format(2)),
        ("pipeline", Parallel("zero1", 16, 16, pipeline=4), over.format(4)),
        ("pipeline", Parallel("zero1", 1, 1, pipeline=64), over.format(8)),
    ):
        assert _over(cause, Setup(LLAMA_70B, parallel, Recipe(4096)), cluster) == said, (cause, parallel)
    hosted = Recipe(4096, offload="parameters")
    for parallel, said in (
        (Parallel("zero3", 1, 1, tensor=8), "from the host's memory, 32.0 GB/s a GPU"),
        (Parallel("zero3", 8, 8), "from the host's memory, 32.0 GB/s a GPU"),
        (Parallel("zero3", 64, 64), over.format(8)),
    ):
        assert _over("parameters", Setup(LLAMA_70B, parallel, hosted), cluster) == said, parallel
        assert "memory" not in _over("gradients", Setup(LLAMA_70B, parallel, hosted), cluster)


def test_gains_are_true(answer: Answer) -> None:
    """What is said of a larger micro-batch, computed once more here."""
    winner = answer.winner
    assert winner is not None
    said = gains(answer)
    missing = [re.search(r"micro-batch (\d+) would be .* needs ([\d.]+) GB more", each) for each in said]
    found = [each for each in missing if each]
    assert found, said
    micro, short = int(found[0][1]), float(found[0][2])
    recipe = winner.setup.recipe
    times = micro // recipe.micro_batch
    larger = replace(recipe, micro_batch=micro, accumulation=recipe.accumulation // times)
    needed = judge(replace(winner.setup, recipe=larger), answer.question.cluster).needed
    assert (needed - answer.question.room_bytes) / 1e9 == pytest.approx(short, rel=0.05)


def test_no_sync_is_told_where_it_is_faster_and_fits() -> None:
    slow = find_cluster("H100", 8, 2, "ethernet-10g")
    asked = ask(cluster=slow, strategy="hybrid", tensor=1, pipeline=1, micro_batch=1, recompute="none")
    found = settled(search(asked))
    setup = found.best.setup
    recipe = replace(setup.recipe, accumulates_whole=True)
    whole = judge(replace(setup, recipe=recipe), slow)
    said = f"faster, keeps whole gradients and fits in {gb(whole.needed)} GB"
    faster = share(1 - whole.seconds / found.best.seconds, 1.0)
    assert f"all but the last micro-batch in model.no_sync(): {faster} {said}" in gains(found)
    reserve = 1 - (whole.needed - 1) / slow.gpu.memory_bytes
    tight = replace(found, question=replace(found.question, reserve=reserve))
    assert not any("no_sync" in each for each in gains(tight))


def test_what_was_pinned_is_told_if_it_costs() -> None:
    said = gains(settled(search(ask(gpu="H100", batch=256, tensor=2))))
    assert any(
        re.fullmatch(r"without --tensor 2: \d+ % faster, for ZeRO-1, .* fits in .* GB", each) for each in said
    )
    assert not any("without" in each for each in gains(settled(search(ask(gpu="H100", batch=256)))))


def test_a_batch_that_the_gpus_can_share_evenly_is_told() -> None:
    said = gains(settled(search(ask(gpu="H100", batch=31, recompute="none"))))
    assert any(re.fullmatch(r"a global batch of 32: \d+ % more tokens a second", each) for each in said), said


def test_a_slow_network_is_named_with_its_rate() -> None:
    asked = ask(hosts=4, batch=256, tensor=1, pipeline=1, micro_batch=1, recompute="none")
    slow = replace(asked.cluster, between=replace(asked.cluster.between, bandwidth=1.25e9))
    found = search(replace(asked, cluster=slow))
    said = gains(found)
    assert any("links of 2.5 instead of 1.2 GB/s between hosts" in each for each in said), said
    lost = [each.sentence for each in others(found)]
    assert any("exposed in" in each and "over 4 hosts, 1.2 GB/s a GPU" in each for each in lost), lost


def test_fewer_bytes_of_gradients_are_told_where_they_gain() -> None:
    """As much as when they are asked for. Between hosts of several GPUs in hybrid strategies alone."""
    slow = find_cluster("A100-80", 1, 4, "ethernet-10g")
    asked = replace(ask(find_model("1.3b"), batch=32, pipeline=1), cluster=slow, seq=2048)
    found = settled(search(asked))
    (said,) = [each for each in gains(found) if each.startswith("--wire")]
    matched = re.fullmatch(r"--wire int8: (\d+) % faster, for (.*)", said)
    assert matched, said
    with_it = settled(search(replace(asked, wire="int8"))).best
    assert title(with_it.setup) == matched[2]
    assert "int8 on the wire" in dict(meanings(with_it.setup, slow))
    assert round(100 * (1 - with_it.seconds / found.best.seconds)) == int(matched[1])
    assert not any("--wire" in each for each in gains(settled(search(ask(find_model("1.3b"), gpus=1)))))
    several = replace(ask(hosts=4, batch=256, tensor=1, pipeline=1, micro_batch=1, wire="int8"))
    sent = {(each.parallel.strategy, each.recipe.wire) for line in setups(several) for each in line}
    assert sent == {
        (name, "int8" if name.startswith("hybrid") else None)
        for name in ("replicate", "zero1", "zero2", "zero3", "hybrid", "hybrid_zero2")
    }


def test_parts_add_up_to_the_step(answer: Answer) -> None:
    for each in answer.ranked[::40]:
        assert each.time is not None
        assert sum(parts(each.time).values()) == pytest.approx(each.seconds)


def test_every_word_of_the_title_is_explained(answer: Answer) -> None:
    cluster = answer.question.cluster
    for each in answer.ranked[::20]:
        words = [word for word, _ in meanings(each.setup, cluster)]
        for word in title(each.setup).split(", "):
            known = any(word.startswith(known) or known in word for known in words)
            assert known or word.endswith(" accumulated") or "chunks" in word or word == "one device", (
                word,
                words,
            )


def test_ranks_that_share_a_sequence_do_not_work_on_different_ones() -> None:
    cluster = find_cluster("H100", 8, 2)
    for parallel, said in (
        (Parallel("zero3", 16, 16), "all 16 GPUs work on different sequences; "),
        (
            Parallel("zero3", 4, 16, context=4),
            "all 16 GPUs are 4 groups of 4, which work on different sequences; ",
        ),
        (Parallel("zero3", 1, 16, context=16), "all 16 GPUs work together; "),
    ):
        told = dict(meanings(Setup(LLAMA_70B, parallel, Recipe(32768)), cluster))
        assert told["ZeRO-3"].startswith(said), told["ZeRO-3"]


def test_a_small_model_has_more_than_nothing() -> None:
    sizes = [gb(nbytes) for nbytes in (0, 2e5, 3.1e7, 1.23e9, 3.12e10, 1.1e11)]
    assert sizes == ["0.00", "0.0002", "0.03", "1.2", "31.2", "110"]


def test_one_sequence_is_one() -> None:
    told = dict(meanings(Setup(LLAMA_70B, Parallel(), Recipe(4096)), find_cluster("H100", 1)))
    assert told["micro-batch 1"].endswith(", once before each update: 1 x 1 = 1 sequence")


def test_every_strategy_has_a_name() -> None:
    assert len(set(NAMES.values())) == 6


def test_nothing_fits_says_by_how_much_and_what_would(too_large: Question) -> None:
    answer = search(too_large)
    assert answer.winner is None
    smallest = least(answer)
    assert smallest.needed == min(each.needed for each in answer.missed)
    found = ways(too_large, gpu_names(), find_cluster)
    assert any(way.fits for way in found)
    for way in found:
        assert (way.least.needed <= way.question.room_bytes) == way.fits
        assert ("fits in" in way.sentence) == way.fits
    names = [way.name for way in found]
    assert "--adapters qlora" in names and "--optimizer adamw-8bit" in names
    assert names[-1] == "--gpus 8xH100 --hosts 2"


def test_what_is_offloaded_needs_memory_of_the_host(too_large: Question) -> None:
    way = next(each for each in ways(too_large, (), find_cluster) if each.name == "--offload parameters")
    whole = way.least.memory.host * 8
    assert whole > 1e12
    assert way.sentence.startswith(
        f"fits in {gb(way.least.needed)} GB and {gb(whole)} GB of memory in each host: "
    )


def test_adapters_with_offload_are_told_where_none_fit_alone(too_large: Question) -> None:
    both = "--adapters qlora --offload parameters"
    small = ask(LLAMA_70B, "RTX-4090", gpus=1, batch=8, seq=2048)
    found = {way.name: way for way in ways(small, (), find_cluster)}
    assert found[both].fits and not found["--adapters qlora"].fits
    assert 35e9 < found[both].least.memory.host < 50e9  # half a byte a parameter, and what is trained
    assert both not in [way.name for way in ways(too_large, (), find_cluster)]
    adapted = replace(small, adapters="qlora")
    assert next(way.name for way in ways(adapted, (), find_cluster)) == "--offload parameters"


def test_nothing_is_offloaded_from_a_cpu() -> None:
    asked = ask(find_model("1.3b"), "CPU", gpus=1, batch=8)
    names = [way.name for way in ways(asked, gpu_names(), find_cluster)]
    assert "--optimizer adamw-8bit" in names and not any("offload" in name for name in names)


def test_no_gpu_that_has_no_bf16_is_advised() -> None:
    asked = ask(find_model("2.2B"), "RTX-4090", gpus=1, batch=1, optimizer="sgd")
    (found, _) = [way.name for way in ways(asked, ("V100", "L40S"), find_cluster) if "--gpus" in way.name]
    assert found == "--gpus 1xL40S"


def test_the_state_is_sixteen_bytes_a_parameter(too_large: Question) -> None:
    said = state_arithmetic(too_large)
    assert said.startswith("2 + 2 + 4 + 4 + 4 = 16 bytes a parameter x 70.6B = 1,129 GB; 8 GPUs have 684 GB")
    assert state_arithmetic(eight_bit(too_large)).startswith("2 + 2 + 4 + 1 + 1 = 10 bytes")
    small = replace(too_large, model=find_model("small"))
    assert "16 bytes a parameter x 4.2M = 0.07 GB" in state_arithmetic(small)


def test_the_state_is_that_of_the_memory(too_large: Question) -> None:
    adamw = "2 + 2 + 4 + 4 + 4 = 16 bytes"
    cases: tuple[tuple[Optimizer, Adapters, str], ...] = (
        ("adamw", "none", f"{adamw} a parameter x 70.6B"),
        ("sgd", "none", "2 + 2 + 4 + 4 = 12 bytes a parameter x 70.6B"),
        ("muon", "none", "2 + 2 + 4 + 4.12 = 12.1 bytes a parameter x 70.6B"),
        ("adamw", "lora", f"2 bytes a frozen parameter x 70.6B, and {adamw} each for 207M of adapters"),
        ("adamw", "qlora", f"0.56 bytes a frozen parameter x 70.6B, and {adamw} each for 207M of adapters"),
    )
    for optimizer, adapters, said in cases:
        text = state_arithmetic(replace(too_large, optimizer=optimizer, adapters=adapters))
        recipe = Recipe(4096, optimizer=optimizer, adapters=adapters)
        sizes = memory(Setup(too_large.model, Parallel(), recipe)).by_category()
        assert text == f"{said} = {gb(sum(sizes[name] for name in STATE))} GB; 8 GPUs have 684 GB"


def test_other_gpus_come_with_their_links() -> None:
    asked = ask(LLAMA_70B, "RTX-4090", batch=128, tensor=8, pipeline=1)
    found = {way.name: way.question.cluster for way in ways(asked, gpu_names(), find_cluster)}
    larger = next(name for name in found if "RTX" not in name and name.startswith("--gpus"))
    assert found[larger] == find_cluster(larger.removeprefix("--gpus 8x"), 8, 1)
    assert found[larger].inside != asked.cluster.inside


def test_more_gpus_share_the_port_of_their_host() -> None:
    asked = ask(LLAMA_70B, "RTX-4090", gpus=4, batch=128, recompute="full", micro_batch=1, context=1)
    *_, last = ways(asked, [], find_cluster)
    assert re.fullmatch(r"--gpus 8xRTX-4090 --hosts \d+", last.name)
    assert last.question.cluster == find_cluster("RTX-4090", 8, last.question.cluster.hosts)


def test_why_not_of_what_only_activations_burst() -> None:
    asked = ask(gpu="A100-40", strategy="zero3", tensor=1, pipeline=1, micro_batch=8, recompute="none")
    found = search(asked)
    assert found.winner is None
    assert "the largest are activations" in why_not(found.missed[0], asked)


def test_figures_in_words() -> None:
    assert [gb(number) for number in (31.2e9, 1.129e12, 0.22e9, 2e9)] == ["31.2", "1,129", "0.22", "2.0"]
    assert [seconds(n) for n in (23.94, 1.234, 0.2144, 0.00333, 119.4)] == [
        "23.9 s", "1.23 s", "214 ms", "3.33 ms", "119 s",
    ]  # fmt: skip
    assert [compared(ratio) for ratio in (0.07, -0.07, 1.0, 1001.26)] == [
        "7 % slower", "7 % faster", "2.0 times as long", "1,002.3 times as long",
    ]  # fmt: skip
    assert [share(part, 8) for part in (1, 0.01, 8)] == ["12 %", "under 1 %", "100 %"]
