"""Text to token ids and back: bytes, or any tokenizer.json.

Bytes, too, are saved as a tokenizer.json that the package `tokenizers` reads: as a BPE without merges.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from imece.data.files import digest
from imece.errors import UserError
from imece.listing import words_of
from imece.writing import other_place, write_whole

END = "<|end|>"
CONFIG = "tokenizer_config.json"  # Hugging Face's: says which tokens begin and end a text
SMALLEST_VOCAB = 257  # all bytes, and END
LARGEST_VOCAB = 1 << 20  # four times the largest of published models

Ids = npt.NDArray[np.uint32]
Spans = npt.NDArray[np.int64]

# Other tokenizers' names for the end of a document, the likelier one first.
_ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "[EOS]", "[SEP]")


class Tokenizer(ABC):
    """Turns text into ids in range(vocab_size) and back.

    For a tokenizer that was made here and every text: decode(encode(text)) == text, and no id is `end`:
    "<|end|>" in a text is seven plain characters. Tokenizers of others may normalise, and may see an end.
    UserError for a str with half a surrogate pair, which has no UTF-8.
    """

    vocab_size: int
    end: int  # id of the token behind each document
    begin: int | None = None  # id of the token at the head of each document, if there is one
    beside: str | None = None  # of tokenizer_config.json, if it says what begins and ends a document

    @property
    def before(self) -> int:
        """The token before the text of a document: its own begin, or the end of the document before."""
        return self.end if self.begin is None else self.begin

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, uint32 [its tokens], without `end`."""

    @abstractmethod
    def encode_with_spans(self, texts: Sequence[str], *, special: bool) -> list[tuple[Ids, Spans]]:
        """The same, with the characters of each token: int64 [its tokens, 2], first and behind the last.

        special: "<|end|>" in a text is not plain characters but the token, as a chat template means it.
        """

    @property
    @abstractmethod
    def added(self) -> dict[str, bool]:
        """The tokens that are found in a text before it is cut into words; whether each is special, and so
        plain characters in a text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text; what is no UTF-8 becomes U+FFFD. UserError for an id outside range(vocab_size)."""

    @abstractmethod
    def to_json(self) -> str:
        """The content of tokenizer.json."""

    def write(self, path: Path) -> None:
        """Write tokenizer.json, and before it the file beside it; each is written whole or not at all.
        OSError."""
        if self.beside is not None:
            write_whole(path.with_name(CONFIG), self.beside.encode(), durable=True)
        write_whole(path, self.to_json().encode(), durable=True)

    def save(self, path: Path | str) -> None:
        """`write`, with a UserError if it fails."""
        try:
            self.write(Path(path))
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written ({error.strerror}): {other_place(error, 'place')}"
            ) from error

    @property
    def hash(self) -> str:
        """The hash of tokenizer.json: tokenizers with equal hashes encode alike.

        If it was loaded, this is its file's hash: another release of the package may write it differently.
        """
        return digest(self.to_json().encode())

    def _check_ids(self, ids: Sequence[int]) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise UserError(
                    f"token {token} is none of this tokenizer's {self.vocab_size}: it is another model's"
                )


class ByteTokenizer(Tokenizer):
    """Token i is byte i of the text's UTF-8."""

    vocab_size = SMALLEST_VOCAB
    end = 256

    def __init__(self, content: str | None = None) -> None:
        self._content = content  # of the tokenizer.json that was read; None: it is made anew

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(_utf8(text), np.uint8).astype(np.uint32) for text in texts]

    def encode_with_spans(self, texts: Sequence[str], *, special: bool) -> list[tuple[Ids, Spans]]:
        alike = JsonTokenizer(tokenizers.Tokenizer.from_str(self.to_json()), self.end)
        return alike.encode_with_spans(texts, special=special)

    @property
    def added(self) -> dict[str, bool]:
        return {END: True}

    def decode(self, ids: Sequence[int]) -> str:
        self._check_ids(ids)
        end = END.encode()
        return b"".join(end if i == self.end else bytes((i,)) for i in ids).decode(errors="replace")

    def to_json(self) -> str:
        if self._content is not None:
            return self._content
        vocab = {letter: byte for byte, letter in enumerate(letters_of_bytes())} | {END: self.end}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        make_byte_level(tokenizer)
        tokenizer.add_special_tokens([END])
        return tokenizer.to_str()


class JsonTokenizer(Tokenizer):
    """Any tokenizer that a tokenizer.json describes."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        end: int,
        content: str | None = None,
        begin: int | None = None,
        beside: str | None = None,
    ) -> None:
        """content, beside: of the tokenizer.json and tokenizer_config.json that were read."""
        before = tokenizer.to_str()
        # As saved, a tokenizer may truncate texts, pad them or split them at random; here none is wanted.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if isinstance(tokenizer.model, models.BPE):
            tokenizer.model.dropout = None
        now = tokenizer.to_str()
        self._content = content if content is not None and now == before else now
        tokenizer.encode_special_tokens = True  # i.e. as plain text
        tokenizer.post_processor = None  # it would leave spaces out of the spans
        self._tokenizer = tokenizer
        self._may_drop = self._lacks_letters()
        added = tokenizer.get_added_tokens_decoder().values()
        self._added = {each.content: each.special for each in added}
        # It does not drop these.
        self._known = {letter for each in added if not each.special for letter in each.content}
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        self.end, self.begin, self.beside = end, begin, beside

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.array(one.ids, np.uint32) for one in self._encoded(texts, "encode_batch_fast")]

    def encode_with_spans(self, texts: Sequence[str], *, special: bool) -> list[tuple[Ids, Spans]]:
        self._tokenizer.encode_special_tokens = not special
        try:
            encoded = self._encoded(texts, "encode_batch")
        finally:
            self._tokenizer.encode_special_tokens = True
        return [
            (np.array(one.ids, np.uint32), np.array(one.offsets, np.int64).reshape(-1, 2)) for one in encoded
        ]

    @property
    def added(self) -> dict[str, bool]:
        return self._added

    def _encoded(self, texts: Sequence[str], how: str) -> list[tokenizers.Encoding]:
        """how: "encode_batch", or "encode_batch_fast", which has no spans."""
        for text in texts:
            _utf8(text)  # otherwise the package raises a TypeError that blames the type
            self._check_known(text)
        try:
            encode = getattr(self._tokenizer, how)
            return list(encode(texts, add_special_tokens=False))
        except Exception as error:  # the package raises this base class for a word that it does not know
            raise UserError(
                f"the tokenizer cannot read this text ({words_of(error)}): give it a token for what it does "
                "not know, or name another"
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        self._check_ids(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def to_json(self) -> str:
        return self._content

    def _check_known(self, text: str) -> None:
        """UserError for characters that the package would drop silently: bits per byte would look too
        good."""
        if not self._may_drop:
            return
        if (normalizer := self._tokenizer.normalizer) is not None:
            text = normalizer.normalize_str(text)
        for letter in sorted(set(text) - self._known):
            for word in self._words(letter):
                spans = (token.offsets for token in self._tokenizer.model.tokenize(word))
                if sum(stop - start for start, stop in spans) < len(word.encode()):
                    raise UserError(
                        f"the tokenizer has no token for {letter!r}, which would be left out: give it one "
                        "for what it does not know (unk_token), or name another"
                    )
            self._known.add(letter)

    def _words(self, text: str) -> list[str]:
        """The pieces of a normalised text that the model sees, one after the other."""
        splitter = self._tokenizer.pre_tokenizer
        return [word for word, _ in splitter.pre_tokenize_str(text)] if splitter is not None else [text]

    def _lacks_letters(self) -> bool:
        """Whether the package may drop characters: a BPE that knows neither them nor their bytes."""
        model = self._tokenizer.model
        if not isinstance(model, models.BPE) or model.unk_token is not None:
            return False
        if model.continuing_subword_prefix or model.end_of_word_suffix:
            return False  # there single letters prove nothing
        vocab, letters = self._tokenizer.get_vocab(with_added_tokens=False), letters_of_bytes()
        if model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
            return False
        of_bytes = "".join(letters[byte] for byte in "€".encode()) in "".join(self._words("€"))
        return not (of_bytes and all(letter in vocab for letter in letters))


def load_tokenizer(path: Path | str) -> Tokenizer:
    """A tokenizer from a tokenizer.json, ours or any other, or from the folder that holds one.

    A tokenizer_config.json beside it says which tokens begin and end a document. Without one, or if it does
    not say, no token begins a document, and the end is found by its usual names.
    UserError if there is no tokenizer.json, if a file is damaged, or if no token ends a document.
    """
    path = Path(path)
    if os.path.isdir(path):
        path /= "tokenizer.json"
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        do = "it belongs to the model, copy it from where that is from"
        if path.with_name("tokenizer.model").exists():
            do = "tokenizer.model alone is not read: transformers' AutoTokenizer saves it as that"
        raise UserError(f"{path}: no such file: {do}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}): get it from where the model is from") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the package raises this base class for whatever it cannot read
        raise UserError(
            f"{path}: not a tokenizer.json ({words_of(error)}): name one, or train a new one"
        ) from error
    if tokenizer.to_str() == ByteTokenizer().to_json():
        return ByteTokenizer(content)
    beside = text_beside(path.with_name(CONFIG))
    begin, end = _said(beside, path.with_name(CONFIG), tokenizer)
    for name in _ENDS if end is None else (end,):
        if tokenizer.token_to_id(name) is not None:
            token = token_of(tokenizer, name)
            return JsonTokenizer(tokenizer, token, content, begin if begin != token else None, beside)
    raise UserError(f"{path}: no token that ends a document ({', '.join(_ENDS)}): add one as a special token")


def make_byte_level(tokenizer: tokenizers.Tokenizer) -> None:
    """Split texts into words first, so that no merge crosses two words."""
    # The package's stubs do not know that these attributes can be set.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()


def text_beside(path: Path) -> str | None:
    """The content of a file that may lie beside a tokenizer; None if it does not. UserError if it cannot be
    read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}): get the file again") from error


def _said(text: str | None, path: Path, tokenizer: tokenizers.Tokenizer) -> tuple[int | None, str | None]:
    """(id of the token that begins a text, name of the token that ends it), as far as the file says."""
    if text is None:
        return None, None
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"a JSON {type(content).__name__}, not an object")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}): get the file again") from error
    begin, end = (
        each.get("content") if isinstance(each, dict) else each
        for each in (content.get(f"{name}_token") for name in ("bos", "eos"))
    )
    known = end is not None and tokenizer.token_to_id(str(end)) is not None
    adds = content.get("add_bos_token")
    if adds is None:  # then the tokens that it puts around a text decide
        special = tokenizer.encode("", add_special_tokens=True).tokens[:1]
        adds = special == [begin]
    return tokenizer.token_to_id(str(begin)) if adds else None, str(end) if known else None


def letters_of_bytes() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: [0] for byte 0, and so on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # printable: themselves
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def token_of(tokenizer: tokenizers.Tokenizer, name: str) -> int:
    """The id of a token that the tokenizer has."""
    token = tokenizer.token_to_id(name)
    assert token is not None, name
    return token


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        found = json.dumps(text[error.start])
        raise UserError(
            f"half a surrogate pair, {found}, at character {error.start}: not text, take it out"
        ) from error
