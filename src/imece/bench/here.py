"""Measures what the ranks of this machine reach, all at the same time, as in a training step.

It measures products of large matrices, attention, bytes moved, the start of a small kernel, memory, and the
links.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.nn.functional as F

import imece
from imece.collectives.links import measure
from imece.launch.spawn import spawn
from imece.models.cross_entropy import summed_cross_entropy
from imece.models.presets import preset
from imece.models.transformer import Transformer
from imece.observe.environment import cpu_model
from imece.system.control_groups import allowed_bytes
from imece.train.model.precision import choose_precision, multiplies_bf16
from imece.train.prediction import FIRST_STEP_BYTES

_LONG_S = 0.4
_LIMIT_S = 120.0
_SIDE = {"cpu": 512, "cuda": 8192}  # rows of square matrices
_MOVED = {"cpu": 16 * 2**20, "cuda": 1 << 30}  # bytes: more than caches hold
ATTENTION = {
    "cpu": (1, 4, 256, 64),
    "cuda": (8, 16, 4096, 128),
}  # sequences, heads, tokens, channels per head
MODEL = ("small", 2, 256)  # preset, sequences, tokens per sequence


def measure_here(ranks: int) -> dict[str, Any]:
    """Figures of one rank while all `ranks` work: the slowest one's; links are the same on all.

    Rates are operations and bytes per second, times are in seconds. Raises what spawn raises.
    """
    found: list[dict[str, Any]] = spawn(_measure_rank, (), ranks, timeout_s=_LIMIT_S)
    slowest = {
        name: min(each[name] for each in found)
        for name in ("product", "product_fp32", "moved_per_s", "memory_bytes")
    }
    longest = {
        name: max(each[name] for each in found)
        for name in ("attention_forward_s", "attention_backward_s", "model_s", "overhead_bytes")
        if name in found[0]
    }
    return found[0] | slowest | longest


def _measure_rank() -> dict[str, Any]:
    mesh = imece.init()
    device = mesh.device
    dtype = _dtype(device)
    together = _Together(mesh)
    outside = _of_libraries() if device.type == "cpu" else _outside(device)
    side = _SIDE[device.type]
    figures = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model(),
        "kind": device.type,
        "backend": mesh.backend,
        "ranks": mesh.world_size,
        "dtype": str(dtype).removeprefix("torch."),
        "side": side,
        "attention": ATTENTION[device.type],
        "product": 2.0 * side**3 / together.best_s(_product(side, dtype, device)),
        "product_fp32": 2.0 * side**3 / together.best_s(_product(side, torch.float32, device)),
        "moved_per_s": _moved(together, device),
        "overhead_bytes": outside,
        "memory_bytes": _memory(mesh.world_size, device),
        "multiprocessors": (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        ),
    }
    forward_s, both_s = _attention(together, dtype, device)
    figures |= {
        "attention_forward_s": forward_s,
        "attention_backward_s": max(both_s - forward_s, forward_s / 2),
    }
    if device.type == "cpu":
        figures |= {"model": MODEL, "model_s": _model(together, dtype)}
    if mesh.world_size > 1:
        links = measure(mesh.world_group, mesh.hosts, device)
        native = links.native["all_reduce"]
        figures |= {"all_reduce_fixed_s": native.fixed_s, "all_reduce_s_per_byte": native.s_per_byte}
    return figures


def _dtype(device: torch.device) -> torch.dtype:
    """The dtype of the hardware's fastest products."""
    if device.type == "cuda" and not multiplies_bf16(device):
        return torch.float16
    return choose_precision("auto", device).dtype


class _Together:
    """Times something on all ranks at once."""

    def __init__(self, mesh: imece.Mesh) -> None:
        self._mesh = mesh

    def best_s(self, run: Callable[[], object]) -> float:
        """The shortest of the runs that fit into some time, in which all ranks do the same.

        Other programs are no property of the machine: some short runs are undisturbed, and a rank with one
        thread counts only its own time.
        """
        cuda = self._mesh.device.type == "cuda"
        alone = not cuda and torch.get_num_threads() == 1
        clock = time.process_time if alone else time.perf_counter
        took: list[float] = []
        for least_s in (0.0, _LONG_S):  # the first round is a warm-up
            imece.barrier(group=self._mesh.world_group)
            until = time.perf_counter() + least_s
            took.clear()
            while not took or time.perf_counter() < until:
                began = clock()
                run()
                if cuda:
                    torch.cuda.synchronize(self._mesh.device)
                took.append(clock() - began)
        return min(took)


def _product(side: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return lambda: left @ right


def _moved(together: _Together, device: torch.device) -> float:
    """Bytes read and written per second."""
    size = _MOVED[device.type]
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / together.best_s(lambda: target.copy_(source))


def _attention(together: _Together, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Seconds of causal attention: (forward, forward and backward)."""
    shape = ATTENTION[device.type]
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    direction = torch.randn(shape, device=device, dtype=dtype)

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def both() -> None:
        forward().backward(direction)

    with torch.no_grad():
        forward_s = together.best_s(forward)
    return forward_s, together.best_s(both)


def _model(together: _Together, dtype: torch.dtype) -> float:
    """Seconds of a small model's forward and backward."""
    name, batch, seq = MODEL
    shape = preset(name)
    model = Transformer(shape, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(shape.vocab_size, (2, batch, seq), generator=torch.Generator().manual_seed(1))

    def run() -> None:
        model.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = model(tokens[0])
            loss = summed_cross_entropy(logits.flatten(0, 1), tokens[1].flatten(), ignore=-1)
        loss.backward()

    return together.best_s(run)


def _memory(ranks: int, device: torch.device) -> int:
    """Bytes that a rank can have."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return allowed_bytes() // ranks


def _of_libraries() -> int:
    """Bytes that a CPU rank's process has besides its tensors while it trains, if it has none yet."""
    torch.optim.SGD([torch.zeros(1, device="cpu")])  # imports what every optimizer does: 75 MB
    return int(psutil.Process().memory_info().rss) + FIRST_STEP_BYTES


def _outside(device: torch.device) -> int:
    """Bytes of a GPU taken by the context, libraries and other programs."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))
