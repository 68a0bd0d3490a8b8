"""Trains a small decoder to predict the next byte of text on your disk, by default of Python's own library.

It runs as one process, or on as many ranks as a launcher (torchrun and srun too) starts, with the same
result:

    python train_text.py --batch 32
    imece launch --ranks 2 train_text.py --batch 16
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import imece
from imece.errors import UserError

LENGTH = 128  # bytes that the decoder sees at most
HELD_OUT = 256  # pieces at the end of the text, never trained on
PADDING = -100  # a target that cross_entropy ignores
Batch = tuple[Tensor, Tensor]  # inputs and targets, int64[pieces, longest piece]


class Decoder(nn.Module):
    """A transformer over bytes."""

    def __init__(self, heads: int, layers: int) -> None:
        super().__init__()
        width = 32 * heads
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs: int64[pieces, length]; logits of each next byte: [pieces, length, 256]."""
        length = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=inputs.device)
        hidden = self.bytes(inputs) + self.places.weight[:length]
        for block in self.blocks:
            hidden = block(hidden, mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def cut(text: bytes) -> list[bytes]:
    """Cut into pieces of 2 to LENGTH + 1 bytes, at line ends where possible, so of different lengths."""
    pieces, start = [], 0
    while start < len(text):
        stop = text.rfind(b"\n", start + 1, start + LENGTH + 1) + 1 or start + LENGTH + 1
        pieces.append(text[start:stop])
        start = stop
    return [piece for piece in pieces if len(piece) > 1]


def collate(pieces: Sequence[bytes]) -> Batch:
    rows = [torch.tensor(list(piece)) for piece in pieces]
    inputs = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
    targets = nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=PADDING)
    return inputs, targets


def loss_of(model: nn.Module, batch: Batch, device: torch.device) -> tuple[Tensor, int]:
    """The mean loss per byte, in nats, and the number of bytes."""
    inputs, targets = batch
    logits = model(inputs.to(device))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten().to(device))
    return loss, int((targets != PADDING).sum())


def evaluate(model: nn.Module, pieces: Sequence[bytes], mesh: imece.Mesh) -> float:
    """The mean loss per byte of these pieces, which the ranks divide among themselves."""
    mine = pieces[mesh.rank :: mesh.world_size]
    sums = torch.zeros(2, dtype=torch.float64)  # losses, bytes
    with torch.no_grad():
        for start in range(0, len(mine), 32):
            loss, count = loss_of(model, collate(mine[start : start + 32]), mesh.device)
            sums += torch.tensor([loss.item() * count, count])
    total, count = imece.all_reduce(sums.to(mesh.device)).tolist()
    return float(total / count)


def train(args: argparse.Namespace, training: Sequence[bytes], held_out: Sequence[bytes]) -> None:
    mesh = imece.init()
    global_batch = mesh.world_size * args.batch * args.accumulate
    if len(training) < global_batch:
        raise UserError(
            f"--text {args.text}: a step takes {global_batch} pieces, and besides the {HELD_OUT} held out "
            f"there are {len(training)}"
        )
    say = print if mesh.rank == 0 else lambda _: None
    say(f"{mesh.device.type}, {mesh.backend}; {len(training):,} pieces of text; a step takes {global_batch} "
        f"= {mesh.world_size} ranks x {args.batch} x {args.accumulate} micro-batches")  # fmt: skip

    torch.manual_seed(0)
    decoder = Decoder(args.heads, args.layers).to(mesh.device)
    model = imece.DistributedDataParallel(decoder, average="tokens")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = imece.DistributedSampler(training, drop_last=True)
    dataset = cast("Dataset[bytes]", training)
    loader = DataLoader(dataset, args.batch, sampler=sampler, collate_fn=collate, drop_last=True)
    batches: Iterator[Batch] = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch

    for step in range(1, args.steps + 1):
        for micro_batch in range(args.accumulate):
            last = micro_batch == args.accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss, count = loss_of(model, next(batches), mesh.device)
                model.weigh(loss, count).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, args.steps // 5) == 0:
            held = evaluate(decoder, held_out, mesh)
            say(f"step {step:>5}  held out {held:.4f} nats a byte = {held / math.log(2):.3f} bits")

    model.check_parameters()  # all ranks hold the same bits, or an error names those that do not
    if mesh.rank == 0:
        part = args.out.with_name(args.out.name + ".part")
        save_file(decoder.state_dict(), part)
        os.replace(part, args.out)
        say(f"saved {args.out}")


def read(path: Path) -> bytes:
    """A file, or all .py, .txt and .md files of a folder in the order of their names."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return b"".join(f.read_bytes() for f in files if f == path or f.suffix in (".py", ".txt", ".md"))


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def arguments() -> argparse.Namespace:
    library = Path(sysconfig.get_paths()["stdlib"])
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=library, help=f"a file or a folder ({library})")
    parser.add_argument("--out", type=Path, default=Path("runs/train_text.safetensors"), help="where to save")
    for name, default, meaning in (
        ("steps", 200, "updates of the parameters"),
        ("batch", 16, "pieces of text of one rank in one micro-batch"),
        ("accumulate", 1, "micro-batches of one step"),
        ("heads", 4, "of each layer, 32 wide"),
        ("layers", 4, "of the decoder"),
    ):
        parser.add_argument(f"--{name}", type=whole, default=default, help=f"{meaning} ({default})")
    return parser.parse_args()


def main() -> None:
    try:
        args = arguments()
        if args.out.is_dir():
            raise UserError(f"--out {args.out} is a folder")
        args.out.parent.mkdir(parents=True, exist_ok=True)
        pieces = cut(read(args.text))
        train(args, pieces[:-HELD_OUT], pieces[-HELD_OUT:])
    except (UserError, OSError) as mistake:
        print(f"train_text: {mistake}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
