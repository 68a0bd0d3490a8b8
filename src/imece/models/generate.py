"""Generates tokens with a model, one after another."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from imece.models.language_model import LanguageModel


class LogitsError(ArithmeticError):
    """The logits are not finite (weights that training has spoilt), so no token can be chosen."""


def generate(
    model: LanguageModel,
    prompt_tokens: Sequence[int],
    max_new: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    stop: Collection[int] = (),
    entries: int | None = None,
) -> Iterator[int]:
    """At most max_new tokens that follow the prompt; ends before a token of `stop`, which is not yielded.

    entries: use only this many of the vocabulary, for a tokenizer with fewer entries than the model.
    temperature: 0, or too small for float32, takes the likeliest token each time. Otherwise a token is drawn
    among the top_k likeliest, and of these among the fewest that together have probability top_p. `generator`
    must be on the model's device.
    Whenever max_seq positions are full, the model forgets the older half and reads the rest again.

    ValueError, at once and not at the first token, for an empty prompt, one of more than max_seq tokens or
    with a token outside the vocabulary, max_new or temperature below 0, top_k below 1, and top_p outside (0,
    1]. LogitsError at the token that cannot be chosen.
    """
    prompt = [int(token) for token in prompt_tokens]
    config = model.config
    if not prompt:
        raise ValueError("prompt_tokens is empty; it must hold at least one token")
    for token in prompt:
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"prompt_tokens has {token}; vocab_size is {config.vocab_size}")
    if max_new < 0:
        raise ValueError(f"max_new is {max_new}; it must not be negative")
    if len(prompt) > config.max_seq:
        raise ValueError(f"prompt_tokens has {len(prompt)} tokens; max_seq is {config.max_seq}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is {temperature}; it must be finite and not negative")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1")

    # A function of its own: a generator function would check nothing before the first token is asked for.
    def tokens() -> Iterator[int]:
        device = next(model.parameters()).device
        cache = model.new_cache(min(len(prompt) + max_new, config.max_seq))
        seen, new = list(prompt), prompt
        for _ in range(max_new):
            if cache.length == config.max_seq:
                # Keys hold absolute positions, so the tokens that stay must be read again from position 0.
                cache.length = 0
                del seen[: -max(1, config.max_seq // 2)]
                new = list(seen)
            logits = model(torch.tensor([new], device=device), cache=cache, last_only=True)[0, -1]
            token = _choose(logits[:entries].float(), temperature, top_k, top_p, generator)
            if token in stop:
                return
            yield token
            new = [token]
            seen.append(token)

    return tokens()


def _choose(
    logits: Tensor,  # float32 [V]
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> int:
    most = logits.max()  # NaN if any logit is; single logits may be -inf
    if not most.isfinite():
        raise LogitsError(f"the model's largest logit is {float(most)}: no token can be chosen")
    if temperature < torch.finfo(torch.float32).tiny:  # float32 may round it to 0
        return int(logits.argmax())
    # Subtract the maximum first: divided by a small temperature, it would overflow.
    scaled = (logits - most) / temperature
    probabilities, tokens = scaled.softmax(-1).sort(descending=True, stable=True)
    probabilities = probabilities[:top_k]
    if top_p is not None:
        probabilities = probabilities / probabilities.sum()
        likelier = probabilities.cumsum(0) - probabilities  # probability of all tokens before each
        kept = likelier < top_p
        kept[0] = True  # the likeliest, even if top_p is so small that it is 0 in float32
        probabilities = probabilities[kept]
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])
