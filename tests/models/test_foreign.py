"""Models of other kinds than ours, which transformers builds and computes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from imece.checkpoint.state.weights import fill
from imece.errors import UserError
from imece.models.foreign import APART, ForeignConfig, ForeignModel
from imece.models.generate import generate
from imece.models.hugging_face import HuggingFaceModel, from_hugging_face, read_config
from imece.models.language_model import give_memory
from imece.train.model.origin import model_of, open_weights

_LLAMAS = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 48, "head_dim": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# What mixtures of experts have beside that, under the names of one kind or another.
_EXPERTS = _LLAMAS | {
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
    "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_layer_start_index": 1, "mlp_only_layers": [0], "num_key_value_heads": 4, "q_lora_rank": 8,
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
}  # fmt: skip
_MIXTURES = (
    "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe", "granitemoe",
    "granitemoeshared", "jetmoe", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
)  # fmt: skip
# Learned positions, windows, tied heads, fused matrices, names in files that differ from those of parameters,
# another rotation than Llama's, norms elsewhere, buffers in files, wider heads in some layers, experts.
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 60, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 48},
    "gemma2": _LLAMAS | {"sliding_window": 6},
    "gemma3_text": _LLAMAS | {
        "sliding_window": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "gemma4_text": _LLAMAS | {
        "sliding_window": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 60,
        "global_head_dim": 8,
    },
    "apertus": _LLAMAS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "phi3": _LLAMAS,
    "gpt_neox": _LLAMAS,
    "olmo2": _LLAMAS,
    "mixtral": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "deepseek_v3": _EXPERTS,
    "llama": _LLAMAS | {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 12,
        }
    },
}  # fmt: skip
PACKED = [[0, 9, 10, 24], [0, 1, 17, 24]]  # where documents begin in two sequences, and their end


def saved(folder: Path, kind: str) -> Any:
    """transformers' own model of a kind, in fp64, after it was saved in several files."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[kind](**KINDS[kind]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size="8KB")
    return exact(model).eval()


def exact(model: Any) -> Any:
    """A model of transformers in fp64, which the kernel that multiplies for experts does not know."""
    model.set_experts_implementation("eager")
    return model.double()


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(tokens, use_cache=False).logits
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_computes_what_transformers_does(tmp_path: Path, kind: str) -> None:
    theirs = saved(tmp_path, kind)
    weights = open_weights(str(tmp_path))
    ours = model_of(weights)
    assert isinstance(ours, ForeignModel) and not any(each.is_meta for each in ours.parameters())
    exact(ours.inner)
    config, tokens = ours.config, torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(1))
    expected = logits_of(theirs, tokens)
    assert torch.allclose(ours(tokens), expected, atol=1e-6, rtol=0)
    assert float(ours(tokens).detach().var()) > 0.01
    assert torch.equal(ours(tokens, last_only=True), ours(tokens)[:, -1:])
    assert config.parameter_count == sum(each.numel() for each in theirs.parameters())
    assert (config.vocab_size, config.layers, config.width, config.max_seq) == (60, 3, 16, 48)

    begins = torch.tensor([
        [max(cut for cut in cuts if cut <= at) for at in range(24)] for cuts in PACKED
    ])  # fmt: skip
    packed = ours(tokens, begins=begins)
    for row, cuts in enumerate(PACKED):
        for start, stop in zip(cuts, cuts[1:], strict=False):
            alone = ours(tokens[row : row + 1, start:stop])
            assert torch.allclose(packed[row : row + 1, start:stop], alone, atol=1e-5, rtol=0), (row, start)
    assert float((packed - ours(tokens)).detach().abs().max()) > 0.01


@pytest.mark.parametrize("kind", sorted(APART))
def test_documents_stay_apart(kind: str) -> None:
    """And no token sees those behind it."""
    transformers = pytest.importorskip("transformers")
    like_gpt2 = kind in ("gpt2", "gptj", "codegen", "gpt_bigcode")
    usual = _EXPERTS if kind in _MIXTURES else _LLAMAS
    size = KINDS["gpt2"] | {"rotary_dim": 4} if like_gpt2 else KINDS.get(kind, usual)
    size = {key: value for key, value in size.items() if kind not in ("falcon", "gptj") or key != "head_dim"}
    config = ForeignConfig.of({**transformers.CONFIG_MAPPING[kind](**size).to_dict(), "model_type": kind})
    assert config.keeps_apart and config.layers == 3
    model = ForeignModel(config)
    give_memory(model, "cpu")
    exact(model.inner).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
        tokens = torch.randint(3, 60, (1, 24), generator=generator)
        begins = torch.tensor([[0] * 9 + [9] + [10] * 14])
        packed, crossing = model(tokens, begins=begins), model(tokens)
        for start, stop in ((0, 9), (9, 10), (10, 24)):
            alone = model(tokens[:, start:stop])
            assert torch.allclose(packed[:, start:stop], alone, atol=1e-5, rtol=0), start
        assert torch.allclose(crossing[:, :10], model(tokens[:, :10]), atol=1e-5, rtol=0)
    assert float((packed - crossing).abs().max()) > 1e-2


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "gemma3_text", "gemma4_text"])
def test_writes_on_as_transformers_does(tmp_path: Path, kind: str) -> None:
    """Also where windows have slid."""
    theirs = saved(tmp_path, kind)
    ours, tokens = model_of(open_weights(str(tmp_path))).double(), [5, 9, 33]
    assert isinstance(ours, ForeignModel)
    cache = ours.new_cache(48)
    assert cache.length == 0
    read = ours(torch.tensor([tokens]), cache=cache, last_only=True)
    for position in range(len(tokens), 48):  # the same tokens for both, not each its own likeliest
        expected = logits_of(theirs, torch.tensor([tokens]))[:, -1:]
        assert torch.allclose(read, expected, atol=1e-5, rtol=0), position
        assert cache.length == position and not read.requires_grad
        tokens.append(position * 7 % 60)
        read = ours(torch.tensor([tokens[-1:]]), cache=cache, last_only=True)
    cache.length = 0
    again = ours(torch.tensor([tokens[-24:]]), cache=cache, last_only=True)
    assert torch.allclose(again, logits_of(theirs, torch.tensor([tokens[-24:]]))[:, -1:], atol=1e-5, rtol=0)
    written = list(generate(ours, tokens[:3], 60, temperature=0.0))
    assert written[0] == int(logits_of(theirs, torch.tensor([tokens[:3]]))[0, -1].argmax())
    assert len(written) == 60, "beyond the context, of which half is read again"


def test_recomputes_the_same(tmp_path: Path) -> None:
    saved(tmp_path, "gemma2")
    model = model_of(open_weights(str(tmp_path))).double().train()
    tokens = torch.arange(20).view(1, -1)
    grads = []
    for recompute in (False, True, False):
        model.checkpoint_blocks = recompute
        assert model.checkpoint_blocks is recompute
        model.zero_grad()
        model(tokens).square().mean().backward()
        grads.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2]) and grads[0].abs().sum() > 0


def test_parameters_have_memory_only_when_it_is_given(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    config = read_config(tmp_path / "config.json")
    assert isinstance(config, ForeignConfig)
    model = ForeignModel(config)
    first = model.get_parameter("inner.transformer.wte.weight")
    assert all(each.is_meta for each in model.parameters())
    give_memory(model, "cpu")
    assert model.get_parameter("inner.lm_head.weight") is first, "still tied, and the same object"
    assert not any(each.is_meta or each.abs().any() for each in model.parameters())
    fill(model, open_weights(str(tmp_path)))
    assert first.abs().sum() > 0


def test_files_whose_names_lack_the_prefix(tmp_path: Path) -> None:
    """As the Hub has GPT-2, with tables of masks."""
    from safetensors.torch import load_file, save_file

    saved(tmp_path, "gpt2")
    whole = model_of(open_weights(str(tmp_path)))
    tensors: dict[str, Tensor] = {}
    for path in tmp_path.glob("model-*.safetensors"):
        tensors |= {name.removeprefix("transformer."): each for name, each in load_file(path).items()}
        path.unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 48, 48)}, tmp_path / "model.safetensors")
    again = dict(model_of(open_weights(str(tmp_path))).named_parameters())
    for name, each in whole.named_parameters():
        assert torch.equal(each, again[name]), name
    save_file(tensors | {"h.0.attn.other": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"h\.0\.attn\.other, of which config\.json knows nothing"):
        HuggingFaceModel.open(tmp_path)
    del tensors["h.1.mlp.c_fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"there is no tensor transformer\.h\.1\.mlp\.c_fc\.weight, but"):
        HuggingFaceModel.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "nothing"}, "transformers [0-9.]+ knows no model_type 'nothing'"),
        ({"model_type": "bert"}, "bert is an encoder: its tokens see those behind them"),
        ({"model_type": "mamba", "num_hidden_layers": 1, "hidden_size": 16}, "mamba has no attention"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 is an encoder and a decoder"),
        ({"model_type": "gemma3", "vision_config": {}}, "gemma3 also sees or hears"),
        (
            _LLAMAS | {"model_type": "gemma", "hidden_size": "x"},
            "transformers builds no language model of it",
        ),
    ],
)
def test_models_that_are_none(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=message) as refused:
        read_config(tmp_path / "config.json")
    assert "\n" not in str(refused.value) and "model_type is" in str(refused.value)


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"} | KINDS["gpt2"]))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError) as refused:
        read_config(tmp_path / "config.json")
    assert str(refused.value) == (
        f"{tmp_path}/config.json: not a model that can be read here (model_type is 'gpt2'; there are llama, "
        "mistral, qwen2, qwen3, smollm3; other kinds need transformers: pip install 'imece[hf]'): name "
        "another folder"
    )


def test_what_its_interface_refuses(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    model, tokens = model_of(open_weights(str(tmp_path))), torch.ones(1, 8, dtype=torch.int64)
    assert isinstance(model, ForeignModel)
    wrong: list[tuple[Tensor, dict[str, Any], str]] = [
        (tokens[0], {}, r"shape \[8\]"),
        (tokens.repeat(1, 7), {}, "at most 48 positions"),
        (tokens, {"positions": torch.arange(8)}, "positions for a gpt2 of transformers"),
        (tokens, {"begins": torch.zeros(1, 7)}, r"begins of shape \[1, 7\]"),
        (tokens, {"begins": torch.zeros(1, 8), "cache": model.new_cache(8)}, "a cache is not possible"),
    ]
    for given, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            model(given, **options)
    with pytest.raises(UserError, match="a gpt2, which Transformer cannot be: read it with transformers"):
        from_hugging_face(tmp_path)
