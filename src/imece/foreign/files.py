"""Finds out which program a configuration file belongs to, and reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imece.errors import UserError
from imece.foreign import accelerate, deepspeed
from imece.foreign.reading import from_json, text_of
from imece.foreign.settings import Settings
from imece.listing import words_of

_OTHER_FORMAT = "; Accelerate's other format ends in .yaml"


def read_settings(file: str | os.PathLike[str] | Mapping[str, Any], ranks: int | None = None) -> Settings:
    """Translate a configuration of DeepSpeed (JSON) or Accelerate (YAML or JSON) to imece.

        settings = imece.read_settings("ds_config.json", ranks=mesh.world_size)
        model, optimizer = imece.parallelize(model, optimizer, **settings.arguments(model))

    file: its path, or its content. ranks: number of ranks, if the file does not say. `imece convert` shows
    what becomes of each value.

    UserError, with the file's name, if it cannot be read, belongs to neither program, or has wrong values.
    """
    if ranks is not None and (not isinstance(ranks, int) or ranks < 1):
        raise UserError(f"ranks={ranks!r}: a whole number, 1 or more")
    name = "this configuration" if isinstance(file, Mapping) else os.fspath(file)
    content = file if isinstance(file, Mapping) else _content(Path(file))
    if accelerate.is_accelerate(content):
        return accelerate.read(content, name, ranks)
    if deepspeed.is_deepspeed(content):
        return deepspeed.read(content, name, ranks)
    raise UserError(
        f"{name}: neither DeepSpeed's (zero_optimization, train_batch_size, ...) nor Accelerate's "
        "(distributed_type, num_processes, ...)"
    )


def _content(path: Path) -> Mapping[str, Any]:
    text = text_of(path, str(path))
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    content = _yaml(path, text) if is_yaml else from_json(text, str(path), _OTHER_FORMAT)
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"{path}: not a configuration: names and their values are wanted")
    return content


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise UserError(f"{path}: YAML is read by PyYAML: pip install pyyaml") from None

    class EachOnce(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses a mapping that has a key twice, of which YAML would take the last."""

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if twice := [key for key in keys if keys.count(key) > 1]:
                raise UserError(f"{path}: {twice[0]} is there twice: take one out")
            return node

    try:
        return yaml.load(text, EachOnce)
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: not YAML ({words_of(error)})") from None
