"""Hugging Face's models, divided by the plans that they bring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import imece
from imece.errors import UserError
from imece.mesh import Mesh
from imece.model_parallel.divided import divided_parameters
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip


def made(family: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config).double()
    for each in model.parameters():
        nn.init.normal_(each, std=0.3)
    return model


def losses(model: nn.Module, parameters: Any) -> Tensor:
    optimizer = torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
    found = []
    for step in range(3):
        tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found)


def compare(mesh: Mesh, family: str, options: dict[str, Any], divided: int) -> None:
    whole = made(family, **options)
    expected = losses(whole, whole.parameters())
    model = imece.tensor_parallel(made(family, **options), mesh)
    assert len(divided_parameters(model)) == divided
    found = losses(model, model.parameters())
    assert (found - expected).abs().max() < 1e-12, (family, options, found, expected)
    known, parts = dict(whole.named_parameters()), divided_parameters(model)
    for name, each in model.named_parameters():
        same = parts[name].of(known[name]) if name in parts else known[name]
        assert (each - same).abs().max() < 1e-12, (family, name)


def families() -> None:
    mesh = imece.init({"tensor": 2})
    compare(mesh, "Llama", {"tie_word_embeddings": False}, 2 * 7 + 2)
    compare(
        mesh, "Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, 2 * 12 + 2
    )
    compare(mesh, "Qwen3", {"head_dim": 4, "tie_word_embeddings": True}, 2 * 7 + 2)
    with pytest.raises(UserError, match="num_attention_heads 3 and num_key_value_heads 3 cannot be"):
        config = SIZES | {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 12}
        imece.tensor_parallel(transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)), mesh)
    with pytest.raises(UserError, match="says nothing of parts of the sequence"):
        imece.tensor_parallel(made("Llama"), mesh, sequence=True)
    with pytest.raises(UserError, match="no plan is known for a GPT2LMHeadModel"):
        small = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=32)
        imece.tensor_parallel(transformers.GPT2LMHeadModel(small), mesh)


def test_train_as_on_one_rank() -> None:
    run_ranks(families, 2)
