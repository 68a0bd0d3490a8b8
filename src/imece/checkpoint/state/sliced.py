"""What a rank of a sharded model hands in: its parts, and empty slices of everything else.

All ranks hand in the same names, so ranks first tell each other what optimizers keep for parts elsewhere.
Ranks that hold the same shard each hand in a piece of it.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from imece.checkpoint.deal import Slice
from imece.checkpoint.state.kept import Entry, key_of, shape_of, tag_of
from imece.checkpoint.state.names import MODEL
from imece.checkpoint.state.staged import share
from imece.collectives.texts import gather_json
from imece.data_parallel.sharded import ShardedDataParallel

Entries = Mapping[Tensor, tuple[str, Mapping[str, Entry]]]
"""By stepped parameter: its optimizer's classes, and what is kept for it."""


def slices_of(model: ShardedDataParallel, kept: Entries) -> dict[str, Tensor | Slice]:
    """Slices of the sharded parameters, frozen ones too, and of what is kept for them. All ranks
    call this."""
    sharding, replicas = model.sharding, model.sharding.groups.replicas
    piece = (replicas.rank(), replicas.size()) if replicas is not None else (0, 1)
    parts = {part.index: part for part in model.parts}
    keys = _keys_of_all(model, kept)
    found: dict[str, Tensor | Slice] = {}
    for index, slot in enumerate(sharding.slots):
        shape, part = tuple(slot.parameter.shape), parts.get(index)
        start = part.start if part else 0
        master = part.values if part else torch.empty(0, dtype=sharding.trained.dtypes[index], device="cpu")
        found[MODEL + slot.name] = share(Slice(master, shape, start), *piece)
        maker, of_all = keys.get(slot.name, ("", {}))
        found |= tag_of(slot.name, maker)
        for key, (dtype, per, own_shape) in of_all.items():
            nothing = torch.empty(0, dtype=getattr(torch, dtype), device="cpu")
            value = kept[part.parameter][1][key].tensor.contiguous() if part else nothing
            if per:
                own = share(Slice(value, shape_of(shape, per), start // per), *piece)
            else:  # the rank with the first element writes it for all
                says = part is not None and start == 0 and piece[0] == 0
                own = Slice(value if says else value.new_empty(0), tuple(own_shape), 0)
            found[key_of(slot.name, key)] = own
    frozen = {part.name: part for part in model.frozen_parts}
    for name, shape, of in sharding.frozen_items:
        part = frozen.get(name)
        values = part.parameter.detach() if part else torch.empty(0, dtype=of, device="cpu")
        found[MODEL + name] = share(Slice(values, shape, part.start if part else 0), *piece)
    return found


def _keys_of_all(
    model: ShardedDataParallel, kept: Entries
) -> dict[str, tuple[str, dict[str, tuple[str, int, list[int]]]]]:
    """{parameter: (made by, {key: (dtype, Entry.per, its shape if per is 0)})}, of all ranks."""
    mine = {}
    for part in model.parts:
        made_by, entries = kept.get(part.parameter, ("", {}))
        if part.start == 0 and entries:  # one rank has it
            kinds = {
                key: (str(value.dtype).removeprefix("torch."), per, [] if per else list(value.shape))
                for key, (value, per) in entries.items()
            }
            mine[part.name] = made_by, kinds
    # Few optimizers keep different things for different parameters: each kind is sent once.
    names = defaultdict(list)
    for name, keys in mine.items():
        names[json.dumps(keys)].append(name)
    said = [[json.loads(keys), together] for keys, together in names.items()]
    every = gather_json(said, model.process_group, model.device, "what optimizers keep")
    return {name: keys for keys, together in itertools.chain.from_iterable(every) for name in together}
