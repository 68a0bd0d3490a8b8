"""With which nanotron, and on which network, a run of ultrascale was made: its sweep had two of either.

The table has of each job its number and the rate of a gather that it measured before it trained. What a
message took longer in the earlier version, and a layer on the slower network, is fitted on 1B; why is known
of neither. A row that tells neither counts as later, and as on the slower network, as most are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from imece.plan.speed.manner import NANOTRON, Manner

# nanotron's scripts/scaling_benchmarks.py repeats pipelines of jobs below 14,097,150. Those of 14,097,145 and
# 14,097,146, the first after a gap of 73,000, are as fast as later ones.
_REPAIRED = 14_097_000
_MESSAGE_S = 0.24
_SPREAD_S = 2.0e-3
_GATHERED = 256 * 2**20  # bytes
_INSIDE = 260e9  # bytes/s, a gather inside a host
_SLOW_HOP_S = 0.35e-3  # each host adds 0.1 to 0.2 ms or 0.5 ms and more, nothing between


def of_row(row: Mapping[str, str]) -> Manner:
    """What made that row."""
    manner = NANOTRON
    if on_slow_network(row):
        manner = replace(manner, name=f"{manner.name}, slow network", spread_host_s=_SPREAD_S)
    if row["job"] and int(row["job"]) < _REPAIRED:
        manner = replace(manner, name=f"{manner.name}, before", message_s=_MESSAGE_S)
    return manner


def on_slow_network(row: Mapping[str, str]) -> bool:
    """Whether each further host added much to the gather. Of one host it tells nothing."""
    hops = int(row["nodes"]) - 1
    if not hops or not row["gather_gbps"]:
        return True
    seconds = _GATHERED / (float(row["gather_gbps"]) * 1e9)
    return (seconds - _GATHERED / _INSIDE) / hops > _SLOW_HOP_S
