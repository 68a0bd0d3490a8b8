"""Reading JSON files that others wrote, or that a killed process may have cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from imece.errors import UserError

Json = dict[str, Any]


def json_object(path: Path, instead: str) -> Json:
    """The JSON object in a file. UserError, with its name, if there is none. instead: what to do if there is
    no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file: {instead}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}): check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}): get the file again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: a JSON {type(content).__name__}, not an object: get the file again")
    return content


def json_if_any(path: Path) -> Json:
    """The same; {} if there is none."""
    try:
        return json_object(path, "")
    except UserError:
        return {}
