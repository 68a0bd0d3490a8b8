"""Model FLOP utilisation: how much of the machine's peak rate a step uses."""

from __future__ import annotations

import functools
import statistics
import time

import torch

from imece.models.language_model import LanguageConfig

_SIZE = {"cpu": 1024, "cuda": 8192}  # rows of the square matrices: large enough for the highest rate
_ROUNDS = 5


def flops_per_token(config: LanguageConfig, seq: int | None = None, *, frozen: bool = False) -> float:
    """Floating-point operations of forward and backward for one token, without recomputation.

    6 for each parameter that is multiplied with (2 forward, 4 backward; the embedding only looks up, and a
    token goes through a few of a mixture's experts), and 12 * layers * width of the heads * context for
    attention, of which only the causal half counts (in Chowdhery et al. 2022, appendix B, all of it), within
    windows where layers have them. seq: tokens of a sequence, if less than the model's context. frozen:
    parameters have no gradients, so 4 for each; adapters beside them are not counted.
    """
    tables = 1 if config.tied_head else 2
    looked_up = (tables - 1) * config.vocab_size * config.width  # a tied table is multiplied with, too
    multiplied = config.active_count - looked_up
    seq = seq or config.max_seq
    windows = (min(config.window_of(layer) or seq, seq) for layer in range(config.layers))
    seen = sum(window * (2 - window / seq) for window in windows)  # twice what a token attends to on average
    return (4.0 if frozen else 6.0) * multiplied + 6.0 * config.q_width * seen


@functools.cache
@torch.no_grad()
def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of this rank in products of large matrices: the median of a few."""
    size = _SIZE[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(1 + _ROUNDS):
        began = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    if device.type == "cuda":  # earlier work must not count
        del left, right
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return 2.0 * size**3 / statistics.median(seconds[1:])  # the first one includes set-up
