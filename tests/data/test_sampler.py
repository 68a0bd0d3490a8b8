"""Each sample comes once per epoch, wherever it is stopped and however many ranks go on."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
import warnings
from collections import Counter
from collections.abc import Iterator, Sized
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

import imece
from imece.data.sampler import UNEVEN, DistributedSampler, Uneven
from tests.ranks import run_ranks

_LENGTHS = st.integers(0, 60)
_WORLD_SIZES = st.integers(1, 7)
_EPOCHS = st.integers(0, 2**40)
_UNEVEN = st.sampled_from(UNEVEN)


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def samplers(length: int, world_size: int, **options: Any) -> list[DistributedSampler]:
    """Those of all ranks."""
    return [DistributedSampler(Numbers(length), world_size, rank, **options) for rank in range(world_size)]


def order_of(length: int, epoch: int, **options: Any) -> list[int]:
    """A whole epoch of a single rank, which never was interrupted."""
    sampler = DistributedSampler(Numbers(length), **options)
    sampler.set_epoch(epoch)
    return list(sampler)


def in_turns(ranks: list[list[int]]) -> list[int]:
    """What the ranks drew, one after the other, as they take turns."""
    rounds = itertools.zip_longest(*ranks)
    return [index for one_round in rounds for index in one_round if index is not None]


def expected(length: int, world_size: int, uneven: Uneven, order: list[int], first: int = 0) -> list[int]:
    """What all ranks hand out of `order` from position `first` on."""
    left = order[first:]
    over = len(left) % world_size
    if uneven == "drop":
        return left[: len(left) - over]
    if uneven == "pad" and over:
        return left + list(itertools.islice(itertools.cycle(order), world_size - over))
    return left


# --- one epoch ---


@given(_LENGTHS, _WORLD_SIZES, _EPOCHS, st.integers(), _UNEVEN, st.booleans())
def test_an_epoch_is_disjoint_and_complete(
    length: int, world_size: int, epoch: int, seed: int, uneven: Uneven, shuffle: bool
) -> None:
    ranks = samplers(length, world_size, seed=seed, uneven=uneven, shuffle=shuffle)
    for sampler in ranks:
        sampler.set_epoch(epoch)
    drawn = [list(sampler) for sampler in ranks]
    order = order_of(length, epoch, seed=seed, shuffle=shuffle)
    assert sorted(order) == list(range(length))
    assert shuffle or order == list(range(length))
    assert in_turns(drawn) == expected(length, world_size, uneven, order)
    times = Counter(index for indices in drawn for index in indices)
    if uneven == "keep":
        assert times == Counter(range(length))
    elif uneven == "drop":
        assert set(times.values()) <= {1}
        assert length - times.total() == length % world_size
    else:
        assert set(times) == set(range(length))
        assert times.total() == math.ceil(length / world_size) * world_size
    assert [len(indices) for indices in drawn] == [len(sampler) for sampler in ranks]
    assert all(type(index) is int for index in times)


@given(_LENGTHS, _WORLD_SIZES, st.booleans())
def test_lengths_and_attributes_are_those_of_torch(length: int, world_size: int, drop_last: bool) -> None:
    for rank in range(world_size):
        arguments = (Numbers(length), world_size, rank, True, 5, drop_last)
        ours = DistributedSampler(*arguments)
        theirs: TorchDistributedSampler[int] = TorchDistributedSampler(*arguments)
        assert len(ours) == len(theirs) == len(list(ours)) == len(list(theirs))
        for name in vars(theirs):
            assert getattr(ours, name) == getattr(theirs, name), name
    assert isinstance(ours, TorchDistributedSampler)  # Lightning asks, and would divide it once more


def test_the_default_for_uneven_ends_is_torch() -> None:
    assert DistributedSampler(Numbers(5)).uneven == "pad"
    assert DistributedSampler(Numbers(5), drop_last=True).uneven == "drop"
    assert DistributedSampler(Numbers(5), uneven="drop").drop_last
    assert DistributedSampler(Numbers(5), drop_last=True, uneven="drop").uneven == "drop"


# --- which epoch ---


def test_each_iteration_is_the_next_epoch() -> None:
    orders = [order_of(50, epoch) for epoch in range(5)]
    assert len(set(map(tuple, orders))) == 5
    sampler = DistributedSampler(Numbers(50))
    assert [list(sampler) for _ in range(5)] == orders
    assert sampler.epoch == 4


def test_set_epoch_is_honoured_and_the_following_epochs_count_from_it() -> None:
    sampler = DistributedSampler(Numbers(50))
    for epoch in (0, 1, 2, 1, 1, 7):  # each epoch, as scripts do
        sampler.set_epoch(epoch)
        assert sampler.epoch == epoch
        assert list(sampler) == order_of(50, epoch)
        assert sampler.epoch == epoch
    assert list(sampler) == order_of(50, 8)
    assert list(sampler) == order_of(50, 9)
    sampler.set_epoch(3)
    sampler.set_epoch(5)
    assert list(sampler) == order_of(50, 5)
    sampler.epoch = 2
    assert list(sampler) == order_of(50, 2)


def test_an_iteration_that_was_left_counts_and_one_that_was_never_asked_does_not() -> None:
    sampler = DistributedSampler(Numbers(50))
    first = iter(sampler)
    assert [next(first), next(first)] == order_of(50, 0)[:2]
    for _ in range(3):
        iter(sampler)
    second = iter(sampler)
    assert next(second) == order_of(50, 1)[0]
    assert list(first) == order_of(50, 0)[2:]  # goes on beside the second, and does not count for it
    assert sampler.state_dict()["epoch"] == 1
    assert sampler.state_dict()["consumed"] == 1


def test_set_epoch_in_the_midst_is_for_the_next_iteration() -> None:
    sampler = DistributedSampler(Numbers(50))
    running = iter(sampler)
    drawn = [next(running)]
    sampler.set_epoch(6)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["consumed"]) == (6, 0)
    assert drawn + list(running) == order_of(50, 0)
    assert list(sampler) == order_of(50, 6)


def test_the_running_epoch_may_be_named_once_more() -> None:
    """Lightning lets the workers draw ahead, and calls set_epoch then."""
    sampler = DistributedSampler(Numbers(50))
    running = iter(sampler)
    drawn = [next(running) for _ in range(20)]
    for _ in range(2):
        sampler.set_epoch(0)
        assert sampler.state_dict()["consumed"] == 20
        assert sampler.state_dict(samples=12)["consumed"] == 12
    assert drawn + list(running) == order_of(50, 0)
    state = sampler.state_dict(samples=12)
    sampler.set_epoch(1)
    assert sampler.state_dict() == state | {"epoch": 1, "consumed": 0}
    sampler.load_state_dict(state)
    sampler.set_epoch(0)
    assert sampler.state_dict() == state
    assert list(sampler) == order_of(50, 0)[12:]
    sampler.set_epoch(0)
    assert list(sampler) == order_of(50, 0)
    assert list(sampler) == order_of(50, 1)


def test_seed_and_epoch_are_not_added() -> None:
    orders = {
        (seed, epoch): tuple(order_of(50, epoch, seed=seed)) for seed in range(-2, 3) for epoch in range(5)
    }
    assert len(set(orders.values())) == len(orders)
    assert len({tuple(order_of(50, e, shuffle=False)) for e in range(5)}) == 1


# --- the order ---


def test_the_order_never_changes() -> None:
    """States that were saved point into it: whoever changes it must raise the state's format."""
    assert order_of(12, 0) == [3, 10, 4, 6, 8, 11, 2, 0, 9, 1, 7, 5]
    assert order_of(1000, 3, seed=-7)[:6] == [921, 597, 863, 552, 671, 443]


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_all_permutations_come_equally_often(length: int) -> None:
    rounds, kinds = 150 if length < 5 else 25, math.factorial(length)
    sampler = DistributedSampler(Numbers(length))
    times = Counter(tuple(sampler) for _ in range(rounds * kinds))
    chi_square = sum((times[kind] - rounds) ** 2 / rounds for kind in itertools.permutations(range(length)))
    assert abs(chi_square - (kinds - 1)) < 4 * math.sqrt(2 * (kinds - 1))


@pytest.mark.parametrize("length", [7, 9])
def test_odd_permutations_come_as_often_as_even_ones(length: int) -> None:
    sampler = DistributedSampler(Numbers(length))
    pairs = list(itertools.combinations(range(length), 2))
    odd = sum(sum(order[i] > order[j] for i, j in pairs) % 2 for order in (list(sampler) for _ in range(900)))
    assert abs(odd - 450) < 4 * 15


@pytest.mark.parametrize("length", [10_007, 131_072])
def test_the_order_looks_random(length: int) -> None:
    order = torch.tensor(order_of(length, 0))
    assert torch.equal(order.sort().values, torch.arange(length))
    places = torch.arange(length)
    assert int((order == places).sum()) < 10  # 1 in the mean
    for distance in (1, 2, 7):
        step = (order[distance:] - order[:-distance]).abs()
        assert int((step == 1).sum()) < 14  # 2 in the mean
        pair = torch.stack([order[distance:], order[:-distance]]).double()
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 4 / math.sqrt(length)
    assert abs(torch.corrcoef(torch.stack([order, places]).double())[0, 1].item()) < 4 / math.sqrt(length)
    # Ten classes that lie one after the other on disk: a rank's first tenth has its share of each.
    share = torch.bincount(order[: length // 10] * 10 // length, minlength=10)
    assert (share - length / 100).abs().max().item() < 4 * math.sqrt(length / 100)


def test_a_dataset_larger_than_memory() -> None:
    length = 10**13
    ranks = samplers(length, 2, uneven="keep")
    drawn = [list(itertools.islice(sampler, 20_000)) for sampler in ranks]
    assert len(set(drawn[0]) | set(drawn[1])) == 40_000
    assert min(map(min, drawn)) >= 0 and max(map(max, drawn)) < length
    assert abs(sum(drawn[0]) / 20_000 / length - 0.5) < 0.01
    assert ranks[0].state_dict()["consumed"] == 40_000
    assert len(ranks[0]) == length // 2


# --- stopping and going on ---

_LEGS = st.lists(st.tuples(_WORLD_SIZES, st.integers(0, 5)), min_size=1, max_size=4)


@given(_LENGTHS, _LEGS, _WORLD_SIZES, st.integers(0, 3), _UNEVEN, st.booleans())
def test_no_sample_is_lost_or_repeated_when_the_number_of_ranks_changes(
    length: int, legs: list[tuple[int, int]], last_world_size: int, epoch: int, uneven: Uneven, named: bool
) -> None:
    """Each leg: so many ranks draw so many samples each, and stop. The last ranks go on to the end."""
    options: dict[str, Any] = {"seed": 3, "uneven": uneven}
    order = order_of(length, epoch, seed=3)
    position = 0  # in the order, counted here by what came
    state: dict[str, Any] | None = None
    for world_size, samples in legs:
        ranks = resumed(samplers(length, world_size, **options), state, epoch, named=named or state is None)
        promised = expected(length, world_size, uneven, order, position)
        samples = min(samples, len(promised) // world_size)
        drawn = [list(itertools.islice(sampler, samples)) for sampler in ranks if samples]
        assert in_turns(drawn) == promised[: samples * world_size]
        states = [sampler.state_dict() for sampler in ranks]
        assert all(each == states[0] for each in states)
        state = json.loads(json.dumps(states[0]))
        position += samples * world_size
        if samples and samples * world_size == len(promised):
            position = length  # this epoch is over, and what was dropped is dropped
        assert state["consumed"] == min(position, length)
        position = state["consumed"]
    ranks = resumed(samplers(length, last_world_size, **options), state, epoch, named=named)
    promised = expected(length, last_world_size, uneven, order, position)
    if promised or named:
        assert in_turns([list(sampler) for sampler in ranks]) == promised
    following = order_of(length, epoch + 1, seed=3)
    assert in_turns([list(sampler) for sampler in ranks]) == expected(
        length, last_world_size, uneven, following
    )


def resumed(
    ranks: list[DistributedSampler], state: dict[str, Any] | None, epoch: int, *, named: bool
) -> list[DistributedSampler]:
    for sampler in ranks:
        if state is not None:
            sampler.load_state_dict(state)
            assert sampler.state_dict() == state
            assert sampler.epoch == epoch
        if named:
            sampler.set_epoch(epoch)
            sampler.set_epoch(epoch)  # some loops say it twice
    return ranks


def test_one_that_is_made_in_each_step_follows_from_its_number() -> None:
    """As help() shows it: the ranks may be others in each step, and any step may come again."""
    length, global_batch = 50, 8
    order = [order_of(length, epoch) for epoch in range(2)]
    for number, world_size in ((0, 1), (1, 3), (1, 2), (5, 4), (6, 5), (6, 3), (11, 8)):
        epoch, step = divmod(number, length // global_batch)
        ranks = []
        for sampler in samplers(length, world_size):
            sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch, "consumed": step * global_batch})
            mine = range(sampler.rank, global_batch, sampler.num_replicas)
            ranks.append([index for _, index in zip(mine, sampler, strict=False)])
        assert in_turns(ranks) == order[epoch][step * global_batch :][:global_batch]


@pytest.mark.parametrize("uneven", UNEVEN)
def test_a_finished_epoch_is_followed_by_the_next_unless_it_is_named(uneven: Uneven) -> None:
    for world_size, next_world_size in ((4, 4), (4, 3), (3, 2)):
        ranks = samplers(10, world_size, uneven=uneven)
        for sampler in ranks:
            sampler.set_epoch(5)
            list(sampler)
        states = [sampler.state_dict() for sampler in ranks]
        assert [(state["epoch"], state["consumed"]) for state in states] == [(5, 10)] * world_size
        for named, order in ((None, order_of(10, 6)), (5, []), (6, order_of(10, 6)), (2, order_of(10, 2))):
            resumed_ranks = samplers(10, next_world_size, uneven=uneven)
            for sampler in resumed_ranks:
                sampler.load_state_dict(states[0])
                if named is not None:
                    sampler.set_epoch(named)
            drawn = in_turns([list(sampler) for sampler in resumed_ranks])
            assert drawn == expected(10, next_world_size, uneven, order)


def test_an_uneven_end_is_told_right_by_rank_0() -> None:
    """10 samples, 4 ranks, one sample a step: after the third step ranks 2 and 3 have had two only."""
    ranks = samplers(10, 4, uneven="keep")
    running = [iter(sampler) for sampler in ranks]
    for step, consumed in enumerate((4, 8, 10)):
        for iterator in running:
            next(iterator, None)
        assert ranks[0].state_dict()["consumed"] == consumed
        assert ranks[0].state_dict(samples=step + 1)["consumed"] == consumed
    assert [sampler.state_dict()["consumed"] for sampler in ranks] == [10] * 4


def test_set_epoch_that_drops_a_restored_position_warns() -> None:
    sampler = DistributedSampler(Numbers(10))
    list(itertools.islice(sampler, 4))
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"set_epoch\(3\).*epoch 0 at sample 4 of 10") as caught:
        sampler.set_epoch(3)
    assert caught[0].filename == __file__
    assert list(sampler) == order_of(10, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.load_state_dict(state)
        sampler.set_epoch(0)
        assert list(sampler) == order_of(10, 0)[4:]
        sampler.set_epoch(0)  # once it was used, the position is not used again
        assert list(sampler) == order_of(10, 0)
        finished = sampler.state_dict()
        sampler.set_epoch(5)
        sampler.load_state_dict(finished)
        sampler.set_epoch(1)
        DistributedSampler(Numbers(10)).set_epoch(5)


def test_samples_say_what_the_loop_has_had() -> None:
    sampler = DistributedSampler(Numbers(20), 2, 1)
    state = sampler.state_dict(samples=0)
    assert (state["epoch"], state["consumed"]) == (0, 0)
    list(itertools.islice(sampler, 7))
    for samples in range(8):
        assert sampler.state_dict(samples=samples)["consumed"] == 2 * samples
    for samples in (8, -1):
        with pytest.raises(ValueError, match=rf"samples={samples}\).*rank 1 has drawn 7 .*epoch 0"):
            sampler.state_dict(samples=samples)
    sampler.load_state_dict(sampler.state_dict(samples=4))
    assert sampler.state_dict(samples=0)["consumed"] == 8
    with pytest.raises(ValueError, match="has drawn 0"):
        sampler.state_dict(samples=1)
    list(itertools.islice(sampler, 3))  # since the iteration began, not since the epoch did
    assert sampler.state_dict(samples=2)["consumed"] == 8 + 2 * 2


def test_copies_go_on_by_themselves() -> None:
    sampler = DistributedSampler(Numbers(10))
    list(itertools.islice(sampler, 4))
    for other in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):  # noqa: S301 - our own
        assert other.state_dict() == sampler.state_dict()
        assert list(other) == order_of(10, 1)
    assert sampler.epoch == 0


# --- under a DataLoader ---


def test_a_state_that_counts_what_workers_have_ahead_warns() -> None:
    for workers in (0, 1):
        sampler = DistributedSampler(Numbers(60), 2, 0)
        batches = iter(loader_of(sampler, batch_size=2, num_workers=workers))
        next(batches)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert sampler.state_dict(samples=2)["consumed"] == 4
            copy.deepcopy(sampler).load_state_dict(sampler.state_dict(samples=2))
            next(batches)
            state = sampler.state_dict()
            for _ in batches:
                pass
            assert sampler.state_dict()["consumed"] == 60
        assert state["consumed"] == (16 if workers else 8)
        said = [str(each.message) for each in caught]
        assert len(said) == workers, said
        for text in said:
            assert text == (
                "a DataLoader with workers draws samples ahead of the loop, and state_dict() counts those "
                "too: to resume from it would leave them out. Say how many samples this rank's loop has had "
                "in this iteration: state_dict(samples=...)"
            )


LOADERS: dict[str, dict[str, Any]] = {
    "no workers": {"batch_size": 4},
    "no batches": {"batch_size": None},
    "workers": {"batch_size": 4, "num_workers": 2},
    "workers, no batches": {"batch_size": None, "num_workers": 2},
    "persistent workers": {"batch_size": 4, "num_workers": 2, "persistent_workers": True},
    "far ahead": {"batch_size": 2, "num_workers": 2, "persistent_workers": True, "prefetch_factor": 5},
}


@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
def test_a_loader_gets_each_epoch_and_resumes_in_its_midst(options: dict[str, Any]) -> None:
    length, stop = 50, 3
    order = order_of(length, 0)
    half = DistributedSampler(Numbers(length), 2, 0)
    loader = loader_of(half, **options)
    batches = [numbers(batch) for batch in itertools.islice(loader, stop)]
    mine = [index for batch in batches for index in batch]
    assert mine == order[0::2][: len(mine)]
    state = half.state_dict(samples=len(mine))
    if "num_workers" in options:
        assert half.state_dict()["consumed"] > state["consumed"]  # it did draw ahead
    else:
        assert half.state_dict() == state
    # Three ranks go on, each with such a loader, from the state of two.
    ranks = samplers(length, 3, uneven="keep")
    loaders = [loader_of(sampler, **options) for sampler in ranks]
    for sampler in ranks:
        sampler.load_state_dict(state)
    rest = in_turns([[index for batch in loader for index in numbers(batch)] for loader in loaders])
    assert rest == order[2 * len(mine) :]
    assert {sampler.state_dict()["consumed"] for sampler in ranks} == {length}
    for epoch in (1, 2):
        drawn = in_turns([[index for batch in loader for index in numbers(batch)] for loader in loaders])
        assert drawn == order_of(length, epoch)
    ranks[0].set_epoch(8)
    assert [index for batch in loaders[0] for index in numbers(batch)] == order_of(length, 8)[0::3]
    assert len(loaders[0]) == (math.ceil(17 / options["batch_size"]) if options["batch_size"] else 17)
    # The first loop was left after three batches: that was epoch 0 all the same.
    assert [index for batch in loader for index in numbers(batch)] == order_of(length, 1)[0::2]


def loader_of(sampler: DistributedSampler, **options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(sampler.length), sampler=sampler, **options)


def numbers(batch: Any) -> list[int]:
    return [int(index) for index in batch] if isinstance(batch, torch.Tensor) else [int(batch)]


# --- who am I ---


def indices_of_this_rank() -> dict[str, Any]:
    """Before the ranks have met, and after; then from the midst of the epoch."""
    try:
        DistributedSampler(Numbers(11))
        early = "no error"
    except ValueError as error:
        early = str(error)
    dist.init_process_group("gloo")
    sampler = DistributedSampler(Numbers(11), uneven="keep")
    first = list(itertools.islice(sampler, 3))
    state = sampler.state_dict()
    sampler = DistributedSampler(Numbers(11), uneven="keep")
    sampler.load_state_dict(state)
    rest = list(sampler)
    fifth = DistributedSampler(Numbers(11), num_replicas=5, rank=4)
    dist.destroy_process_group()
    return {
        "early": early,
        "place": (sampler.num_replicas, sampler.rank),
        "first": first,
        "state": state,
        "rest": rest,
        "fifth": (fifth.num_replicas, fifth.rank),
    }


def test_the_defaults_are_those_of_the_process_group() -> None:
    results = run_ranks(indices_of_this_rank, 2, backend=None)
    for rank, result in enumerate(results):
        assert "one of 2 ranks" in result["early"] and "imece.init()" in result["early"]
        assert result["place"] == [2, rank]
        assert result["fifth"] == [5, 4]
        assert result["state"] == results[0]["state"]
    assert in_turns([result["first"] for result in results]) == order_of(11, 0)[:6]
    assert in_turns([result["rest"] for result in results]) == order_of(11, 0)[6:]


def places_on_a_mesh(shapes: list[dict[str, int]]) -> list[Any]:
    found: list[Any] = []
    for shape in shapes:
        mesh = imece.init(shape)
        sampler = DistributedSampler(Numbers(6), shuffle=False)
        found.append([mesh.batch_ranks, mesh.batch_rank, list(sampler)])
        mesh.close()
    return found


def test_ranks_that_divide_one_model_or_its_sequences_read_the_same() -> None:
    shapes = [{"replicate": 2, "context": 2}, {"pipeline": 2, "shard": 2}, {"replicate": 2, "shard": 2}]
    by_rank = run_ranks(places_on_a_mesh, 4, args=(shapes,), backend=None)
    shares = [[2, 0, [0, 2, 4]], [2, 1, [1, 3, 5]]]
    quarters = [[4, at, list(range(6))[at::4] + [[], [], [0], [1]][at]] for at in range(4)]
    assert by_rank == [[shares[rank // 2], shares[rank % 2], quarters[rank]] for rank in range(4)]


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_ranks_that_have_not_met_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would take itself for the only one, and train on every sample."""
    monkeypatch.setenv(name, "4")
    options: list[dict[str, Any]] = [{}, {"rank": 1}, {"num_replicas": 4}]
    for arguments in options:
        with pytest.raises(ValueError, match=r"one of 4 ranks.*imece\.init\(\)"):
            DistributedSampler(Numbers(5), **arguments)
    assert len(DistributedSampler(Numbers(5), 1)) == 5
    assert len(DistributedSampler(Numbers(5), 4, 0)) == 2
    monkeypatch.setenv(name, "1")
    assert len(DistributedSampler(Numbers(5))) == 5


# --- mistakes ---


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_replicas": 4, "rank": 4}, r"rank 4 of 4 .*0 to 3"),
        ({"num_replicas": 4, "rank": -1}, r"rank -1 of 4 .*0 to 3"),
        ({"rank": 1}, r"rank 1 of 1 "),
        ({"num_replicas": 0, "rank": 0}, r"num_replicas=0"),
        ({"num_replicas": 3}, r"one of 3 ranks.*both num_replicas and rank"),
        ({"uneven": "repeat"}, r"uneven='repeat': one of pad, drop, keep"),
        ({"uneven": "keep", "drop_last": True}, r"drop_last=True.*uneven='keep'"),
        ({"uneven": "pad", "drop_last": True}, r"drop_last=True.*uneven='pad'"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DistributedSampler(Numbers(5), **arguments)


def test_a_dataset_without_length_is_refused() -> None:
    dataset = Endless()
    assert not isinstance(dataset, Sized)
    with pytest.raises(TypeError, match="Endless has no __len__"):
        DistributedSampler(dataset)


def test_a_loader_is_no_dataset_and_a_tensor_no_state() -> None:
    with pytest.raises(TypeError, match="a DataLoader is no dataset"):
        DistributedSampler(DataLoader(Numbers(5)))  # of which it would take the number of batches
    with pytest.raises(TypeError, match="a Tensor is no sampler's state"):
        DistributedSampler(Numbers(5)).load_state_dict(torch.get_rng_state())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"length": 11}, "length 11, this sampler has length 10"),
        ({"seed": 8}, "seed 8, this sampler has seed 7"),
        ({"shuffle": False}, "shuffle False, this sampler has shuffle True"),
        ({"format": 2}, "format 2, this sampler has format 1"),
        ({"consumed": 11}, "11 of 10"),
        ({"consumed": -1}, "-1 of 10"),
    ],
)
def test_states_that_do_not_fit(changes: dict[str, Any], said: str) -> None:
    sampler = DistributedSampler(Numbers(10), seed=7)
    list(itertools.islice(sampler, 4))
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=said):
        sampler.load_state_dict(before | changes)
    assert sampler.state_dict() == before
    with pytest.raises(ValueError, match="has no seed, consumed"):
        sampler.load_state_dict({k: v for k, v in before.items() if k not in ("seed", "consumed")})


def test_how_a_sampler_is_shown() -> None:
    _, sampler = samplers(1_000, 2, seed=3)
    indices = iter(sampler)
    for _ in range(100):
        next(indices)
    assert repr(sampler) == (
        "<imece.DistributedSampler rank 1 of 2, epoch 0, 200 of 1,000 samples read by all ranks, "
        "shuffled by seed 3>"
    )
    sampler.set_epoch(4)
    assert ", epoch 4, 0 of 1,000 samples read by all ranks, " in repr(sampler)
    assert repr(DistributedSampler(Numbers(3), shuffle=False)).endswith(", in order>")
