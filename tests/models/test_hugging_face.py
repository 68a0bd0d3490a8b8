"""Names, shapes and config.json of an exported model; and, where transformers is installed, equal logits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from imece.errors import UserError
from imece.models.hugging_face import (
    from_hugging_face,
    generation_config,
    hugging_face_name,
    hugging_face_shapes,
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
        ({"model_type": "mistral"}, "model_type is 'mistral', only 'llama'"),
        ({"model_type": ...}, "it has no 'model_type'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"head_dim": 16}, "head_dim is 16, only width / heads = 8"),
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
def test_models_that_cannot_be_read(tmp_path: Path, values: dict[str, Any], message: str) -> None:
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


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers(tmp_path: Path, shape: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = model_of(SHAPES[shape])
    write(tmp_path, model, end=3)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    assert theirs.dtype == torch.float32
    tokens = torch.randint(50, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = model(tokens), theirs(tokens).logits
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

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
