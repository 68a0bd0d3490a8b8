"""`imece plan --check RUN`: compares what was predicted of a run with what was measured."""

from __future__ import annotations

import json
from pathlib import Path

from imece.plan.check import check_json, check_lines, read_plan


def check_run(run: Path, as_json: bool) -> int:
    """Exit status 0. UserError if the run has no prediction."""
    content = read_plan(run)
    if as_json:
        print(json.dumps(check_json(content), indent=1))
    else:
        predicted = content["predicted"]
        hardware = predicted.get("hardware") or "hardware that is not measured"
        print(f"{run}: {predicted.get('plan', '')} on {hardware}\n")
        print("\n".join(check_lines(content)))
    return 0
