"""The model card beside an export: true figures, a head that is YAML, and nothing of this machine's paths."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from imece.cli.export.adapter import FOUR_BITS
from imece.cli.export.card import write_card
from imece.cli.main import main
from imece.data.tokens import open_tokens
from imece.models.foreign import WITHOUT_LIMIT
from imece.models.shape import TransformerConfig
from imece.train.config import DataSection, LoraSection, ModelSection, OptimizerSection, defaults
from imece.train.run.folder import RunFolder, shape_as_json
from tests.cli.conftest import BEST_STEP, LAST_STEP

yaml = pytest.importorskip("yaml")

SHAPE = TransformerConfig(vocab_size=300, layers=2, width=32, heads=4, kv_heads=2, mlp_width=64, max_seq=64)


def read(folder: Path) -> tuple[Any, dict[str, str], str]:
    """(the head, the table, all of it)."""
    text = (folder / "README.md").read_text()
    _, head, body = text.split("---\n", 2)
    rows = [re.fullmatch(r"\| (.+) \| (.+) \|", line) for line in body.splitlines() if line.startswith("| ")]
    return yaml.safe_load(head), {row[1]: row[2] for row in rows if row is not None}, text


def card(
    tmp_path: Path, adapter: bool, shape: TransformerConfig = SHAPE, **sections: Any
) -> tuple[Any, dict[str, str], str]:
    """The card of a run with a config of these sections."""
    run = RunFolder(tmp_path / "a | run")
    run.begin(dataclasses.replace(defaults("", 0), run=str(run.path), seed=7, **sections))
    state = {"model": shape_as_json(shape), "counters": {"tokens": 12_288}, "metric_over": 25}
    saved: Any = SimpleNamespace(step=3, metric=2.5, state=state)
    write_card(tmp_path, run, saved, 1_234, "bf16", adapter=adapter)
    return read(tmp_path)


@pytest.mark.parametrize(("which", "loss", "steps"), [("best", 3.0, BEST_STEP), ("last", 4.0, LAST_STEP)])
def test_of_a_run(trained_run: Path, tmp_path: Path, which: str, loss: float, steps: int) -> None:
    out = tmp_path / "out"
    assert main(["export", str(trained_run), str(out), f"--which={which}", "--dtype=bf16"]) == 0
    head, facts, text = read(out)
    assert head == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["imece"]}
    held_out = open_tokens(trained_run / "tokens").validation
    bits = loss / math.log(2) * len(held_out.tokens) / held_out.text_bytes
    assert facts["validation"] == f"{loss:.3f} nats a token = {bits:.3f} bits a byte"
    assert facts["trained on"] == f"{steps} step{'s' * (steps > 1)}"
    assert (facts["began from"], facts["text"], facts["tokenizer"]) == ("random weights", "`texts`", "bytes")
    assert (facts["products in"], facts["seed"]) == ("fp32", "1")
    config = json.loads((out / "config.json").read_text())
    assert f"{config['num_hidden_layers']} layers x {config['hidden_size']}, " in facts["model"]
    parameters = sum(each.numel() for each in load_file(out / "model.safetensors").values())
    assert f"language model of {parameters:,} parameters in bf16" in text
    assert str(trained_run.parent) not in text


def test_of_what_came_from_the_hub(tmp_path: Path) -> None:
    head, facts, text = card(
        tmp_path,
        adapter=True,
        model=ModelSection(preset="", weights="/secret/hub/models--some--model-1.7B/snapshots/0a1b2c"),
        data=DataSection(
            paths=("hf:owner/name:train[:5%]", "/secret/my `notes`|\n", "hf:/secret/saved"),
            weights=(3, 1, 0.5),
            format="chat",
            tokenizer="model",
        ),
        lora=LoraSection(rank=16, quantize="nf4", targets=("q", "v")),
        optimizer=OptimizerSection(kind="adamw", lr=2e-4),
    )
    assert head == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["imece", "lora"],
        "base_model": "some/model-1.7B",
        "datasets": ["owner/name"],
    }
    assert "secret" not in text and "# a   run\n" in text
    assert facts["text"] == "`owner/name`, `my  notes   `, `saved`, in proportion 3 : 1 : 0.5"
    assert facts["adapters"] == "LoRA of rank 16, alpha 32, on `q v`, beside a model in 4 bits (nf4)"
    assert facts["trained on"] == "3 steps, 12,288 tokens" and facts["seed"] == "7"
    assert facts["validation"] == "2.500 nats a token, on 25 sequences that were held out"  # no text is there
    assert facts["optimizer"].startswith("adamw, learning rate 0.0002, ")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert f'from_pretrained("some/model-1.7B", quantization_config={FOUR_BITS})' in code
    assert "import AutoModelForCausalLM, BitsAndBytesConfig\n" in code
    compile(code, "card", "exec")


def test_of_what_nobody_knows(tmp_path: Path) -> None:
    """A base that lies in a folder has no name on the Hub; a text may be Python's own."""
    model = ModelSection(preset="", weights="/secret/base")
    shape = dataclasses.replace(SHAPE, max_seq=WITHOUT_LIMIT)  # of a model whose config.json names none
    head, facts, text = card(tmp_path, True, shape, model=model, lora=LoraSection(rank=4))
    assert facts["model"] == "2 layers x 32, 4 heads (2 of keys and values), vocabulary 300"
    assert head.keys() == {"library_name", "pipeline_tag", "tags"}
    assert (facts["began from"], facts["text"]) == ("`base`", "Python's standard library")
    assert 'from_pretrained("BASE")' in text and "BitsAndBytes" not in text
