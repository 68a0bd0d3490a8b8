"""Makes text of unknown origin safe to print: a sample or a file's name may hold any character."""

from __future__ import annotations

import unicodedata


def visible(text: str, encoding: str = "utf-8") -> str:
    """`text` with control and invisible characters as escapes (an escape character becomes \\x1b).

    Newlines, tabs and all spaces stay. What `encoding` does not have becomes an escape too, so that
    printing the result cannot fail.
    """
    shown = "".join(c if c in "\n\t" or _is_seen(c) else _escape(c) for c in text)
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def _is_seen(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
