"""Records of prompts and answers: which tokens they have, which of them are learned, and mistakes in them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Package
from tokenizers import decoders, models, pre_tokenizers, processors

from imece.data.build import build
from imece.data.corpus import Source, documents
from imece.data.records import TEXT, Answers
from imece.data.sources import sources
from imece.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer
from imece.data.tokens import Part, open_tokens
from tests.data.helpers import mistake, write

ANSWERS = Answers("prompt", "completion")


def lines(*both: tuple[object, object]) -> str:
    return "".join(json.dumps({"prompt": one, "completion": other, "n": 1}) + "\n" for one, other in both)


def parts(part: Part, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Of each document what is only read, and what is learned behind it."""
    found = []
    assert part.learned is not None and part.learned_tokens == part.learned.sum()
    for number in range(part.documents):
        ids = part.document(number)
        learned = part.learned[part.offsets[number] : part.offsets[number + 1]]
        assert (np.diff(learned.astype(int)) >= 0).all() and not learned[0]
        found.append(tuple(tokenizer.decode(ids[which].tolist()) for which in (~learned, learned)))
    return found  # type: ignore[return-value]


def words_of_several_letters() -> Tokenizer:
    """In which a space before a word is of its token, and whose post-processor would cut it from the span."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: number for number, letter in enumerate(sorted(letters))} | {"Ġy": 256, "<|end|>": 257}
    made = Package(models.BPE(vocab=vocab, merges=[("Ġ", "y")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    return JsonTokenizer(made, 257)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), words_of_several_letters()], ids=["bytes", "words"])
def test_the_answer_and_its_end_are_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A token that holds the last of the prompt and the first of the answer is learned."""
    both = [("Is it?", " yes"), ("é日", "  "), ("", "<|end|>"), ("is it? ", "yes"), (None, "é")]
    file = write(tmp_path / "a.jsonl", lines(*both, ("no answer", ""), ("none either", None)))
    made = build(tmp_path / "tokens", [Source(sources([file], ANSWERS))], ANSWERS, tokenizer, share=0)
    end, found = "<|end|>", parts(made.train, tokenizer)
    crossing = isinstance(tokenizer, JsonTokenizer)  # " y" is one token
    expected = [(end + (one or ""), f"{other}{end}") for one, other in both]
    if crossing:
        expected[3] = (f"{end}is it?", f" yes{end}")
    assert found == expected
    assert made.train.text_bytes == sum(len(str(other).encode()) for _, other in both)
    assert open_tokens(tmp_path / "tokens", verify=True).identity == made.identity


def test_the_files_follow_what_is_read(tmp_path: Path) -> None:
    """The same file as text, as answers, and with the fields exchanged: made anew each time, and nothing of
    the old is left; a folder of text is what it was before there were answers."""
    file = write(tmp_path / "a.jsonl", lines(("a", "b")).replace('"n": 1', '"text": "c"'))
    made = [
        build(tmp_path / "tokens", [Source([file])], reading, ByteTokenizer(), share=0)
        for reading in (TEXT, ANSWERS, Answers("completion", "prompt"), TEXT)
    ]
    assert len({each.identity for each in made}) == 3 and made[0].identity == made[3].identity
    assert made[0].train.learned is None and made[3].train.learned is None
    names = sorted(path.name for path in (tmp_path / "tokens").iterdir())
    assert names == ["lock", "manifest.json", "train.bin", "train.idx", "validation.bin", "validation.idx"]
    with (tmp_path / "tokens/train.ans").open("wb") as others:
        others.write(b"1")  # what an older run left
    made_again = build(tmp_path / "tokens", [Source([file])], ANSWERS, ByteTokenizer(), share=0)
    (tmp_path / "tokens/train.ans").write_bytes(b"\1" * len(made_again.train.tokens))
    assert "train.ans: damaged" in mistake(open_tokens, tmp_path / "tokens", verify=True)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            '{"prompt": "a"}',
            ["a.jsonl:2", "no field 'completion'", "the one with prompt and answer with --data.field"],
        ),
        ('{"messages": []}', ["a.jsonl:2", "no field 'prompt'", "take --data.format chat"]),
        ('{"conversations": []}', ["take --data.format chat --data.field conversations"]),
        (
            '{"instruction": "a", "input": "", "output": "b"}',
            ["--data.format answers --data.field instruction"],
        ),
        ('{"prompt": 3, "completion": "b"}', ["a.jsonl:2", "field 'prompt' holds an int"]),
        ('{"prompt": "a", "completion": ["b"]}', ["a.jsonl:2", "field 'completion' holds a list"]),
        ('{"prompt": "a", "completion": "\\ud800"}', ["a.jsonl:2", "half a surrogate pair"]),
        ("[1]", ["a.jsonl:2", "a JSON list", "'prompt', 'completion'"]),
    ],
)
def test_wrong_records(tmp_path: Path, line: str, said: list[str]) -> None:
    file = write(tmp_path / "a.jsonl", lines(("a", "b")) + line)
    message = mistake(list, documents([file], ANSWERS))
    assert all(each in message for each in said), message


def test_files_without_records(tmp_path: Path) -> None:
    """One that is named is refused, one in a folder is left out."""
    write(tmp_path / "a.jsonl", lines(("a", "b")))
    text, skipped = write(tmp_path / "b.txt", "text"), dict[Path, str]()
    assert "b.txt: no records with the fields 'prompt', 'completion'" in mistake(sources, [text], ANSWERS)
    found = [each.text for each in documents(sources([tmp_path], ANSWERS), ANSWERS, skipped)]
    assert found == ["ab"] and list(skipped) == [text]
    assert "name some with --data" in mistake(sources, [], ANSWERS)
