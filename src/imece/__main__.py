"""`python -m imece` is the command `imece`."""

from __future__ import annotations

import sys

from imece.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
