"""The loss on a part of the data: the same number whoever computes it, one process or many ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from imece.data.batches import Tokens
from imece.data.tokens import Part
from imece.model_parallel.vocabulary import cross_entropy
from imece.train.precision import Precision
from imece.train.sending import sent

IGNORE = -100  # a target that does not count


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
    nats: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[float, int]:
    """(nats, tokens): this rank's share, to be added up over the ranks.

    The part is read in windows of `seq` tokens that do not overlap, `batch` at a time. Each token counts
    once; the one before a document's first is an end token, as in training.
    most_tokens: in so many windows only, at equal distances over the whole part; 0 for all. nats: of (inputs,
    targets), instead of `summed` by this model, which then says no more than where tensors are.

    All ranks make as many forwards, as gathered parameters need: some of them one more that does not count.
    """
    windows = math.ceil(len(part.tokens) / seq)
    chosen = windows_read(part, seq, most_tokens)
    device = next(model.parameters()).device
    # Whole batches are dealt out, so that each product has the same shape whatever the number of ranks.
    nats = nats or partial(summed, model, precision)
    total, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
    was_training = model.training
    model.eval()
    for begin in range(0, chosen, world_size * batch):
        first = begin + rank * batch
        numbers = range(first, min(first + batch, chosen))  # none for the last ranks of the last round
        inputs, targets = _windows(part, seq, [number * windows // chosen for number in numbers])
        total += nats(*(sent(torch.from_numpy(each), device) for each in (inputs, targets)))
        tokens += int((targets != IGNORE).sum())
    model.train(was_training)
    return float(total), tokens


def summed(model: nn.Module, precision: Precision, inputs: Tensor, targets: Tensor) -> Tensor:
    """Nats of those targets (int64 [B, T]) that count, an fp64 scalar."""
    with precision.autocast():
        logits = model(inputs)
    return cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum").double()


def windows_read(part: Part, seq: int, most_tokens: int) -> int:
    """In how many windows `evaluate` reads the part: of the same number it reads the same ones."""
    windows = math.ceil(len(part.tokens) / seq)
    return min(windows, math.ceil(most_tokens / seq)) if most_tokens else windows


def _windows(part: Part, seq: int, numbers: Sequence[int]) -> tuple[Tokens, Tokens]:
    """Inputs and targets, each int64 [windows, seq]; what lies behind the part's end does not count.

    At least one window: of no number it is one in which nothing counts.
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
