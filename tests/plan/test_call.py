"""`next` is a valid call of imece: for the plan itself, or for another, with the true reason."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import imece
from imece.errors import UserError
from imece.mesh import Mesh
from imece.model_parallel.schedules import check_schedule
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer
from imece.plan.answer.call import _FEW, _WHOLE, Call, Next, _ours, next_of
from imece.plan.answer.search import search, settled
from imece.plan.answer.space import Question
from imece.plan.answer.words import gb
from imece.plan.models.by_name import find_model
from imece.plan.models.model import Model, from_shape
from imece.plan.presets import find_cluster
from imece.plan.setup import FP32
from tests.plan.asked import LLAMA_8B, ask
from tests.ranks import run_ranks

SHAPE = TransformerConfig(
    vocab_size=64, layers=2, width=64, heads=8, kv_heads=2, mlp_width=64, max_seq=64, tied_head=True
)
UNLIKE = replace(LLAMA_8B, name="unlike", ours=False)


def found(question: Question, precision: str = "bf16") -> Next:
    return next_of(settled(search(question)), precision)


def small(shape: TransformerConfig, **changes: Any) -> Question:
    cluster = find_cluster("CPU", 4)
    return replace(Question(from_shape("small", shape), cluster, 4, 64, precision=FP32), **changes)


def test_a_schedule_that_keeps_gradients_is_the_same_way() -> None:
    asked = ask(find_model("7B"), batch=256, strategy="zero2", pipeline=2)
    told = found(asked)
    assert told.call is not None and 'strategy="zero2"' in told.call.text()
    assert told.call.text().startswith('mesh = imece.init({"pipeline": 2, "replicate": 4})')
    needed = told.call.candidate.needed / 1e9
    assert told.says == f"{needed:.1f} GB a GPU in imece: the schedule of a pipeline keeps gradients whole"


def test_a_schedule_that_has_no_room_for_gradients_is_the_reason() -> None:
    asked = ask(gpu="H100", strategy="zero2", pipeline=2, precision=FP32, seq=7936)
    told = found(asked, "fp32")  # which has room for another way with what was asked for
    assert told.call is not None and told.says.startswith("what imece does by itself, 2 % slower, ")
    parallel = told.call.candidate.setup.parallel
    assert (parallel.strategy, parallel.pipeline) == ("zero2", 2)
    best = settled(search(asked)).best.setup
    pinned = replace(asked, tensor=best.parallel.tensor, interleave=best.parallel.interleave)
    pinned = replace(pinned, micro_batch=best.recipe.micro_batch, recompute=best.recipe.recompute)
    says = found(pinned, "fp32").says
    assert f"without --strategy zero2, --tensor 2, --pipeline 2 and --interleave 8 ({_WHOLE}" in says
    assert ", and that needs 84.8 of 82.1 GB), under 1 % faster, " in says


def test_a_schedule_takes_as_many_micro_batches_as_there_are() -> None:
    """Fewer than stages, as many, and more; whole rounds of them where stages have several chunks."""
    called: dict[str, int] = {}
    for batch in (2, 8, 16):
        answer = search(small(replace(SHAPE, layers=8), global_batch=batch))
        for each in answer.ranked:
            if (ours := _ours(each, answer.question)) is None or each.setup.parallel.pipeline == 1:
                continue
            text, setup = Call(ours, answer.question, "fp32").text(), ours.setup
            name = (re.findall(r'schedule="(\w+)"', text) or ["1f1b"])[0]
            stages, chunks = setup.parallel.pipeline, setup.parallel.interleave
            check_schedule(name, setup.recipe.accumulation, chunks, stages)
            called[name] = called.get(name, 0) + 1
    assert min(called.values()) > 3 and called.keys() == {"1f1b", "gpipe", "interleaved"}


def test_the_logits_of_all_micro_batches_are_told() -> None:
    shape = replace(SHAPE, layers=8, vocab_size=2**17)  # so that the last stage is the largest
    told = found(small(shape, global_batch=3, pipeline=4, micro_batch=1), "fp32")
    assert told.call is not None and 'schedule="gpipe"' in told.call.text()
    assert told.says == f"{gb(told.call.candidate.needed)} GB a rank in imece: {_FEW}"


_SUMS = "it keeps masters in sharded strategies alone, which sum gradients in the masters' dtype besides"


@pytest.mark.parametrize("pins", [{"tensor": 8}, {"tensor": 4, "pipeline": 2}, {"pipeline": 8}])
def test_a_strategy_over_one_rank_is_the_same_way(pins: dict[str, Any]) -> None:
    told = found(ask(gpu="H100", **pins))  # masters need zero1, which shards nothing here
    assert told.call is not None
    text = told.call.text()
    assert all(f'"{axis}": {size}' in text for axis, size in pins.items()) and 'strategy="zero1"' in text
    assert told.says in ("", f"{told.call.candidate.needed / 1e9:.1f} GB a GPU in imece: {_SUMS}")


@pytest.mark.parametrize("gpus", [1, 2])
def test_sums_for_which_there_is_no_room_are_the_reason(gpus: int) -> None:
    pins = {"tensor": gpus} if gpus > 1 else {}
    asked = ask(find_model("1.3b"), gpu="RTX-4090", gpus=gpus, batch=8, seq=2048, **pins)
    room = int(1.02 * min(each.needed for each in settled(search(asked)).ranked))
    asked = replace(asked, reserve=1 - room / asked.cluster.gpu.memory_bytes)
    assert f"{_SUMS}, and that needs " in found(asked).says


@pytest.mark.parametrize("pins", [{"tensor": 2, "pipeline": 1}, {"tensor": 1, "pipeline": 2}])
def test_what_no_transformer_of_imece_is_is_not_divided(pins: dict[str, Any]) -> None:
    for model, divided in ((LLAMA_8B, True), (UNLIKE, False)):
        told = found(ask(model, **pins))
        assert told.call is not None
        assert ("tensor_parallel" in told.call.text() or "Pipeline" in told.call.text()) == divided
        assert ("(of models like unlike it divides no matrices and cuts no stages)" in told.says) != divided


def test_no_sequence_is_shared_where_attention_has_windows() -> None:
    pins: dict[str, Any] = {"seq": 32768, "tensor": 1, "context": 4, "pipeline": 1, "batch": 32}
    for window, said in ((4096, "(it shares no sequence of 32,768 tokens of which one sees 4,096)"), (0, "")):
        model = replace(LLAMA_8B, window=window, windowed=0.5 if window else 0.0)
        told = found(ask(model, gpu="H100", **pins))
        assert told.call is not None and said in told.says
        assert ("sequences" in dict(told.call.left())) == (not window)


CASES: dict[str, tuple[Model | None, dict[str, Any], str]] = {
    "heads of keys and values": (
        None, {"tensor": 4}, "(it cannot divide 2 heads of keys and values among 4 ranks)",
    ),
    "a tied vocabulary": (
        from_shape("odd", replace(SHAPE, vocab_size=65)), {"tensor": 2},
        "(it cannot divide a tied vocabulary of 65 among 2 ranks)",
    ),
    "a head of its own": (
        from_shape("odd", replace(SHAPE, vocab_size=65, tied_head=False)),
        {"tensor": 2, "strategy": "zero1"}, "",
    ),
    "an odd sequence": (None, {"tensor": 2, "seq": 63, "strategy": "zero1"}, ""),
}  # fmt: skip


def test_tensor_parallel_takes_what_is_called_and_refuses_what_is_not() -> None:
    """All of them in one start of ranks."""
    calls = []
    for model, changes, said in CASES.values():
        asked = small(SHAPE, **changes) if model is None else small(SHAPE, model=model, **changes)
        told = found(asked, "fp32")
        assert told.call is not None and (said in told.says if said else not told.says), told.says
        divided = f'"tensor": {changes["tensor"]}' in told.call.text()
        assert divided == (not said)
        calls.append((asked.model.vocab_size, asked.model.tied_head, asked.seq, told.call.text()))
    assert ", sequence=True" not in calls[-1][-1] and ", sequence=True" in calls[-2][-1]
    for taken in run_ranks(take, 4, args=(calls,), backend=None):
        assert taken == [True] * len(calls)
    for wrong in run_ranks(refuse, 4, backend=None):
        assert [text.partition(" cannot be divided")[0] for text in wrong] == ["kv_heads 2", "vocab_size 65"]


def take(calls: list[tuple[int, bool, int, str]]) -> list[bool]:
    """Whether each call gives a model that computes, of the sequences that it is for."""
    done = []
    for vocab_size, tied, seq, call in calls:
        shape = replace(SHAPE, vocab_size=vocab_size, tied_head=tied)
        names: dict[str, Any] = {"imece": imece, "torch": torch, "model": Transformer(shape)}
        names["optimizer"] = torch.optim.AdamW
        exec(call if "mesh = " in call else f"mesh = imece.init()\n{call}", names)
        tokens = torch.zeros(1, seq, dtype=torch.int64)
        imece.cross_entropy(names["model"](tokens), tokens).backward()
        done.append(True)
        names["mesh"].close()
    return done


def refuse() -> list[str]:
    """What imece says of those that the planner leaves out."""
    said = []
    for ranks, shape in ((4, SHAPE), (2, replace(SHAPE, vocab_size=65))):
        mesh: Mesh = imece.init({"replicate": 4 // ranks, "tensor": ranks})
        with pytest.raises(UserError) as caught:
            imece.tensor_parallel(Transformer(shape), mesh, sequence=True, divided_logits=True)
        said.append(str(caught.value))
        mesh.close()
    return said
