"""`imece bench`: the list of benchmarks; runs one, and judges what it found."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from imece.bench import machine, memory, report
from imece.bench.collectives import collectives, plot
from imece.bench.gpu import gpu
from imece.bench.gpu import targets as gpu_targets
from imece.bench.hosts import hosts
from imece.bench.hosts.namespaces import HostsUnavailable
from imece.bench.options import Options
from imece.bench.pipeline import pipeline
from imece.bench.planner import page as planner_page
from imece.bench.planner import planner
from imece.bench.planner import plot as planner_plot
from imece.bench.recovery import record, recovery
from imece.bench.recovery import targets as recovery_targets
from imece.bench.save import save
from imece.bench.step import parameter_cost, step
from imece.bench.step import targets as step_targets
from imece.bench.targets import Verdict
from imece.bench.tensor import tensor
from imece.bench.train import contenders, train
from imece.bench.train import targets as train_targets
from imece.cli.doctor.host import interface
from imece.cli.options import nearest, parse
from imece.errors import UserError

_IDLE = ", on an idle machine with two cores"


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: how it runs, and how its results are judged."""

    text: str
    """One line for the list of all benchmarks, and for the top of its own help."""
    plan: type[Options]
    """What it measures, and the files to write to."""
    run: Callable[[Any, Callable[[str], None]], report.Results]
    """(plan, function that is told each line of progress) -> results."""
    judged: Callable[[Any], Sequence[Verdict]] = lambda results: ()
    """results -> a verdict for each target."""
    whose: str = ""
    """What its targets take for granted."""
    finish: Callable[[Any, Any], None] = lambda plan, results: None
    """(plan, results) -> None: prints and writes whatever else there is."""
    measures: bool = True
    """Whether it measures this machine, which is then described first."""


def run(argv: Sequence[str]) -> int:
    """`imece bench WHAT ...`: exit status 0, 1 if a result was wrong, or 2 if nothing is asked for."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: imece bench WHAT [options]\n")
        for name, each in BENCHMARKS.items():
            print(f"  {name:<12} {each.text}")
        print("\nimece bench WHAT --help lists the options of one of them.")
        return 0 if argv else 2
    if argv[0] not in BENCHMARKS:
        near = nearest(argv[0], BENCHMARKS)
        hint = f"did you mean {near}?" if near else f"choose one of {', '.join(BENCHMARKS)}"
        raise UserError(f"{argv[0]!r} is not a benchmark: {hint}")
    bench = BENCHMARKS[argv[0]]
    return _measure(argv[0], bench, parse(bench.plan, argv[1:], f"imece bench {argv[0]}", bench.text))


def _measure(name: str, bench: Benchmark, plan: Any) -> int:
    plan.check()
    # `bench gpu` has no --quick: on a CPU it only shows that it works.
    trial = "--device cpu" if getattr(plan, "device", None) == "cpu" else ""
    if getattr(plan, "quick", False):
        plan, trial = plan.shortened(), "--quick"
    if getattr(plan, "parameters", ()):
        bench = _PARAMETERS
    report.check_ending("--plot", getattr(plan, "plot", None), report.PICTURES)
    for file in ("json", "plot", "trace", "page"):
        report.check_writable(getattr(plan, file, None))
    if bench.measures:
        for wrong in interface(os.environ, "GLOO_SOCKET_IFNAME", sorted(psutil.net_if_addrs())):
            if wrong.status == "warn":
                raise UserError(wrong.text)
        print(machine.describe())
    try:
        results = bench.run(plan, _say)
    except HostsUnavailable as error:
        print(f"skipped: {error}")
        return 0
    for line in results.wrong:
        print(f"WRONG    {line}")
    verdicts = bench.judged(results)
    if verdicts:
        unjudged = f"; none is judged, for {trial} is not to quote" if trial else ""
        print(f"\ntargets (set before any of it was measured{bench.whose}){unjudged}")
        for each in verdicts:
            print((replace(each, met=None) if trial else each).line)
    if plan.json is not None:
        figures = {"benchmark": name, "machine": machine.facts(), **results.as_json()}
        report.write_json(plan.json, figures | {"targets": [asdict(each) for each in verdicts]})
        print(f"figures  {plan.json}")
    bench.finish(plan, results)
    return 1 if results.wrong else 0


def _say(line: str) -> None:
    print(line, flush=True)


def _write(what: str, path: Path | None, write: Callable[[Path], object]) -> None:
    if path is not None:
        write(path)
        print(f"{what:<8} {path}")


def _finish_collectives(plan: collectives.Plan, results: collectives.Results) -> None:
    _write("plot", plan.plot, lambda path: plot.draw(results.results, path, machine.describe()))


def _finish_planner(plan: planner.Plan, results: planner.Results) -> None:
    _write("plot", plan.plot, lambda path: planner_plot.draw(results.tables, path))
    _write("page", plan.page, lambda path: planner_page.write(results, path, plan.plot))


BENCHMARKS = {
    "collectives": Benchmark(
        "all_reduce and others beside Gloo, MPICH and DeepSpeed",
        collectives.Plan,
        collectives.run,
        collectives.judged,
        _IDLE,
        finish=_finish_collectives,
    ),
    "hosts": Benchmark(
        "two emulated hosts on a slow cable; needs root and iproute2",
        hosts.Plan,
        hosts.run,
        hosts.judged,
        measures=False,
    ),
    "step": Benchmark(
        "what synchronisation adds to a step: imece, torch and others",
        step.Plan,
        step.run,
        step_targets.judged,
        _IDLE,
        finish=lambda plan, results: step.write_timelines(results, plan.trace, plan.plot, _say),
    ),
    "pipeline": Benchmark(
        "how long ranks idle in each schedule, beside (p - 1) / m",
        pipeline.Plan,
        pipeline.run,
    ),
    "tensor": Benchmark(
        "ranks that divide matrices, beside one rank and torch's own way",
        tensor.Plan,
        tensor.run,
    ),
    "memory": Benchmark(
        "bytes of a rank in every strategy, predicted and counted; bars",
        memory.Plan,
        memory.run,
        finish=lambda plan, results: _write(
            "plot",
            plan.plot,
            lambda path: memory.draw(results, path, machine.describe().partition("; load")[0]),
        ),
    ),
    "save": Benchmark(
        "what a checkpoint costs training: time, bytes, memory",
        save.Plan,
        save.run,
        save.judged,
    ),
    "recovery": Benchmark(
        "ranks of a real training are killed at random, beside torchrun",
        record.Plan,
        recovery.run,
        recovery_targets.judged,
    ),
    "planner": Benchmark(
        "imece plan beside published measurements; nothing is run",
        planner.Plan,
        planner.run,
        planner.judged,
        finish=_finish_planner,
        measures=False,
    ),
    "train": Benchmark(
        "imece train beside a plain loop on Gloo, and the machine's limit",
        contenders.Plan,
        train.run,
        train_targets.judged,
        _IDLE,
    ),
    "gpu": Benchmark(
        "one GPU: imece beside the bare model, torch's DDP and fully_shard",
        gpu.Plan,
        gpu.run,
        gpu_targets.judged,
        ", on an idle GPU",
    ),
}
_PARAMETERS = Benchmark(  # `bench step --parameters`
    "",
    step.Plan,
    parameter_cost.run,
    parameter_cost.judged,
)
