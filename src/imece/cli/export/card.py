"""README.md beside exported weights: the model card that the Hugging Face Hub shows."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from imece.checkpoint.commit import METRIC_ON, METRIC_OVER
from imece.checkpoint.load import Saved
from imece.cli.export.adapter import FOUR_BITS
from imece.data.tokens import open_tokens
from imece.errors import UserError
from imece.listing import many, some
from imece.models.foreign import WITHOUT_LIMIT
from imece.observe.environment import version
from imece.train.config import OF_MODEL, OptimizerSection, TrainConfig
from imece.train.model.origin import sequence_length
from imece.train.run.folder import RunFolder, read_shape

CARD = "README.md"
_NAMED = 5  # texts named in a line
_HUB_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)
_HUB_CACHE = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/", re.ASCII)  # of the Hub's own client
_LEARNED = {"answers": "answers alone", "chat": "what the assistant says alone"}
_TOKENIZERS = {"bpe": "byte pairs of this text", "bytes": "bytes", OF_MODEL: "of the model it began from"}

_CARD = """\
---
{head}
---

# {name}

{what} language model of {parameters:,} parameters in {dtype}, trained with imece {version}.

| | |
|---|---|
{facts}

## Loading it

FOLDER is this folder, or its name on the Hub.

{loading}

## License

Not said yet: put `license: ...` into the head of this file.
"""
_WHOLE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```

```bash
imece sample FOLDER --prompt "..."
imece train --from FOLDER --data texts/ --run runs/tuned
```"""
_ADAPTER = """\
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

base = AutoModelForCausalLM.from_pretrained({base}{quantized})
model = PeftModel.from_pretrained(base, "FOLDER")
```"""


def write_card(
    folder: Path, run: RunFolder, saved: Saved, parameters: int, dtype: str, *, adapter: bool
) -> None:
    """Write the card beside what was exported of a run's checkpoint. OSError if that fails.

    Texts and models are named by the last part of their paths, as others see the card; what is not known is
    left out. parameters: in the exported files, in `dtype`. adapter: they are of adapters alone.
    """
    config = run.config()
    text = _CARD.format(
        head="\n".join(_head(config, adapter)),
        name=_plain(run.path.resolve().name),
        what="Adapters (LoRA) for a" if adapter else "A",
        parameters=parameters,
        dtype=dtype,
        version=version("imece"),
        facts="\n".join(f"| {name} | {fact} |" for name, fact in _facts(run, config, saved)),
        loading=_loading_adapter(config) if adapter else _WHOLE,
    )
    (folder / CARD).write_text(text, encoding="utf-8")


def _head(config: TrainConfig, adapter: bool) -> Iterator[str]:
    """What the Hub reads, in YAML."""
    yield f"library_name: {'peft' if adapter else 'transformers'}"
    yield "pipeline_tag: text-generation"
    yield from ("tags:", "- imece", *(["- lora"] if config.lora.rank else []))
    if (base := _of_the_hub(config.model.weights)) is not None:
        yield f"base_model: {json.dumps(base)}"
    datasets = [name for name in map(_dataset, config.data.paths) if name is not None]
    if datasets:
        yield from ("datasets:", *(f"- {json.dumps(name)}" for name in datasets))


def _facts(run: RunFolder, config: TrainConfig, saved: Saved) -> Iterator[tuple[str, str]]:
    data, batch, lora, shape = config.data, config.batch, config.lora, read_shape(saved.state["model"])
    context = f", context {shape.max_seq:,} tokens" if shape.max_seq < WITHOUT_LIMIT else ""
    yield (
        "model",
        f"{shape.layers} layers x {shape.width}, {many(shape.heads, 'head')} ({shape.kv_heads} of keys and "
        f"values), vocabulary {shape.vocab_size:,}{context}",
    )
    base = config.model.weights
    yield "began from", _code(_of_the_hub(base) or os.path.basename(base)) if base else "random weights"
    if lora.rank:
        targets = _code(" ".join(lora.targets)) if lora.targets else "all matrices but the head"
        bits = "" if lora.quantize == "none" else f", beside a model in 4 bits ({lora.quantize})"
        yield "adapters", f"LoRA of rank {lora.rank}, alpha {lora.alpha_or_usual}, on {targets}{bits}"
    names = [_code(_dataset(path) or os.path.basename(path)) for path in data.paths]
    weights = f", in proportion {' : '.join(f'{each:g}' for each in data.weights)}" if data.weights else ""
    yield "text", (some(names, _NAMED) or "Python's standard library") + weights
    if data.format in _LEARNED:
        yield "learned", _LEARNED[data.format]
    yield "tokenizer", _TOKENIZERS.get(data.tokenizer) or _code(os.path.basename(data.tokenizer))
    tokens = saved.state.get("counters", {}).get("tokens")
    yield "trained on", many(saved.step, "step") + (f", {tokens:,} tokens" if tokens else "")
    if saved.metric is not None and math.isfinite(saved.metric):
        yield "validation", _validation(run, config, saved, saved.metric)
    size = f"{batch.tokens:,} tokens" if batch.tokens else many(batch.sequences, "sequence")
    yield "batch", f"{size} a step, in sequences of {sequence_length(config, shape):,} tokens"
    yield "optimizer", _optimizer(config.optimizer)
    products = "bf16 where the processor multiplies in it, else fp32"
    yield "products in", config.compute.dtype if config.compute.dtype != "auto" else products
    yield "seed", str(config.seed)


def _validation(run: RunFolder, config: TrainConfig, saved: Saved, loss: float) -> str:
    """The loss of the checkpoint; in bits a byte too if the tokens that it is of are still there."""
    text, over = f"{loss:.3f} nats a token", saved.state.get(METRIC_OVER)
    try:
        tokens = open_tokens(run.tokens(config))
    except UserError:
        tokens = None
    if tokens is not None and tokens.identity == saved.state.get(METRIC_ON):
        held_out = tokens.validation
        bits = loss / math.log(2) * held_out.targets / held_out.text_bytes
        text += f" = {bits:.3f} bits a byte"
    return text + (f", on {many(over, 'sequence')} that were held out" if over else "")


def _optimizer(section: OptimizerSection) -> str:
    return (
        f"{section.kind}, learning rate {section.lr:g}, {section.schedule} after {section.warmup} steps of "
        f"warmup, weight decay {section.weight_decay:g}, AdamW's betas {section.beta1:g} and "
        f"{section.beta2:g}, eps {section.eps:g}, gradients clipped at {section.clip:g}"
    )


def _loading_adapter(config: TrainConfig) -> str:
    """With the model beside which they were trained; BASE where nobody knows its name."""
    base, quantized = _of_the_hub(config.model.weights) or "BASE", config.lora.quantize != "none"
    text = _ADAPTER.format(
        base=json.dumps(base), quantized=f", quantization_config={FOUR_BITS}" if quantized else ""
    )
    return text if quantized else text.replace(", BitsAndBytesConfig", "")


def _dataset(path: str) -> str | None:
    """The name of a dataset of the Hub; None for another text."""
    name, _, _ = path.removeprefix("hf:").partition(":")
    return name if path.startswith("hf:") and _HUB_NAME.fullmatch(name) else None


def _of_the_hub(folder: str) -> str | None:
    """The name of the model that the Hub's client has put into this folder; None for another one."""
    found = _HUB_CACHE.search(f"{folder}/")
    return f"{found[1]}/{found[2]}" if found else None


def _code(name: str) -> str:
    return f"`{_plain(name)}`"


def _plain(name: str) -> str:
    """A name without what would end a line, a cell of the table, or code."""
    return re.sub(r"[`|\x00-\x1f\x7f]", " ", name)
