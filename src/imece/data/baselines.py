"""The losses that models without training reach, to compare a trained model with."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from imece.data.tokens import Part
from imece.errors import UserError

_CHUNK = 1 << 22  # tokens at a time: sorting their pairs takes some 200 MiB
_MOST_TOKENS = 24 * _CHUNK  # tokens of a part that are counted: rank 0 counts while all others wait

_Counts = npt.NDArray[np.int64]


def baselines(train: Part, validation: Part, vocab_size: int) -> dict[str, float]:
    """Nats per token of the validation part, end tokens included, under three models of the training part. Of
    records only the answers count, in both.

    uniform: all tokens are equally likely.
    unigram: how often a token occurs in training, plus one (Laplace).
    bigram: after token a, which occurs n(a) times in training and is followed by t(a) different tokens, token
    b has the probability (n(a, b) + t(a) * unigram(b)) / (n(a) + t(a)): Witten and Bell's interpolation.

    The token before a document's first is an end token, as in `Batches`. At most 100 million tokens of a part
    are counted, in chunks at equal distances: about a minute for each part, see `counted_in`. Memory grows
    with the number of different pairs, not with vocab_size^2.
    UserError if a part is empty.
    """
    for part in (train, validation):
        if not len(part.tokens):
            raise UserError(f"the {part.title} holds no tokens, so there are no baselines: give more text")
    pairs, times = _count_pairs(train, vocab_size)
    before, tokens = np.divmod(pairs, vocab_size)
    followed = np.bincount(before, times, vocab_size)  # n(a)
    kinds = np.bincount(before, minlength=vocab_size)  # t(a)
    seen = np.bincount(tokens, times, vocab_size)
    unigram = (seen + 1) / (seen.sum() + vocab_size)

    wanted, weights = _count_pairs(validation, vocab_size)
    before, tokens = np.divmod(wanted, vocab_size)
    places = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    joint = np.where(pairs[places] == wanted, times[places], 0)
    total = followed[before] + kinds[before]
    known = total > 0  # a token that never occurs in training says nothing about the next one
    smoothed = (joint + kinds[before] * unigram[tokens]) / np.maximum(total, 1)
    bigram = np.where(known, smoothed, unigram[tokens])
    return {
        "uniform": float(np.log(vocab_size)),
        "unigram": -float(weights @ np.log(unigram[tokens])) / int(weights.sum()),
        "bigram": -float(weights @ np.log(bigram)) / int(weights.sum()),
    }


def counted_in(train: Part, validation: Part) -> str:
    """How many tokens `baselines` counted, in words; empty if it counted all."""
    return " and ".join(
        f"{_MOST_TOKENS / 1e6:,.0f} of {len(part.tokens) / 1e6:,.0f} million {part.name} tokens"
        for part in (train, validation)
        if len(part.tokens) > _MOST_TOKENS
    )


def _pairs(part: Part) -> Iterator[tuple[_Counts, _Counts]]:
    """(previous tokens, tokens) of the part's counted tokens, in chunks; of records only of the answers."""
    chunks = math.ceil(len(part.tokens) / _CHUNK)
    chosen = min(chunks, _MOST_TOKENS // _CHUNK)
    for number in range(chosen):
        first = number * chunks // chosen * _CHUNK
        tokens = part.tokens[first : first + _CHUNK].astype(np.int64)
        before = int(part.tokens[first - 1]) if first else part.end
        pairs = np.concatenate(([before], tokens[:-1])), tokens
        if part.learned is None:
            yield pairs
        else:
            learned = part.learned[first : first + _CHUNK]
            yield pairs[0][learned], pairs[1][learned]


def _count_pairs(part: Part, vocab_size: int) -> tuple[_Counts, _Counts]:
    """The different pairs, sorted, as before * vocab_size + token; and how often each occurs.

    Tables are merged with tables of similar length: merging each into one long table would cost chunks x
    pairs.
    """
    tables: list[tuple[_Counts, _Counts]] = []
    for before, tokens in _pairs(part):
        tables.append(np.unique(before * vocab_size + tokens, return_counts=True))
        while len(tables) > 1 and len(tables[-2][0]) <= 2 * len(tables[-1][0]):
            tables.append(_merged(tables.pop(), tables.pop()))
    while len(tables) > 1:
        tables.append(_merged(tables.pop(), tables.pop()))
    return tables[0]


def _merged(one: tuple[_Counts, _Counts], other: tuple[_Counts, _Counts]) -> tuple[_Counts, _Counts]:
    pairs, times = (np.concatenate(both) for both in zip(one, other, strict=True))
    order = np.argsort(pairs, kind="stable")  # stable: merges the two sorted halves
    pairs = pairs[order]
    first = np.flatnonzero(np.diff(pairs, prepend=-1))
    return pairs[first], np.add.reduceat(times[order], first)
