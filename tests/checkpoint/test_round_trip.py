"""What any number of ranks saves, any other number reads bit-equal, and it was copied only once."""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch.optim import lr_scheduler

from imece.checkpoint import Checkpoints, Slice, all_steps, best, newest, open_checkpoint
from imece.checkpoint.manifest import DTYPES
from tests.checkpoint.crew import Crew, assert_whole, crew, newest_whole, state_of
from tests.data_parallel.test_tensor_subclasses import Quantised


def test_every_dtype_and_form(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)

    def of_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Any bit pattern, so NaNs with every payload too; of bool the two that there are."""
        most = 2 if dtype == torch.bool else 256
        size = math.prod(shape) * dtype.itemsize
        return torch.randint(most, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)

    tensors: dict[str, torch.Tensor] = {}
    for name, dtype in DTYPES.items():
        tensors[f"{name}/plain"] = of_bits(dtype, 37, 5)
        tensors[f"{name}/none"] = torch.tensor(0).to(dtype)
        tensors[f"{name}/empty"] = of_bits(dtype, 2, 0, 3)
        tensors[f"{name}/turned"] = of_bits(dtype, 11, 7, 3).permute(2, 0, 1)
        tensors[f"{name}/spaced"] = of_bits(dtype, 9, 8)[1::2, ::3]
    tensors["nan"] = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    tensors["repeated"] = torch.tensor([[1.0], [2.0]]).expand(2, 5)
    tensors["with gradient"] = torch.nn.Parameter(torch.ones(3))
    for world_size in (1, 2, 3, 7):
        with crew(tmp_path / str(world_size), world_size) as ranks:
            assert ranks.save(1, tensors), ranks.alarms
        saved = newest_whole(tmp_path / str(world_size))
        assert saved is not None and sorted(saved.names()) == sorted(tensors)
        for name, tensor in tensors.items():
            found = saved.tensor(name)
            assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
            assert _bits(found) == _bits(tensor), name


def test_safetensors_reads_what_is_in_a_file(tmp_path: Path) -> None:
    """Each dtype as it is, but complex numbers of 128 bits, which it does not have, as pairs."""
    tensors = {name: torch.arange(6).to(dtype).view(2, 3) for name, dtype in DTYPES.items()}
    with crew(tmp_path, 1) as ranks:
        assert ranks.save(1, tensors), ranks.alarms
    found = load_file(tmp_path / "step-00000001" / "rank-00000.safetensors")
    found["C128"] = torch.view_as_complex(found["C128"])
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@st.composite
def _spread(draw: st.DrawFn) -> tuple[int, list[tuple[tuple[int, ...], list[int] | None]]]:
    """A number of ranks; and of each tensor the shape, and where it is cut, or None if all ranks have it."""
    world_size = draw(st.integers(1, 4))
    tensors = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        inner = st.integers(0, math.prod(shape))
        cuts = draw(st.none() | st.lists(inner, min_size=world_size - 1, max_size=world_size - 1))
        tensors.append((shape, cuts))
    return world_size, tensors


@settings(max_examples=25)
@given(_spread(), st.integers(1, 5))
def test_any_cut_is_read_at_any_world_size(
    spread: tuple[int, list[tuple[tuple[int, ...], list[int] | None]]], readers: int
) -> None:
    world_size, drawn = spread
    whole = {
        f"t{i}": torch.randn(shape).to([torch.float32, torch.bfloat16, torch.float64][i % 3])
        for i, (shape, _) in enumerate(drawn)
    }

    def of_rank(rank: int) -> dict[str, torch.Tensor | Slice]:
        found: dict[str, torch.Tensor | Slice] = {}
        for (name, tensor), (shape, cuts) in zip(whole.items(), drawn, strict=True):
            bounds = None if cuts is None else [0, *sorted(cuts), tensor.numel()]
            if bounds is None:
                found[name] = tensor
            else:
                found[name] = Slice(tensor.reshape(-1)[bounds[rank] : bounds[rank + 1]], shape, bounds[rank])
        return found

    with TemporaryDirectory() as folder, crew(Path(folder), world_size) as ranks:
        assert ranks.save(1, of_rank), ranks.alarms
        saved = newest_whole(Path(folder))
        assert saved is not None
        for name, tensor in whole.items():
            assert _bits(saved.tensor(name)) == _bits(tensor)
            cuts = [tensor.numel() * reader // readers for reader in range(readers + 1)]
            for start, stop in zip(cuts, cuts[1:], strict=False):
                assert _bits(saved.slice(name, start, stop)) == _bits(tensor.reshape(-1)[start:stop])


def test_only_the_files_that_are_needed_are_opened(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as ranks:
        assert ranks.save(1, lambda rank: {"x": Slice(torch.arange(4) + 4 * rank, (12,), 4 * rank)})
    saved = open_checkpoint(tmp_path / "step-00000001")
    for rank in (0, 2):
        (saved.folder / f"rank-{rank:05d}.safetensors").unlink()
    assert saved.slice("x", 4, 8).tolist() == [4, 5, 6, 7]


def test_no_more_files_are_open_than_a_process_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imece.checkpoint.load._MOST_OPEN", 2)
    with crew(tmp_path, 5) as ranks:
        assert ranks.save(1, lambda rank: {"x": Slice(torch.arange(4) + 4 * rank, (20,), 4 * rank)})
    saved = open_checkpoint(tmp_path / "step-00000001")
    for _ in range(2):
        assert saved.tensor("x").tolist() == list(range(20))
        assert saved.slice("x", 15, 17).tolist() == [15, 16]
        opened = [each.path for each in psutil.Process().open_files()]
        assert sum(path.startswith(str(tmp_path)) for path in opened) == 2


def test_each_element_is_in_one_file_that_safetensors_reads(tmp_path: Path) -> None:
    with crew(tmp_path, 3) as ranks:
        assert ranks.save(1, state_of(1))
    numels: dict[str, int] = {}
    for path in (tmp_path / "step-00000001").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                numels[name] = numels.get(name, 0) + file.get_tensor(name).numel()
    assert numels == {name: tensor.numel() for name, tensor in state_of(1).items() if tensor.numel()}


def test_the_ranks_deal_the_bytes_out_evenly_and_keep_one_buffer(tmp_path: Path) -> None:
    tensors = {
        "big": torch.randn(9_999),
        "small": torch.randn(10).double(),
        "odd": torch.zeros(77).bfloat16(),
    }
    total = sum(tensor.nbytes for tensor in tensors.values())
    with crew(tmp_path, 3) as ranks:
        assert ranks.save(1, tensors)
        buffers = [checkpoints._buffer for checkpoints in ranks.ranks]
        assert sum(buffer.numel() for buffer in buffers) == total
        assert all(abs(buffer.numel() - total / 3) < 8 for buffer in buffers)
        assert ranks.save(2, tensors)
        assert [c._buffer.data_ptr() for c in ranks.ranks] == [buffer.data_ptr() for buffer in buffers]
        assert ranks.save(3, {"big": tensors["big"]})  # of another size: the memory follows
        assert sum(c._buffer.numel() for c in ranks.ranks) == tensors["big"].nbytes
    assert all(checkpoints._buffer.numel() == 0 for checkpoints in ranks.ranks)


def test_what_changes_after_save_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = threading.Event()
    write = os.write

    def waiting(descriptor: int, data: memoryview) -> int:
        assert changed.wait(20)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", waiting)
    tensors, state, rank_state = state_of(1), {"step": 1}, {"rank": 0, "step": 1}
    with crew(tmp_path, 1) as ranks:
        ranks.ranks[0].save(1, tensors, state, rank_state)
        for tensor in tensors.values():
            tensor.zero_()
        state["step"] = rank_state["step"] = 9
        changed.set()
        assert ranks.ranks[0].finish()
    assert_whole(newest_whole(tmp_path), 1, 1)


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    with crew(tmp_path, 2, keep=9) as ranks:
        for step in range(1, 6):
            for checkpoints in ranks.ranks:
                checkpoints.save(step, {"x": torch.full((1000,), step)}, {}, None)
        assert [checkpoints.finish() for checkpoints in ranks.ranks] == [True, True]
        for step in range(1, 6):
            assert open_checkpoint(tmp_path / f"step-{step:08d}").tensor("x").unique().tolist() == [step]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.zeros(3).to_sparse(), "strided"),
        (lambda: torch.zeros(3, dtype=torch.complex32), "complex32"),
        (lambda: Slice(torch.zeros(3), (4,), 2), r"\[2, 5\) is not within the 4 elements"),
        (lambda: Slice(torch.zeros(3), (4,), -1), r"\[-1, 2\) is not within"),
        (lambda: Slice(torch.zeros(3, 2).t(), (6,), 0), "not contiguous"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(
    tmp_path: Path, make: Callable[[], torch.Tensor | Slice], says: str
) -> None:
    with crew(tmp_path, 2) as ranks:
        for checkpoints in ranks.ranks:
            with pytest.raises(ValueError, match=f"'the name'.*{says}"):
                checkpoints.save(1, {"the name": make()}, {}, None)
        assert [checkpoints.finish() for checkpoints in ranks.ranks] == [False, False]
        assert ranks.save(1, state_of(1)) and ranks.alarms == [[], []]


def test_what_is_no_tensor_is_refused_by_name(tmp_path: Path) -> None:
    """A state dict of dicts, a loss: these are for the state."""
    with crew(tmp_path, 1) as ranks:
        for value, kind in ((None, "None"), ({"a": 1}, "a dict"), (0.5, "a float")):
            no_tensors: Any = {"the name": value}
            with pytest.raises(TypeError, match=f"tensor 'the name' is {kind}: hand in tensors and slices"):
                ranks.ranks[0].save(1, no_tensors, {}, None)
        no_tensors = SimpleNamespace()  # as a TrainingState, whose tensors() were forgotten
        with pytest.raises(
            TypeError, match=r"tensors: a SimpleNamespace, where TrainingState\.tensors\(\) or"
        ):
            ranks.ranks[0].save(1, no_tensors, {})
        quantised = Quantised.of(torch.ones(2, 2))
        with pytest.raises(ValueError, match="tensor 'the name' is a Quantised, which is made of others"):
            ranks.ranks[0].save(1, {"the name": quantised}, {}, None)


def _nested(levels: int) -> Any:
    return [_nested(levels - 1)] if levels else 0


@pytest.mark.parametrize(
    ("step", "state", "rank_state", "says"),
    [
        (1, None, None, "state: a dict, not None"),
        (1, [1, 2], None, "state: a dict, not a list"),
        (1, {"a": {3: [0, object()]}}, None, "state['a'][3][1]: an object is not JSON serializable"),
        (1, {"a": torch.ones(1).to_sparse()}, None, "state['a']: a Tensor is not JSON serializable"),
        (
            1,
            {"a": torch.ones(2**18 + 1)},
            None,
            "state['a']: 1048580 bytes, and 1048576 at most: save it with",
        ),
        (1, {}, {"rng": b"x"}, "rank_state['rng']: a bytes is not JSON serializable"),
        (1, {}, _nested(101), ": nested more than 100 deep"),
        (2.7, {}, None, "step 2.7: a whole number of steps"),
    ],
)
def test_states_that_cannot_be_saved_are_refused_by_name(
    tmp_path: Path, step: Any, state: Any, rank_state: Any, says: str
) -> None:
    with crew(tmp_path, 1) as ranks:
        with pytest.raises((TypeError, ValueError), match=re.escape(says)):
            ranks.ranks[0].save(step, state_of(1), state, rank_state)
        assert not ranks.ranks[0].finish() and not ranks.alarms[0] and all_steps(tmp_path) == []
        ranks.ranks[0].save(1, state_of(1), {}, _nested(100))
        assert ranks.ranks[0].finish() and open_checkpoint(tmp_path / "step-00000001").rank_states


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_refusal_on_one_rank_costs_that_save_only(tmp_path: Path, refusing: int) -> None:
    """The others hear of it at once, and all have the same answer."""
    with crew(tmp_path, 2) as ranks:
        assert ranks.save(1, state_of(1))
        for rank, checkpoints in enumerate(ranks.ranks):
            if rank == refusing:
                with pytest.raises(TypeError, match="rank_state"):
                    checkpoints.save(2, state_of(2), {}, object())
            else:
                checkpoints.save(2, state_of(2), {}, None)
        began = time.monotonic()
        assert [checkpoints.finish() for checkpoints in ranks.ranks] == [False, False]
        assert time.monotonic() - began < 10, "and not until time is up"
        (line,) = ranks.alarms[1 - refusing]
        assert "step 2 was not saved: " in line and "rank_state: an object is not JSON" in line
        assert not ranks.alarms[refusing]
        assert ranks.save(2, state_of(2)), ranks.alarms


def test_schedulers_go_on_as_they_would_have(tmp_path: Path) -> None:
    """Their states have keys that are numbers, Counters, infinities and tensors, none of which JSON has."""

    def schedulers() -> list[Any]:
        rate: list[float | torch.Tensor] = [0.1, 0.1, 0.1, torch.tensor(0.1)]
        made = [torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=each) for each in rate]
        warm_up = lr_scheduler.LinearLR(made[1], 0.1, 1, 3)
        return [
            lr_scheduler.MultiStepLR(made[0], [6, 9]),
            lr_scheduler.SequentialLR(made[1], [warm_up, lr_scheduler.MultiStepLR(made[1], [4])], [7]),
            lr_scheduler.ReduceLROnPlateau(made[2], patience=1),
            lr_scheduler.CosineAnnealingLR(made[3], 13),
        ]

    def rates(of: list[Any], steps: int) -> list[list[float]]:
        found = []
        for _ in range(steps):
            for each in of:
                each.optimizer.step()
                each.step(*[1.0] * isinstance(each, lr_scheduler.ReduceLROnPlateau))
            found.append([float(each.optimizer.param_groups[0]["lr"]) for each in of])
        return found

    undisturbed = schedulers()
    with contextlib.closing(Checkpoints(str(tmp_path), rank=0, world_size=1, alarm=print)) as checkpoints:
        for step, steps in ((0, 0), (5, 5)):
            rates(undisturbed, steps)
            checkpoints.save(
                step, {}, {"all": [each.state_dict() for each in undisturbed]}, (1, {2: math.inf})
            )
            assert checkpoints.finish()
    expected = rates(undisturbed, 8)
    assert all(len({step[i] for step in expected}) > 1 for i in range(4)), "each of them does something"
    saved, resumed = newest(str(tmp_path), print), schedulers()
    assert (
        saved is not None and saved.rank_states == [(1, {2: math.inf})] and all_steps(str(tmp_path)) == [0, 5]
    )
    assert best(str(tmp_path), print) is None and open_checkpoint(str(saved.folder)).step == 5
    for each, state in zip(resumed, saved.state["all"], strict=True):
        each.load_state_dict(state)
        each.optimizer.param_groups[0]["lr"] = each.get_last_lr()[0]
    assert rates(resumed, 8) == expected


def test_random_generators_go_on_as_they_would_have(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [torch.rand(3).tolist(), random.random(), np.random.rand(), generator.random()]

    generator = np.random.default_rng(0)
    own = (torch.get_rng_state(), random.getstate(), np.random.get_state(), generator.bit_generator.state)
    with contextlib.closing(Checkpoints(tmp_path, rank=0, world_size=1, alarm=print)) as checkpoints:
        checkpoints.save(1, {}, {}, own)
        assert checkpoints.finish()
    expected = draw()
    saved = newest(tmp_path, print)
    assert saved is not None
    ((of_torch, of_python, of_numpy, of_generator),) = saved.rank_states
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    generator.bit_generator.state = of_generator
    assert draw() == expected


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_the_crew_notices_that_ranks_disagree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Crew(tmp_path, 2)
    monkeypatch.setattr(ranks.ranks[1], "finish", lambda: False)
    with pytest.raises(AssertionError, match="do not agree"):
        ranks.save(1, state_of(1))
    for checkpoints in ranks.ranks:
        checkpoints.close()
