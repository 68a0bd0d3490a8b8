"""`imece sample RUN --prompt "..."`: prints what a trained model writes, as it writes it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro

from imece.cli.options import parse
from imece.data.chats import Chats, find_template
from imece.data.prepare import TextSource
from imece.data.tokenizer import Tokenizer
from imece.device import best_device
from imece.errors import UserError
from imece.models.generate import LogitsError, generate
from imece.observe.visible import visible
from imece.saying import say
from imece.train.model.origin import Weights, model_of, open_weights, tokenizer_of
from imece.train.run.folder import Which, check_which

PROG = "imece sample"
DESCRIPTION = (
    "Let a trained model write: the prompt and what follows it go to standard output as they come, until the "
    "document or the answer ends, or --tokens are written."
)
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 4  # bytes of a character at most


@dataclass(frozen=True)
class SampleOptions:
    """Options of `imece sample`."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """The run folder, or a folder with a model in Hugging Face's format."""
    prompt: str = ""
    """The beginning of the text; -: read it from standard input. Empty: begin a new document. For a run that
    learned from chats, and a folder with a chat template: what a user says, and the model answers."""
    raw: bool = False
    """The prompt is the beginning of a text also for a model that chats."""
    tokens: int = 200
    """Most tokens to write. Beyond its context the model goes on from the last half of the context."""
    temperature: float = 0.6
    """Above 1 wilder, below 1 tamer; 0: always the likeliest token."""
    top_k: int | None = None
    """Draw only among this many of the likeliest tokens. Default: among all."""
    top_p: float | None = 0.95
    """Draw only among the fewest tokens that together have this probability."""
    seed: int | None = None
    """Seed of the draws. Default: a new one each time, which is printed at the end."""
    which: Which = "best"
    """Which checkpoint of a run: best (by validation loss), last, or the number of a step."""
    stop: bool = True
    """End where the document ends. --no-stop: go on with the next one."""

    def __post_init__(self) -> None:
        check_which(self.which)
        if self.tokens < 1:
            raise ValueError(f"--tokens {self.tokens}: at least 1")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature {self.temperature}: at least 0, and finite")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"--top-k {self.top_k}: at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p}: more than 0, at most 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed {self.seed}: from 0 to 2^63 - 1")


def run(argv: Sequence[str]) -> int:
    """`imece sample ARGV`: exit status 0 once the text is written."""
    options = parse(SampleOptions, argv, PROG, DESCRIPTION)
    weights, device = open_weights(options.run, options.which), best_device()
    tokenizer, model = tokenizer_of(weights), model_of(weights, device)
    prompt = _standard_input() if options.prompt == "-" else options.prompt
    # Training puts this token before each document, so to the model it means a beginning.
    ids, stop = [tokenizer.before, *tokenizer.encode(prompt)], {tokenizer.end}
    if (chats := _chats(weights, options)) is not None:
        ids, stop, prompt = chats.question(prompt), chats.ends(), f"{prompt}\n"
    most = model.config.max_seq
    if len(ids) > most:
        say(f"the prompt has {len(ids):,} tokens, the model's context {most:,}: it reads the last {most:,}")
        ids = ids[-most:]
    generator = torch.Generator(device)
    seed = generator.seed() % 2**63 if options.seed is None else options.seed
    tokens = generate(
        model,
        ids,
        options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        generator=generator.manual_seed(seed),
        stop=stop if options.stop else (),
        entries=tokenizer.vocab_size,
    )
    began, text = time.perf_counter(), Text(tokenizer, ids)
    _show(prompt)
    try:
        for piece in text.pieces(tokens):
            _show(piece)
    except LogitsError:
        _show("\n")  # after the prompt, and what came before
        raise UserError(_unusable(weights)) from None
    seconds = time.perf_counter() - began
    _show("\n")
    speed = f"{text.tokens / seconds:,.0f} tokens/s" if text.tokens else "the document ended at once"
    step = f"step {weights.saved.step}: " if weights.saved is not None else ""
    say(f"{step}{text.tokens:,} tokens, {speed}; --seed {seed} writes this again")
    return 0


def _chats(weights: Weights, options: SampleOptions) -> Chats | None:
    """How a prompt becomes a user's message, if a run learned from chats, or lies in a folder with a chat
    template. UserError without a prompt."""
    if options.raw:
        return None
    tokenizer_file, source = weights.home.tokenizer_file, TextSource(format="chat")
    if weights.saved is not None:
        source = weights.home.config().data
    elif find_template(tokenizer_file.parent) is None:
        return None
    if source.format != "chat":
        return None
    if not options.prompt:
        raise UserError(f"{options.run} answers what a user says: say it with --prompt, or take --raw")
    if weights.saved is None:  # which may have a template and never have learned by it
        say("the chat template asks what a user says; --raw: the prompt is the beginning of a text")
    return Chats.of(source.fields, tokenizer_file)


class Text:
    """Turns tokens into text, showing each character once it is certain: a token may end inside a character.

    tokens: how many there were.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        """before: tokens that come first; a tokenizer may write the first token of a text differently."""
        self.tokens = 0
        self._tokenizer = tokenizer
        # Decoded together each time: a few tokens that are shown and end with a whole character, and the new
        # ones.
        self._context, self._new = list(before[-1:]), list[int]()
        self._shown = 0  # characters of the new ones

    def pieces(self, tokens: Iterator[int]) -> Iterator[str]:
        """The text of `tokens`, in pieces."""
        for token in tokens:
            self.tokens += 1
            self._new.append(token)
            text = self._text()
            unfinished = len(text) - len(text.rstrip(_UNKNOWN))
            # Some tokenizers show a whole run of bytes as unknown until its last character is complete. But
            # if this many tokens did not complete a character, the bytes are no text.
            held = unfinished if len(self._new) <= _LONGEST else min(unfinished, _LONGEST - 1)
            certain = max(len(text) - held, self._shown)
            if certain > self._shown:
                yield text[self._shown : certain]
            self._shown = certain
            if not unfinished:
                self._context, self._new, self._shown = self._new, [], 0
        if rest := self._text()[self._shown :]:
            yield rest

    def _text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._new)[len(before) :]


def _unusable(weights: Weights) -> str:
    """The message that this model's outputs choose no token, and what to do."""
    said = f"{weights.folder}: what its model computes is not finite"
    if weights.saved is None:
        return f"{said}: get the folder again, or name another"
    earlier = {which: weights.home.saved(which).step for which in ("best", "last")}
    cure = next(
        (
            f"--which {which} takes step {step}"
            for which, step in earlier.items()
            if step < weights.saved.step
        ),
        "the usual cure is a new run with a lower --optimizer.lr",
    )
    return f"{said}, so its training went wrong before: {cure}"


def _show(text: str) -> None:
    """Print without control characters, which a terminal would obey, and without characters that it lacks."""
    if sys.stdout.isatty():
        text = visible(text, sys.stdout.encoding or "utf-8")
    print(text, end="", flush=True)


def _standard_input() -> str:
    if sys.stdin is None:
        raise UserError("standard input is closed: give the text with --prompt, or a file with < FILE")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input: not UTF-8 at byte {error.start}: convert it with iconv") from error
