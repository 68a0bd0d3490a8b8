"""Imports point one way only: the table below gives the order of the folders, and every import is checked.

A room is a module or folder directly in src/imece. Imports inside functions and for type checking count, and
so do importlib.import_module and __import__ with a constant name.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import imece

SRC = Path(__file__).parent.parent / "src"

_BASE = {"errors", "listing", "reading", "saying", "system", "writing"}
_RANKS = _BASE | {
    "layout",
    "buckets",
    "footprint",
    "world",
    "launchers",
    "axes",
    "store",
    "status",
    "device",
    "moments",
    "groups",
    "mesh",
}
_ENGINE = _RANKS | {"collectives", "model_parallel", "data_parallel"}
_TRAIN = _ENGINE | {"data", "models", "checkpoint", "membership", "observe"}

# Room -> what it may import besides itself. A dotted entry allows that one module and what is in it.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "listing": set(),
    "reading": {"errors"},
    "saying": set(),
    "writing": {"errors"},
    "moments": set(),
    "system": {"errors", "listing"},
    "on_import": set(),  # it runs while others are being imported
    "layout": _BASE,
    "buckets": _BASE | {"layout"},
    "footprint": _BASE,
    "world": _BASE,
    "launchers": _BASE | {"world"},
    "axes": _BASE,
    "store": _BASE | {"world", "launchers"},
    "status": _BASE | {"store"},
    "device": _BASE | {"world"},
    "groups": _RANKS - {"groups", "mesh"},
    "mesh": _RANKS,
    "meeting": _RANKS - {"groups", "mesh"},
    "opening": _RANKS | {"meeting"},
    "collectives": _RANKS,
    "model_parallel": _RANKS | {"collectives", "models"},
    "data_parallel": _RANKS
    | {"collectives", "model_parallel", "plan.answer.auto", "plan.setup"},  # for strategy="auto"
    "data": _BASE | {"mesh"},  # of ranks it knows two numbers: arguments, or by default the mesh's
    "models": _BASE,
    "observe": {"reading", "saying", "system", "writing"},
    "checkpoint": _ENGINE,
    "membership": _ENGINE | {"checkpoint", "opening"},
    "train": _TRAIN | {"opening", "plan"},
    # What becomes of another system's settings, and so what of them is refused here.
    "foreign": _BASE
    | {"data_parallel.sharding.cast", "data_parallel.sharding.offload", "data_parallel.strategy"}
    | {"observe.visible", "train.config"},
    # Outside the ranks: never the engine.
    "launch": _BASE | {"world", "launchers", "store", "status", "membership.roster", "membership.where"},
    "plan": _BASE
    | {
        "layout",
        "buckets",
        "footprint",
        "models",
        "observe.pictures",
        "observe.units",
    },  # before the ranks: never the engine
}
# What a person meets, and what measures it: these gather the rest, and no room may import them.
FREE = {"__init__", "__main__", "cli", "bench"}
# What the launcher and the planner start with.
WITHOUT_TORCH = (
    "imece", "imece.cli.main", "imece.cli.options", "imece.cli.launch.launch", "imece.plan", "imece.layout",
    "imece.launchers",
)  # fmt: skip


def violations(src: Path, may_import: dict[str, set[str]]) -> list[str]:
    """One line for each import that `may_import` does not allow. AssertionError if there is no file."""
    files = sorted((src / "imece").rglob("*.py"))
    assert files, f"no Python file below {src / 'imece'}"
    found = []
    for file in files:
        parts = file.relative_to(src).with_suffix("").parts  # ("imece", "collectives", "ops")
        room = parts[1]
        if room in FREE:
            continue
        where = file.relative_to(src)
        if room not in may_import:
            found.append(f"{where}: the room {room} has no line in MAY_IMPORT")
            continue
        allowed = may_import[room] | {room}
        for line, target in imports(ast.parse(file.read_text(), str(file)), parts, src):
            if not any(target == f"imece.{name}" or target.startswith(f"imece.{name}.") for name in allowed):
                found.append(f"{where}:{line}: {room} may not import {target}")
    return found


def imports(tree: ast.Module, parts: tuple[str, ...], src: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import of imece in one file; `parts` are the file's own path in src."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = parts[: len(parts) - node.level] if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            names = [_module_or_member(module, alias.name, src) for alias in node.names]
        elif isinstance(node, ast.Call) and _is_import_call(node.func) and node.args:
            first = node.args[0]
            names = [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "imece")


def _module_or_member(module: str, name: str, src: Path) -> str:
    """`from imece import mesh` imports imece.mesh; `from imece import init` imports imece itself."""
    path = src.joinpath(*module.split("."), name)
    return f"{module}.{name}" if path.is_dir() or path.with_suffix(".py").is_file() else module


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def test_the_order_has_no_circle() -> None:
    done: set[str] = set()
    while left := set(MAY_IMPORT) - done:
        ready = {room for room in left if {n.split(".")[0] for n in MAY_IMPORT[room]} - {room} <= done}
        assert ready, f"each of these may import another of them: {sorted(left)}"
        done |= ready


def test_imports_point_one_way() -> None:
    found = violations(SRC, MAY_IMPORT)
    assert not found, "\n".join(found)


def test_what_starts_at_once_waits_for_no_torch() -> None:
    imports = "".join(f"import {name}\n" for name in WITHOUT_TORCH)
    assert _printed(f"import sys\n{imports}print('torch' in sys.modules)") == "False"


def test_shm_is_known_once_torch_is_imported_by_anybody() -> None:
    code = "import imece, torch\nfrom torch.distributed import Backend\n"
    code += "print('shm' in Backend.backend_list, 'imece' in type(torch.__spec__.loader).__module__)"
    assert _printed(code) == "True False"


def _printed(code: str) -> str:
    """What a Python of its own prints for `code`."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_every_name_that_is_offered_has_a_home() -> None:
    assert sorted(imece.__all__) == dir(imece)
    for name in imece.__all__:
        assert getattr(imece, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'inti'") as caught:
        imece.inti  # type: ignore[attr-defined]  # noqa: B018 # mypy sees it, as a user's does
    assert (caught.value.name, caught.value.obj) == ("inti", imece)  # Python asks "Did you mean: 'init'?"


def test_help_lists_every_name_that_is_offered() -> None:
    assert imece.__doc__ is not None
    words = re.findall(r"\w+", imece.__doc__.partition("the ranks ")[2])
    assert [name for name in imece.__all__ if name not in words] == ["__version__"]


@pytest.mark.parametrize(
    ("file", "line", "expected"),
    [
        ("world.py", "from imece.mesh import Mesh", "world may not import imece.mesh"),
        (
            "mesh.py",
            "def f():\n    import imece.collectives.ops",
            "mesh may not import imece.collectives.ops",
        ),
        ("mesh.py", "from .collectives import ops", "mesh may not import imece.collectives.ops"),
        (
            "collectives/ops.py",
            "from ..data_parallel import shard",
            "collectives may not import imece.data_parallel",
        ),
        ("collectives/ops.py", "from imece import init", "collectives may not import imece"),
        ("collectives/ops.py", "import imece", "collectives may not import imece"),
        ("launch/run.py", "from imece import collectives", "launch may not import imece.collectives"),
        (
            "launch/run.py",
            "import importlib\nimportlib.import_module('imece.mesh')",
            "launch may not import imece.mesh",
        ),
        ("launch/run.py", "from imece.cli.main import main", "launch may not import imece.cli.main"),
        ("plan/memory.py", "from imece.train.loop import run", "plan may not import imece.train.loop"),
        ("attic.py", "x = 1", "the room attic has no line in MAY_IMPORT"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, line: str, expected: str) -> None:
    _plant(tmp_path, file, line)
    found = violations(tmp_path, MAY_IMPORT)
    assert len(found) == 1
    assert found[0].endswith(expected) or expected in found[0]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("mesh.py", "from imece import world\nfrom .errors import UserError\nimport torch, imece.world"),
        (
            "collectives/ops.py",
            "from . import wire\nfrom ..mesh import current\nfrom imece.collectives import wire",
        ),
        ("plan/memory.py", "from imece.observe.units import si"),
        ("cli/main.py", "import imece\nfrom imece.data_parallel import shard"),
        ("__init__.py", "from imece.opening import init"),
    ],
)
def test_what_the_order_allows_is_let_through(tmp_path: Path, file: str, line: str) -> None:
    _plant(tmp_path, file, line)
    assert violations(tmp_path, MAY_IMPORT) == []


@pytest.mark.parametrize(
    "folder",
    [
        "checkpoint", "collectives", "collectives/shared_memory", "data_parallel", "data_parallel/reducing",
        "data_parallel/sharding", "membership", "model_parallel",
    ],
)  # fmt: skip
def test_the_first_page_of_a_folder_names_each_of_its_files(folder: str) -> None:
    page = SRC / "imece" / folder / "__init__.py"
    files = {file.stem for file in page.parent.glob("*.py")} - {"__init__"}
    named = set(re.findall(r"\w+", ast.get_docstring(ast.parse(page.read_text())) or ""))
    assert files and files <= named, f"{folder}/__init__.py does not name {sorted(files - named)}"


def test_an_empty_tree_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no Python file"):
        violations(tmp_path, MAY_IMPORT)


def _plant(src: Path, file: str, text: str) -> None:
    """A small copy of the house's shape, with `text` in one file of it."""
    empty = ["errors", "world", "mesh", "collectives/__init__", "collectives/ops", "collectives/wire"]
    for name in [*empty, "data_parallel/__init__", "data_parallel/shard", "train/config", "train/loop"]:
        path = src / "imece" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    target = src / "imece" / file
    target.parent.mkdir(exist_ok=True)
    target.write_text(text)


_FUNCTIONS = [name for name in imece.__all__ if inspect.isfunction(getattr(imece, name))]


@pytest.mark.parametrize("name", [*_FUNCTIONS, "World"])
def test_help_says_what_every_argument_is(name: str) -> None:
    """Of functions, and of the fields of World; what has a signature of torch's is told of there."""
    told = inspect.getdoc(getattr(imece, name)) or ""
    missing = [
        argument
        for argument in inspect.signature(getattr(imece, name)).parameters
        if not re.search(rf"\b{argument}\b", told)
    ]
    assert missing == []
