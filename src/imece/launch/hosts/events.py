"""What happens between hosts, in the order in which it is to be believed.

About one link: Up, then what was Said, then Down; or only Down, if a host was dialled in vain. By the time
that an event is read, the host may have a newer link: so whoever sends, or drops, names a link by its Up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from imece.system.addresses import Address


@dataclass(frozen=True)
class Up:
    """There is a link to `host`."""

    host: int
    link: int
    """Its number, which no other one has."""
    address: Address
    """Where it listens; port 0 if it does not."""
    hello: dict[str, Any]
    """What the user of the peer's network says first."""


@dataclass(frozen=True)
class Said:
    """`host` sent a message."""

    host: int
    link: int
    message: dict[str, Any]


@dataclass(frozen=True)
class Down:
    """The link to `host` has ended, or could not be made."""

    host: int
    link: int | None
    """None: there was none."""
    why: str
    """Printable."""
    surely: bool
    """There was a link, its agent is gone, and its machine says so: its ranks died with it. Otherwise nobody
    knows what it does now."""
    told: bool = False
    """An agent answered and does not want this one; `why` is what it says. Dialling again does not help."""


@dataclass(frozen=True)
class Refused:
    """Somebody was not let in. Rarely reported, however many come."""

    address: str
    why: str
    """Printable."""


Event = Up | Said | Down | Refused


class Complaints:
    """Lets through one complaint in a while, with the number of those it held back."""

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._next_s = float("-inf")
        self._kept_back = 0

    def about(self, address: str, why: str, now: float) -> Refused | None:
        """The event to report now; None: nothing."""
        if now < self._next_s:
            self._kept_back += 1
            return None
        more, self._kept_back = self._kept_back, 0
        self._next_s = now + self._every_s
        return Refused(address, why + (f" (and {more} more since the last one told)" if more else ""))
