"""What a record of a file gives to learn: a text, or a prompt and its answer.

A *reading* says which fields of a record are read, which document they make, and which tokens this has. Of a
record only its answers are *learned*: their tokens are targets, all others are only read.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from imece.data.tokenizer import Ids, Spans, Tokenizer
from imece.errors import UserError
from imece.listing import kind_of

Format = Literal["text", "answers", "chat"]
# The usual ones.
FIELDS: dict[Format, str] = {"text": "text", "answers": "prompt,completion", "chat": "messages"}

Span = tuple[int, int]  # characters [first, stop)
Learned = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Document:
    """One text, which is packed and held out as a whole."""

    name: str  # relative to the folder that all files share; "a.jsonl:7" is line 7, or row 7
    text: str  # never empty
    learned_bytes: int  # of the text that is learned, in UTF-8
    answers: tuple[Span, ...] | None = None  # ascending; None: all of it is learned


class Encoded(NamedTuple):
    """All tokens of a document, with those that begin and end it."""

    ids: Ids  # uint32 [its tokens]
    learned: Learned | None  # [its tokens], which are targets; None: all


class Reading(ABC):
    """How documents are made of records."""

    format: Format
    fields: tuple[str, ...]  # that each record has
    whole: bool = True  # a record is not cut: its answers would lose their prompt
    strings: bool = True  # the fields hold strings
    what: str  # they hold, for messages

    @property
    @abstractmethod
    def key(self) -> str:
        """Differs between readings that make other documents of the same records, or other tokens."""

    @abstractmethod
    def document(self, name: str, where: str, values: Sequence[object]) -> Document | None:
        """The document of a record; None if it has no text. values: of `fields`; where: for messages.

        UserError for values of another type or meaning.
        """

    @abstractmethod
    def encode(self, tokenizer: Tokenizer, documents: Sequence[Document]) -> Iterator[Encoded]:
        """The tokens of each document."""


@dataclass(frozen=True)
class Texts(Reading):
    """The text in one field. Files without records are texts too."""

    field: str
    format, whole, what = "text", False, "the text"

    @property
    def fields(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.field,)

    @property
    def key(self) -> str:
        return self.field

    def document(self, name: str, where: str, values: Sequence[object]) -> Document | None:
        text = string(values[0], self.field, where)
        return Document(name, text, len(text.encode())) if text else None

    def encode(self, tokenizer: Tokenizer, documents: Sequence[Document]) -> Iterator[Encoded]:
        begin = np.array([] if tokenizer.begin is None else [tokenizer.begin], np.uint32)
        for ids in tokenizer.encode_batch([document.text for document in documents]):
            yield Encoded(np.concatenate((begin, ids, [tokenizer.end])).astype(np.uint32), None)


@dataclass(frozen=True)
class Answers(Reading):
    """A prompt in one field, and in another its answer, which is learned together with the end behind it.

    Before the prompt is what `imece sample` puts there: the tokenizer's begin, or an end.
    """

    prompt: str
    answer: str
    format, what = "answers", "prompt and answer"

    @property
    def fields(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.prompt, self.answer)

    @property
    def key(self) -> str:
        return json.dumps(["answers", *self.fields])

    def document(self, name: str, where: str, values: Sequence[object]) -> Document | None:
        prompt, answer = (string(*each, where) for each in zip(values, self.fields, strict=True))
        text = prompt + answer
        if not answer:
            return None
        return Document(name, text, len(answer.encode()), ((len(prompt), len(text)),))

    def encode(self, tokenizer: Tokenizer, documents: Sequence[Document]) -> Iterator[Encoded]:
        for document, (ids, spans) in encoded_with_spans(tokenizer, documents, special=False):
            around = np.array([tokenizer.before], np.uint32), np.array([tokenizer.end], np.uint32)
            learned = np.concatenate(([False], learned_tokens(spans, document), [True]))
            yield Encoded(np.concatenate((around[0], ids, around[1])), learned)


TEXT = Texts("text")


def encoded_with_spans(
    tokenizer: Tokenizer, documents: Sequence[Document], *, special: bool
) -> Iterator[tuple[Document, tuple[Ids, Spans]]]:
    """Each document with its tokens and their characters, as from `Tokenizer.encode_with_spans`."""
    texts = [document.text for document in documents]
    return zip(documents, tokenizer.encode_with_spans(texts, special=special), strict=True)


def learned_tokens(spans: Spans, document: Document) -> Learned:
    """Which tokens hold a character of an answer. spans: int64 [tokens, 2], the characters of each."""
    first, stop = spans[:, 0], np.maximum(spans[:, 1], spans[:, 0] + 1)
    learned = np.zeros(len(spans), np.bool_)
    for begin, end in document.answers or ():
        learned |= (first < end) & (stop > begin)
    return learned


def take_instead(reading: Reading, there: Collection[str]) -> str:
    """What to do about a record whose fields are not those of the reading: the format that they are usual
    for, here or in other programs, or other names."""
    for format, fields in FIELDS.items():
        if format != reading.format and {*fields.split(",")} <= {*there}:
            return f"take --data.format {format}"
    if "conversations" in there:  # ShareGPT's
        return "take --data.format chat --data.field conversations"
    if {"instruction", "output"} <= {*there}:  # Alpaca's
        return (
            "--data.format answers --data.field instruction,output takes both as they are, one behind the "
            "other: first write into instruction what else the model is to read, input and a line's end say"
        )
    return f"name the one with {reading.what} with --data.field"


def string(value: object, field: str, where: str) -> str:
    """The string in a field; null counts as an empty one. UserError for anything else."""
    text = "" if value is None else value
    if not isinstance(text, str):
        raise UserError(f"{where}: field {field!r} holds {kind_of(text)}, not a string: name another")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: field {field!r} has half a surrogate pair: repair the line") from error
    return text
