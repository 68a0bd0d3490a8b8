"""The page of `imece bench planner --page`: targets, tables, worst rows, and origins of constants."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

from imece.bench.planner.planner import Results, fits_text, judged, lines
from imece.plan.accuracy.stalls import Stalls, stalls
from imece.writing import write_whole

_HEAD = """\
# How far the planner is from what others measured

This page is written by

    imece bench planner --page docs/planner-accuracy.md --plot docs/images/planner-accuracy.png

in a few seconds. It compares predictions with published tables, which lie in
`src/imece/plan/accuracy/published/`, each with its source. All but "own_engine" was measured by others.
Predictions use one set of constants for each GPU type, network and framework, for all models.

## Targets

"""

_READING = """\

## How to read the tables

| word | what it means |
|---|---|
| **MAPE** | the mean of the absolute errors in per cent |
| **p90** | what nine tenths of the absolute errors are below |
| **bias** | the median of the errors with their sign: below zero, the planner is too optimistic |
| **fitted on** | rows that constants were chosen on |
| **held out** | the other rows |
| **constant** | predicts every row by one utilisation: the best one for these very rows in hindsight |
| **skill** | 1 - our MAPE over the constant's: 1 is perfect, 0 no better |
| **cell** | a model on a number of hosts: what somebody chooses an arrangement for |
| **tau** | Kendall's: 1 if the predicted order is the measured one, -1 if it is the opposite |
| **regret** | by how much the best measured rate is above that of the predicted fastest |
| **slow** | runs that took more than twice the predicted time; **tau without** is the order without them |

- Held out is not unseen. Which effects there are, and what a framework overlaps or fuses, was decided with
  all of these tables in sight, and so were the three figures of rings over many hosts.
- The constant is good on tables of well-tuned runs, and it knows nothing: it cannot tell which of two
  arrangements is faster.
"""

_KNOWN = """\

## What is known of the worst rows

"""

_OTHERS = """\
### The other tables

- **llm_foundry.** Two kinds of rows are slow. 760M with micro-batches of 96 x 512 and 48 x 1,024 tokens and
  1B on 32 GPUs are slower than rows beside them that move and compute as much. 70B on 64 GPUs and 13B on 8
  are those with the smallest micro-batches for their size. The table does not say why: micro-batches there
  may be as large as memory allows, and an allocator at its limit is slow, which the planner does not know.
- **torchtitan_float8.** 8B on 8 GPUs with 4 and 8 ranks that share a sequence takes 28 and 32 % less time by
  prediction than by measurement, with 1 and 2 ranks 8 and 2 %. All four have 32,768 tokens a GPU, so each
  further rank adds one block of keys and values that comes round. A step takes 4.5 s longer with 2 ranks than
  with 1, 8.9 s a block longer with 4 than with 2, and 7.3 s a block longer with 8 than with 4; 4.7 to 4.9 s
  are predicted of each. But all blocks are of one size, compute as much and go over the same links, and in
  runs of 405B on 512 GPUs of the same source none takes longer than the first. So what is predicted is left
  as it is.
- **torchtitan_h200.** The same software half a year later takes 6 to 8 % less time than predicted.
- **vtrain.** Runs with 8 tensor-parallel ranks and small micro-batches are slower than predicted: the CPU
  takes longer for each collective there than with 2 or 4.
- **nccl.** EFA with 2 hosts does better than predicted, by a switch that adds up. What EFA takes for each
  host is fitted on training, where it is more than in this table.
- **ddp_v100, bert.** What data parallelism adds to the measured step on one GPU: 1 to 6 % measured, 0 to
  2 % predicted. The constant knows by hindsight that it is 2 to 4 %.

## Where constants come from

| constant | of | fitted on |
|---|---|---|
| rate of flash attention; of adding up what blocks of a shared sequence give | A100, H100; all | attention |
| sustained rate of matrix products | A100 | llm_foundry, runs of one host |
| | H100 | ultrascale, 1B |
| what hidden communication costs | FSDP | llm_foundry, runs of one host |
| rate of Triton's attention | llm-foundry | llm_foundry, runs of one host |
| time of the CPU for a layer, a collective, a step | nanotron | ultrascale, 1B |
| | Megatron-DeepSpeed | vtrain, models 1024 wide |
| what a message took longer before a repair, what a layer on the slower network | nanotron | ultrascale, 1B |
| bytes of element-wise work (torchtitan's and ours likewise), loss, optimizer | nanotron | ultrascale, 1B |
| links inside a host | A100, V100 | nccl |
| | H100 | ultrascale, 1B, with nccl |
| time for each host of a ring, and how it adds up | EFA | ultrascale, 1B, then settled on 3B and nccl |

All else is from data sheets, from the frameworks' sources, or counted: `src/imece/plan/presets.toml` and
`src/imece/plan/speed/manner.py` say which. Of memory alone the allocators' slack is measured
(`src/imece/plan/memory/frameworks.py`).

## Tables

"""


def _sweep(found: Stalls) -> str:
    """What is known of ultrascale's runs: two versions of nanotron, two networks."""
    in_32 = [cell for cell in found.unaware if cell.endswith(" 32 hosts")]
    unaware, most = (
        " and ".join(f"{taus[cell]:.2f} ({cell.partition(',')[0]})" for cell in in_32)
        for taus in (found.unaware, found.ceiling)
    )
    seconds = " and ".join(f"{each:.2f} s ({name})" for name, each in found.seconds.items())
    few, many = found.micro_batches
    (slow, of), (slow_without, of_without) = found.slow_network
    return _section(
        "ultrascale: two versions of nanotron",
        f"Of {found.before} pipelines that were run before nanotron's were repaired, "
        f"{found.before_stalled} have one thing in common: each message from stage to stage takes longer "
        f"than predicted by {seconds}, whether the micro-batch is {few} or {many} sequences, on "
        f"{found.hosts[0]} hosts as on {found.hosts[1]}. The {found.before_wide} others have tensor "
        "parallelism over hosts, and less of it or nothing. The planner predicts it, by one constant, as "
        "of another version of the software; why a message took so long is not known. Which runs those "
        "are is told by the number of the job, in the raw results of the sweep, which others published: "
        "nanotron's own script repeats pipelines of early jobs.",
        f"Of {found.after} pipelines afterwards, in {found.after_free} a message is within 0.05 s of what "
        f"is predicted; {found.after_stalled} are as slow as those before. Five of these had 33 to 42 GB/s "
        "in the gather below, where the others have 237 on one host, 143 on two and 44 on eight at least; "
        "of the rest nothing tells why. They are most of the column *slow*.",
        f"If one did not know the version, tau in the cells with 32 hosts would be {unaware}. If one met "
        f"all but the slow pipelines exactly it would be {most}.",
    ) + _section(
        "ultrascale: two networks",
        "Before it trained, each job measured a gather of 256 MB over its ranks. A further host added "
        "either 0.1 to 0.2 ms, or 0.5 ms and more. On the slower network a layer with tensor parallelism "
        "takes the CPU 2 ms x ranks longer, even inside a host. That is measured, one constant, and not "
        "understood.",
        f"Of the runs on several hosts, {slow} of {of} with a pipeline were on the slower network and "
        f"{slow_without} of {of_without} without. So few rows tell the network from what a pipeline costs.",
        "The faster network is predicted to sum gradients as slowly as the other: with its own figure for "
        "each host the steps on it would come out shorter than they were.",
    )


def _section(title: str, *paragraphs: str) -> str:
    return "\n\n".join((f"### {title}", *(textwrap.fill(each, 115) for each in paragraphs))) + "\n\n"


def write(results: Results, path: Path, plot: Path | None) -> None:
    """Write the page, which shows `plot`."""
    page = _HEAD + _block([each.line for each in judged(results)])
    if plot is not None:
        page += f"\n![predicted against measured]({os.path.relpath(plot, path.parent)})\n"
    page += _READING + _KNOWN + _sweep(stalls()) + _OTHERS
    for table in results.tables:
        page += _block("\n".join(lines(table, results.plan.worst)).strip("\n").splitlines()) + "\n"
    if results.fits:
        page += "Whether a run fits:\n\n"
        page += _block([f"{name}: {fits_text(fits)}" for name, fits in results.fits.items()])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (page.rstrip("\n") + "\n").encode())


def _block(shown: list[str]) -> str:
    return "".join(f"    {line}".rstrip() + "\n" for line in shown)
