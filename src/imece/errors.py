"""The exceptions: a user's mistake (`UserError`), and failures between ranks (`CollectiveError` and
its kinds)."""

from __future__ import annotations


class UserError(Exception):
    """A mistake of the person who runs imece. Commands print it as one line and exit with status 2."""


class NotMetError(UserError):
    """Ranks that others waited for, when they opened their world, never came. A start anew may mend it."""


class CollectiveError(RuntimeError):
    """A collective that could not be completed. The group it ran on cannot be used any more."""


class MismatchError(CollectiveError):
    """Ranks entered the same collective with different operations, dtypes or shapes."""


class PeerLostError(CollectiveError):
    """A rank that others wait for is dead or has left."""


class CollectiveTimeoutError(CollectiveError):
    """A rank that others wait for is alive but did not come in time."""
