"""Several sources, each with a weight: how often each is read, that each is read whole, and what they are."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imece.data.batches import Batches
from imece.data.mix import Turns, whole_weights
from imece.data.prepare import Prepared, TextSource, prepare, reopen
from imece.data.tokens import Part, open_tokens
from tests.data.helpers import mistake, part_of, part_of_sources, write

_WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


# --- turns ---


@given(_WEIGHTS)
def test_each_source_has_its_share_at_any_time(weights: list[int]) -> None:
    turns, had = Turns(weights), [0] * len(weights)
    for number in range(2 * sum(weights) + 3):
        source, sequence = turns.place(number)
        assert sequence == had[source], "none is left out, none comes twice"
        had[source] += 1
        for weight, count in zip(weights, had, strict=True):
            assert abs(count - (number + 1) * weight / sum(weights)) < 1
    assert sum(turns.share(source) for source in range(len(weights))) == 1


def test_turns_are_the_same_for_ever() -> None:
    """A run goes on under another version: these are the turns it began with."""
    assert [Turns((3, 1, 1)).place(number) for number in range(7)] == [
        (0, 0), (0, 1), (1, 0), (0, 2), (2, 0), (0, 3), (0, 4),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ((3.0, 1.0, 1.0), (3, 1, 1)),
        ((0.7, 0.2, 0.1), (7, 2, 1)),
        ((50.0, 25.0, 25.0), (2, 1, 1)),
        ((1e-3, 2e-3), (1, 2)),
        ((1e300, 1e300), (1, 1)),
        ((7.0,), (1,)),
        ((), (1,)),
        ((9999.0, 1.0), (9999, 1)),
    ],
)
def test_whole_weights(weights: tuple[float, ...], whole: tuple[int, ...]) -> None:
    assert whole_weights(weights) == whole


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_weights_that_are_none(wrong: float) -> None:
    with pytest.raises(ValueError, match=f"^weights are 3 {wrong:g}: each a number above 0"):
        whole_weights((3.0, wrong))


def test_weights_with_too_many_digits() -> None:
    """What is offered instead is taken."""
    with pytest.raises(
        ValueError, match=r"^weights are 0\.333333 0\.666667: too many digits, .*: such as 333 667$"
    ):
        whole_weights((0.333333, 0.666667))
    with pytest.raises(ValueError, match=r"such as 1000 1$"):
        whole_weights((10_000.0, 1.0))


# --- batches ---


@st.composite
def mixes(draw: st.DrawFn) -> Batches:
    """Sources of a few documents, in which each token is another: 1, 2, 3, ... Some are shorter than a step,
    or than a sequence."""
    weights, seq = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4)), draw(st.integers(1, 5))
    global_batch, first, sources = draw(st.integers(1, 7)), 1, []
    for _ in weights:
        documents = []
        for length in draw(st.lists(st.integers(0, 6), min_size=1, max_size=15)):
            documents.append(range(first, first + length))
            first += length
        sources.append(part_of(documents))
    return Batches(part_of_sources(sources), seq, global_batch, draw(st.integers()), weights)


def afresh(one: Batches) -> Batches:
    """The same, without anything it may remember."""
    return Batches(one.part, one.seq, one.global_batch, one.seed, one.turns.weights)


def by_source(one: Batches, steps: int) -> list[list[list[int]]]:
    """The first sequences of the run that are of each source, by whose turn it is."""
    rows = [row for step in range(steps) for row in one.sequences(step).tolist()]
    found: list[list[list[int]]] = [[] for _ in one.part.sources]
    for number, row in enumerate(rows):
        found[one.turns.place(number)[0]].append(row)
    return found


@given(mixes())
def test_each_pass_of_a_source_has_each_of_its_tokens_once(one: Batches) -> None:
    """While others have been read more often, or less. At a stretch's end some tokens are one ahead."""
    found = by_source(one, 3 * max(one.steps(1), 2))
    for rows, part in zip(found, one.part.sources, strict=True):
        length, stretch = len(part.tokens), max(1, len(part.tokens) // one.seq)
        ledger, own = Counter[int](), set(part.tokens.tolist())
        for number, row in enumerate(rows, start=1):
            assert set(row) <= own, "tokens of another source"
            ledger.update(row[1:])
            if number % stretch == 0:
                times = {ledger[token] for token in own - {0}}
                assert times <= {number * one.seq // length, -(-number * one.seq // length)}


@given(mixes(), st.integers(0, 30))
def test_whoever_reads_a_step_reads_the_same(one: Batches, step: int) -> None:
    sequences = one.sequences(step)
    assert one.learned(step) == sequences[:, 1:].size
    for world_size in (1, 2, 3, 5):
        each = [afresh(one).for_rank(step, rank, world_size) for rank in range(world_size)]
        assert np.concatenate([inputs for inputs, _ in each]).tolist() == sequences[:, :-1].tolist()
        assert np.concatenate([targets for _, targets in each]).tolist() == sequences[:, 1:].tolist()


@given(mixes(), st.integers(0, 30))
def test_names_are_the_documents_of_the_whole_part(one: Batches, step: int) -> None:
    there = {token for name in one.names(step) for token in one.part.document(name).tolist()}
    assert set(one.sequences(step)[:, 1:].ravel().tolist()) <= there


@given(mixes(), st.floats(0, 5))
def test_epochs_are_those_of_each_source(one: Batches, epochs: float) -> None:
    steps = one.steps(epochs)
    for rows, part, times in zip(by_source(one, steps), one.part.sources, one.epochs(steps), strict=True):
        assert abs(times - len(rows) * one.seq / len(part.tokens)) < one.seq / len(part.tokens)
    assert one.epoch(steps) == min(one.epochs(steps)) >= epochs * (1 - 1e-12)
    assert steps == 1 or one.epoch(steps - 1) < epochs


def test_sources_of_the_same_sizes_have_orders_of_their_own() -> None:
    parts = [part_of([[first + number] for number in range(20)]) for first in (100, 200)]
    rows = by_source(Batches(part_of_sources(parts), 2, 4, 1, (1, 1)), 8)
    one, other = ([[token % 100 for token in row if token] for row in each] for each in rows)
    assert one != other


def test_a_small_source_may_come_more_than_once_in_a_step() -> None:
    """And in a sequence; alone it is read by smaller steps."""
    part = part_of_sources([part_of([range(1, 60)]), part_of([[60, 61]])])
    small = by_source(Batches(part, 5, 8, 1, (3, 1)), 2)[1]
    assert [token for row in small for token in row[1:]] == [60, 61, 0] * 6 + [60, 61]
    assert "holds 3 tokens, but a step reads 2 sequences x 5 " in mistake(
        Batches, part_of([[60, 61]]), 5, 2, 1
    )
    assert "1 weight for text of 2 sources" in mistake(Batches, part, 3, 1, 1)


# --- files ---


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Sources with 40, 30 and 20 documents."""
    for name, count in (("web", 40), ("code", 30), ("notes", 20)):
        for number in range(count):
            write(tmp_path / name / f"{number}.txt", f"{name} {number}" * (1 + number % 3))
    return [str(tmp_path / name) for name in ("web", "code", "notes")]


def made(tmp_path: Path, paths: list[str], weights: tuple[float, ...], **options: Any) -> Prepared:
    source = TextSource(
        tuple(paths), **{"weights": weights, "tokenizer": "bytes", "held_out": 0.1, **options}
    )
    return prepare(source, tmp_path / "run/tokenizer.json", tmp_path / "run/tokens")


def texts(part: Part) -> list[str]:
    return sorted(bytes(part.document(index)[:-1].tolist()).decode() for index in range(part.documents))


def test_sources_are_divided_in_files_and_held_out_alike(tmp_path: Path, folders: list[str]) -> None:
    prepared = made(tmp_path, folders, (3, 1, 1))
    alone = made(tmp_path / "alone", folders, ())
    assert prepared.files == 90 and not alone.tokens.train.divided
    for name in ("train", "validation"):
        part, whole = getattr(prepared.tokens, name), getattr(alone.tokens, name)
        assert [each.source for each in part.sources] == ["web", "code", "notes"]
        assert whole.sources == (whole,)
        for each in part.sources:
            assert texts(each) and all(text.startswith(each.source) for text in texts(each))
            assert each.targets == len(each.tokens) and each.text_bytes == sum(map(len, texts(each)))
        assert texts(part) == sorted(text for each in part.sources for text in texts(each)) == texts(whole)
    again = open_tokens(tmp_path / "run/tokens", verify=True)
    assert [each.documents for each in again.train.sources] == [
        each.documents for each in prepared.tokens.train.sources
    ]


def test_small_sources_hold_out_a_document_each(tmp_path: Path, folders: list[str]) -> None:
    prepared = made(tmp_path, folders, (3, 1, 1), held_out=1e-9)
    assert [each.documents for each in prepared.tokens.validation.sources] == [1, 1, 1]


def test_other_sources_are_other_tokens(tmp_path: Path, folders: list[str]) -> None:
    """Weights are not: runs with other ones share files."""
    first = made(tmp_path, folders, (3, 1, 1)).tokens
    manifest = first.folder / "manifest.json"
    then = manifest.stat().st_mtime_ns
    assert made(tmp_path, folders, (1, 2, 3)).tokens.identity == first.identity
    assert manifest.stat().st_mtime_ns == then
    for paths, weights in ((folders[::-1], (3.0, 1.0, 1.0)), (folders, ()), (folders[:2], (1.0, 1.0))):
        other = made(tmp_path, paths, weights).tokens
        assert other.identity != first.identity
        assert manifest.stat().st_mtime_ns != then
    # They have the names of now.
    made(tmp_path, folders, (3, 1, 1))
    Path(folders[0]).rename(named := f"{folders[0]}-pages")
    folders[0] = named
    assert made(tmp_path, folders, (3, 1, 1)).tokens.train.sources[0].source == "web-pages"
    # The same documents in the same order, but the last of a source is the next one's first.
    moved = Path(folders[0], "9.txt")
    before = made(tmp_path, folders, (3, 1, 1), held_out=0).tokens
    moved.rename(Path(folders[1], "0.0.txt"))
    after = made(tmp_path, folders, (3, 1, 1), held_out=0).tokens
    assert before.train.tokens.tolist() == after.train.tokens.tolist() and before.identity != after.identity


def test_texts_that_are_gone_leave_their_sources(tmp_path: Path, folders: list[str]) -> None:
    before = made(tmp_path, folders, (3, 1, 1)).tokens
    Path(folders[1]).rename(tmp_path / "elsewhere")
    after = made(tmp_path, folders, (3, 1, 1))
    assert after.files == 0 and after.tokens.identity == before.identity
    assert [each.source for each in after.tokens.train.sources] == ["web", "code", "notes"]
    source = TextSource(tuple(folders), weights=(3, 1, 1), tokenizer="bytes", held_out=0.1)
    assert reopen(source, tmp_path / "run/tokenizer.json", tmp_path / "run/tokens").tokens.train.divided


def test_text_for_validation_is_of_no_source(tmp_path: Path, folders: list[str]) -> None:
    apart = str(Path(folders[2], "3.txt"))
    tokens = made(tmp_path, folders, (3, 1, 1), validation=(apart,)).tokens
    assert [each.documents for each in tokens.train.sources] == [40, 30, 19]
    assert not tokens.validation.divided and texts(tokens.validation) == [Path(apart).read_text()]


def test_nothing_held_out(tmp_path: Path, folders: list[str]) -> None:
    tokens = made(tmp_path, folders, (3, 1, 1), held_out=0).tokens
    assert not tokens.validation.documents and [each.documents for each in tokens.train.sources] == [
        40,
        30,
        20,
    ]


def test_a_tokenizer_is_learned_from_all_but_what_is_held_out(tmp_path: Path, folders: list[str]) -> None:
    """As without weights, where the same documents are held out."""
    one, other = (
        made(tmp_path / name, folders, weights, tokenizer="bpe", vocab_size=280).tokenizer.hash
        for name, weights in (("one", (3.0, 1.0, 1.0)), ("other", ()))
    )
    assert one == other


def test_names_are_short_and_differ(tmp_path: Path) -> None:
    for name in ("a/text", "b/text", "my notes", "c"):
        write(tmp_path / name / "one.jsonl", f'{{"text": "{name}"}}\n' * 9)
    said = ("a/text", "b/text/", "my notes", "c/*.jsonl")
    tokens = made(tmp_path, [f"{tmp_path}/{each}" for each in said], (1, 1, 1, 1), held_out=0).tokens
    assert [each.source for each in tokens.train.sources] == ["a/text", "b/text", "my notes", "c/*.jsonl"]


def test_sources_that_cannot_be(tmp_path: Path, folders: list[str]) -> None:
    def refused(paths: list[str], weights: tuple[float, ...], **options: Any) -> str:
        return mistake(made, tmp_path, paths, weights, **options).replace(f"{tmp_path}/", "")

    assert refused(folders, (1, 2)).startswith(
        "--data.weights names 2 weights for 3 names behind --data: one"
    )
    assert refused([], (1,)).startswith("--data.weights names 1 weight for 0 names")
    both = refused([*folders, str(Path(folders[2], "0.txt"))], (1, 1, 1, 1))
    assert both.startswith(
        "notes/0.txt is in both notes and notes/0.txt: with --data.weights a file is of one"
    )
    assert "is in both web and web" in refused([folders[0]] * 2, (1, 1))
    assert "all text is that of --data.validation" in refused(folders, (1, 1, 1), validation=(folders[1],))
    single = str(write(tmp_path / "single.jsonl", '{"text": "one"}\n'))
    assert refused([*folders, single], (1,) * 4).startswith(
        "single.jsonl holds one document, of 3 bytes, and it is held out"
    )
    empty = str(write(tmp_path / "empty.txt", ""))
    assert refused([*folders, empty], (1,) * 4) == "empty.txt: the file is empty: name one that holds text"
    assert not (tmp_path / "run/tokens/manifest.json").exists()
