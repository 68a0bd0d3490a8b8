"""Context parallelism: the ranks of the mesh's axis "context" divide the positions of each sequence.

Whatever treats each position by itself (matrices, norms, the loss) needs no other rank. Attention does:
inside `with context`, torch's `scaled_dot_product_attention` runs as the ring of ring.py, whichever model
calls it. A TorchFunctionMode intercepts the call, also when recomputation repeats it in backward: autograd
takes the modes of the thread that calls it into its own threads.

    stretch    one of 2 N equal pieces of a sequence of T positions, on N ranks
    part       a rank's two stretches, the r-th from the beginning and the r-th from the end: T / N positions
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from imece import mesh as meshes
from imece.collectives.ops import all_gather
from imece.mesh import Mesh
from imece.model_parallel.alike import check_alike, content_of, plain_tensors
from imece.model_parallel.ring import positions_of, ring_attention

# They attend inside one call, where a mode sees nothing.
_HIDING = {
    F.multi_head_attention_forward: "nn.MultiheadAttention",
    torch._native_multi_head_attention: "nn.MultiheadAttention",
    torch._transformer_encoder_layer_fwd: "nn.TransformerEncoderLayer",
}


class ContextParallel:
    """Divides long sequences over the ranks of a mesh's axis "context": exact, with 1/N of the activations on
    each rank.

        context = imece.ContextParallel(mesh)
        inputs, targets = context.part(inputs), context.part(targets)
        with context:                                                    # backward too
            logits = model(inputs, positions=context.positions(T))
            model.weigh(cross_entropy(logits, targets), targets.numel()).backward()

    Ranks along the axis read the same sequences and each keeps its part. DistributedSampler does so
    (`mesh.batch_rank`); if `part` was given different sequences, the first attention is a UserError. The
    model must turn its queries and keys by the positions that it is given, and must attend with
    F.scaled_dot_product_attention, causal or not, without mask and dropout. `imece.parallelize` averages over
    "context" too. With one rank along the axis this class changes nothing.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        """All ranks of the mesh construct together. mesh: by default that of imece.init()."""
        mesh = meshes.chosen(mesh)
        self.ranks = mesh.size("context")
        self.rank = mesh.coordinate("context")
        self._device = mesh.device
        # A single rank needs no group, and a group keeps connections open.
        self._mode = _Mode(mesh) if self.ranks > 1 else None

    def positions(self, length: int, *, device: torch.device | str | None = None) -> Tensor:
        """This rank's positions in a sequence of `length`: int64 [length / ranks], ascending.

        device: the mesh's by default. ValueError if twice the number of ranks does not divide `length`.
        """
        if self._mode is not None:
            self._mode.told = True
        return self._positions(length).to(device or self._device)

    def _positions(self, length: int) -> Tensor:
        check_length(length, self.ranks)
        if self.ranks == 1:
            return torch.arange(length, device="cpu")
        return positions_of(self.rank, self.ranks, length)

    def part(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's positions of a tensor that has all of them along `dim`. ValueError if it has no such
        dim, and as from `positions`."""
        _check_dim(tensor, dim)
        if self._mode is None:
            return tensor
        mine = self._positions(tensor.shape[dim]).to(tensor.device)
        self._mode.of_tokens |= not (tensor.is_floating_point() or tensor.is_complex())
        if not self._mode.given:  # only the first: later a loader may have read further ahead on one rank
            self._mode.given = content_of(plain_tensors(tensor))
        return tensor.index_select(dim, mine)

    def whole(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """The reverse of `part`, on every rank, in the sequence's order; has no gradient.

        tensor: of the same shape on all ranks along the axis, which all call this. ValueError if it has no
        such dim.
        """
        _check_dim(tensor, dim)
        if self._mode is None:
            return tensor.detach()
        mine = tensor.detach().movedim(dim, 0).contiguous()
        parts = mine.new_empty(self.ranks, *mine.shape)
        all_gather(parts, mine, group=self._mode.group, label="a sequence's parts")
        first, second = parts.unflatten(1, (2, -1)).unbind(1)  # each [ranks, stretch, ...]
        return torch.cat((first, second.flip(0))).flatten(0, 1).movedim(0, dim)

    def __enter__(self) -> Self:
        if self._mode is not None:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mode is None:
            return
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None and not self._mode.attended:
            raise ValueError(
                "no attention went round the ring: inside `with context` nothing called "
                "F.scaled_dot_product_attention, so each rank's positions would see those of no other; a "
                'model of transformers does with attn_implementation="sdpa"'
            )


class _Mode(TorchFunctionMode):
    """Passes every call of torch's attention to `_attend`."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.group, self._device = mesh.group("context"), mesh.device
        # Not `group`, in which other threads sum gradients if "context" is the only axis of data.
        self._ring = mesh.messages_group("context")
        self.attended = False
        self.told = False  # somebody asked for the positions
        self.of_tokens = False  # `part` was given numbers of tokens, which say nothing of positions
        self.given = ""  # content of the first tensor given to `part`, until the first attention compares it

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **options)
        if func in _HIDING:
            raise ValueError(
                f"{_HIDING[func]} inside `with context`: its attention is hidden from the ring; let the "
                "module call F.scaled_dot_product_attention"
            )
        if func is Tensor.backward:
            func, options = (
                torch.autograd.backward,
                {"grad_tensors": options.pop("gradient", None), **options},
            )
        if func is torch.autograd.backward or func is torch.autograd.grad:
            return self._go_back(func, args, options)
        return func(*args, **options)

    @torch._disable_dynamo(recursive=True)  # torch.compile compiles the code around it
    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Replaces F.scaled_dot_product_attention, with its parameters, and attends to the keys of all
        ranks."""
        _check(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        if not self.attended:
            self.attended = True
            check_alike(self.given, self.group, self._device, "context")
            if self.of_tokens and not self.told:
                warnings.warn(
                    "inside `with context` a model attends to parts of sequences, and nobody asked for "
                    "context.positions(T): unless it is told them, as by positions= or position_ids=, it "
                    "takes its tokens for the first ones, and what it learns is wrong",
                    stacklevel=2,
                )
        kind = query.device.type
        if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:  # as torch casts this function's
            to = torch.get_autocast_dtype(kind)
            query, key, value = query.to(to), key.to(to), value.to(to)
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        return ring_attention(query, key, value, self._ring, causal=is_causal, scale=scale)

    def _go_back(self, func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run backward with this mode active. torch runs a function that it hands to a mode without that
        mode, and asking tensors for modes would lead here again; edges of the graph are not asked."""
        ends = [*args, *([options["inputs"]] if options.get("inputs") is not None else [])]
        tensors = [each for end in ends for each in ((end,) if isinstance(end, Tensor) else end)]
        in_graph = all(isinstance(each, Tensor) and each.requires_grad for each in tensors)
        if not in_graph or options.get("materialize_grads") or options.get("is_grads_batched"):
            return func(*args, **options)  # edges lack these attributes; torch refuses such calls itself
        if len(ends) > len(args):
            options["inputs"] = _edges(options["inputs"])
        with self:
            return func(*map(_edges, args), **options)


def _edges(tensors: Tensor | Iterable[Tensor]) -> tuple[GradientEdge, ...]:
    """The edges where backward begins or ends."""
    return tuple(map(get_gradient_edge, (tensors,) if isinstance(tensors, Tensor) else tensors))


def _check_dim(tensor: Tensor, dim: int) -> None:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(
            f"a tensor {list(tensor.shape)} has no dim {dim} of positions: dim= says which one is"
        )


def check_length(length: int, ranks: int) -> None:
    """ValueError, with the nearest lengths that work, if a sequence cannot be divided among `ranks`."""
    unit = 2 * ranks
    if ranks > 1 and length % unit:
        below = length // unit * unit
        near = f"{below} and {below + unit}" if below else f"{unit} and {2 * unit}"
        raise ValueError(
            f"sequences of {length} positions cannot be divided by 2 x {ranks} ranks along context, each of "
            f"which takes a stretch from both ends; the nearest are {near}"
        )


def _check(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, gqa: bool
) -> None:
    """ValueError for attention that the ring cannot compute."""
    if mask is not None:
        raise ValueError(
            f"attn_mask of shape {list(mask.shape)} inside `with context`: the ring knows is_causal=True or "
            "False only, no masks, as windows and padding are; a model of transformers makes them unless "
            "attention_mask=torch.ones_like(input_ids) is given"
        )
    if dropout:
        raise ValueError(f"dropout_p={dropout} inside `with context`: the ring has no dropout, set it to 0")
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if query.dim() != 4 or key.dim() != 4 or key.shape != value.shape:
        raise ValueError(
            f"{shapes} inside `with context`: the ring takes [batch, heads, positions, width], keys and "
            "values alike"
        )
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{shapes} inside `with context`: queries and keys are to be of the same positions, this rank's; "
            "a cache, or another sequence, cannot be attended to"
        )
    if causal and query.shape[2] % 2:
        raise ValueError(
            f"{query.shape[2]} positions on this rank inside `with context`: causal attention takes what "
            "`part` gives, two stretches, so an even number"
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and (not gqa or heads % kv_heads):
        hint = "" if gqa else "; enable_gqa=True if neighbouring heads share them"
        raise ValueError(f"{heads} heads of queries and {kv_heads} of keys cannot be matched{hint}")
    if (query.shape[0], query.shape[-1]) != (key.shape[0], key.shape[-1]):
        raise ValueError(f"{shapes}: another batch or width of heads")
