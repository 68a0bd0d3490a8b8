"""A model as the planner sees it: its widths, from which parameters and FLOPs follow.

It covers more than models/shape.py, which has what imece builds: published runs also have learned positions,
biases, LayerNorm, ungated MLPs and experts.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from imece.models.shape import TransformerConfig

Norm = Literal["rms", "layer"]


@dataclass(frozen=True)
class Matrix:
    """The weight of a linear layer, [rows, columns]. A fused one is in place of several that read the
    same."""

    name: str  # of its module
    rows: int  # channels that it makes
    columns: int  # channels that it reads
    reads_residual: bool  # ranks that divide the layer have parts of its rows; of others' columns

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def part(self, tensor: int) -> tuple[int, int]:
        """(rows, columns) of the largest of `tensor` parts."""
        if self.reads_residual:
            return -(-self.rows // tensor), self.columns
        return self.rows, -(-self.columns // tensor)


class Mlp(NamedTuple):
    """One MLP, or equal experts, that layers have."""

    width: int
    matrices: tuple[Matrix, ...]  # of one
    experts: int  # or 1
    active: int  # of these, for a token
    part: float  # of the layers that have it


@dataclass(frozen=True)
class Latent:
    """Attention whose keys and values are made from a few channels, as DeepSeek's; its queries may be,
    too."""

    queries: int  # channels from which queries are made; 0: from the residual
    keys: int  # the same of keys and values
    turned: int  # channels of a head that have rotary positions; all heads' keys have the same ones
    value_width: int  # of one head

    @property
    def kept(self) -> int:
        """Channels of what lies between a layer's residual and its queries, keys and values."""
        return self.queries + self.keys + self.turned


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer. ValueError, with names and values, for an impossible one."""

    name: str
    layers: int
    width: int  # of the residual stream
    heads: int
    kv_heads: int  # equal to `heads` in plain multi-head attention
    head_width: int
    mlp_width: int
    gated: bool  # SwiGLU and the like: three matrices in the MLP instead of two
    vocab_size: int
    tied_head: bool = True
    learned_positions: int = 0  # rows of a table of positions; 0: rotary or none
    biases: bool = False  # in every matrix and LayerNorm
    norm: Norm = "rms"
    experts: int = 0  # per layer, each an MLP; 0: one MLP without router
    active_experts: int = 0  # per token
    shared_width: int = 0  # of an MLP beside the experts, which all tokens go through; 0: there is none
    routing: int = 0  # elements beside the matrices of experts and router: their biases, gates
    dense_layers: int = 0  # layers that have one MLP in place of experts
    dense_width: int = 0  # of that MLP
    latent: Latent | None = None
    window: int = 0  # tokens that one attends to in layers with a sliding window; 0: no such layers
    windowed: float = 0.0  # part of the layers with a window
    norms: int = 2  # per layer, of the residual's width
    head_norms: bool = False  # queries and keys have norms, too
    vectors: int | None = None  # elements of a layer's norms and biases; None: from `norm` and `biases`
    others: int | None = None  # the same for everything outside the layers except tables and positions
    fused_queries: bool = False  # one matrix makes queries, keys and values
    fused_gate: bool = False  # one matrix makes the gate and what it lets through
    max_seq: int = 0  # tokens per sequence if positions are not learned; 0: unknown
    made_for: int = 0  # tokens that its file names, if scaled rotary positions may allow more; 0: unknown
    ours: bool = True  # whether models/transformer.py builds it, so that imece can divide and cut it

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "head_width", "mlp_width", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads is {self.heads}, which cannot be divided among kv_heads = {self.kv_heads}"
            )
        if self.experts and not 1 <= self.active_experts <= self.experts:
            raise ValueError(f"{self.active_experts} of {self.experts} experts work for a token")
        if self.dense_layers and not (self.dense_layers < self.layers and self.dense_width > 0):
            without = f"{self.dense_layers} of {self.layers} layers without experts"
            raise ValueError(f"{without} and with an MLP of {self.dense_width} channels")

    def __hash__(self) -> int:  # of one field only: instances are keys of caches that every candidate asks
        return hash(self.name)

    @property
    def positions(self) -> int:
        """Tokens that a sequence may have; 0: unknown."""
        return self.learned_positions or self.max_seq

    @property
    def q_width(self) -> int:
        """Width of all heads' queries together."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of all keys together, and of all values."""
        return self.kv_heads * self.head_width

    @property
    def value_width(self) -> int:
        """Width of one head's values."""
        return self.latent.value_width if self.latent else self.head_width

    @property
    def core_width(self) -> float:
        """The mean of the widths of one head's keys and values: scores multiply by one, then by the other."""
        return (self.head_width + self.value_width) / 2

    @functools.cached_property
    def attention(self) -> tuple[Matrix, ...]:
        """A layer's matrices of attention, in the order of their modules."""
        query, key = self.q_width, self.kv_width
        if self.latent is not None:
            return self._through(self.latent)
        if self.fused_queries:
            return self._in_and_out("attention", {"qkv": query + 2 * key}, "out", query)
        return self._in_and_out("attention", {"q": query, "k": key, "v": key}, "out", query)

    def _through(self, latent: Latent) -> tuple[Matrix, ...]:
        first = {"q_a": latent.queries} if latent.queries else {"q": self.q_width}
        first["kv_a"] = latent.keys + latent.turned
        *reading, out = self._in_and_out("attention", first, "out", self.heads * latent.value_width)
        # These are divided like matrices that read the residual.
        made = [Matrix("attention.q_b", self.q_width, latent.queries, True)] if latent.queries else []
        both = self.heads * (self.head_width - latent.turned + latent.value_width)
        return (*reading, *made, Matrix("attention.kv_b", both, latent.keys, True), out)

    @functools.cached_property
    def mlp(self) -> tuple[Matrix, ...]:
        """The same of its MLP, or of one expert."""
        return self._mlp_of("mlp", self.mlp_width)

    @functools.cached_property
    def mlps(self) -> tuple[Mlp, ...]:
        """All that layers have: an MLP; or experts, what is beside them and what some layers have instead."""
        usual = 1 if not self.dense_layers else 1 - self.dense_layers / self.layers
        found = [Mlp(self.mlp_width, self.mlp, max(1, self.experts), max(1, self.active_experts), usual)]
        others = (("shared", self.shared_width, usual), ("dense", self.dense_width, 1 - usual))
        found += [Mlp(width, self._mlp_of(name, width), 1, 1, part) for name, width, part in others if width]
        return tuple(found)

    def _mlp_of(self, part: str, inner: int) -> tuple[Matrix, ...]:
        made = {"gate": inner, "up": inner} if self.gated else {"up": inner}
        if self.fused_gate:
            made = {"gate_up": 2 * inner}
        return self._in_and_out(part, made, "down", inner)

    def _in_and_out(self, part: str, made: dict[str, int], last: str, inner: int) -> tuple[Matrix, ...]:
        reading = (Matrix(f"{part}.{name}", rows, self.width, True) for name, rows in made.items())
        return (*reading, Matrix(f"{part}.{last}", self.width, inner, False))

    @functools.cached_property
    def expert_parameters(self) -> int:
        """Parameters of an MLP, or of one expert, with the biases that go where its matrices go."""
        found = sum(each.numel for each in self.mlp)
        if self._has_plain_biases:
            found += sum(each.rows for each in self.mlp if each.reads_residual or self.experts)
        return found

    @functools.cached_property
    def products(self) -> float:
        """Elements of the average layer's matrices, of all experts, with those biases; its router is left
        out."""
        usual, *others = self.mlps
        found: float = sum(each.numel for each in self.attention)
        found += usual.part * usual.experts * self.expert_parameters
        found += sum(each.part * sum(matrix.numel for matrix in each.matrices) for each in others)
        if self._has_plain_biases:
            found += sum(each.rows for each in self.attention if each.reads_residual)
        return found

    @functools.cached_property
    def whole_vectors(self) -> int:
        """Elements of a layer's norms and biases that ranks which divide it have whole."""
        if self.vectors is not None:
            return self.vectors
        summed = self.width * (1 if self.experts else 2) if self.biases else 0
        return self.norms * self.norm_parameters + summed

    @property
    def _has_plain_biases(self) -> bool:
        return self.biases and self.vectors is None

    @property
    def with_experts(self) -> float:
        """The part of the layers that have experts."""
        return self.mlps[0].part if self.experts else 0

    @property
    def router_parameters(self) -> int:
        """Elements that ranks which divide a layer with experts have whole: its router, and `routing`."""
        return self.experts * self.width + self.routing

    @property
    def layer_parameters(self) -> float:
        """Parameters of the average block, including all its experts."""
        return self.products + self.with_experts * self.router_parameters + self.whole_vectors

    @property
    def largest_matrix(self) -> int:
        """Elements of the largest matrix of a layer; an expert's counts alone."""
        matrices = itertools.chain(self.attention, *(each.matrices for each in self.mlps))
        return max(each.numel for each in matrices)

    @functools.cached_property
    def adapter_parameters(self) -> float:
        """Parameters of adapters of rank 1 beside every matrix of the average layer."""
        found: float = sum(each.rows + each.columns for each in self.attention)
        for mlp in self.mlps:
            found += mlp.part * mlp.experts * sum(each.rows + each.columns for each in mlp.matrices)
        return found

    def with_vectors(self, vectors: int, others: int) -> Model:
        """The same model with these numbers. None stays if `norm` and `biases` imply the same: only then can
        tensors be laid out one by one, as in the engine."""
        usual, exact = replace(self, vectors=None, others=None), replace(self, vectors=vectors, others=others)
        return replace(
            self,
            vectors=None if usual.layer_parameters == exact.layer_parameters else vectors,
            others=None if usual.other_parameters == exact.other_parameters else others,
        )

    def with_copies(self, tensor: int) -> Model:
        """The model as ranks that divide matrices hold it: with too few heads of keys and values, each rank
        has a copy of one."""
        return replace(self, kv_heads=tensor) if tensor > self.kv_heads else self

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return self.width * (2 if self.norm == "layer" and self.biases else 1)

    def scores_part(self, seq: int) -> float:
        """Share of causal attention's scores over `seq` tokens that windows leave, in the average layer."""
        if not 0 < self.window < seq:
            return 1.0
        seen = self.window / seq
        return 1 - self.windowed * (1 - seen * (2 - seen))

    @property
    def table_parameters(self) -> int:
        """Parameters of the embedding, and of a head that is not tied."""
        return self.vocab_size * self.width

    def table_parts(self, tensor: int) -> int:
        """Parts into which tables and logits are divided over this many ranks: 1 if the vocabulary cannot
        be."""
        return tensor if self.vocab_size % tensor == 0 else 1

    @property
    def other_parameters(self) -> int:
        """Parameters outside the layers, without tables: the last norm, positions."""
        others = self.norm_parameters if self.others is None else self.others
        return others + self.learned_positions * self.width

    @property
    def parameters(self) -> int:
        """Number of trained parameters; a tied head counts once."""
        tables = 1 if self.tied_head else 2
        layers = round(self.layers * self.layer_parameters)  # an average is no whole number
        return layers + tables * self.table_parameters + self.other_parameters


def from_shape(name: str, shape: TransformerConfig) -> Model:
    """The model that models/transformer.py builds for this shape."""
    return Model(
        name, shape.layers, shape.width, shape.heads, shape.kv_heads, shape.head_width, shape.mlp_width,
        gated=True, vocab_size=shape.vocab_size, tied_head=shape.tied_head, window=shape.window or 0,
        windowed=1 - len(shape.full_layers) / shape.layers if shape.window else 0.0,
        head_norms=shape.head_norms, max_seq=shape.max_seq,
    ).with_vectors(shape.vectors, shape.width)  # fmt: skip
