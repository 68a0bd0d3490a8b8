"""Which nanotron, and which network, made a run of ultrascale: its sweep had two of each.

For each job the table has its number and the rate of a gather that it measured before training. Two costs are
fitted on 1B, their causes unknown: what a message took longer in the earlier version, and what a layer took
longer on the slower network. A row without these columns counts as the later version on the slower network,
as most rows are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from imece.plan.speed.manner import NANOTRON, Manner

# nanotron's scripts/scaling_benchmarks.py repeats pipelines of jobs below 14,097,150. Jobs 14,097,145 and
# 14,097,146, the first after a gap of 73,000, are as fast as later ones.
_REPAIRED = 14_097_000
_MESSAGE_S = 0.24
_SPREAD_S = 2.0e-3
_GATHERED = 256 * 2**20  # bytes
_INSIDE = 260e9  # bytes/s of a gather inside a host
_SLOW_HOP_S = 0.35e-3  # each host adds either 0.1 to 0.2 ms, or 0.5 ms and more


def of_row(row: Mapping[str, Any]) -> Manner:
    """The version of nanotron that made this row, with its costs."""
    manner = NANOTRON
    if on_slow_network(row):
        manner = replace(manner, name=f"{manner.name}, slow network", spread_host_s=_SPREAD_S)
    if row["job"] and row["job"] < _REPAIRED:
        manner = replace(manner, name=f"{manner.name}, before", message_s=_MESSAGE_S)
    return manner


def on_slow_network(row: Mapping[str, Any]) -> bool:
    """Whether each further host slowed the gather much. Rows of one host cannot tell."""
    hops: int = row["nodes"] - 1
    if not hops or not row["gather_gbps"]:
        return True
    seconds = _GATHERED / (float(row["gather_gbps"]) * 1e9)
    return (seconds - _GATHERED / _INSIDE) / hops > _SLOW_HOP_S
