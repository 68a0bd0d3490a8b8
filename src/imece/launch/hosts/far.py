"""The hands of another host: requests of a job go to its agent, what its members say comes from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from imece.launch.endings import name_of
from imece.launch.host import Start
from imece.launch.hosts.words import Seen, of_starts
from imece.membership.roster import Generation


class Far:
    """`Hands` on another host."""

    def __init__(self, host: int, send: Callable[[dict[str, Any]], None]) -> None:
        self.host = host
        self.seen: dict[int, Seen] = {}
        """What its agent last said about its members."""
        self._send = send

    def start(self, starts: Sequence[Start]) -> None:
        self._send({"do": "start", **of_starts(starts)})

    def publish(self, generation: Generation) -> None:
        self._send({"do": "publish", **generation.as_json()})

    def publish_last(self, generation: int) -> None:
        self._send({"do": "last", "number": generation})

    def say_finished(self, ranks: Collection[int], starts: int) -> None:
        """Nothing to do: its ranks meet the others on the coordinator's host."""

    def end(self, members: Collection[int], number: int, grace_s: float) -> None:
        self._send({"do": "end", "members": list(members), "signal": number, "grace_s": grace_s})

    def kill(self, members: Collection[int]) -> None:
        self._send({"do": "kill", "members": list(members)})

    def forget(self, members: Collection[int]) -> None:
        self._send({"do": "forget", "members": list(members)})

    def begin_anew(self) -> None:
        self._send({"do": "begin_anew"})

    def ask_for_stacks(self) -> None:
        self._send({"do": "stacks"})

    def say(self, line: str) -> None:
        self._send({"do": "say", "line": line[:4000]})

    def all_resilient(self, members: Collection[int]) -> bool:
        return bool(members) and all(m in self.seen and self.seen[m].resilient for m in members)

    def ready(self, members: Iterable[int]) -> list[int]:
        return [member for member in members if member in self.seen and self.seen[member].ready]

    def closed(self, members: Iterable[int]) -> list[int]:
        return [member for member in members if member in self.seen and self.seen[member].closed]

    def lost(self, members: Iterable[int], generation: int) -> list[int]:
        return [member for member in members if member in self.seen and self.seen[member].lost == generation]

    def beats(self, members: Iterable[int]) -> dict[int, tuple[int, int]]:
        known = {member: self.seen[member] for member in members if member in self.seen}
        return {m: (each.beats, each.steps) for m, each in known.items() if each.beats is not None}

    def name(self, member: int, slot: int) -> str:
        return name_of(slot, self.seen[member].pid if member in self.seen else 0, self.host)
