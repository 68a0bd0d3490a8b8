"""What a model without any training would reach: the losses to compare a trained one with."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from imece.data.tokens import Part
from imece.errors import UserError

_CHUNK = 1 << 22  # tokens at once: so many pairs are sorted in some 200 MiB

_Counts = npt.NDArray[np.int64]


def baselines(train: Part, validation: Part, vocab_size: int) -> dict[str, float]:
    """Nats a token of the validation part, end tokens included, under three models of the training part.

    uniform: all tokens alike.
    unigram: how often a token comes in training, plus one (Laplace).
    bigram: after token a, with n(a) tokens and t(a) different ones seen behind it in training, the token b
        has the probability (n(a, b) + t(a) * unigram(b)) / (n(a) + t(a)): Witten and Bell's interpolation.

    The token before a document's first is an end token, as in `Batches`. Memory grows with the number of
    different pairs, not with vocab_size^2; ten million tokens take about a second.
    UserError if one part is empty.
    """
    for part in (train, validation):
        if not len(part.tokens):
            raise UserError(
                f"the {part.name} part holds no tokens, so there are no baselines: give more text"
            )
    seen = np.zeros(vocab_size, np.int64)
    for _, tokens in _pairs(train):
        seen += np.bincount(tokens, minlength=vocab_size)
    unigram = (seen + 1) / (seen.sum() + vocab_size)

    pairs, times = _count_pairs(train, vocab_size)
    kinds = np.bincount(pairs // vocab_size, minlength=vocab_size)  # t(a)
    # n(a) is `seen`: each document begins after an end token and ends with one, so every token is followed.
    unigram_nats = bigram_nats = 0.0
    for before, tokens in _pairs(validation):
        unigram_nats -= float(np.log(unigram[tokens]).sum())
        wanted = before * vocab_size + tokens
        places = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
        joint = np.where(pairs[places] == wanted, times[places], 0)
        total = seen[before] + kinds[before]
        known = total > 0  # what never came in training says nothing about what follows
        smoothed = (joint + kinds[before] * unigram[tokens]) / np.maximum(total, 1)
        bigram_nats -= float(np.log(np.where(known, smoothed, unigram[tokens])).sum())
    return {
        "uniform": float(np.log(vocab_size)),
        "unigram": unigram_nats / len(validation.tokens),
        "bigram": bigram_nats / len(validation.tokens),
    }


def _pairs(part: Part) -> Iterator[tuple[_Counts, _Counts]]:
    """(the token before, the token) for all tokens of the part, in chunks."""
    before = part.end
    for first in range(0, len(part.tokens), _CHUNK):
        tokens = part.tokens[first : first + _CHUNK].astype(np.int64)
        yield np.concatenate(([before], tokens[:-1])), tokens
        before = int(tokens[-1])


def _count_pairs(part: Part, vocab_size: int) -> tuple[_Counts, _Counts]:
    """The different pairs, sorted, as before * vocab_size + token; and how often each comes."""
    pairs, times = np.empty(0, np.int64), np.empty(0, np.int64)
    for before, tokens in _pairs(part):
        some, some_times = np.unique(before * vocab_size + tokens, return_counts=True)
        places = np.asarray(np.searchsorted(pairs, some))
        known = np.isin(some, pairs, assume_unique=True)
        times[places[known]] += some_times[known]
        pairs = np.insert(pairs, places[~known], some[~known])
        times = np.insert(times, places[~known], some_times[~known])
    return pairs, times
