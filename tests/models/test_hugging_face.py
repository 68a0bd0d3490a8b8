"""Names, shapes and config.json of an exported model; and equal logits, if transformers is installed."""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from imece.errors import UserError
from imece.models.generate import generate
from imece.models.hugging_face import (
    from_hugging_face,
    generation_config,
    hugging_face_name,
    hugging_face_shapes,
    read_config,
    to_hugging_face,
    tokenizer_config,
)
from imece.models.hugging_face_files import divide, write_weights
from imece.models.presets import preset
from imece.models.shape import RopeScaling, TransformerConfig
from imece.models.transformer import Transformer

PLAIN = TransformerConfig(
    vocab_size=50, layers=2, width=32, heads=4, kv_heads=4, mlp_width=48, max_seq=64, tied_head=False
)
SHAPES = {
    "plain": PLAIN,
    "tied, grouped": replace(PLAIN, kv_heads=2, tied_head=True, norm_eps=1e-3),
    "rope": replace(
        PLAIN,
        kv_heads=1,
        rope_theta=500.0,
        rope_scaling=RopeScaling(8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq=16),
    ),
}


# The same in the words of those that differ from Llama. (model_type, shape) where several could say it.
KINDS = {
    "llama": replace(PLAIN, head_dim=10, qkv_bias=True, out_bias=True, mlp_bias=True),
    "mistral": replace(PLAIN, kv_heads=2, window=20),
    "qwen2": replace(PLAIN, kv_heads=2, tied_head=True, qkv_bias=True),
    "qwen2 with windows": replace(PLAIN, qkv_bias=True, window=20, full_layers=(0,)),
    "qwen3": replace(PLAIN, kv_heads=2, head_dim=16, head_norms=True),
    "qwen3 with biases": replace(PLAIN, head_norms=True, qkv_bias=True, out_bias=True, window=7),
    "smollm3": replace(PLAIN, layers=4, tied_head=True, nope_layers=(3,)),
    "smollm3 with windows": replace(
        PLAIN, layers=4, nope_layers=(1, 3), window=9, full_layers=(0, 2), mlp_bias=True, rope_theta=2e6
    ),
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
# What transformers 5.23 writes for small ones of `_TINY`, and the logits that it computes of them with the
# weights of `wave`: of the 6th and the last of 12 tokens, three each.
_TINY = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "hidden_act": "silu",
    "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
_ALL_FULL = {"use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * 3}
RECORDED: list[tuple[dict[str, Any], list[float]]] = [
    (
        {
            "model_type": "qwen2", "tie_word_embeddings": True, "use_sliding_window": True,
            "sliding_window": 4, "max_window_layers": 2,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        },
        [-0.2651, -1.7143, 0.2582, -2.3872, -1.4315, 0.9369],
    ),
    (
        {
            "model_type": "qwen3", "head_dim": 6, "rms_norm_eps": 1e-5, "attention_bias": False, **_ALL_FULL,
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        },
        [4.4922, -3.5437, -3.7302, -0.4628, 2.188, -3.6927],
    ),
    (
        {
            "model_type": "mistral", "head_dim": 8, "sliding_window": 5,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        [-1.3138, 1.4284, -2.4412, -0.034, -3.0714, -1.7348],
    ),
    (
        {
            "model_type": "smollm3", **_ALL_FULL, "no_rope_layers": [1, 1, 0], "no_rope_layer_interval": 3,
            "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 2000000.0, "rope_type": "default"},
        },
        [0.5964, -0.9239, 1.3107, -2.8151, -1.8732, 0.5566],
    ),
    (
        {
            "model_type": "llama", "head_dim": 10, "attention_bias": True, "mlp_bias": True,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        [2.1011, 1.6297, -4.3571, 1.8826, 1.8531, 0.1928],
    ),
]  # fmt: skip
# Of the Hub, by what their config.json says that counts; and how many parameters they have.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen2.5-0.5B": (
        {
            "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
            "tie_word_embeddings": True, "rope_theta": 1000000.0, "sliding_window": 32768,
            "max_window_layers": 24, "use_sliding_window": False,
        },
        494_032_768,
    ),
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936, "head_dim": 128,
            "tie_word_embeddings": True, "rope_theta": 1000000, "sliding_window": None,
            "max_window_layers": 28, "use_sliding_window": False, "attention_bias": False,
        },
        596_049_920,
    ),
    "Mistral-7B-v0.1": (
        {
            "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": 4096,
        },
        7_241_732_096,
    ),
    "Mistral-Nemo": (
        {
            "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 131072, "head_dim": 128,
            "sliding_window": None,
        },
        12_247_782_400,
    ),
    "SmolLM3-3B": (
        {
            "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256,
            "rope_theta": 5000000.0, "no_rope_layers": [1, 1, 1, 0] * 9, "use_sliding_window": False,
            "sliding_window": None,
        },
        3_075_098_624,
    ),
}  # fmt: skip


def wave(name: str, shape: Sequence[int]) -> Tensor:
    """Weights that need no generator."""
    at = torch.arange(math.prod(shape), dtype=torch.float64)
    found = torch.sin(at * at * 0.37 + zlib.crc32(name.encode()) % 1000)
    return (found + 1.5 if "norm" in name else found / 2).float().view(*shape)


def model_of(config: TransformerConfig) -> Transformer:
    generator = torch.Generator().manual_seed(0)
    model = Transformer(config, generator=generator)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.mul_(10)
    return model


def write(folder: Path, model: Transformer, **options: Any) -> dict[str, Tensor]:
    folder.mkdir(exist_ok=True)
    config, tensors = to_hugging_face(model.config, model.named_parameters(), **options)
    (folder / "config.json").write_text(json.dumps(config))
    dtype = options.get("dtype", torch.float32)
    write_weights(folder, hugging_face_shapes(model.config), tensors, dtype=dtype, most_bytes=10**9)
    return load_file(folder / "model.safetensors")


def change(folder: Path, **values: Any) -> None:
    """Set keys of config.json; those that are ... go away."""
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


# ---------------------------------------------------------------- without transformers


@pytest.mark.parametrize(("content", "logits"), RECORDED)
def test_logits_are_those_that_transformers_gave(
    tmp_path: Path, content: dict[str, Any], logits: list[float]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**_TINY, **content}))
    config = read_config(tmp_path / "config.json")
    weights = {name: wave(name, shape) for name, shape in hugging_face_shapes(config).items()}
    save_file(weights, tmp_path / "model.safetensors")
    config, tensors = from_hugging_face(tmp_path)
    assert sum(each.numel() for each in tensors.values()) == config.parameter_count
    model = Transformer(config)
    model.load_state_dict(tensors)
    with torch.no_grad():
        found = model(torch.arange(12)[None] * 7 % 40)[0, [5, 11], :3].flatten()
    torch.testing.assert_close(found, torch.tensor(logits), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_size(tmp_path: Path, name: str) -> None:
    content, parameters = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = read_config(tmp_path / "config.json")
    assert config.parameter_count == parameters == sum(map(math.prod, hugging_face_shapes(config).values()))
    again, _ = to_hugging_face(config, [], like=content["model_type"])
    assert again["model_type"] == content["model_type"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_there_and_back(tmp_path: Path, kind: str) -> None:
    model, name = model_of(KINDS[kind]), kind.partition(" ")[0]
    write(tmp_path, model)
    content = json.loads((tmp_path / "config.json").read_text())
    assert (content["model_type"], content["architectures"]) == (name, [CLASSES[name]])
    config, tensors = from_hugging_face(tmp_path)
    assert config == model.config
    Transformer(config).load_state_dict(tensors)


def test_what_several_can_say() -> None:
    """Without a window Mistral is Llama."""
    assert to_hugging_face(PLAIN, [])[0]["model_type"] == "llama"
    content, _ = to_hugging_face(PLAIN, [], like="mistral")
    assert (content["model_type"], content["sliding_window"]) == ("mistral", None)
    assert to_hugging_face(PLAIN, [], like="qwen3")[0]["model_type"] == "llama", "which has other tensors"
    assert to_hugging_face(PLAIN, [], like="gpt2")[0]["model_type"] == "llama"
    with pytest.raises(ValueError, match="none of llama, mistral, qwen2, qwen3, smollm3 has this shape"):
        to_hugging_face(replace(PLAIN, head_norms=True, nope_layers=(1,)), [])


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("mistral", {"sliding_window": ...}, {"window": 4096}),
        ("mistral", {"sliding_window": None}, {"window": None}),
        ("mistral", {"layer_types": ["full_attention"] * 2}, {}),  # as there
        ("qwen2", {"sliding_window": 9}, {}),
        ("qwen2 with windows", {"layer_types": ..., "max_window_layers": 1}, {}),
        ("qwen2 with windows", {"layer_types": ..., "max_window_layers": 0}, {"full_layers": ()}),
        ("qwen2 with windows", {"layer_types": ..., "max_window_layers": 2}, {"window": None}),
        ("qwen3", {"use_sliding_window": ..., "layer_types": ..., "sliding_window": 9}, {}),
        ("smollm3", {"no_rope_layers": ..., "layer_types": ..., "tie_word_embeddings": ...}, {}),
        ("smollm3 with windows", {"layer_types": ..., "rope_theta": ..., "rope_parameters": ...}, {}),
    ],
)
def test_what_their_files_may_leave_out(
    tmp_path: Path, kind: str, values: dict[str, Any], expected: dict[str, Any]
) -> None:
    write(tmp_path, model_of(KINDS[kind]))
    change(tmp_path, **values)
    assert from_hugging_face(tmp_path)[0] == replace(KINDS[kind], **expected)


def test_names_and_shapes() -> None:
    _, tensors = to_hugging_face(SHAPES["plain"], model_of(SHAPES["plain"]).named_parameters())
    shapes = {name: list(tensor.shape) for name, tensor in tensors}
    block = {
        "input_layernorm": [32],
        "self_attn.q_proj": [32, 32],
        "self_attn.k_proj": [32, 32],
        "self_attn.v_proj": [32, 32],
        "self_attn.o_proj": [32, 32],
        "post_attention_layernorm": [32],
        "mlp.gate_proj": [48, 32],
        "mlp.up_proj": [48, 32],
        "mlp.down_proj": [32, 48],
    }
    expected = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in block.items()}
    expected |= {"model.embed_tokens.weight": [50, 32], "model.norm.weight": [32], "lm_head.weight": [50, 32]}
    assert shapes == expected
    tied = SHAPES["tied, grouped"]
    _, tensors = to_hugging_face(tied, model_of(tied).named_parameters())
    names = {name: list(tensor.shape) for name, tensor in tensors}
    assert set(names) == set(expected) - {"lm_head.weight"}
    assert names["model.layers.1.self_attn.k_proj.weight"] == [16, 32]


def test_each_name_has_the_tensor_that_it_means() -> None:
    attention = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out"}
    mlp = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    pairs = {"input_layernorm": "attention.norm", "post_attention_layernorm": "mlp.norm"}
    pairs |= {f"self_attn.{theirs}": f"attention.{ours}" for theirs, ours in attention.items()}
    pairs |= {f"mlp.{theirs}": f"mlp.{ours}" for theirs, ours in mlp.items()}
    for theirs, ours in pairs.items():
        assert hugging_face_name(f"blocks.12.{ours}.weight") == f"model.layers.12.{theirs}.weight"
    model = model_of(PLAIN)
    renamed = dict(to_hugging_face(PLAIN, model.named_parameters())[1])
    for name, parameter in model.named_parameters():
        assert torch.equal(renamed[hugging_face_name(name)], parameter), name


@pytest.mark.parametrize("name", ["embed", "embed.bias", "blocks.weight", "blocks.x.mlp.up.weight", ""])
def test_no_parameters_name(name: str) -> None:
    with pytest.raises(ValueError, match="is no parameter"):
        hugging_face_name(name)


def test_config_of_llama_3() -> None:
    config, _ = to_hugging_face(preset("llama-8b"), [], dtype=torch.bfloat16, end=7)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = {  # as Llama 3.1 8B is published, but for the tokens
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 7,
        "eos_token_id": 7,
        "rope_theta": 500000.0,
        "rope_scaling": scaling,
        "rope_parameters": {**scaling, "rope_theta": 500000.0},
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    assert {key: config[key] for key in expected} == expected
    config, _ = to_hugging_face(SHAPES["tied, grouped"], [])
    assert config["tie_word_embeddings"] is True
    assert config["rope_scaling"] is None
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    json.dumps(config)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back(tmp_path: Path, shape: str, dtype: torch.dtype) -> None:
    model = model_of(SHAPES[shape])
    written = write(tmp_path, model, dtype=dtype)
    config, tensors = from_hugging_face(tmp_path)
    assert config == model.config
    expected = {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters()}
    assert list(tensors) == list(expected)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert all(tensor.dtype == dtype and not tensor.requires_grad for tensor in written.values())
    Transformer(config).load_state_dict(tensors)


def test_a_file_of_transformers_4(tmp_path: Path) -> None:
    model = model_of(SHAPES["rope"])
    write(tmp_path, model)
    change(tmp_path, rope_parameters=..., dtype=..., head_dim=..., attention_bias=..., mlp_bias=...)
    assert from_hugging_face(tmp_path)[0] == model.config
    content = json.loads((tmp_path / "config.json").read_text())
    scaling = {key: value for key, value in content["rope_scaling"].items() if key != "rope_type"}
    change(tmp_path, rope_scaling={**scaling, "type": "llama3"}, num_key_value_heads=...)
    with pytest.raises(UserError, match="k_proj"):  # heads of keys are as many as others, if it does not say
        from_hugging_face(tmp_path)


def test_what_a_file_does_not_say_is_as_in_transformers(tmp_path: Path) -> None:
    write(tmp_path, model_of(PLAIN))
    keys = ["rope_parameters", "rope_theta", "rope_scaling", "rms_norm_eps", "max_position_embeddings"]
    change(tmp_path, **dict.fromkeys([*keys, "tie_word_embeddings", "num_key_value_heads"], ...))
    assert from_hugging_face(tmp_path)[0] == replace(PLAIN, norm_eps=1e-6, max_seq=2048)


def test_several_files_and_a_head_that_is_written_although_tied(tmp_path: Path) -> None:
    model = model_of(SHAPES["tied, grouped"])
    written = write(tmp_path, model)
    written["lm_head.weight"] = written["model.embed_tokens.weight"].clone()
    (tmp_path / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(written)}
    for file in set(places.values()):
        save_file({name: written[name] for name in written if places[name] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config, tensors = from_hugging_face(tmp_path)
    assert config == model.config
    assert torch.equal(tensors["blocks.1.mlp.up.weight"], model.state_dict()["blocks.1.mlp.up.weight"])
    assert "head.weight" not in tensors
    index.write_text(json.dumps({"weight_map": dict.fromkeys(places, "../model.safetensors")}))
    with pytest.raises(UserError, match="no weight_map of file names"):
        from_hugging_face(tmp_path)


def test_a_file_ends_before_it_would_be_too_large() -> None:
    shapes = {"a": (2, 3), "b": (4,), "c": (11,), "d": (), "e": (9,)}
    assert divide(shapes, 4, 40) == [["a", "b"], ["c"], ["d", "e"]]
    assert divide(shapes, 4, 39) == [["a"], ["b"], ["c"], ["d"], ["e"]]
    assert divide(shapes, 2, 10**9) == [list("abcde")]


def test_tensors_that_are_not_the_models() -> None:
    def read(tensors: Iterator[tuple[str, Tensor]]) -> None:
        for _ in to_hugging_face(PLAIN, tensors)[1]:
            pass

    named = dict(model_of(PLAIN).named_parameters())
    read(iter(named.items()))
    with pytest.raises(ValueError, match=r"norm.weight, \[3\], should be \[32\]"):
        read(iter({**named, "norm.weight": torch.zeros(3)}.items()))
    with pytest.raises(ValueError, match=r"blocks.2.mlp.up.weight, .* is none of this model's"):
        read(iter({**named, "blocks.2.mlp.up.weight": torch.zeros(48, 32)}.items()))
    with pytest.raises(ValueError, match=r"norm.weight, .* came twice"):
        read(iter([*named.items(), ("norm.weight", named["norm.weight"])]))
    with pytest.raises(ValueError, match=r"1 tensors are missing, such as head.weight"):
        read((name, tensor) for name, tensor in named.items() if name != "head.weight")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; there are llama, mistral, qwen2, qwen3, smollm3"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
        ({"model_type": "qwen2"}, r"no tensor model.layers.0.self_attn.q_proj.bias, nor 5 more"),
        ({"model_type": "qwen3"}, r"no tensor model.layers.0.self_attn.q_norm.weight, nor 3 more"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers is not a list of 2"),
        ({"model_type": "smollm3", "no_rope_layers": 7}, "no_rope_layers is not a list of 2"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0; it must be"),
        ({"model_type": "qwen2", "layer_types": [[1], [2]]}, "layer_types is not 2 times"),
        ({"model_type": "qwen2", "layer_types": 7}, "layer_types is not 2 times"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, more than 10000"),
        ({"model_type": "qwen2", "layer_types": ["linear"] * 2}, "layer_types is not 2 times"),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2},
            "layer_types has 'sliding_attention', but there is no window",
        ),
        ({"model_type": ...}, "it has no 'model_type'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "no tensor model.layers.0.self_attn.q_proj.bias, nor 7 more"),
        ({"mlp_bias": True}, "no tensor model.layers.0.mlp.gate_proj.bias, nor 5 more"),
        ({"mlp_bias": 1}, "mlp_bias is 1, not true or false"),
        ({"head_dim": 16}, r"q_proj.weight is \[32, 32\], by config.json it is \[64, 32\]"),
        ({"head_dim": "8"}, "head_dim is '8', not a whole number"),
        ({"hidden_size": ...}, "it has no 'hidden_size'"),
        ({"hidden_size": "32"}, "hidden_size is '32', not a whole number"),
        ({"num_hidden_layers": 0}, "layers is 0"),
        ({"rms_norm_eps": None}, "NoneType"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            r"its weights are quantised, as quantization_config says\): name another folder",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "of the type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "of the type 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "it has no 'low_freq_factor'"),
        ({"rope_scaling": [1]}, "list"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"vocab_size": 51}, r"embed_tokens.weight is \[50, 32\], by config.json it is \[51, 32\]"),
        ({"num_hidden_layers": 3}, "no tensor model.layers.2.input_layernorm"),
    ],
)
def test_models_that_cannot_be_read(
    tmp_path: Path, values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without transformers, which computes some of them."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    write(tmp_path, model_of(PLAIN))
    change(tmp_path, **values)
    with pytest.raises(UserError, match=message) as refused:
        from_hugging_face(tmp_path)
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("dtype", "said"), [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.float8_e4m3fn, "F8_E4M3")]
)
def test_weights_without_their_scales(tmp_path: Path, dtype: torch.dtype, said: str) -> None:
    """Also where several are packed into one, so that the shape is another."""
    written, key = write(tmp_path, model_of(PLAIN)), "model.layers.1.mlp.up_proj.weight"
    written[key] = torch.ones(48, 16).to(dtype)
    save_file(written, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as refused:
        from_hugging_face(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path}/model.safetensors: {key} is {said}, so quantised; only "
        "floating point of 16 bits or more can be read: get the model as it was before"
    )


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("file", "spoil", "message"),
    [
        ("config.json", Path.unlink, "no such file"),
        ("config.json", lambda path: path.write_text("{"), "not JSON"),
        ("config.json", lambda path: path.write_text("[]"), "a JSON list"),
        ("config.json", lambda path: path.write_bytes(b"\xff"), "not JSON"),
        ("config.json", lambda path: path.unlink() or path.mkdir(), "cannot be read"),
        ("model.safetensors", Path.unlink, "no such file"),
        ("model.safetensors", _cut, "cannot be read"),
        ("model.safetensors", lambda path: path.write_bytes(b""), "cannot be read"),
        (
            "model.safetensors",
            lambda path: path.write_text(
                "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
            ),
            "only Git LFS's pointer to the file",
        ),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, file: str, spoil: Callable[[Path], object], message: str
) -> None:
    write(tmp_path, model_of(PLAIN))
    spoil(tmp_path / file)
    with pytest.raises(UserError, match=message) as refused:
        from_hugging_face(tmp_path)
    assert file in str(refused.value)


# ---------------------------------------------------------------- with transformers


@pytest.mark.parametrize("shape", [*SHAPES, *KINDS])
def test_logits_are_those_of_transformers(tmp_path: Path, shape: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = model_of((SHAPES | KINDS)[shape])
    write(tmp_path, model, end=3)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs).__name__ == CLASSES.get(shape.partition(" ")[0], "LlamaForCausalLM")
    assert theirs.dtype == torch.float32
    tokens = torch.randint(50, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = model(tokens), theirs(tokens).logits
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    ours = [*generate(model, tokens[0, :30].tolist(), 12, temperature=0)]
    written = theirs.generate(tokens[:1, :30], max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert ours == written[0, 30:].tolist()

    saved = tmp_path / "again"
    theirs.save_pretrained(saved)
    config, tensors = from_hugging_face(saved)
    assert config == model.config
    for name, parameter in model.named_parameters():
        assert torch.equal(tensors[name], parameter), name


def test_generation_config_is_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = model_of(SHAPES["tied, grouped"])
    write(tmp_path, model, end=3)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation_config(3)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = transformers.GenerationConfig(bos_token_id=3, eos_token_id=3, pad_token_id=3, do_sample=True)
    assert theirs.generation_config.to_diff_dict() == expected.to_diff_dict()
    assert theirs.generate(max_new_tokens=4)[0, 0] == 3


def test_tokenizer_config() -> None:
    content = tokenizer_config(PLAIN, "<|end|>")
    assert content["eos_token"] == content["bos_token"] == "<|end|>"
    assert content["model_max_length"] == 64
    assert content["padding_side"] == "left"
