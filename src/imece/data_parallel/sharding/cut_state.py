"""Cuts an optimizer's state for whole parameters down to the state for one rank's parts.

groups: for each of the optimizer's groups, the parameters that the program gave it before parts
replaced them.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, repeat
from typing import Any

import torch
from torch.optim import Optimizer

from imece.data_parallel.shard import Sharding
from imece.data_parallel.sharding.parts import Part

Groups = Sequence[Mapping[str, list[Any]]]


def whose(optimizer: Optimizer, sharding: Sharding) -> dict[str, Any]:
    """Which rank's parts a state dict is of; kept within it. "parts": a digest of which elements they are."""
    by_parameter = {id(part.parameter): part for part in sharding.parts}
    elements = [
        [(part.index, part.shape, part.start, part.stop)
         for each in group["params"] if (part := by_parameter.get(id(each))) is not None]
        for group in optimizer.param_groups
    ]  # fmt: skip
    digest = hashlib.sha256(repr(elements).encode()).hexdigest()
    return {"rank": sharding.rank, "size": sharding.size, "parts": digest}


def is_of_whole(
    state_dict: dict[str, Any], optimizer: Optimizer, groups: Groups, parts: Iterable[Part]
) -> bool:
    """Whether a state dict without that note looks like one for whole parameters."""
    given = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in given]
    if sizes != [len(whole["params"]) for whole in groups]:
        return False
    if sizes != [len(group["params"]) for group in optimizer.param_groups]:
        return True
    by_parameter = {id(part.parameter): part for part in parts}
    return any(
        isinstance(value, torch.Tensor) and value.shape == part.shape != part.parameter.shape
        for group, mine in zip(given, optimizer.param_groups, strict=True)
        for key, each in zip(group["params"], mine["params"], strict=True)
        if (part := by_parameter.get(id(each))) is not None
        for value in state_dict["state"].get(key, {}).values()
    )


def cut_state(state_dict: dict[str, Any], groups: Groups, sharding: Sharding) -> dict[str, Any]:
    """The state of whole parameters, cut to this rank's parts."""
    parts = by_index(sharding.parts)
    index = {id(each): at for at, (_, each) in enumerate(sharding.trained.named)}
    cut: list[dict[str, Any]] = []
    state: dict[int, Any] = {}
    number = count()  # of the parameters in the groups, as torch counts them
    for group, whole in zip(state_dict["param_groups"], groups, strict=True):
        mine: list[tuple[int, Any]] = []
        given = zip(group["params"], whole["params"], group.get("param_names", repeat("")), strict=False)
        for key, parameter, name in given:
            # A frozen parameter stays in its group as it was.
            found = parts.get(index[id(parameter)], []) if id(parameter) in index else [None]
            for part in found:
                mine.append((next(number), name))
                if (kept := state_dict["state"].get(key)) is not None:
                    state[mine[-1][0]] = part_of_state(kept, part) if part is not None else kept
        names = {"param_names": [name for _, name in mine]} if "param_names" in group else {}
        cut.append(group | {"params": [at for at, _ in mine]} | names)
    return state_dict | {"state": state, "param_groups": cut}


def by_index(parts: Iterable[Part]) -> dict[int, list[Part]]:
    """The parts of each parameter, by its number."""
    found: dict[int, list[Part]] = defaultdict(list)
    for part in parts:
        found[part.index].append(part)
    return found


def part_of_state(state: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """An optimizer's state for a whole parameter, cut as the parameter is."""
    whole = math.prod(part.shape)
    home = part.parameter.device

    def cut(value: Any) -> Any:
        # A tensor of another shape may be per row, and then is not cut even if the part is all of it.
        spread = isinstance(value, torch.Tensor) and value.numel() == whole and value.ndim
        if spread and (value.shape == part.shape or part.numel < whole):
            mine = value.reshape(-1)[part.start : part.stop].clone().view(part.parameter.shape)
            return mine.to(home)
        # A step count may lie on a GPU, but not beside a part that is stepped on the CPU.
        return value.cpu() if isinstance(value, torch.Tensor) and home.type == "cpu" else value

    return {key: cut(value) for key, value in state.items()}
