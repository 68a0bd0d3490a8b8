"""The loss on a part of the data: the same number for one process and for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from imece.data.batches import IGNORE, Tokens, inputs_and_targets
from imece.data.begins import begins_of
from imece.data.tokens import Part
from imece.data.whole_windows import WholeWindows
from imece.models.cross_entropy import cross_entropy
from imece.train.model.precision import Precision
from imece.train.sending import sent

Nats = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Nats of the targets that count, an fp64 scalar, from inputs, targets and begins, as Transformer has it."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    part: Part,
    seq: int,
    batch: int,
    precision: Precision,
    *,
    rank: int = 0,
    world_size: int = 1,
    most_tokens: int = 0,
    nats: Nats | None = None,
    separate: bool = False,
) -> tuple[float, int]:
    """(nats, tokens): this rank's share, to be summed over the ranks.

    The part is read in windows of `seq` tokens that do not overlap, `batch` at a time; of records, in windows
    that hold them whole, and only answers count. Each token counts once; the token before a text's first is
    an end token, as in training.
    most_tokens: reads windows of only this many tokens, at equal distances over the part; 0: all. nats:
    replaces `summed`; the model then only tells the device. separate: whether attention stays within a
    document.

    All ranks make equally many forwards, because gathered parameters need that: some make an extra one that
    does not count.
    """
    whole = WholeWindows(part, seq) if part.learned is not None else None
    windows = _windows_of(part, seq, whole)
    chosen = _chosen(windows, seq, most_tokens)
    device = next(model.parameters()).device
    # Ranks take whole batches, so that products have the same shape for any number of ranks.
    nats = nats or partial(summed, model, precision)
    total, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
    was_training = model.training
    model.eval()
    for begin in range(0, chosen, world_size * batch):
        first = begin + rank * batch
        numbers = range(first, min(first + batch, chosen))  # empty for the last ranks in the last round
        read = [number * windows // chosen for number in numbers]
        inputs, targets = _windows(part, seq, read) if whole is None else _whole_windows(whole, read)
        part.check(inputs)
        begins = None
        if separate:
            array = _begins(part, seq, read) if whole is None else whole.begins(read or [0])
            begins = sent(torch.from_numpy(array), device)
        read_in, wanted = (sent(torch.from_numpy(each), device) for each in (inputs, targets))
        total += nats(read_in, wanted, begins)
        tokens += int((targets != IGNORE).sum())
    model.train(was_training)
    return float(total), tokens


def summed(
    model: nn.Module, precision: Precision, inputs: Tensor, targets: Tensor, begins: Tensor | None
) -> Tensor:
    """`Nats` of a model (each int64 [B, T])."""
    with precision.autocast():
        logits = model(inputs, begins=begins)
    return cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum").double()


def windows_read(part: Part, seq: int, most_tokens: int) -> int:
    """Number of windows in which `evaluate` reads a part's sources; equal numbers mean the same windows."""
    count = 0
    for each in part.sources:
        whole = WholeWindows(each, seq) if each.learned is not None else None
        count += _chosen(_windows_of(each, seq, whole), seq, of_each(part, most_tokens))
    return count


def of_each(part: Part, most_tokens: int) -> int:
    """`most_tokens` that are to be read of a part, for each of its sources."""
    return math.ceil(most_tokens / len(part.sources))


def of_all(part: Part, losses: Sequence[float]) -> float:
    """The loss of all tokens of a part that are learned, from those of its sources."""
    shares = [each.targets / part.targets for each in part.sources]
    return sum(share * loss for share, loss in zip(shares, losses, strict=True))


def _windows_of(part: Part, seq: int, whole: WholeWindows | None) -> int:
    return math.ceil(len(part.tokens) / seq) if whole is None else len(whole)


def _chosen(windows: int, seq: int, most_tokens: int) -> int:
    return min(windows, math.ceil(most_tokens / seq)) if most_tokens else windows


def mean_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats per target that counts (int64 [...]); 0 if none does."""
    nats = cross_entropy(logits, targets, IGNORE, "sum")
    return nats / (targets != IGNORE).sum().clamp(min=1)


def _windows(part: Part, seq: int, numbers: Sequence[int]) -> tuple[Tokens, Tokens]:
    """Inputs and targets, each int64 [windows, seq]; targets behind the part's end are IGNORE.

    At least one window: without numbers, one in which nothing counts.
    """
    inputs = np.full((max(1, len(numbers)), seq), part.end, np.int64)
    targets = np.full_like(inputs, IGNORE)
    for row, number in enumerate(numbers):
        tokens = part.tokens[number * seq : (number + 1) * seq]
        targets[row, : len(tokens)] = tokens
        inputs[row, 1 : len(tokens)] = tokens[:-1]
        if number:
            inputs[row, 0] = part.tokens[number * seq - 1]
    return inputs, targets


def _begins(part: Part, seq: int, numbers: Sequence[int]) -> Tokens:
    """The begins of the inputs of `_windows`."""
    begins = np.zeros((max(1, len(numbers)), seq), np.int64)
    starts = part.offsets - part.read_before + 1  # in the inputs of the whole part, which an end token begins
    for row, number in zip(begins, numbers, strict=False):
        first = number * seq
        low, high = np.searchsorted(starts, [first, first + seq])
        row[:] = begins_of(starts[low:high] - first, seq)
    return begins


def _whole_windows(whole: WholeWindows, numbers: Sequence[int]) -> tuple[Tokens, Tokens]:
    """The same of windows of records."""
    inputs, targets = inputs_and_targets(*whole.read(numbers or [0]))
    return inputs, targets if numbers else np.full_like(targets, IGNORE)
