"""The loss on a part of the data: the same number whoever computes it, one process or many ranks."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from imece.data.tokens import Part
from imece.models.transformer import token_loss
from imece.train.precision import Precision

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
) -> tuple[float, int]:
    """(nats, tokens): this rank's share, to be added up over the ranks.

    The part is read once from its beginning, in windows of `seq` tokens that do not overlap, `batch` at a
    time. Each token counts once; the one before a document's first is an end token, as in training.
    most_tokens: of the beginning only; 0 for all.
    """
    length = min(len(part.tokens), most_tokens or len(part.tokens))
    windows = math.ceil(length / seq)
    device = next(model.parameters()).device
    # Whole batches are dealt out, so that each product has the same shape whatever the number of ranks.
    nats, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
    was_training = model.training
    model.eval()
    for first in range(rank * batch, windows, world_size * batch):
        inputs, targets = _windows(part, seq, first, min(first + batch, windows), length)
        with precision.autocast():
            logits = model(torch.from_numpy(inputs).to(device))
        nats += token_loss(
            logits, torch.from_numpy(targets).to(device), ignore=IGNORE, reduction="sum"
        ).double()
        tokens += int((targets != IGNORE).sum())
    model.train(was_training)
    return float(nats), tokens


def _windows(part: Part, seq: int, first: int, last: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, each int64 [last - first, seq]; what lies behind `length` does not count."""
    begin, end = first * seq, min(last * seq, length)
    stream = np.full((last - first) * seq + 1, part.end, np.int64)
    if begin:
        stream[0] = part.tokens[begin - 1]
    stream[1 : 1 + end - begin] = part.tokens[begin:end]
    targets = stream[1:].copy()
    targets[end - begin :] = IGNORE
    return stream[:-1].reshape(-1, seq).copy(), targets.reshape(-1, seq)
