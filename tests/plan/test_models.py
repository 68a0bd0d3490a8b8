"""A model by name, size, config.json or code: its shape, and what is said when there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from imece.bench.reference_model import LARGE, Decoder
from imece.errors import UserError
from imece.models.presets import PRESETS
from imece.models.transformer import Transformer
from imece.plan.models.by_name import MODELS, find_model, from_shape
from imece.plan.models.from_code import of_module
from imece.plan.models.from_config import from_content


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_that_it_is_built_with(name: str) -> None:
    assert from_shape(name, PRESETS[name]) == find_model(name.upper())
    assert find_model(name).parameters == PRESETS[name].parameter_count


def test_published_models_have_their_published_parameters() -> None:
    published = {
        "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "llama-2-7b": 6_738_415_616,
        "llama-2-13b": 13_015_864_320, "llama-30b": 32_528_943_616, "llama-65b": 65_285_660_672,
    }  # fmt: skip
    assert {name: MODELS[name].parameters for name in published} == published


@pytest.mark.parametrize(
    ("size", "name"),
    [("7B", "llama-2-7b"), ("8b", "llama-8b"), ("70b", "llama-70b"), ("1.3B", "1.3b"), ("1T", "megatron-1t")],
)
def test_a_size_means_the_published_model_of_it(size: str, name: str) -> None:
    assert find_model(size) is MODELS[name]


@pytest.mark.parametrize(
    ("size", "parameters"), [("125M", 125e6), ("2.7B", 2.7e9), ("22b", 22e9), ("120 B", 120e9)]
)
def test_another_size_has_a_shape_like_theirs(size: str, parameters: float) -> None:
    found = find_model(size)
    assert found.parameters == pytest.approx(parameters, rel=0.05)
    assert 40 <= found.width / found.layers <= 250
    assert found.heads % (8 if parameters > 1e9 else 2) == 0


LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
MIXTURE = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
CONFIGS: dict[str, tuple[dict[str, Any], int]] = {  # what it says, parameters published
    "Llama-3.1-8B": (LLAMA, 8_030_261_248),
    "Mistral-7B": (LLAMA | {"model_type": "mistral", "vocab_size": 32000}, 7_241_732_096),
    "Qwen3-8B": (
        LLAMA | {"model_type": "qwen3", "num_hidden_layers": 36, "intermediate_size": 12288,
                 "vocab_size": 151936, "head_dim": 128}, 8_190_735_360,
    ),
    "Qwen2.5-7B": (
        LLAMA | {"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "vocab_size": 152064,
                 "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944},
        7_615_616_512,
    ),
    "gemma-7b": (
        LLAMA | {"model_type": "gemma", "num_hidden_layers": 28, "hidden_size": 3072, "head_dim": 256,
                 "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 24576,
                 "vocab_size": 256000}, 8_537_680_896,
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024,
         "vocab_size": 50257}, 124_439_808,
    ),
    "pythia-1b": (
        {"model_type": "gpt_neox", "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 8,
         "intermediate_size": 8192, "vocab_size": 50304, "tie_word_embeddings": False}, 1_011_781_632,
    ),
    "Mixtral-8x7B": (
        LLAMA | {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8,
                 "num_experts_per_tok": 2}, 46_702_792_704,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_json_gives_the_parameters_of_the_model(name: str, tmp_path: Path) -> None:
    content, parameters = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = find_model(str(tmp_path / "config.json"))
    assert found == find_model(str(tmp_path))  # its folder does too
    # Biases of queries alone and norms of heads are left out.
    assert found.parameters == pytest.approx(parameters, rel=5e-5)


def test_gemma_3_as_it_is_published_leaves_out_what_transformers_knows() -> None:
    text = {"model_type": "gemma3_text", "sliding_window": 1024}
    four = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    twelve = {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
              "num_attention_heads": 16, "num_key_value_heads": 8}  # fmt: skip
    for own, heads, kv_heads, parameters in ((four, 8, 4, 3_880_099_328), (twelve, 16, 8, 11_765_788_416)):
        content = {"model_type": "gemma3", "text_config": text | own}
        found = from_content(content, "x", "x")
        seeing = from_content(content | {"vision_config": {"hidden_size": 1152}}, "x", "gemma")
        assert found.name == "x" and seeing == replace(found, name="gemma without vision")
        assert (found.heads, found.kv_heads, found.head_width, found.vocab_size) == (
            heads, kv_heads, 256, 262208,
        )  # fmt: skip
        assert found.parameters == pytest.approx(
            parameters, rel=5e-4
        )  # four norms a layer, and those of heads
        assert (found.window, found.windowed) == (1024, 5 / 6)


def test_the_head_of_smollm3_is_tied_unless_its_file_says_that_it_is_not() -> None:
    config = LLAMA | {
        "model_type": "smollm3", "num_hidden_layers": 36, "hidden_size": 2048, "num_attention_heads": 16,
        "num_key_value_heads": 4, "intermediate_size": 11008,
    }  # fmt: skip
    assert from_content(config, "x", "x").parameters == pytest.approx(3_075_098_624, rel=1e-6)
    assert not from_content(config | {"tie_word_embeddings": False}, "x", "x").tied_head


@pytest.mark.parametrize(
    ("change", "window", "windowed"),
    [
        ({"model_type": "mistral"}, 4096, 1.0),
        ({"model_type": "mistral", "sliding_window": None}, 0, 0.0),
        ({"model_type": "gemma2"}, 4096, 0.5),
        ({"model_type": "gemma2", "layer_types": ["sliding_attention"] + 3 * ["full_attention"]}, 4096, 0.25),
        ({"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False}, 32768, 0.0),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, 4096, 4 / 32),
        (
            {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}
            | {"max_window_layers": None},
            4096,
            4 / 32,
        ),
        ({}, 0, 0.0),
    ],
)
def test_sliding_windows(change: dict[str, Any], window: int, windowed: float) -> None:
    found = from_content(LLAMA | change, "x", "x")
    assert (found.window, found.windowed) == (window, windowed)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mistral", "sliding_window": "wide"}, "sliding_window is 'wide', not a whole number"),
        ({"hidden_size": None}, "without hidden_size"),
        ({"intermediate_size": None, "vocab_size": None}, "without vocab_size, intermediate_size"),
        ({"model_type": "bert"}, "model_type is 'bert'; there are llama"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', not a whole number"),
        ({"vocab_size": 10**310}, r"0, not a whole number below 1e\+12"),
        ({"head_dim": float("inf")}, "head_dim is inf, not a whole number"),
        ({"head_dim": 0}, "head_width is 0; it must be 1 or more: get the file again"),
        ({"num_attention_heads": 0}, "heads is 0; it must be 1 or more: get the file again"),
        ({"num_key_value_heads": 8.5}, "num_key_value_heads is 8.5, not a whole number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', not true or false"),
        (MIXTURE | {"num_experts_per_tok": 9}, "9 of 8 experts work for a token: get the file again"),
        (MIXTURE | {"num_experts_per_tok": 0}, "0 of 8 experts work for a token: get the file again"),
        (MIXTURE | {"mlp_only_layers": [3]}, "some of its layers have no experts, which is not planned for"),
        (
            {"model_type": "qwen2", "sliding_window": 9, "max_window_layers": "x"},
            "max_window_layers is 'x', not a whole number",
        ),
        ({"num_key_value_heads": 5}, "cannot be divided among kv_heads = 5"),
        ({"n_shared_experts": 1}, "experts that all tokens share"),
    ],
)
def test_a_config_json_that_cannot_be_used(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        from_content(LLAMA | change, "x/config.json", "x")
    assert str(error.value).startswith("x/config.json: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["{", "[1]", ""])
def test_a_file_that_is_none(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(UserError, match="get the file again"):
        find_model(str(path))
    with pytest.raises(UserError, match="cannot be read"):
        find_model(str(tmp_path / "none.json"))


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(UserError, match="did you mean llama-8b"):
        find_model("lama-8b")
    with pytest.raises(UserError, match="there are tiny, small"):
        find_model("zzz")
    with pytest.raises(UserError, match="from 1M to 20T"):
        find_model("900T")


def test_what_code_makes_is_read_off_its_tensors(tmp_path: Path) -> None:
    with torch.device("meta"):
        for name in ("small", "llama-8b"):
            assert of_module(Transformer(PRESETS[name]), name) == find_model(name)
        decoder = Decoder(LARGE)
    found = of_module(decoder, "97M")
    assert found.parameters == sum(each.numel() for each in decoder.parameters())
    assert (found.heads, found.gated, found.learned_positions, found.biases) == (14, False, 256, True)
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\nfrom imece.models.presets import preset\n"
        "from imece.models.transformer import Transformer\n"
        "def make(): return Transformer(preset('small'))\ndef bad(): raise RuntimeError('no')\n"
        "def number(): return 3\ndef line(): return nn.Linear(2, 3)\ndef leaves(): raise SystemExit(3)\n"
    )
    made = find_model(f"{file}:make")
    assert (made.name, made.parameters) == ("mine:make", PRESETS["small"].parameter_count)
    for function, says in (
        ("none", "has no function 'none'"), ("bad", "failed on the meta device"),
        ("number", "returned a int"), ("line", "has no nn.Embedding"),
        ("leaves", r"failed on the meta device: SystemExit\(3\)"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            find_model(f"{file}:{function}")
    with pytest.raises(UserError, match="no such file"):
        find_model(f"{tmp_path}/other.py:make")
    file.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(UserError, match=r"mine.py cannot be imported: SystemExit\(3\)"):
        find_model(f"{file}:make")


def test_finding_a_model_and_its_memory_waits_for_no_torch() -> None:
    code = (
        "import sys; from imece.plan.models.by_name import find_model\n"
        "from imece.plan.memory.memory import memory\n"
        "from imece.plan.setup import Parallel, Recipe, Setup\n"
        "assert memory(Setup(find_model('7B'), Parallel(), Recipe(seq=2048))).total > 2**36\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
