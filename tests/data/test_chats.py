"""Conversations: written as transformers writes them, and of them only the assistant's answers learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from imece.data.build import build
from imece.data.chats import Chats
from imece.data.corpus import Source, documents
from imece.data.sources import sources
from tests.data.helpers import mistake, write

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% if loop.index == 90 %}{% break %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (  # as of Llama 2: no generation prompt, spaces around the answer, and roles must alternate
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must\nalternate') }}"
    "{% elif message.role == 'user' %}{{ bos_token + '[INST] ' + message.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LAST = "('!' if loop.last and message.role == 'assistant' else '')"
TALK = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1, é日😀"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "\n2"},
]


def write_folder(folder: Path, template: str | None, **config: Any) -> Path:
    """A tokenizer of bytes and special tokens, with this template; its tokenizer.json."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[])
    )
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    made.add_tokens(["<think>"])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    content = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write(folder / "tokenizer_config.json", json.dumps(content | config))
    if template is not None:
        write(folder / "chat_template.jinja", template)
    return folder / "tokenizer.json"


def chats_of(folder: Path, template: str) -> Chats:
    return Chats.of("messages", write_folder(folder / "model", template))


def lines(*records: object) -> str:
    return "".join(json.dumps({"messages": each}) + "\n" for each in records)


def learned(chats: Chats, messages: object) -> tuple[str, list[str]]:
    """The text of all tokens, and that of each run of learned ones."""
    document = chats.document("a", "a.jsonl:1", [messages])
    assert document is not None
    (encoded,) = chats.encode(chats.tokenizer, [document])
    assert encoded.learned is not None
    runs: list[list[int]] = [[]]
    for token, counts in zip(encoded.ids.tolist(), encoded.learned, strict=True):
        if counts:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return chats.tokenizer.decode(encoded.ids.tolist()), [chats.tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_answers_with_their_ends_are_learned(tmp_path: Path, template: str) -> None:
    """The same with the tag as without; and what is no answer is not, such as the line's end behind it."""
    chats = chats_of(tmp_path, template)
    text, answers = learned(chats, [{"role": "system", "content": "Be."}, *TALK])
    begin = "<s>" if template == MARKED else ""
    turns = [("system", "Be."), *((each["role"], each["content"]) for each in TALK)]
    assert text == begin + "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert answers == ["1, é日😀<|im_end|>", "\n2<|im_end|>"]
    asked = chats.tokenizer.decode(chats.question("one?"))
    assert asked == f"{begin}<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n"
    assert {chats.tokenizer.decode([token]) for token in chats.ends()} == {"</s>", "<|im_end|>"}
    document = chats.document("a", "", [TALK])
    assert document is not None and document.learned_bytes == len("1, é日😀\n2".encode())


def test_a_template_that_begins_no_answer(tmp_path: Path) -> None:
    text, answers = learned(chats_of(tmp_path, STRICT), TALK)
    assert text == "<s>[INST] one? [/INST] 1, é日😀 </s><s>[INST] two? [/INST] 2 </s>"
    assert answers == [" 1, é日😀 </s>", " 2 </s>"]


def test_thoughts_are_learned_and_other_keys_are_for_the_template(tmp_path: Path) -> None:
    template = CHATML.replace(
        "message.content +", "(message.why or '') + ('?' if 'none' in message else '') + message.content +"
    )
    talk = [TALK[0], {"role": "assistant", "content": "<think>1", "why": "as", "none": None}]
    assert learned(chats_of(tmp_path, template), talk)[1] == ["as<think>1<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML, MARKED, STRICT])
def test_the_tokens_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    transformers = pytest.importorskip("transformers")
    chats = chats_of(tmp_path, template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    document = chats.document("a", "", [TALK])
    assert document is not None
    (encoded,) = chats.encode(chats.tokenizer, [document])
    options = {"tokenize": True, "return_dict": True}
    marks = template == MARKED
    found = theirs.apply_chat_template(TALK, return_assistant_tokens_mask=marks, **options)
    assert encoded.learned is not None and found["input_ids"] == encoded.ids.tolist()
    assert not marks or found["assistant_masks"] == encoded.learned.astype(int).tolist()
    asked = theirs.apply_chat_template(TALK[:1], add_generation_prompt=True, **options)["input_ids"]
    assert asked == chats.question("one?")


def test_where_the_template_is(tmp_path: Path) -> None:
    """In a file of its own, in tokenizer_config.json, or there one of several."""
    several = [{"name": "tool_use", "template": "{{ 1 }}"}, {"name": "default", "template": CHATML}]
    expected = learned(chats_of(tmp_path, CHATML), TALK)
    for place, said in enumerate((CHATML, several)):
        path = write_folder(tmp_path / str(place), None, chat_template=said)
        assert learned(Chats.of("messages", path), TALK) == expected
    path = write_folder(tmp_path / "none", None)
    assert "no chat template" in mistake(Chats.of, "messages", path)
    write(tmp_path / "none/chat_template.jinja", "{% for %}")
    assert "chat_template.jinja: no chat template (" in mistake(Chats.of, "messages", path)


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (STRICT, {"</s>"}),
        (CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<think>' }}"), {"</s>", "<|im_end|>"}),
        (CHATML.replace("<|im_end|>", ""), {"</s>"}),
        ("{{ messages[0].content }}", {"</s>"}),
    ],
)
def test_a_template_that_nothing_could_be_learned_by_can_be_asked(
    tmp_path: Path, template: str, ends: set[str]
) -> None:
    chats = chats_of(tmp_path, template)
    assert {chats.tokenizer.decode([token]) for token in chats.ends()} == ends
    assert chats.question("one?")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hello", "a.jsonl:2: field 'messages' holds a str, not a list of messages"),
        (["hello"], 'a.jsonl:2: message 1: not like {"role": "user"'),
        ([{"from": "human", "text": "x"}], "a.jsonl:2: message 1: not like"),
        ([{"from": "bot", "value": "x"}], "a.jsonl:2: message 1: from is 'bot', none of human, user, gpt"),
        ([{"from": "human", "value": "</s>"}], "message 1: it holds '</s>'"),
        ([TALK[0], {"role": "assistant", "content": ["x"]}], "message 2: field 'content' holds a list"),
        ([TALK[0], {"role": "gpt", "content": "x"}], "no message of the assistant to learn from, only of"),
        ([TALK[1], TALK[0]], "a.jsonl:2: refused by the chat template, "),
        ([TALK[0], TALK[0], TALK[1]], "roles must alternate"),
        ([{"role": "user", "content": "a</s>b"}, TALK[1]], "message 1: it holds '</s>'"),
        ([TALK[0] | {"name": "<s>"}, TALK[1]], "message 1: it holds '<s>'"),
        ([TALK[0] | {"name": "\ud801"}, TALK[1]], "half a surrogate pair"),
        ([TALK[0], {"role": "assistant", "content": "\ud800"}], "half a surrogate pair"),
    ],
)
def test_wrong_records(tmp_path: Path, messages: object, said: str) -> None:
    chats = chats_of(tmp_path, STRICT)
    file = write(tmp_path / "a.jsonl", lines(TALK, messages))
    message = mistake(list, documents(sources([file], chats), chats))
    assert said in message and "a.jsonl:2" in message


def test_messages_of_sharegpt(tmp_path: Path) -> None:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    talk = [{"role": "system", "content": "Be."}, *TALK]
    theirs = [{"from": names[each["role"]], "value": each["content"]} for each in talk]
    chats = chats_of(tmp_path, CHATML)
    assert learned(chats, theirs) == learned(chats, talk)


def test_a_record_of_another_kind(tmp_path: Path) -> None:
    chats = chats_of(tmp_path, CHATML)
    file = write(tmp_path / "a.jsonl", lines(TALK) + '{"prompt": "a", "completion": "b"}')
    message = mistake(list, documents([file], chats))
    assert message.endswith(
        "a.jsonl:2: no field 'messages'; its fields are 'prompt', 'completion': take --data.format answers"
    )


def test_records_without_an_answer_are_left_out(tmp_path: Path) -> None:
    chats = chats_of(tmp_path, CHATML)
    nothing: list[object] = [None, [], [TALK[0], {"role": "assistant", "content": None}]]
    file = write(tmp_path / "a.jsonl", lines(*nothing, TALK))
    assert [each.name for each in documents([file], chats)] == ["a.jsonl:4"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        # What comes later changes what was written before: which tokens an answer has cannot be told.
        (
            CHATML.replace("message.content", "(message.content if loop.last else '-')"),
            "put {% generation %}",
        ),
        (CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ 'A:' }}"), "put {% generation %}"),
        (CHATML.replace("message.content", "message.content + ('!' if loop.last else '')"), "put {%"),
        (CHATML.replace("message.content", f"message.content + {LAST}"), "put {% generation %}"),
        ("{% generation %}{% endgeneration %}{{ messages[0].content }}", "leaves its answers out"),
        (CHATML.replace("<|im_end|>", ""), "so a model would never learn to stop"),
        ("{{ messages[5].content }}", "refused by the chat template, "),
        # It is a stranger's program.
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "refused by the chat template, "),
        ("{{ messages.append(1) }}", "refused by the chat template, "),
    ],
)
def test_wrong_templates(tmp_path: Path, template: str, said: str) -> None:
    chats = chats_of(tmp_path, template)
    found = mistake(chats.document, "a", "a.jsonl:1", [TALK])
    # A run reads its own copy, which goes away with the mistake: its path would lead to nothing.
    assert said in found and "the chat template, chat_template.jinja" in found and str(tmp_path) not in found


def test_tokens_are_made_again_after_another_template(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", lines(TALK))
    made = []
    for template in (CHATML, CHATML.replace("\n", " "), CHATML):
        chats = chats_of(tmp_path, template)
        made.append(build(tmp_path / "tokens", [Source([file])], chats, chats.tokenizer, share=0))
    assert made[0].identity == made[2].identity != made[1].identity


def test_a_table_of_messages(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    chats, file = chats_of(tmp_path, CHATML), tmp_path / "a.parquet"
    padded = [TALK, [{**each, "extra": None} for each in TALK], None]
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"messages": padded}), file)
    found = list(documents(sources([file], chats), chats))
    assert [each.name for each in found] == ["a.parquet:1", "a.parquet:2"]
    assert found[0].text == found[1].text and found[0].answers == found[1].answers
