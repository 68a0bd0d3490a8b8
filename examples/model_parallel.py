"""Trains a small decoder on bytes of text, with its ranks arranged as one option says.

    python model_parallel.py                                                          # one rank
    imece launch --ranks 2 model_parallel.py --mesh tensor=2                          # matrices divided
    imece launch --ranks 4 model_parallel.py --mesh pipeline=2,replicate=2            # layers, two copies
    imece launch --ranks 8 model_parallel.py --mesh pipeline=2,replicate=2,tensor=2   # both
    imece launch --ranks 4 model_parallel.py --mesh replicate=2,context=2             # sequences

The losses are the same each time, up to rounding.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

import imece
from imece.errors import UserError
from imece.models.shape import TransformerConfig
from imece.models.transformer import Transformer

SEQ = 128  # bytes per sequence
SHAPE = TransformerConfig(256, layers=4, width=64, heads=4, kv_heads=2, mlp_width=128, max_seq=SEQ)
Step = Callable[[Tensor, Tensor], Tensor]


def axes_of(text: str) -> dict[str, int] | None:
    """pipeline=2,tensor=2 -> {"pipeline": 2, "tensor": 2}; nothing -> None: all ranks are replicas."""
    try:
        return {
            name: int(size) for name, size in (each.split("=") for each in text.split(",") if each)
        } or None
    except ValueError:
        raise UserError(f"--mesh {text}: name axes and their sizes, as pipeline=2,tensor=2") from None


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)


def prepared(
    mesh: imece.Mesh, model: Transformer, args: argparse.Namespace
) -> tuple[Step, torch.optim.Optimizer]:
    """(function for forward and backward of this rank's share of a batch, which returns its mean loss;
    optimizer)."""
    model = imece.tensor_parallel(model, mesh, sequence=True)
    if mesh.size("pipeline") > 1:
        pipeline = imece.Pipeline(model, mesh, micro_batches=4, loss=imece.cross_entropy)
        _, optimizer = imece.parallelize(pipeline.part, adamw, args.strategy, mesh)
        return pipeline.step, optimizer

    context = imece.ContextParallel(mesh)
    wrapped, optimizer = imece.parallelize(model, adamw, args.strategy, mesh)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        inputs, targets, positions = context.part(inputs), context.part(targets), context.positions(SEQ)
        with context:
            loss = imece.cross_entropy(wrapped(inputs, positions=positions), targets)
            loss.backward()
        return loss.detach()

    return step, optimizer


def train(args: argparse.Namespace) -> None:
    mesh = imece.init(axes_of(args.mesh))
    if args.batch < 1 or args.batch % mesh.batch_ranks:
        raise UserError(
            f"--batch {args.batch}: a multiple of {mesh.batch_ranks}, the ranks that read their own"
        )
    text = torch.tensor(list(Path(args.text).read_bytes()), device=mesh.device)
    if len(text) < 2 * SEQ:
        raise UserError(f"--text {args.text} has {len(text)} bytes: at least {2 * SEQ}")
    model = Transformer(SHAPE, generator=torch.Generator().manual_seed(0)).to(mesh.device)
    step, optimizer = prepared(mesh, model, args)
    draws = torch.Generator().manual_seed(1)
    for number in range(1, args.steps + 1):
        starts = torch.randint(len(text) - SEQ - 1, (args.batch,), generator=draws).tolist()
        rows = torch.stack([text[start : start + SEQ + 1] for start in starts])
        mine = rows.chunk(mesh.batch_ranks)[mesh.batch_rank]
        loss = step(mine[:, :-1], mine[:, 1:])
        optimizer.step()
        optimizer.zero_grad()
        mean = imece.all_reduce(loss.float(), "avg", group=mesh.data_group)
        if mesh.rank == 0 and (number % 10 == 0 or number == args.steps):
            print(f"step {number}: loss {mean.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", default="", help="axes and sizes; by default all ranks are replicas")
    parser.add_argument(
        "--strategy", default="zero1", help="over the data axes: replicate, zero1, zero2, zero3"
    )
    parser.add_argument("--text", default=os.__file__, help="a file of at least a few thousand bytes")
    parser.add_argument("--batch", type=int, default=16, help="sequences of all ranks together")
    parser.add_argument("--steps", type=int, default=50)
    try:
        train(parser.parse_args())
    except (UserError, ValueError, OSError) as error:
        print(f"model_parallel.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
