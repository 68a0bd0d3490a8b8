"""What imece itself says, among the lines of the programs that it runs."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Print it on stderr: stdout is for results."""
    print(f"imece: {line}", file=sys.stderr, flush=True)
