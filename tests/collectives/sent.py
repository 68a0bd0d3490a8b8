"""Counts the bytes that a rank really sends, by its messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from imece.collectives.execute import post


@contextmanager
def sent_by(module: str) -> Iterator[list[int]]:
    """The bytes of each message that a module of imece.collectives posts inside."""
    sent: list[int] = []

    def counting(sends: Any, receives: Any, group: Any) -> Any:
        sent.extend(message.tensor.nbytes for message in sends)
        return post(sends, receives, group)

    with mock.patch(f"imece.collectives.{module}.post", counting):
        yield sent
