"""Products of the experts of transformers' mixtures, in the dtype of autocast.

transformers sorts tokens by expert, and one kernel multiplies for all of a layer. Autocast does not know that
kernel, so it would multiply in the parameters' fp32, which a GPU does at a small part of its speed.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "moe_k")
_THEIRS, _OURS = "grouped_mm", "grouped_mm_in_autocast"


def cast_experts(model: Any) -> None:
    """Let the experts of a model of transformers follow autocast, if one kernel multiplies for them."""
    if getattr(model.config, "_experts_implementation", None) == _THEIRS:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(_OURS, _experts)
        model.set_experts_implementation(_OURS)


def experts_of(config: Any) -> tuple[int, int]:
    """(experts of a layer, those that a token goes to) of a model of transformers; (0, 0) without."""
    text, found = config.get_text_config(), []
    for names in (_EXPERTS, _ACTIVE):
        said = (getattr(text, name, None) for name in names)
        found.append(next((each for each in said if isinstance(each, int)), 0))
    return (found[0], found[1]) if 0 < found[1] <= found[0] else (0, 0)


def _experts(module: nn.Module, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Outputs [N, channels] of the experts [N, k] that each row of `hidden` [N, channels] goes to, in its
    dtype, weighed with `weights` [N, k]."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    device = hidden.device.type
    as_read = module
    if torch.is_autocast_enabled(device):
        as_read = cast(nn.Module, _Cast(module, torch.get_autocast_dtype(device)))
    return cast(Tensor, grouped_mm_experts_forward(as_read, hidden, experts, weights))


class _Cast:
    """A module whose parameters are read in a dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return found.to(self._dtype) if isinstance(found, nn.Parameter) else found
