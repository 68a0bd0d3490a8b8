"""One rank over NCCL, and two that share a GPU over Gloo, train like torch's wrapper in every strategy."""

from __future__ import annotations

import pytest

from tests.gpu.devices import DEVICES, run_on
from tests.gpu.training import HYBRIDS, STEPS, WAYS, all_ways, beside_torch

ROOM = 1e-4  # some kernels of a GPU add in no fixed order
ROUNDED = 5e-4  # a sum without the other rank's part is ten times as far off


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("ranks", "backend"), [(1, None), (2, "gloo")])
def test_as_torch_trains(device: str, ranks: int, backend: str | None) -> None:
    for found in run_on(beside_torch, ranks, device, [backend]):
        ours, torchs, alone = found["losses"]
        assert len(ours) == STEPS
        assert ours == pytest.approx(torchs, abs=ROOM)
        beside_torch_, beside_none = found["apart"]
        assert beside_torch_ <= ROOM
        if ranks == 2:  # the others' gradients count: without them it is another model
            assert beside_none > 1e-3
        else:
            assert ours == pytest.approx(alone, abs=ROOM)
            assert found["backend"] == ("nccl" if device == "cuda" else "shm")


@pytest.mark.parametrize("device", DEVICES)
def test_all_strategies_train_alike_on_two_ranks(device: str) -> None:
    by_rank = run_on(all_ways, 2, device, [False])
    for found in by_rank:
        assert set(found) == set(WAYS)
        for name in ("zero1", "zero2", "zero3", "zero3 kept"):
            assert found[name] == pytest.approx(found["replicate"], abs=ROOM), name
        for name in ("accumulated zero1", "accumulated zero3"):
            assert found[name] == pytest.approx(found["accumulated replicate"], abs=ROOM), name
        assert found["accumulated zero1"] != pytest.approx(found["zero1"], abs=1e-3)
        for name in ("wire replicate", "wire zero1", "wire zero2"):
            assert found[name] == pytest.approx(found["replicate"], abs=ROUNDED), name
            assert found[name] != found["replicate"], name
        for name in ("bf16 zero1", "bf16 zero2", "bf16 zero3"):
            assert found[name][:-1] == pytest.approx(found["replicate"][:-1], abs=4 * ROUNDED), name
            assert found[name] == pytest.approx(found["bf16 zero1"], abs=1e-3), name
    for name in WAYS:
        assert by_rank[0][name][-1] == pytest.approx(by_rank[1][name][-1], abs=1e-6), name


@pytest.mark.parametrize("device", DEVICES)
def test_hybrid_strategies_train_alike_on_two_hosts_of_one_rank(device: str) -> None:
    for found in run_on(all_ways, 2, device, [True], hosts=True):
        assert set(found) == set(HYBRIDS)
        for name in ("hybrid", "hybrid_zero2"):
            assert found[name] == pytest.approx(found["replicate"], abs=ROOM), name
        assert found["wire hybrid"] == pytest.approx(found["replicate"], abs=ROUNDED)
