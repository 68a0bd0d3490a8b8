"""A model by name, size, config.json or code: its shape, and messages if there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from imece.bench.reference_model import LARGE, Decoder
from imece.errors import UserError
from imece.models import hugging_face_config
from imece.models.presets import PRESETS
from imece.models.transformer import Transformer
from imece.plan.memory.activations import whole_layer
from imece.plan.memory.frameworks import IMECE
from imece.plan.memory.memory import memory
from imece.plan.models.by_name import MODELS, find_model
from imece.plan.models.families import FAMILIES
from imece.plan.models.from_code import of_module
from imece.plan.models.from_config import from_content
from imece.plan.models.model import from_shape
from imece.plan.setup import Parallel, Recipe, Setup


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_that_it_is_built_with(name: str) -> None:
    assert from_shape(name, PRESETS[name]) == find_model(name.upper())
    assert find_model(name).parameters == PRESETS[name].parameter_count


@pytest.mark.parametrize(
    "other",
    [
        {"head_norms": True, "head_dim": 32},
        {"qkv_bias": True},
        {"out_bias": True, "mlp_bias": True, "tied_head": True},
        {"window": 16, "full_layers": (0,)},
    ],
)
def test_a_runs_own_shape_with_what_others_have(other: dict[str, Any]) -> None:
    shape = replace(PRESETS["small"], **other)
    planned = from_shape("small", shape)
    assert planned.parameters == shape.parameter_count
    layers = range(shape.layers)
    windowed = [layer for layer in layers if shape.window_of(layer) is not None]
    assert planned.windowed == len(windowed) / shape.layers and planned.window == (shape.window or 0)
    assert planned.head_norms == shape.head_norms


def test_published_models_have_their_published_parameters() -> None:
    """As their files on Hugging Face have them; Llama's older ones as in its papers."""
    published = {
        "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "llama-2-7b": 6_738_415_616,
        "llama-2-13b": 13_015_864_320, "llama-30b": 32_528_943_616, "llama-65b": 65_285_660_672,
        "tinyllama-1.1b": 1_100_048_384, "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120,
        "smollm2-1.7b": 1_711_376_384, "smollm3-3b": 3_075_098_624, "qwen2.5-0.5b": 494_032_768,
        "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512,
        "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352, "qwen2.5-72b": 72_706_203_648,
        "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096,
        "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
        "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
        "qwen1.5-moe-a2.7b": 14_315_784_192, "qwen2-57b-a14b": 57_408_658_944,
        "deepseek-v2-lite": 15_706_484_224, "deepseek-v3": 671_026_404_352,
        "kimi-k2": 1_026_408_209_408,  # its file has 23,040 numbers more, by which routers choose
        "moonlight-16b-a3b": 15_960_108_544, "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
        "glm-4.5-air": 106_852_245_504, "llama-4-scout-17b-16e": 107_769_861_120,
        "llama-4-maverick-17b-128e": 400_711_848_960, "ernie-4.5-21b-a3b": 21_825_437_888,
        "mistral-7b": 7_241_732_096, "mistral-7b-v0.3": 7_248_023_552,
        "mistral-nemo": 12_247_782_400, "mistral-small-24b": 23_572_403_200, "mixtral-8x7b": 46_702_792_704,
        "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320,
        "gemma-3-1b": 999_885_952, "phi-3-mini": 3_821_079_552, "phi-3-medium": 13_960_238_080,
        "phi-4": 14_659_507_200, "phi-4-mini": 3_836_021_760, "gpt2": 124_439_808, "gpt2-medium": 354_823_168,
        "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    }  # fmt: skip
    assert {name: MODELS[name].parameters for name in published} == published
    without_files = {"gpt-3-175b", "megatron-530b", "megatron-1t"}
    assert not MODELS.keys() - published - PRESETS.keys() - without_files


@pytest.mark.parametrize(
    ("size", "name"),
    [
        ("7B", "llama-2-7b"),
        ("7e9", "llama-2-7b"),
        ("8b", "llama-8b"),
        ("70b", "llama-70b"),
        ("1.3B", "1.3b"),
        ("1T", "megatron-1t"),
    ],
)
def test_a_size_means_the_published_model_of_it(size: str, name: str) -> None:
    assert find_model(size) is MODELS[name]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Llama-3.1-8B", "llama-8b"), ("meta-llama/Meta-Llama-3-70B-Instruct", "llama-70b"),
        ("meta-llama/Llama-3.1-405B", "llama-405b"), ("meta-llama/Llama-3.3-70B-Instruct", "llama-70b"),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama-3.2-1b"), ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"), ("Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"), ("Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-Nemo-Base-2407", "mistral-nemo"), ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"), ("openai-community/gpt2", "gpt2"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"), ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-v2-lite"), ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama-4-scout-17b-16e"),
    ],
)  # fmt: skip
def test_names_as_their_makers_have_them(written: str, name: str) -> None:
    assert find_model(written) is MODELS[name]


def test_a_name_like_metas_that_is_none() -> None:
    with pytest.raises(UserError, match=r"unknown model 'Llama-3.2-8B': did you mean llama-3.2-"):
        find_model("Llama-3.2-8B")


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("125M", 125e6),
        ("2.7B", 2.7e9),
        ("22b", 22e9),
        ("120 B", 120e9),
        ("7.4e9", 7.4e9),
        ("3_500_000_000", 3.5e9),
    ],
)
def test_another_size_has_a_shape_like_theirs(size: str, parameters: float) -> None:
    found = find_model(size)
    assert found.parameters == pytest.approx(parameters, rel=0.005)
    assert 40 <= found.width / found.layers <= 250
    assert found.heads % (8 if parameters > 1e9 else 2) == 0


LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
MIXTURE = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
LATENT = {"model_type": "deepseek_v3", "num_experts_per_tok": 8, "moe_intermediate_size": 2048}


def _named(
    kind: str, width: int, layers: int, heads: int, kv_heads: int, mlp_width: int, vocab_size: int,
    **others: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": kind, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": mlp_width, "vocab_size": vocab_size,
    } | others  # fmt: skip


CONFIGS: dict[str, tuple[dict[str, Any], int]] = {  # what it says, parameters in transformers 5.23
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
    "llama-bias": (
        _named("llama", 2048, 16, 32, 8, 8192, 128256, attention_bias=True, mlp_bias=True), 1_498_859_520,
    ),
    "gemma-2-9b": (
        _named("gemma2", 3584, 42, 16, 8, 14336, 256000, head_dim=256, sliding_window=4096), 9_241_705_984,
    ),
    "phi-2": (
        {"model_type": "phi", "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32,
         "intermediate_size": 10240, "vocab_size": 51200, "tie_word_embeddings": False}, 2_779_683_840,
    ),
    "phi-4-mini": (
        _named("phi3", 3072, 32, 24, 8, 8192, 200064, sliding_window=262144, tie_word_embeddings=True),
        3_836_021_760,
    ),
    "gpt-j-6b": (
        {"model_type": "gptj", "n_layer": 28, "n_embd": 4096, "n_head": 16, "n_positions": 2048,
         "vocab_size": 50400, "n_inner": None, "tie_word_embeddings": False}, 6_050_882_784,
    ),
    "gpt-neo-2.7b": (
        {"model_type": "gpt_neo", "num_layers": 32, "hidden_size": 2560, "num_heads": 20,
         "vocab_size": 50257, "max_position_embeddings": 2048,
         "attention_types": [[["global", "local"], 16]]}, 2_651_307_520,
    ),
    "opt-6.7b": (
        {"model_type": "opt", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "ffn_dim": 16384, "vocab_size": 50272, "max_position_embeddings": 2048,
         "word_embed_proj_dim": 4096}, 6_658_473_984,
    ),
    "bloom-7b1": (
        {"model_type": "bloom", "hidden_size": 4096, "n_layer": 30, "n_head": 32, "vocab_size": 250880},
        7_069_016_064,
    ),
    "falcon-7b": (
        {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
         "vocab_size": 65024, "multi_query": True, "parallel_attn": True, "bias": False,
         "new_decoder_architecture": False}, 6_921_720_704,
    ),
    "falcon-40b": (
        {"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128,
         "num_kv_heads": 8, "vocab_size": 65024, "parallel_attn": True, "bias": False,
         "new_decoder_architecture": True}, 41_303_293_952,
    ),
    "falcon-rw-1b": (
        {"model_type": "falcon", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
         "vocab_size": 50304, "multi_query": False, "parallel_attn": False, "bias": True,
         "new_decoder_architecture": False}, 1_311_625_216,
    ),
    "falcon with both norms": (
        {"model_type": "falcon", "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
         "ffn_hidden_size": 128, "vocab_size": 101, "parallel_attn": False, "bias": False, "num_kv_heads": 2,
         "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}, 342_912,
    ),
    "qwen3_moe without num_key_value_heads": (
        {"model_type": "qwen3_moe", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
         "moe_intermediate_size": 96, "vocab_size": 128, "num_experts": 4, "num_experts_per_tok": 1},
        2_038_272,
    ),
    "stablelm-2-12b": (
        _named("stablelm", 5120, 40, 32, 8, 13824, 100352, use_qkv_bias=False, qk_layernorm=True,
               use_parallel_residual=True), 12_143_185_920,
    ),
    "olmo-7b": (_named("olmo", 4096, 32, 32, 32, 11008, 50304), 6_888_095_744),
    "olmo2-7b": (_named("olmo2", 4096, 32, 32, 32, 11008, 100352), 7_298_617_344),
    "olmo3-7b": (_named("olmo3", 4096, 32, 32, 32, 11008, 100278, sliding_window=4096), 7_298_011_136),
    "granite-3-8b": (
        _named("granite", 4096, 40, 32, 8, 12800, 49155, tie_word_embeddings=True), 8_170_848_256,
    ),
    "command-r-plus": (_named("cohere", 12288, 64, 96, 8, 33792, 256000, use_qk_norm=True), 103_810_674_688),
    "command-r7b": (_named("cohere2", 4096, 32, 32, 8, 14336, 256000, sliding_window=4096), 8_028_033_024),
    "mpt-7b": (
        {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4,
         "vocab_size": 50432, "max_seq_len": 2048, "no_bias": True}, 6_649_286_656,
    ),
    "starcoder2-3b": (
        _named("starcoder2", 3072, 30, 24, 2, 12288, 49152, sliding_window=4096, use_bias=True),
        3_030_371_328,
    ),
    "starcoder": (
        {"model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48, "n_inner": 24576,
         "n_positions": 8192, "vocab_size": 49152, "multi_query": True}, 15_517_456_384,
    ),
    "glm-4-9b": (
        _named("glm", 4096, 40, 32, 2, 13696, 151552, head_dim=128, attention_bias=True), 9_399_951_360,
    ),
    "glm4-0414-9b": (
        _named("glm4", 4096, 40, 32, 2, 13696, 151552, head_dim=128, attention_bias=True), 9_400_279_040,
    ),
    "seed-oss-36b": (
        _named("seed_oss", 5120, 64, 80, 8, 27648, 155136, head_dim=128, attention_bias=True),
        36_151_104_512,
    ),
    "nemotron-4-mini": (_named("nemotron", 3072, 32, 24, 8, 9216, 256000, head_dim=128), 4_190_509_056),
    "ernie4.5-0.3b": (
        _named("ernie4_5", 1024, 18, 16, 2, 3072, 103424, head_dim=128, tie_word_embeddings=True),
        360_748_032,
    ),
    "qwen3-30b-a3b": (
        _named("qwen3_moe", 2048, 48, 32, 4, 6144, 151936, head_dim=128, moe_intermediate_size=768,
               num_experts=128, num_experts_per_tok=8, decoder_sparse_step=1, mlp_only_layers=[]),
        30_532_122_624,
    ),
    "olmoe": (
        _named("olmoe", 2048, 16, 16, 16, 1024, 50304, num_experts=64, num_experts_per_tok=8),
        6_919_161_856,
    ),
    "deepseek-v2 with biases": (
        _named("deepseek_v2", 256, 4, 8, 8, 512, 128, q_lora_rank=48, kv_lora_rank=32, qk_rope_head_dim=16,
               qk_nope_head_dim=32, v_head_dim=24, n_routed_experts=8, n_shared_experts=2,
               moe_intermediate_size=64, num_experts_per_tok=2, first_k_dense_replace=2, attention_bias=True),
        2_269_120,
    ),
    "deepseek-v3 with what transformers knows": (
        {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 129280,
         "num_attention_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
         "num_experts_per_tok": 8}, 671_026_404_352,
    ),
    "glm-4.5": (
        _named("glm4_moe", 5120, 92, 96, 8, 12288, 151552, head_dim=128, attention_bias=True,
               n_routed_experts=160, n_shared_experts=1, moe_intermediate_size=1536, num_experts_per_tok=8,
               first_k_dense_replace=3, use_qk_norm=True), 352_797_814_784,
    ),
    "qwen3_moe with layers that have no experts": (
        _named("qwen3_moe", 256, 6, 8, 2, 512, 128, head_dim=32, moe_intermediate_size=96, num_experts=4,
               num_experts_per_tok=2, decoder_sparse_step=2, mlp_only_layers=[3]), 3_217_024,
    ),
    "ernie-4.5 with experts in every second layer up to the last but one": (
        _named("ernie4_5_moe", 128, 6, 4, 2, 80, 100, moe_num_experts=8, moe_k=2, moe_num_shared_experts=1,
               moe_intermediate_size=40, moe_layer_start_index=1, moe_layer_interval=2,
               moe_layer_end_index=4, tie_word_embeddings=True), 710_800,
    ),
    "codegen": (
        {"model_type": "codegen", "n_embd": 1024, "n_layer": 20, "n_head": 16, "n_positions": 2048,
         "vocab_size": 51200}, 356_712_448,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_json_gives_the_parameters_of_the_model(name: str, tmp_path: Path) -> None:
    content, parameters = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = find_model(str(tmp_path / "config.json"))
    assert found == find_model(str(tmp_path))  # its folder does too
    assert found.parameters == parameters


def test_a_config_json_has_the_names_that_the_version_of_transformers_gave() -> None:
    old = LLAMA | {"model_type": "qwen3_moe", "moe_intermediate_size": 768, "num_experts_per_tok": 8}
    new = from_content(old | {"num_local_experts": 128}, "x", "x")
    assert new == from_content(old | {"num_experts": 128}, "x", "x") and new.experts == 128


@pytest.mark.parametrize(
    ("name", "norms", "head_norms"),
    [("Mistral-7B", 2, False), ("Qwen3-8B", 2, True), ("gemma-2-9b", 4, False), ("phi-2", 1, False)],
)
def test_norms_whose_inputs_are_kept(name: str, norms: int, head_norms: bool) -> None:
    found = from_content(CONFIGS[name][0], "x", "x")
    assert (found.norms, found.head_norms) == (norms, head_norms)
    recipe, plain = Recipe(seq=512), replace(found, norms=2, head_norms=False)
    layer, usual = (whole_layer(each, Parallel(), recipe, IMECE) for each in (found, plain))
    vector = 2 * 512  # bytes of all tokens, for each channel
    turned = (found.heads + found.kv_heads) * found.head_width * head_norms
    assert layer.norms - usual.norms == (norms - 2) * vector * found.width
    assert layer.inputs - usual.inputs == min(0, norms - 2) * vector * found.width
    assert layer.attention - usual.attention == turned * vector


def test_gemma_3_as_it_is_published_leaves_out_what_transformers_knows() -> None:
    text = {"model_type": "gemma3_text", "sliding_window": 1024}
    four = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    twelve = {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
              "num_attention_heads": 16, "num_key_value_heads": 8}  # fmt: skip
    for own, heads, kv_heads, parameters in ((four, 8, 4, 3_880_263_168), (twelve, 16, 8, 11_766_034_176)):
        content = {"model_type": "gemma3", "text_config": text | own}
        found = from_content(content, "x", "x")
        seeing = from_content(content | {"vision_config": {"hidden_size": 1152}}, "x", "gemma")
        assert found.name == "x" and seeing == replace(found, name="gemma without vision")
        assert (found.heads, found.kv_heads, found.head_width, found.vocab_size) == (
            heads, kv_heads, 256, 262208,
        )  # fmt: skip
        assert found.parameters == parameters
        full = own["num_hidden_layers"] // 6
        assert (found.window, found.windowed) == (1024, 1 - full / own["num_hidden_layers"])


def test_what_sees_has_the_shape_of_its_text_that_its_file_leaves_out() -> None:
    """As LLaVA's and Idefics 2's files: the decoders of Vicuna and of Mistral, with a few more words."""
    for kind, vocab_size, parameters in (("llama", 32064, 6_738_939_904), ("mistral", 32003, 7_241_756_672)):
        text = {"model_type": kind, "vocab_size": vocab_size}
        content = {"model_type": "llava", "text_config": text, "vision_config": {}}
        found = from_content(content, "config.json", kind)
        assert (found.parameters, found.name) == (parameters, f"{kind} without vision")
        with pytest.raises(UserError, match="without num_hidden_layers"):
            from_content(text, "config.json", kind)


@pytest.mark.parametrize(
    ("kind", "alike"),
    [
        ("qwen2_vl", "qwen2"),
        ("qwen2_5_vl", "qwen2"),
        ("qwen2_5_vl_text", "qwen2"),
        ("qwen3_vl_text", "qwen3"),
    ],
)
def test_qwens_that_see_have_the_shape_of_those_that_do_not(kind: str, alike: str) -> None:
    found, plain = (
        from_content(LLAMA | {"model_type": each, "sliding_window": 512}, "config.json", "")
        for each in (kind, alike)
    )
    assert found == replace(plain, ours=False)
    assert found.scores_part(4096) == 1


@pytest.mark.parametrize(
    "kind",
    ["gpt2", "gpt_bigcode", "bloom", "falcon", "mpt", "codegen", "gpt_neox", "phi3"],
)
def test_adapters_beside_one_matrix_of_queries_keys_and_values(kind: str) -> None:
    content = {
        "model_type": kind, "n_layer": 2, "n_layers": 2, "num_hidden_layers": 2, "n_embd": 64, "d_model": 64,
        "hidden_size": 64, "n_head": 4, "n_heads": 4, "num_attention_heads": 4, "n_positions": 128,
        "intermediate_size": 256, "vocab_size": 512, "multi_query": False, "num_key_value_heads": 4,
    }  # fmt: skip
    made, out = from_content(content, "config.json", kind).attention
    assert (made.rows, made.columns, out.rows, out.columns) == (3 * 64, 64, 64, 64)


def test_the_head_of_smollm3_is_tied_unless_its_file_says_that_it_is_not() -> None:
    config = LLAMA | {
        "model_type": "smollm3", "num_hidden_layers": 36, "hidden_size": 2048, "num_attention_heads": 16,
        "num_key_value_heads": 4, "intermediate_size": 11008,
    }  # fmt: skip
    assert from_content(config, "x", "x").parameters == 3_075_098_624
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


def test_what_imece_builds_is_known_without_torch() -> None:
    """Of each kind whether models/hugging_face_config.py reads it."""
    for kind, family in FAMILIES.items():
        assert family.ours == (kind in hugging_face_config._FAMILIES), kind
    assert from_content(LLAMA, "x", "x").ours and not from_content(LLAMA | MIXTURE, "x", "x").ours
    for change in ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, {"hidden_act": "gelu"}):
        with pytest.raises(ValueError, match=r"not 'default' or 'llama3'|only 'silu' is possible"):
            hugging_face_config.shape_from(LLAMA | change)
        assert not from_content(LLAMA | change, "x", "x").ours
    assert find_model("7B").ours and find_model("20B").ours and not find_model("gpt-3-175b").ours


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mistral", "sliding_window": "wide"}, "sliding_window is 'wide', not a whole number"),
        ({"hidden_size": None}, "without hidden_size"),
        ({"intermediate_size": None, "vocab_size": None}, "without vocab_size, intermediate_size"),
        ({"model_type": "x"}, "model_type is 'x'; there are llama, .* does for other decoders"),
        ({"model_type": None}, "no model_type: it is not the config.json of a language model; name another"),
        ({"model_type": "bert"}, "model_type is 'bert': an encoder; such models are not planned for"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5': an encoder and a decoder"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "an encoder and a decoder"),
        ({"model_type": "vit", "image_size": 224, "patch_size": 16}, "'vit': a model of images"),
        ({"model_type": "mamba"}, "states instead of attention"),
        (
            {"model_type": "dbrx", "num_local_experts": 16},
            "a mixture of experts unlike mixtral, qwen2_moe, qwen3_moe, deepseek_v2, deepseek_v3",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "something else than the next token"),
        (
            {"model_type": "opt", "ffn_dim": 4096, "word_embed_proj_dim": 512},
            "its embedding is not as wide as its layers",
        ),
        ({"attention_bias": 1}, "attention_bias is 1, not true or false"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', not a whole number"),
        ({"vocab_size": 10**310}, r"0, not a whole number below 1e\+12"),
        ({"head_dim": float("inf")}, "head_dim is inf, not a whole number"),
        ({"head_dim": 0}, "head_width is 0; it must be 1 or more: get the file again"),
        ({"num_attention_heads": 0}, "heads is 0; it must be 1 or more: get the file again"),
        ({"num_key_value_heads": 8.5}, "num_key_value_heads is 8.5, not a whole number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', not true or false"),
        (MIXTURE | {"num_experts_per_tok": 9}, "9 of 8 experts work for a token: get the file again"),
        (MIXTURE | {"num_experts_per_tok": 0}, "0 of 8 experts work for a token: get the file again"),
        (MIXTURE | {"num_local_experts": 0}, "experts is 0, and a mixtral model has experts: at least 1"),
        (MIXTURE | {"mlp_only_layers": [3]}, "some of its layers have no experts; such models"),
        (
            {"model_type": "qwen2", "sliding_window": 9, "max_window_layers": "x"},
            "max_window_layers is 'x', not a whole number",
        ),
        ({"num_key_value_heads": 5}, "cannot be divided among kv_heads = 5"),
        ({"n_shared_experts": 1}, "experts that all tokens share"),
        (LATENT | {"qk_rope_head_dim": "x"}, "qk_rope_head_dim is 'x', not a whole number"),
        (LATENT | {"first_k_dense_replace": 32}, "32 of 32 layers without experts"),
        (LATENT | {"intermediate_size": None}, "without intermediate_size, which a deepseek_v3 model needs"),
        (LATENT | {"model_type": "qwen2_moe", "num_experts": 4, "mlp_only_layers": 3}, "is 3, not a list"),
        (
            LATENT | {"model_type": "qwen2_moe", "num_experts": 4, "num_hidden_layers": 10**11},
            "num_hidden_layers is 100000000000, more than 100,000",
        ),
        (
            LATENT | {"model_type": "ernie4_5_moe", "use_bias": True},
            "it has biases, which is not planned for",
        ),
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
    with pytest.raises(UserError, match="no such file"):
        find_model(str(tmp_path / "none.json"))


def test_a_folder_without_a_config_json_is_no_unknown_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "7B", "small"):
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=r"mine/: a folder without a config\.json, which says what model it"):
        find_model("mine/")
    assert (find_model("7B"), find_model("small")) == (MODELS["llama-2-7b"], MODELS["small"])


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(UserError, match="did you mean llama-8b"):
        find_model("lama-8b")
    with pytest.raises(UserError, match=r"there are tiny, small, .*, smollm2-135m\|360m\|1\.7b, .*, gpt2,"):
        find_model("zzz")
    with pytest.raises(UserError, match="from 1M to 20T"):
        find_model("900T")


def test_what_code_makes_is_read_off_its_tensors(tmp_path: Path) -> None:
    with torch.device("meta"):
        for name in ("small", "llama-8b"):
            assert of_module(Transformer(PRESETS[name]), name) == find_model(name)
        windowed = Transformer(replace(PRESETS["small"], window=64, full_layers=(0,)))
        assert of_module(windowed, "windowed").windowed == 0.75
        decoder = Decoder(LARGE)
    found = of_module(decoder, "97M")
    assert not found.ours
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
        ("number", "returned an int"), ("line", "has no nn.Embedding"),
        ("leaves", r"failed on the meta device: SystemExit\(3\)"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            find_model(f"{file}:{function}")
    with pytest.raises(UserError, match="no such file"):
        find_model(f"{tmp_path}/other.py:make")
    file.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(UserError, match=r"mine.py cannot be imported: SystemExit\(3\)"):
        find_model(f"{file}:make")


class _Uneven(nn.Module):
    """Heads wider than the residual says, norms of queries and keys, biases of queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 32
        self.q, self.kv, self.out = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(*two, bias=False) for two in ((64, 192), (64, 192), (192, 64))
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width) for width in (64, 64, 64, 64, 32, 32))


def _uneven() -> nn.Module:
    return nn.ModuleDict(
        {"embed": nn.Embedding(1000, 64), "layers": nn.ModuleList(_Uneven() for _ in range(3)),
         "norm": nn.RMSNorm(64), "head": nn.Linear(64, 1000)}
    )  # fmt: skip


def test_what_code_makes_has_exactly_its_parameters() -> None:
    module = _uneven()
    found = of_module(module, "x")
    assert found.parameters == sum(each.numel() for each in module.parameters())
    assert (found.heads, found.kv_heads, found.head_width, found.norms) == (4, 2, 32, 4)
    assert found.head_norms and not found.tied_head
    planned = memory(Setup(found, Parallel("zero3", 2, 2), Recipe(64)))
    assert planned.gradients == pytest.approx(4 * found.parameters / 2, rel=1e-3)  # laid by unit


class _Transformers(nn.Module):
    """With a config, as models of transformers have it."""

    def __init__(self, **content: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(to_dict=lambda: content)
        self.weight = nn.Parameter(torch.empty(CONFIGS["gpt2"][1], device="meta"))


def test_a_model_of_transformers_is_as_its_config_says() -> None:
    content, _ = CONFIGS["gpt2"]
    assert of_module(_Transformers(**content), "x") == from_content(content, "", "x")
    with pytest.raises(ValueError, match="its config: model_type is 'bert': an encoder"):
        of_module(_Transformers(model_type="bert"), "x")
    with pytest.raises(ValueError, match=r"no nn\.Embedding"):  # it has other parameters than its config says
        of_module(_Transformers(**content | {"n_layer": 13}), "x")


def test_finding_a_model_and_its_memory_waits_for_no_torch() -> None:
    code = (
        "import sys; from imece.plan.models.by_name import find_model\n"
        "from imece.plan.memory.memory import memory\n"
        "from imece.plan.setup import Parallel, Recipe, Setup\n"
        "assert memory(Setup(find_model('7B'), Parallel(), Recipe(seq=2048))).total > 2**36\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
