"""The transformer compared with explicit references, its cache with full forwards, its shapes with papers."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from imece.models.cross_entropy import Reduction, cross_entropy
from imece.models.presets import PRESETS, preset
from imece.models.shape import RopeScaling, TransformerConfig
from imece.models.transformer import Attention, KVCache, Transformer, rotate, rotation_at
from imece.train.run.folder import read_shape, shape_as_json

CONFIG = TransformerConfig(
    vocab_size=50, layers=3, width=32, heads=4, kv_heads=2, mlp_width=48, max_seq=24, tied_head=True
)
# Each option that other models of the kind have.
OPTIONS: dict[str, dict[str, Any]] = {
    "heads of another width": {"head_dim": 12},
    "norms of heads": {"head_norms": True},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "biases of queries, keys and values": {"qkv_bias": True},
    "a window": {"window": 5},
    "a window in some layers": {"window": 5, "full_layers": (0, 2)},
    "layers without positions": {"nope_layers": (0, 2)},
    "all": {
        "head_dim": 6, "head_norms": True, "qkv_bias": True, "mlp_bias": True, "window": 4,
        "full_layers": (1,), "nope_layers": (2,), "tied_head": False,
    },
}  # fmt: skip
LLAMA_SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq=8192)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loud(config: TransformerConfig = CONFIG) -> Transformer:
    """A model with weights 10 times as large as they start: its logits differ clearly, so do its heads."""
    model = Transformer(config, generator=seeded())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10)
            else:
                parameter.uniform_(0.5, 1.5, generator=seeded(1))
    return model


def some_tokens(batch: int = 2, positions: int = 16, config: TransformerConfig = CONFIG) -> Tensor:
    return torch.randint(config.vocab_size, (batch, positions), generator=seeded(2))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert found
    assert all(gradient is not None and gradient.any() for gradient in found.values()), list(found)
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


# ---------------------------------------------------------------- shapes and counts


@pytest.mark.parametrize(
    ("name", "published"),
    [("llama-8b", 8_030_261_248), ("llama-70b", 70_553_706_496), ("llama-405b", 405_853_388_800)],
)
def test_llamas_have_their_published_size(name: str, published: int) -> None:
    config = preset(name)
    assert config.parameter_count == published
    assert (config.rope_theta, config.max_seq, config.rope_scaling) == (500000.0, 131072, LLAMA_SCALING)


@pytest.mark.parametrize("name", PRESETS)
def test_the_count_is_that_of_the_model(name: str) -> None:
    config = preset(name)
    for tied in (True, False):
        with torch.device("meta"):
            model = Transformer(replace(config, tied_head=tied))
        assert all(parameter.is_meta for parameter in model.parameters())
        numel = sum(parameter.numel() for parameter in model.parameters())
        assert numel == replace(config, tied_head=tied).parameter_count


@pytest.mark.parametrize("options", OPTIONS)
def test_the_count_with_options(options: str) -> None:
    config = replace(CONFIG, **OPTIONS[options])
    assert sum(each.numel() for each in Transformer(config).parameters()) == config.parameter_count


def test_shapes_of_one_model_are_equal() -> None:
    assert replace(CONFIG, head_dim=8) == CONFIG
    assert replace(CONFIG, window=7, full_layers=(2, 0, 1)) == CONFIG == replace(CONFIG, full_layers=(1,))
    assert replace(CONFIG, nope_layers=(2, 0, 2)).nope_layers == (0, 2)
    config = replace(CONFIG, **OPTIONS["all"])
    assert read_shape(json.loads(json.dumps(shape_as_json(config)))) == config
    before = {key: value for key, value in shape_as_json(CONFIG).items() if key not in OPTIONS["all"]}
    assert read_shape(before | {"tied_head": True}) == CONFIG, "a checkpoint of before there were options"


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("tiny", 50_000, 200_000),
        ("small", 4_000_000, 4_400_000),
        ("medium", 27e6, 33e6),
        ("1.3b", 1.25e9, 1.35e9),
    ],
)
def test_our_presets_are_as_large_as_they_say(name: str, least: float, most: float) -> None:
    assert least <= preset(name).parameter_count <= most


def test_a_preset_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="no preset 'lama-8b': did you mean 'llama-8b'"):
        preset("lama-8b")
    with pytest.raises(ValueError, match=r"one of tiny, small, .*llama-405b"):
        preset("?")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 30}, "width is 30, .* heads = 4"),
        ({"kv_heads": 3}, "heads is 4, .* kv_heads = 3"),
        ({"width": 12}, "width / heads is 12 / 4 = 3; .* even"),
        ({"head_dim": 7}, "head_dim is 7; .* even"),
        ({"head_dim": 0}, "^head_dim is 0; it must be positive"),
        ({"window": 0}, "^window is 0; it must be positive"),
        ({"window": 4, "full_layers": (1, 3)}, "full_layers has 3; layers are from 0 to 2"),
        ({"nope_layers": (-1,)}, "nope_layers has -1; layers are from 0 to 2"),
        ({"norm_eps": 0.0}, r"norm_eps is 0.0; it must be positive"),
        ({"rope_theta": math.inf}, r"rope_theta is inf; it must be positive"),
        *(
            ({name: value}, f"^{name} is {value}; it must be positive")
            for name in ("vocab_size", "layers", "width", "heads", "kv_heads", "mlp_width", "max_seq")
            for value in (0, -1)
        ),
    ],
)
def test_a_shape_that_cannot_be_built(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": 0.0}, "factor is 0.0; it must be positive"),
        ({"original_max_seq": -1}, "original_max_seq is -1; it must be positive"),
        ({"high_freq_factor": 1.0}, r"high_freq_factor is 1.0; .* low_freq_factor, which is 1.0"),
    ],
)
def test_a_scaling_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LLAMA_SCALING, **change)


def test_names_and_the_absence_of_everything_else() -> None:
    block = [f"attention.{name}.weight" for name in ("norm", "q", "k", "v", "out")]
    block += [f"mlp.{name}.weight" for name in ("norm", "gate", "up", "down")]
    names = ["embed.weight", "norm.weight", *(f"blocks.{i}.{name}" for i in range(3) for name in block)]
    assert sorted(Transformer(CONFIG).state_dict()) == sorted(names)
    untied = Transformer(replace(CONFIG, tied_head=False)).state_dict()
    assert sorted(untied) == sorted([*names, "head.weight"])


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("tied", [True, False])
def test_from_the_meta_device_it_is_the_same_model(tied: bool) -> None:
    config = replace(CONFIG, tied_head=tied, rope_scaling=replace(LLAMA_SCALING, original_max_seq=8))
    direct = Transformer(config, generator=seeded(5))
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(math.nan)  # what empty memory may hold
    model.reset_parameters(seeded(5))
    for (name, one), other in zip(direct.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert torch.equal(direct(some_tokens()), model(some_tokens()))


def test_torchs_own_generator_draws_the_same_weights() -> None:
    torch.manual_seed(3)
    direct = Transformer(CONFIG)
    drawn_after = torch.rand(1)
    torch.manual_seed(3)
    direct.reset_parameters()
    assert torch.equal(torch.rand(1), drawn_after)  # construction draws nothing besides
    assert torch.equal(direct.embed.weight, Transformer(CONFIG, generator=seeded(3)).embed.weight)


def test_how_large_the_weights_start() -> None:
    model = Transformer(replace(CONFIG, width=128, tied_head=False), generator=seeded())
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones(128)), name
            continue
        std = 0.02 / math.sqrt(6) if name.endswith(("out.weight", "down.weight")) else 0.02
        assert float(parameter.detach().std()) == pytest.approx(std, rel=0.05), name
        assert abs(float(parameter.detach().mean())) < 0.002, name


def test_a_tied_head_is_the_embedding() -> None:
    model = loud()
    tokens = torch.tensor([[3, 4]])
    before = model(tokens)
    with torch.no_grad():
        model.embed.weight[7] = 0.0  # not among the tokens: only the head reads it
    after = model(tokens)
    assert not after[..., 7].any()
    others = [token for token in range(50) if token != 7]
    assert torch.equal(after[..., others], before[..., others])

    untied = loud(replace(CONFIG, tied_head=False))
    before = untied(tokens)
    with torch.no_grad():
        untied.embed.weight[7] = 0.0
    assert torch.equal(untied(tokens), before)


# ---------------------------------------------------------------- attention and positions


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model, tokens = loud(), some_tokens()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % CONFIG.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert ((before[:, 9:] - after[:, 9:]).abs().amax(dim=(0, 2)) > 1e-3).all()  # and do change later ones


@pytest.mark.parametrize(
    ("kv_heads", "options"), [(1, {}), (2, {}), (4, {}), *((2, each) for each in OPTIONS.values())]
)
def test_attention_against_one_with_repeated_heads(kv_heads: int, options: dict[str, Any]) -> None:
    """In the last layer, which has each option but the window where that is only in the middle one."""
    config = replace(CONFIG, kv_heads=kv_heads, **options)
    attention = loud(config).get_submodule("blocks.2.attention")
    assert isinstance(attention, Attention)
    x = torch.randn(2, 10, 32, generator=seeded())
    rotation = rotation_at(config, torch.arange(10))
    width, window = config.head_width, 10 if 2 in config.full_layers else config.window or 10

    def projected(project: nn.Linear, norm: str, head: int, turns: bool) -> Tensor:
        rows = slice(head * width, head * width + width)
        y = (x * scale) @ project.weight[rows].T + (project.bias[rows] if config.qkv_bias else 0)
        if config.head_norms and norm:
            y = y / (y.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
            y = y * attention.get_parameter(f"{norm}.weight")
        return rotate(y, rotation) if turns and 2 not in config.nope_layers else y

    scale = attention.norm.weight / (x.square().mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt()
    far = torch.arange(10)[:, None] - torch.arange(10)
    heads = []
    for head in range(4):
        kv_head = head // (4 // kv_heads)
        q = projected(attention.q, "q_norm", head, turns=True)
        k = projected(attention.k, "k_norm", kv_head, turns=True)
        v = projected(attention.v, "", kv_head, turns=False)
        scores = (q @ k.transpose(1, 2) / math.sqrt(width)).masked_fill(
            (far < 0) | (far >= window), -math.inf
        )
        heads.append(scores.softmax(-1) @ v)
    expected = torch.cat(heads, -1) @ attention.out.weight.T + (attention.out.bias if config.out_bias else 0)
    torch.testing.assert_close(attention(x, rotation), expected, rtol=1e-4, atol=1e-5)


def test_rotary_positions_are_products_of_complex_numbers() -> None:
    x = torch.randn(2, 3, 12, 8, generator=seeded(), dtype=torch.float64)
    pairs = torch.complex(x[..., :4], x[..., 4:])  # channel i with channel i + 4, as Hugging Face has it
    frequencies = [10000.0 ** (-2 * i / 8) for i in range(4)]
    turns = torch.tensor(
        [[complex(math.cos(p * f), math.sin(p * f)) for f in frequencies] for p in range(5, 17)],
        dtype=torch.complex128,
    )
    expected = torch.cat(((pairs * turns).real, (pairs * turns).imag), -1)
    torch.testing.assert_close(
        rotate(x, rotation_at(CONFIG, torch.arange(5, 17))), expected, rtol=1e-5, atol=1e-5
    )


def test_tokens_that_are_not_at_the_beginning() -> None:
    """With all of a sequence in another place attention sees the same distances; one that has moved is seen
    elsewhere.
    """
    model = loud(replace(CONFIG, max_seq=64))
    tokens = some_tokens(2, 10)
    expected = model(tokens)
    torch.testing.assert_close(model(tokens, positions=torch.arange(37, 47)), expected, rtol=1e-4, atol=1e-4)
    gap = torch.tensor([*range(9), 40])
    assert (model(tokens, positions=gap)[:, :9] - expected[:, :9]).abs().max() < 1e-4
    assert (model(tokens, positions=gap)[:, 9] - expected[:, 9]).abs().max() > 1e-2


def test_positions_that_cannot_be() -> None:
    model, tokens = loud(replace(CONFIG, window=16, max_seq=16)), some_tokens(1, 4)
    model(tokens, positions=torch.tensor([0, 1, 4, 15]))
    for positions, cache, said in (
        (torch.arange(3), None, r"shape \[3\]; tokens of shape \[1, 4\] have \[4\]"),
        (torch.arange(13, 17), None, "go up to 16; max_seq is 16"),
        (torch.arange(4), KVCache(model.config), "positions beside a cache"),
    ):
        with pytest.raises(ValueError, match=said):
            model(tokens, cache=cache, positions=positions)
    with pytest.raises(ValueError, match="a window of 15"):
        loud(replace(CONFIG, window=15, max_seq=16))(tokens, positions=torch.arange(4))


@pytest.mark.parametrize("scaling", [None, replace(LLAMA_SCALING, original_max_seq=64)])
def test_only_the_distance_between_positions_counts(scaling: RopeScaling | None) -> None:
    config = replace(CONFIG, max_seq=4096, rope_scaling=scaling)
    q, k = torch.randn(2, 1, 8, generator=seeded())

    def score(q_at: int, k_at: int) -> float:
        turned = (rotate(x, rotation_at(config, torch.tensor([at]))) for x, at in ((q, q_at), (k, k_at)))
        return float(math.prod(turned, start=torch.ones(())).sum())

    assert score(9, 2) == pytest.approx(score(1009, 1002), abs=1e-3)
    assert score(9, 2) != pytest.approx(score(9, 4), abs=1e-2)


def test_llama_scaling_slows_the_slow_pairs_only() -> None:
    config = replace(preset("llama-8b"), rope_scaling=None)
    plain = [500000.0 ** (-2 * i / 128) for i in range(64)]
    expected, slow, fast = [], 0, 0
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength > 8192 / 1.0:
            expected.append(frequency / 8)
            slow += 1
        elif wavelength < 8192 / 4.0:
            expected.append(frequency)
            fast += 1
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    assert slow and fast and slow + fast < 64

    def frequencies(config: TransformerConfig) -> Tensor:
        _, sin = rotation_at(config, torch.tensor([1]))  # at position 1 the angle is the frequency
        cos, _ = rotation_at(config, torch.tensor([1]))
        return torch.atan2(sin, cos)[0]

    torch.testing.assert_close(frequencies(config), torch.tensor(plain), rtol=1e-5, atol=0)
    scaled = frequencies(replace(config, rope_scaling=LLAMA_SCALING))
    torch.testing.assert_close(scaled, torch.tensor(expected), rtol=1e-5, atol=0)


def test_a_window_hides_what_is_before_it() -> None:
    model, tokens = loud(replace(CONFIG, window=5)), some_tokens()
    changed = tokens.clone()
    changed[:, 2] = (changed[:, 2] + 1) % CONFIG.vocab_size
    before, after = model(tokens), model(changed)
    reached = 2 + 3 * (5 - 1)  # by way of three layers
    assert torch.equal(before[:, reached + 1 :], after[:, reached + 1 :]) and reached + 1 < 16
    assert ((before[:, 2:reached] - after[:, 2:reached]).abs().amax(dim=(0, 2)) > 1e-6).all()
    short = tokens[:, :5]
    assert torch.equal(model(short), loud()(short)), "as long as it is, it hides nothing"


@pytest.mark.parametrize("options", ["none", "a window", "all"])
def test_documents_in_a_sequence_are_read_as_if_alone(options: str) -> None:
    """Logits and gradients; also where blocks are computed again."""
    model, tokens = loud(replace(CONFIG, **OPTIONS.get(options, {}))), some_tokens()
    cuts = [[0, 3, 12, 16], [0, 9, 10, 16]]
    begins = torch.zeros_like(tokens)
    alone = torch.empty(*tokens.shape, CONFIG.vocab_size)
    for row, starts in enumerate(cuts):
        for first, last in itertools.pairwise(starts):
            begins[row, first:last] = first
            alone[row, first:last] = model(tokens[row : row + 1, first:last])[0]
    weights = torch.randn(alone.shape, generator=seeded(3))
    (alone * weights).sum().backward()
    expected = gradients(model)
    for again in (False, True):
        model.zero_grad()
        model.checkpoint_blocks = again
        found = model(tokens, begins=begins)
        torch.testing.assert_close(found, alone.detach(), rtol=1e-4, atol=1e-4)
        (found * weights).sum().backward()
        torch.testing.assert_close(gradients(model), expected, rtol=1e-3, atol=1e-3)
    assert (model(tokens) - alone).abs().max() > 0.1


def test_begins_that_cannot_be() -> None:
    model, tokens = loud(), some_tokens(2, 4)
    for begins, more, message in (
        (tokens[:1], {}, r"begins has shape \[1, 4\]; tokens have \[2, 4\]"),
        (tokens, {"cache": KVCache(CONFIG, 2)}, "begins beside a cache"),
        (tokens, {"positions": torch.arange(4)}, "begins beside positions"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, begins=begins, **more)


@pytest.mark.parametrize("options", OPTIONS)
def test_biases_begin_with_zeros_and_all_learn(options: str) -> None:
    model = Transformer(replace(CONFIG, **OPTIONS[options]), generator=seeded())
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.full_like(parameter, float("norm" in name))), name
    tokens = some_tokens()
    model.loss(tokens, tokens.roll(-1, 1)).backward()
    of_keys = {f"blocks.{i}.attention.k.bias" for i in range(3)}  # all scores of a query alike: no gradient
    found = {name: parameter.grad for name, parameter in model.named_parameters() if name not in of_keys}
    assert all(each is not None and each.any() for each in found.values())


@pytest.mark.parametrize("options", OPTIONS)
def test_in_bf16_it_is_near(options: str) -> None:
    """Under autocast, and as a whole."""
    model, tokens = Transformer(replace(CONFIG, **OPTIONS[options]), generator=seeded()), some_tokens()
    expected = model.loss(tokens, tokens.roll(-1, 1)).item()
    with torch.autocast("cpu", torch.bfloat16):
        assert model.loss(tokens, tokens.roll(-1, 1)).item() == pytest.approx(expected, rel=1e-3)
    assert model.bfloat16()(tokens).dtype == torch.bfloat16


# ---------------------------------------------------------------- cache


@pytest.mark.parametrize("options", ["none", "a window", "all"])
@pytest.mark.parametrize("chunks", [[16], [1] * 16, [5, 1, 1, 9], [8, 8], [1, 15]])
def test_in_chunks_the_logits_are_those_of_the_whole(chunks: list[int], options: str) -> None:
    config = replace(CONFIG, **OPTIONS.get(options, {}))
    model, tokens = loud(config), some_tokens()
    cache = KVCache(config, batch=2, capacity=16)
    for tensor in (cache._keys, cache._values):
        tensor.fill_(math.nan)  # what empty memory may hold
    assert sum(chunks) == 16
    logits = torch.cat([model(chunk, cache=cache) for chunk in tokens.split(chunks, dim=1)], dim=1)
    assert cache.length == 16
    torch.testing.assert_close(logits, model(tokens).detach(), rtol=1e-5, atol=1e-5)


def test_a_cache_can_forget() -> None:
    model, tokens = loud(), some_tokens()
    cache = KVCache(CONFIG, batch=2)
    model(tokens, cache=cache)
    cache.length = 4
    again = model(tokens[:, 4:8], cache=cache)
    torch.testing.assert_close(again, model(tokens)[:, 4:8].detach(), rtol=1e-5, atol=1e-5)


def test_logits_of_the_last_position_only() -> None:
    model, tokens = loud(), some_tokens()
    last = model(tokens, last_only=True)
    torch.testing.assert_close(last, model(tokens)[:, -1:], rtol=1e-5, atol=1e-5)


def test_no_gradient_goes_through_a_cache() -> None:
    assert not loud()(some_tokens(), cache=KVCache(CONFIG, 2)).requires_grad


def test_too_many_positions() -> None:
    model = Transformer(CONFIG)
    model(some_tokens(1, 24))
    with pytest.raises(ValueError, match="tokens has 25 positions; max_seq is 24"):
        model(some_tokens(1, 25))
    with pytest.raises(ValueError, match=r"tokens has shape \[5\]; it must be \[batch, positions\]"):
        model(torch.zeros(5, dtype=torch.int64))

    cache = KVCache(CONFIG, capacity=6)
    model(some_tokens(1, 4), cache=cache)
    with pytest.raises(ValueError, match="3 positions after the 4 in the cache; the cache's capacity is 6"):
        model(some_tokens(1, 3), cache=cache)
    cache = KVCache(CONFIG)
    model(some_tokens(1, 20), cache=cache)
    with pytest.raises(ValueError, match="5 positions after the 20 in the cache; max_seq is 24"):
        model(some_tokens(1, 5), cache=cache)
    with pytest.raises(ValueError, match="tokens has 2 sequences; the cache has 1"):
        model(some_tokens(2, 1), cache=cache)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 4), "batch is 0; it must be at least 1"),
        ((1, 0), "capacity is 0; it must be from 1 to max_seq = 24"),
        ((1, 25), "capacity is 25; it must be from 1 to max_seq = 24"),
    ],
)
def test_a_cache_that_cannot_be(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCache(CONFIG, *sizes)


# ---------------------------------------------------------------- loss and training


@pytest.mark.parametrize(("ignore", "reduction"), [(-100, "mean"), (-100, "sum"), (3, "mean"), (3, "sum")])
def test_loss_counts_what_is_not_ignored(ignore: int, reduction: Reduction) -> None:
    model, tokens = loud(), some_tokens()
    targets = tokens.roll(-1, 1)
    targets[0, :5], targets[1, -1] = ignore, ignore
    kept = targets != ignore
    assert 0 < int(kept.sum()) < targets.numel()
    each = -model(tokens).log_softmax(-1)[kept].gather(1, targets[kept][:, None])
    loss = model.loss(tokens, targets, ignore=ignore, reduction=reduction)
    torch.testing.assert_close(loss, each.mean() if reduction == "mean" else each.sum())
    default = model.loss(tokens, tokens)
    torch.testing.assert_close(default, F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))


def test_what_loss_refuses() -> None:
    model, tokens = Transformer(CONFIG), some_tokens()
    with pytest.raises(ValueError, match="reduction is 'none'; it must be 'mean' or 'sum'"):
        model.loss(tokens, tokens, reduction="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"logits \[2, 16, .*want targets \[2, 16\], not \[2, 15\]"):
        model.loss(tokens, tokens[:, 1:])


def test_bfloat16_in_autocast_and_throughout() -> None:
    model, tokens = loud(), some_tokens()
    exact = model.loss(tokens, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
        loss = model.loss(tokens, tokens)
        cached = model(tokens[:, 8:], cache=_filled(model, tokens[:, :8]))
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)
    assert cached.sub(logits[:, 8:]).abs().mean() < 0.05 * logits.abs().mean()
    loss.backward()
    assert all(gradient.dtype == torch.float32 for gradient in gradients(model).values())

    narrow = model.bfloat16()
    assert narrow(tokens).dtype == torch.bfloat16
    loss = narrow.loss(tokens, tokens)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.05)
    logits = narrow(tokens)
    assert torch.equal(cross_entropy(logits, tokens), cross_entropy(logits.float(), tokens))


def _filled(model: Transformer, tokens: Tensor) -> KVCache:
    cache = KVCache(CONFIG, batch=len(tokens))
    model(tokens, cache=cache)
    return cache


def test_checkpointed_blocks_give_equal_gradients() -> None:
    model, tokens = loud(), some_tokens()
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    model.get_submodule("blocks.1").register_forward_pre_hook(count)
    model.loss(tokens, tokens).backward()
    plain = gradients(model)
    assert calls == 1
    model.zero_grad()
    model.checkpoint_blocks = True
    model.loss(tokens, tokens).backward()
    assert calls == 3  # once more in backward
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, plain[name]), name
    with torch.no_grad():
        model(tokens)
    assert calls == 4


def test_it_learns_one_batch_by_heart() -> None:
    config = preset("tiny")
    model = Transformer(config, generator=seeded())
    tokens = some_tokens(4, 17, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = float(model.loss(tokens[:, :-1], tokens[:, 1:]))
    assert first == pytest.approx(math.log(256), rel=0.05)  # before training, every token is equally likely
    for _ in range(40):
        optimizer.zero_grad()
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
    assert float(loss) < 0.1
