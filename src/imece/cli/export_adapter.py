"""`imece export RUN DIR --to adapter`: writes adapters as peft does, for transformers' model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from imece.checkpoint.load import Saved
from imece.checkpoint.names import MODEL
from imece.models.hugging_face import hugging_face_name
from imece.train.adapters import ADAPTER_A, ADAPTER_B
from imece.train.config import TrainConfig

# How transformers makes the same codes as imece.train.adapters.codes_of.
FOUR_BITS = 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)'
_WRAPPED = "base_model.model."  # peft's prefix for the names of transformers' model
_ENDS = {ADAPTER_A: ".lora_A.weight", ADAPTER_B: ".lora_B.weight"}


def write_adapter(folder: Path, saved: Saved, config: TrainConfig, dtype: torch.dtype) -> int:
    """Write both files into an existing folder and return the number of parameters. OSError if that fails."""
    tensors: dict[str, torch.Tensor] = {}
    modules = set()
    for name in saved.names():
        for end, theirs in _ENDS.items():
            if name.startswith(MODEL) and name.endswith(end):
                own = f"{name.removeprefix(MODEL).removesuffix(end)}.weight"
                module = hugging_face_name(own).removesuffix(".weight")
                tensors[f"{_WRAPPED}{module}{theirs}"] = saved.tensor(name).to(dtype)
                modules.add(module.rpartition(".")[2])
    lora = config.lora
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.model.weights,
        "r": lora.rank,
        "lora_alpha": lora.alpha_or_usual,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(modules),
        "bias": "none",
        "inference_mode": True,
    }
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return sum(each.numel() for each in tensors.values())
