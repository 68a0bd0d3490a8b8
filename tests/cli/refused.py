"""A command that is refused: one line, and exit status 2."""

from __future__ import annotations

import pytest

from imece.cli.main import main


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Runs `imece ARGV`, which must be refused: the one line that it prints, on standard error alone."""
    capsys.readouterr()
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("imece: ") and err.count("\n") == 1 and err.endswith("\n"), (out, err)
    return err
