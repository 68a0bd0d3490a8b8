"""Text survives tokenization, and no text can end a document."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from imece.data.files import digest
from imece.data.tokenizer import END, ByteTokenizer, Tokenizer, load_tokenizer
from tests.data.helpers import files_of_at_most, mistake

_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
_SAMPLE = "def read(self, size=-1):\n    return self.buffer.read(size)  # größer, 日本, 😀\r\n\tĠ Ċ\0"


@pytest.fixture(params=["bytes", "bpe", "bytes, loaded", "bpe, loaded"])
def ours(request: pytest.FixtureRequest, bpe: Tokenizer, tmp_path: Path) -> Tokenizer:
    """Each kind that is made here, and each again after it was saved."""
    tokenizer = bpe if request.param.startswith("bpe") else ByteTokenizer()
    if request.param.endswith("loaded"):
        tokenizer.save(tmp_path / "tokenizer.json")
        tokenizer = load_tokenizer(tmp_path)
    return tokenizer


# --- what all of ours promise ---


def test_text_comes_back(ours: Tokenizer) -> None:
    @given(_TEXT)
    @example(_SAMPLE)
    @example(f"a{END}b{END}{END}")
    @example("")
    def check(text: str) -> None:
        ids = ours.encode(text)
        assert ours.decode(ids) == text
        assert ours.end not in ids
        assert all(0 <= token < ours.vocab_size for token in ids)

    check()


def test_a_batch_is_each_text_alone(ours: Tokenizer) -> None:
    texts = [_SAMPLE, "", END, "short", _SAMPLE * 20]
    batch = ours.encode_batch(texts)
    assert [ids.tolist() for ids in batch] == [ours.encode(text) for text in texts]
    assert all(ids.dtype == np.uint32 for ids in batch)
    assert ours.encode_batch([]) == []


def test_the_end_is_shown_but_never_read(ours: Tokenizer) -> None:
    assert ours.decode([ours.end]) == END
    assert ours.decode([*ours.encode("a"), ours.end, *ours.encode("b")]) == f"a{END}b"
    assert len(ours.encode(END)) > 1


def test_half_a_character_is_shown_as_such(ours: Tokenizer) -> None:
    # Each byte is a token by itself also in a BPE without that letter.
    assert ours.decode(ours.encode("😀")[:-1]).startswith("\N{REPLACEMENT CHARACTER}")


def test_ids_of_another_model_are_refused(ours: Tokenizer) -> None:
    for ids in ([ours.vocab_size], [3, -1]):
        assert f"token {ids[-1]} is none of this tokenizer's {ours.vocab_size}" in mistake(ours.decode, ids)


def test_what_is_no_text_is_refused(ours: Tokenizer) -> None:
    assert "half a surrogate pair" in mistake(ours.encode, "ab\ud800")
    assert "character 2" in mistake(ours.encode_batch, ["good", "ab\ud800"])


# --- each kind ---


def test_bytes_are_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(_SAMPLE) == list(_SAMPLE.encode())
    assert (tokenizer.vocab_size, tokenizer.end) == (257, 256)


def test_the_package_reads_our_bytes_as_we_do(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    package = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert package.encode(_SAMPLE).ids == list(_SAMPLE.encode())
    assert package.decode(package.encode(_SAMPLE).ids) == _SAMPLE
    assert package.encode(f"a{END}").ids == [97, 256]  # the package's own default: it sees an end there
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)


# --- those of others ---


def write_foreign(path: Path, end: str, *, special: bool = True, cut: bool = False) -> Path:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([end]) if special else tokenizer.add_tokens([end])
    if cut:
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=8, pad_id=1)
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>", "[SEP]", "<|end_of_text|>", "<eos>"])
def test_a_foreign_tokenizer(tmp_path: Path, end: str) -> None:
    tokenizer = load_tokenizer(write_foreign(tmp_path / "tokenizer.json", end, cut=True))
    assert (tokenizer.vocab_size, tokenizer.end) == (4, 3)
    assert tokenizer.encode("A b a b c") == [0, 1, 0, 1, 2]  # neither cut off nor filled up
    assert 3 not in tokenizer.encode(f"a {end} b")
    tokenizer.save(tmp_path / "copy.json")
    copy = load_tokenizer(tmp_path / "copy.json")
    assert copy.encode("A b a b c") == [0, 1, 0, 1, 2]
    assert copy.hash == tokenizer.hash


def test_letters_are_not_left_out_without_a_word(tmp_path: Path) -> None:
    letters = {letter: number for number, letter in enumerate(["<eos>", *"hélo \u2581"])}
    pieces = {f"<0x{byte:02X}>": 20 + byte for byte in range(256)}
    said = (
        "the tokenizer has no token for 'x', which would be left out: give it one for what it does not know"
    )

    def load(vocab: dict[str, int], pre: Any = None, **options: Any) -> Tokenizer:
        package = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], **options))
        package.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
        if pre is not None:
            package.pre_tokenizer = pre
        package.save(str(tmp_path / "tokenizer.json"))
        return load_tokenizer(tmp_path)

    plain = load(letters)
    assert plain.encode("He\u0301llo") == [1, 2, 3, 3, 4]
    for _ in range(2):
        assert mistake(plain.encode, "héllo xé").startswith(said)
    package = tokenizers.Tokenizer.from_str(plain.to_json())
    package.add_tokens(["x"])
    package.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("hxh") == [1, 7, 1]
    spaces = load(letters, pre_tokenizers.Whitespace())
    assert spaces.encode("hé\nlo") == [1, 2, 3, 4]  # a line's end is taken out before, and on purpose
    assert mistake(spaces.encode, "hé\nxlo").startswith(said)
    assert load(letters | {"?": 9}, unk_token="?").encode("hxh") == [1, 9, 1]
    assert load(letters | pieces, byte_fallback=True).encode("hx") == [1, 20 + ord("x")]
    assert mistake(load(letters, byte_fallback=True).encode, "hx").startswith(said)
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    all_bytes = json.loads(ByteTokenizer().to_json())["model"]["vocab"] | {"<eos>": 300}
    assert load(all_bytes, of_bytes).encode("h\0日") == list("h\0日".encode())
    assert mistake(load(all_bytes).encode, "日").startswith(said.replace("x", "日"))
    del all_bytes["\u00c3"]
    assert "no token for 'é'" in mistake(load(all_bytes, of_bytes).encode, "hé")


def test_words_that_a_tokenizer_does_not_know(tmp_path: Path) -> None:
    package = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1}))
    package.save(str(tmp_path / "tokenizer.json"))
    said = mistake(load_tokenizer(tmp_path).encode, "b")
    assert said.startswith(
        "the tokenizer cannot read this text (WordLevel error: Missing [UNK] token from the "
    )
    assert said.endswith("): give it a token for what it does not know, or name another")


def test_no_merge_is_left_to_chance(tmp_path: Path, bpe: Tokenizer) -> None:
    content = json.loads(bpe.to_json())
    content["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert {tuple(tokenizer.encode(_SAMPLE)) for _ in range(10)} == {tuple(bpe.encode(_SAMPLE))}
    assert tokenizer.to_json() == bpe.to_json()


def test_a_file_that_another_release_wrote_is_the_same_tokenizer(tmp_path: Path, bpe: Tokenizer) -> None:
    """A run and its checkpoints know their tokenizer by this hash."""
    path = tmp_path / "tokenizer.json"
    for tokenizer in (ByteTokenizer(), bpe):
        content = json.dumps(json.loads(tokenizer.to_json()), indent=3)
        path.write_text(content)
        loaded = load_tokenizer(path)
        assert type(loaded) is type(tokenizer) and loaded.encode(_SAMPLE) == tokenizer.encode(_SAMPLE)
        assert loaded.hash == digest(content.encode()) != tokenizer.hash
        loaded.save(path)
        assert path.read_text() == content


def test_ours_is_the_likelier_end(tmp_path: Path) -> None:
    write_foreign(tmp_path / "tokenizer.json", "</s>")
    package = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    package.add_special_tokens(["<|endoftext|>"])
    package.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).end == 4


def test_ids_need_not_be_without_gaps(tmp_path: Path) -> None:
    content = json.loads(write_foreign(tmp_path / "tokenizer.json", "</s>").read_text())
    content["model"]["vocab"]["b"] = 9
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.encode("a b")) == (10, [0, 9])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        (b"", "not a tokenizer.json"),
        (b'{"version": "1.0"}', "not a tokenizer.json"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_what_is_no_tokenizer(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    message = mistake(load_tokenizer, path)
    assert words in message and str(path) in message
    (tmp_path / "tokenizer.model").touch()
    alone = "tokenizer.model alone is not read: transformers' AutoTokenizer"
    assert (alone in mistake(load_tokenizer, path)) == (content is None)


def test_a_tokenizer_without_an_end(tmp_path: Path) -> None:
    path = write_foreign(tmp_path / "tokenizer.json", "<other>")
    assert f"{path}: no token that ends a document" in mistake(load_tokenizer, path)


# --- saving ---


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, bpe: Tokenizer) -> None:
    path = tmp_path / "tokenizer.json"
    ByteTokenizer().save(path)
    for size in (0, 1, 1000, len(bpe.to_json()) - 1):
        with files_of_at_most(size):
            assert f"{path}: cannot be written (File too large)" in mistake(bpe.save, path)
        assert os.listdir(tmp_path) == ["tokenizer.json"]
        assert load_tokenizer(path).hash == ByteTokenizer().hash
    for place in (tmp_path / "nowhere/tokenizer.json", path / "below", tmp_path):
        assert f"{place}: cannot be written" in mistake(bpe.save, place)
    bpe.save(path)
    assert load_tokenizer(path).hash == bpe.hash
    assert os.listdir(tmp_path) == ["tokenizer.json"]
