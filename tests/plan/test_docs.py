"""docs/planner.md shows what the command prints now: `python docs/figures/planner_examples.py` updates it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = DOCS / "planner.md"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    found = importlib.util.spec_from_file_location(
        "planner_examples", DOCS / "figures" / "planner_examples.py"
    )
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["planner_examples"] = module
    found.loader.exec_module(module)
    return module


def blocks(page: str) -> dict[str, str]:
    return {
        found[1]: found[0]
        for found in re.finditer(r"<!-- imece (plan .*?) -->.*?<!-- end -->", page, re.DOTALL)
    }


EXAMPLES = blocks(PAGE.read_text(encoding="utf-8"))
LONG = ("plan 405B", "plan 70B --gpus 8xH100 --hosts 8 --global-batch 2048 --scale")  # most ways, most GPUs


@pytest.mark.parametrize(
    "command",
    [pytest.param(each, marks=[pytest.mark.slow] * each.startswith(LONG)) for each in EXAMPLES],
)
def test_an_example_is_what_is_printed_now(script: ModuleType, command: str) -> None:
    here = EXAMPLES[command]
    assert script.renewed(here) == here, f"imece {command}: run python docs/figures/planner_examples.py"


def test_every_question_has_its_example() -> None:
    assert len(EXAMPLES) >= 7
    for words in (
        "7B --gpus 4xA100-80", "13B --gpus 8xA100-40", "70B --gpus 8xH100 --global",
        "70B --gpus 8xH100 --hosts 8", "405B --gpus 1024xH100", "7B --gpus 1xA100-40",
    ):  # fmt: skip
        assert any(words in command for command in EXAMPLES), words


def test_an_old_example_is_seen(script: ModuleType) -> None:
    old = "<!-- imece plan 7B --gpus 8xH100 --top 1 -->\n\n    imece plan\n\n    ZeRO-9\n\n<!-- end -->"
    renewed = script.renewed(old)
    assert "ZeRO-9" not in renewed and "tokens/s" in renewed
    assert script.renewed(renewed) == renewed
    failing = "<!-- imece plan 70B --gpus 8xH100 --global-batch 128 -->\n<!-- end -->"
    assert "(exit status 2)" in script.renewed(failing)
