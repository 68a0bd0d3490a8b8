"""Conversations: a chat template writes them as text, of which only the assistant's answers are learned.

A template is a program by whoever made the model, so it runs in jinja2's sandbox. Which characters are an
answer, it says itself with {% generation %} around them. Without that tag an answer is what the template
writes more with the message than without: after all that it writes to have the assistant begin, up to the
last token of its own (`<|im_end|>`), with which the answer ends.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from imece.data.records import (
    Document,
    Encoded,
    Reading,
    Span,
    encoded_with_spans,
    learned_tokens,
    string,
)
from imece.data.tokenizer import CONFIG, Tokenizer, load_tokenizer, text_beside
from imece.errors import UserError
from imece.listing import kind_of, words_of
from imece.reading import json_object

TEMPLATE = "chat_template.jinja"
_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_TODAY = datetime(2025, 1, 1)  # to all templates: the same records make the same tokens on any day
# Around what {% generation %} marks. No text holds half a surrogate pair, so they cannot be mistaken.
_OPEN, _CLOSE = "\ud800", "\ud801"

# Who speaks in ShareGPT's records, {"from": "human", "value": "..."}, and their roles.
_FROM = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

Message = dict[str, Any]


class ChatTemplate:
    """Writes conversations as text."""

    def __init__(self, source: str, tokens: Mapping[str, str], where: Path) -> None:
        """tokens: what it may name, as bos_token. UserError if it is no template."""
        self.source, self.tokens, self.name = source, dict(tokens), where.name
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _TODAY.strftime}
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise UserError(f"{where}: no chat template ({words_of(error)}): get the file again") from error

    def write(self, messages: Sequence[Message], where: str, *, begins: bool = False) -> str:
        """The text, in which _OPEN and _CLOSE are around what it marks. begins: with what has the assistant
        begin an answer. UserError, with `where`, if the template fails."""
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=begins, **self.tokens
            )
        except Exception as error:  # whatever a stranger's program raises
            raise UserError(
                f"{where}: refused by the chat template, {self.name}: {words_of(error)}"
            ) from error


def open_template(folder: Path) -> ChatTemplate:
    """The chat template of the tokenizer in this folder. UserError if it has none."""
    if (found := find_template(folder)) is None:
        raise UserError(
            f"{folder}: its tokenizer has no chat template, which writes messages as text: put a {TEMPLATE} "
            "beside it, such as that of the model's chat version"
        )
    return found


def find_template(folder: Path) -> ChatTemplate | None:
    """The same, or None. UserError if it cannot be read."""
    files = (folder / CONFIG, folder / "special_tokens_map.json")
    said, special = (json_object(each, "") if os.path.exists(each) else {} for each in files)
    path = folder / TEMPLATE
    source: object = text_beside(path)
    if source is None:
        path, source = folder / CONFIG, said.get("chat_template")
        if isinstance(source, list):  # several, of which "default" is for conversations
            named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
            source = named.get("default")
    if not isinstance(source, str):
        return None
    every = (special | said).items()
    tokens = ((name, each.get("content") if isinstance(each, dict) else each) for name, each in every)
    known = {name: each for name, each in tokens if name in _TOKENS and isinstance(each, str)}
    return ChatTemplate(source, known, path)


@dataclass(frozen=True)
class Chats(Reading):
    """A list of messages in one field: {"role": "user", "content": "..."} and so on, or ShareGPT's."""

    field: str
    template: ChatTemplate
    tokenizer: Tokenizer
    format, strings, what = "chat", False, "messages"

    @classmethod
    def of(cls, field: str, tokenizer_path: Path) -> Chats:
        """Of the tokenizer at this path and the template beside it. UserError if one is missing."""
        return cls(field, open_template(tokenizer_path.parent), load_tokenizer(tokenizer_path))

    @property
    def fields(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.field,)

    @property
    def key(self) -> str:
        return json.dumps(["chat", self.field, self.template.source, self.template.tokens])

    def document(self, name: str, where: str, values: Sequence[object]) -> Document | None:
        messages = self._messages(values[0], where)
        if not messages:
            return None
        answers = [each["content"] for each in messages if each["role"] == "assistant"]
        if not answers:
            roles = ", ".join(dict.fromkeys(repr(each["role"]) for each in messages))
            raise UserError(f"{where}: no message of the assistant to learn from, only of {roles}: mend it")
        if not (learned_bytes := len("".join(answers).encode())):
            return None
        text = self.template.write(messages, where)
        spans = list(_marked(text)) if _OPEN in text else list(self._told_apart(messages, text, where))
        if all(first == stop for first, stop in spans):
            raise UserError(
                f"{where}: the chat template, {self.template.name}, leaves its answers out: mend it"
            )
        return Document(name, _unmarked(text), learned_bytes, tuple(spans))

    def encode(self, tokenizer: Tokenizer, documents: Sequence[Document]) -> Iterator[Encoded]:
        for document, (ids, spans) in encoded_with_spans(tokenizer, documents, special=True):
            learned = learned_tokens(spans, document)
            learned[:1] = False  # nothing stands before it from which it could be learned
            yield Encoded(ids, learned)

    def question(self, prompt: str) -> list[int]:
        """The tokens of a user's message, after which the assistant answers. UserError."""
        messages = self._messages([{"role": "user", "content": prompt}], "the prompt")
        text = _unmarked(self.template.write(messages, "the prompt", begins=True))
        ((ids, _),) = self.tokenizer.encode_with_spans([text], special=True)
        return [int(token) for token in ids]

    def ends(self) -> set[int]:
        """The tokens that end an answer: the tokenizer's end, and its own ones that the template writes
        behind an answer."""
        answer = "forty-two"
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
        text = _unmarked(self.template.write(messages, "an answer"))
        _, written, behind = text.rpartition(answer)
        ((ids, _),) = self.tokenizer.encode_with_spans([behind if written else ""], special=True)
        own = {
            token for token in ids.tolist() if self.tokenizer.decode([token]).strip() in self.tokenizer.added
        }
        return {self.tokenizer.end} | own

    def _messages(self, value: object, where: str) -> list[Message]:
        """The messages of a record; null counts as none, and null in a message as absent."""
        if value is None:
            return []
        if not isinstance(value, list):
            raise UserError(
                f"{where}: field {self.field!r} holds {kind_of(value)}, not a list of messages: name another"
            )
        return [self._message(each, f"{where}: message {place}") for place, each in enumerate(value, start=1)]

    def _message(self, value: object, where: str) -> Message:
        if isinstance(value, dict) and "role" not in value and {"from", "value"} <= {*value}:
            if (role := _FROM.get(str(value["from"]))) is None:
                raise UserError(f"{where}: from is {value['from']!r}, none of {', '.join(_FROM)}: mend it")
            others = {name: each for name, each in value.items() if name not in ("from", "value")}
            value = {"role": role, "content": value["value"]} | others
        if not isinstance(value, dict) or not isinstance(value.get("role"), str):
            raise UserError(f'{where}: not like {{"role": "user", "content": "..."}}: mend it')
        content = string(value.get("content"), "content", where)
        every = string(json.dumps(value, ensure_ascii=False, default=str), self.field, where)
        special = [name for name, special in self.tokenizer.added.items() if special and name in every]
        if special:
            raise UserError(f"{where}: it holds {special[0]!r}, which is a token of its own: take it out")
        return {name: each for name, each in value.items() if each is not None} | {"content": content}

    def _told_apart(self, messages: Sequence[Message], text: str, where: str) -> Iterator[Span]:
        """The answers in the text that a template without {% generation %} wrote."""
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.template.write(messages[:place], where, begins=True)
            until = self.template.write(messages[: place + 1], where)
            if not (until.startswith(before) and text.startswith(until)):
                raise UserError(
                    f"{where}: the chat template, {self.template.name}, writes other messages otherwise "
                    f"with message {place + 1} than without, so which tokens are its answer cannot be told: "
                    "put {% generation %} and {% endgeneration %} around answers in it"
                )
            end = until.rstrip()
            if len(end) <= len(before) or not end.endswith(tuple(self.tokenizer.added)):
                raise UserError(
                    f"{where}: the chat template, {self.template.name}, ends the answer "
                    f"{end[len(before) :][-20:]!r} with none of the tokenizer's own tokens, so a model would "
                    "never learn to stop: mend the template"
                )
            yield len(before), len(end)


class _Generation(Extension):
    """The tag {% generation %} ... {% endgeneration %}."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's way

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Macro) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


def _marked(text: str) -> Iterator[Span]:
    """What the marks in a text enclose: characters of the text without them."""
    first = 0
    for marks, mark in enumerate(re.finditer(f"[{_OPEN}{_CLOSE}]", text)):
        place = mark.start() - marks
        if mark[0] == _CLOSE:
            yield first, place
        first = place


def _unmarked(text: str) -> str:
    return text.replace(_OPEN, "").replace(_CLOSE, "")


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    """In a prompt, unlike in HTML, no character needs an escape."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))
