"""`imece export RUN DIR --to adapter`: writes adapters as peft does, for transformers' model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from imece.checkpoint.load import Saved
from imece.checkpoint.state.names import MODEL
from imece.models.foreign import INNER, ForeignConfig
from imece.models.hugging_face import hugging_face_name
from imece.models.language_model import LanguageConfig, outline
from imece.train.config import LoraSection, TrainConfig
from imece.train.model.adapters import ADAPTER_A, ADAPTER_B, lies, targets_of
from imece.train.run.folder import read_shape

# How transformers makes the same codes as imece.train.model.adapters.codes_of.
FOUR_BITS = 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)'
_WRAPPED = "base_model.model."  # peft's prefix for the names of transformers' model
_ENDS = {ADAPTER_A: ".lora_A.weight", ADAPTER_B: ".lora_B.weight"}


def write_adapter(folder: Path, saved: Saved, config: TrainConfig, dtype: torch.dtype) -> int:
    """Write both files into an existing folder and return the number of parameters. OSError if that fails."""
    lora, shape = config.lora, read_shape(saved.state["model"])
    tensors = {
        f"{_WRAPPED}{_theirs(name, shape)}{theirs}": saved.tensor(f"{MODEL}{name}{end}").to(dtype)
        for name in targets_of(lora, shape)
        for end, theirs in _ENDS.items()
    }
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.model.weights,
        "r": lora.rank,
        "lora_alpha": lora.alpha_or_usual,
        "lora_dropout": lora.dropout,
        "target_modules": _target_modules(lora, shape),
        "fan_in_fan_out": lies(shape),
        "bias": "none",
        "inference_mode": True,
    }
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return sum(each.numel() for each in tensors.values())


def _theirs(name: str, shape: LanguageConfig) -> str:
    """The name that a module has in transformers' model."""
    if isinstance(shape, ForeignConfig):
        return name.removeprefix(INNER)
    return hugging_face_name(f"{name}.weight").removesuffix(".weight")


def _target_modules(lora: LoraSection, shape: LanguageConfig) -> list[str]:
    """The last parts of the names, as usual; whole names if other modules end so, too."""
    targets = targets_of(lora, shape)
    whole, ends = {*targets}, {_end(name) for name in targets}
    is_clear = all(name in whole for name, _ in outline(shape).named_modules() if _end(name) in ends)
    theirs = (_theirs(name, shape) for name in targets)
    return sorted({_end(name) if is_clear else name for name in theirs})


def _end(name: str) -> str:
    return name.rpartition(".")[2]
