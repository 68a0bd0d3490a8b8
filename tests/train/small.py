"""The smallest possible run: options and a text for it."""

from __future__ import annotations

import random
from pathlib import Path

# 5,000 parameters; a step of it takes two milliseconds. In fp32: these are tests of arithmetic.
OPTIONS = (
    "--model=tiny", "--model.layers=1", "--model.width=16", "--model.heads=2", "--model.kv-heads=1",
    "--model.mlp-width=24", "--model.max-seq=16", "--data.tokenizer=bytes", "--data.held-out=0.1",
    "--batch.sequences=12", "--optimizer.warmup=4", "--compute.dtype=fp32",
)  # fmt: skip


def write_text(path: Path, documents: int = 40, seed: int = 0) -> Path:
    """A .jsonl of that many documents, some 60 bytes each, all different."""
    draw = random.Random(seed)
    words = ["one", "village", "does", "a", "job", "together", "and", "goes", "home"]
    lines = [f'{{"text": "{n}: {" ".join(draw.choices(words, k=12))}"}}' for n in range(documents)]
    path.write_text("\n".join(lines) + "\n")
    return path


def options(tmp_path: Path, run: str = "run", *more: str) -> list[str]:
    """For `imece train`, with the run folder tmp_path/run and a text beside it, unless `more` names texts."""
    text = tmp_path / "text.jsonl"
    if not text.exists():
        write_text(text)
    own = [] if any(word.split("=")[0] == "--data" for word in more) else [f"--data={text}"]
    return [*OPTIONS, *own, f"--run={tmp_path / run}", *more]
