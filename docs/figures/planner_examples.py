"""Writes the examples of docs/planner.md as the command prints them: python planner_examples.py [--pictures]

A block begins with `<!-- imece plan ... -->` and ends with `<!-- end -->`; what is between is written anew.
With --pictures the pictures in docs/images are drawn too.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

from imece.cli.main import main

DOCS = Path(__file__).parent.parent
PAGE = DOCS / "planner.md"
BLOCK = re.compile(r"<!-- imece (plan .*?) -->\n.*?<!-- end -->", re.DOTALL)
PICTURES = (
    ("planner.png", "70B --gpus 8xH100 --hosts 8 --global-batch 1024"),
    ("planner_scale.png", "70B --gpus 8xH100 --hosts 8 --global-batch 2048 --scale strong"),
)


def printed(command: str) -> str:
    """What `imece COMMAND` prints, and its exit status if that is not 0."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(shlex.split(command))
    return out.getvalue() + (f"\n(exit status {status})\n" if status else "")


def renewed(page: str) -> str:
    """The page with all blocks written anew."""

    def block(found: re.Match[str]) -> str:
        lines = [f"    imece {found[1]}", "", *printed(found[1]).rstrip().splitlines()]
        shown = "\n".join(line if line.startswith("    imece") else f"    {line}".rstrip() for line in lines)
        return f"<!-- imece {found[1]} -->\n\n{shown}\n\n<!-- end -->"

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    if "--pictures" in sys.argv:
        for name, words in PICTURES:
            printed(f"plan {words} --plot {DOCS / 'images' / name}")
