"""The base under adapters: what training does not change, and the digests that identify it.

left_out/NAME    for a frozen parameter of which a checkpoint holds nothing else: uint8 [32]
beside/NAME      for other entries that a module with frozen parameters has in its state dict: the scales of
                 bitsandbytes' codes, which are of no use with other codes

A digest is the SHA-256 of a tensor's dtype, shape and bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from weakref import ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from imece.checkpoint.load import Source
from imece.checkpoint.state.names import BESIDE, LEFT_OUT
from imece.checkpoint.state.plain import memory_of
from imece.collectives.texts import gather_json
from imece.data_parallel.replicate import DistributedDataParallel
from imece.data_parallel.sharded import ShardedDataParallel
from imece.errors import UserError
from imece.listing import some

_CHUNK = 4 << 20  # bytes of a tensor that are on the CPU at a time
_SHOWN = 3


class Digests:
    """Digests of a model's tensors; each is computed again only if its tensor was written."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Storage, how often it was written, and the digest; tensors are not kept alive.
        self._known: dict[str, tuple[StorageWeakRef, int, int, str]] = {}
        self._shared_out: dict[str, str] = {}  # of frozen parameters of which this rank keeps a part
        self._written: dict[str, tuple[ref[Tensor], int]] = {}  # of each such part

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Digests in hex, by name. All ranks of a wrapped model call this, with the same names; each does
        a share."""
        names, model = sorted(tensors), self._model
        if not isinstance(model, DistributedDataParallel) or not names:
            return {name: self._one(name, tensors[name]) for name in names}
        group = model.process_group
        shared_out = set[str]()
        if isinstance(model, ShardedDataParallel) and model.sharding.gathers:
            self._look_at_parts(model)
            shared_out = self._shared_out.keys() & set(names)
        whole = [name for name in names if name not in shared_out]
        mine = {name: self._one(name, tensors[name]) for name in whole[group.rank() :: group.size()]}
        return self._all(model, mine) | {name: self._shared_out[name] for name in shared_out}

    def _look_at_parts(self, model: ShardedDataParallel) -> None:
        """Gather one bucket at a time, if any rank's part of it was written. All ranks call this."""
        sharding, group = model.sharding, model.process_group
        mine, nothing = [], (None, 0)
        for at, store in enumerate(sharding.frozen):
            for part in store.parts:
                held, written = self._written.get(part.name, nothing)
                if held is None or held() is not part.parameter or written != part.parameter._version:
                    mine.append(at)
        stale = {*chain.from_iterable(gather_json(mine, group, model.device, "frozen parameters written"))}
        if not stale:
            return
        found = {}
        for store in (sharding.frozen[at] for at in sorted(stale)):
            flat = sharding.gather_masters(store, "whole for the frozen base's digests")
            items = list(zip(store.plan.places, store.items, strict=True))
            for place, item in items[group.rank() :: group.size()]:
                found[item.name] = digest_of(flat[place.start : place.stop].view(item.shape))
        self._shared_out |= self._all(model, found)
        parts = sharding.frozen_parts
        self._written = {part.name: (ref(part.parameter), part.parameter._version) for part in parts}

    @staticmethod
    def _all(model: DistributedDataParallel, mine: dict[str, str]) -> dict[str, str]:
        """The digests of all ranks."""
        every = gather_json(mine, model.process_group, model.device, "digests of frozen parameters")
        return dict(chain.from_iterable(each.items() for each in every))

    def _one(self, name: str, tensor: Tensor) -> str:
        if tensor.is_inference():  # nothing counts how often it was written
            return digest_of(tensor)
        now = StorageWeakRef(tensor.untyped_storage()), tensor.data_ptr(), tensor._version
        known = self._known.get(name)
        if known is None or known[:3] != now:
            known = self._known[name] = *now, digest_of(tensor)
        return known[3]


class Base:
    """Which frozen parameters of one wrapped model a checkpoint need not hold."""

    def __init__(self, model: DistributedDataParallel, *, is_left_out: bool) -> None:
        self._model, self._is_left_out = model, is_left_out
        self.digests = Digests(model)
        self._first: dict[str, str] | None = None

    def begin(self) -> None:
        """Take the present frozen parameters as those that anybody can load again. All ranks call this."""
        if self._first is None:
            self._first = self.digests.of(self._frozen())

    def digest(self) -> str:
        """One digest of everything that a checkpoint leaves out, in hex. All ranks call this."""
        found = self.of()
        text = json.dumps([sorted(found[key].items()) for key in (LEFT_OUT, BESIDE)])
        return hashlib.sha256(text.encode()).hexdigest()

    def of(self) -> dict[str, dict[str, str]]:
        """{LEFT_OUT: {name: digest}, BESIDE: the same}. All ranks call this.

        A frozen parameter that was changed since `begin`, by an average of weights, say, is not left out.
        """
        self.begin()
        frozen, beside = self._frozen(), dict(beside_frozen(self._model.module))
        now, first = self.digests.of(frozen | beside), self._first or {}
        left_out = {name: now[name] for name in frozen if now[name] == first.get(name)}
        return {LEFT_OUT: left_out, BESIDE: {name: now[name] for name in beside}}

    def _frozen(self) -> dict[str, Tensor]:
        # Frozen when the model was wrapped: a parameter that was trained first exists nowhere else.
        return dict(in_memory(self._model.frozen)) if self._is_left_out else {}


@dataclass(frozen=True)
class Expected:
    """What a checkpoint says about the base that it was trained on."""

    left_out: Mapping[str, str]
    beside: Mapping[str, str]

    @classmethod
    def by(cls, saved: Source) -> Expected:
        """UserError if it cannot be read."""
        found: dict[str, dict[str, str]] = {LEFT_OUT: {}, BESIDE: {}}
        for name in saved.names():
            for prefix, digests in found.items():
                if name.startswith(prefix):
                    digests[name.removeprefix(prefix)] = bytes(saved.tensor(name).tolist()).hex()
        return cls(found[LEFT_OUT], found[BESIDE])

    def check(self, model: nn.Module, digests: Digests, source: object) -> None:
        """UserError, with the first names, unless this model has that base. All ranks call this.

        A parameter that is trained and sharded does not count as base: no rank has all its bytes.
        """
        plain, cut = model, set[str]()
        if isinstance(model, DistributedDataParallel):
            plain, cut = model.module, {*model.sharded_names} - {*model.frozen_names}
        here = dict(in_memory((name, each) for name, each in plain.named_parameters() if name not in cut))
        beside = dict(beside_frozen(plain))
        looked_at = {name: here[name] for name in self.left_out if name in here}
        looked_at |= {name: beside[name] for name in self.beside if name in beside}
        now, expected = digests.of(looked_at), {**self.left_out, **self.beside}
        wrong = [
            f"{name} is {'trained' if name in cut else 'not there'}"
            for name in self.left_out
            if name not in here
        ]
        wrong += [f"{name} is another" for name in looked_at if now[name] != expected[name]]
        if wrong:
            raise UserError(
                f"{source} was trained on a frozen base that it does not hold, and this model has another: "
                f"{some(wrong, _SHOWN, '; ')}. Begin with the same base, of the same dtype, or "
                "take what it holds with imece.load_weights(model, folder, strict=False)"
            )


def in_memory(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that hold the values of these."""
    return chain.from_iterable(memory_of(name, each) for name, each in named)


def beside_frozen(plain: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """For modules whose own parameters are all frozen: entries of the state dict that are no parameters and
    no buffers."""
    for prefix, module in plain.named_modules():
        own = list(module.parameters(recurse=False))
        overrides = type(module)._save_to_state_dict is not nn.Module._save_to_state_dict
        if overrides and own and not any(each.requires_grad for each in own):
            state: dict[str, object] = {}
            module._save_to_state_dict(state, "", keep_vars=True)  # some may be freed
            for name, value in state.items():
                if isinstance(value, Tensor) and name not in {*module._parameters, *module._buffers}:
                    yield f"{prefix}.{name}" if prefix else name, value


def as_tensor(digest: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(digest), dtype=torch.uint8)


@torch.no_grad()
def digest_of(tensor: Tensor) -> str:
    """In hex."""
    found = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    if tensor.numel():
        for chunk in tensor.detach().contiguous().view(-1).view(torch.uint8).split(_CHUNK):
            found.update(chunk.cpu().numpy().data)
    return found.hexdigest()
