"""`imece bench`: measure this machine's collectives, two emulated hosts, a training step, and training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from imece.bench import (
    collectives,
    ddp,
    gpu,
    gpu_targets,
    hosts,
    machine,
    memory,
    parameter_cost,
    planner,
    planner_page,
    planner_plot,
    recovery,
    recovery_targets,
    report,
    save,
    step,
    targets,
    train,
    train_targets,
)
from imece.bench.namespaces import HostsUnavailable
from imece.cli.bench_gpu import GpuOptions
from imece.cli.bench_options import (
    CollectivesOptions,
    DdpOptions,
    HostsOptions,
    MemoryOptions,
    StepOptions,
    TrainOptions,
)
from imece.cli.bench_planner import PlannerOptions
from imece.cli.bench_recovery import RecoveryOptions
from imece.cli.bench_save import SaveOptions
from imece.cli.options import nearest, parse
from imece.errors import UserError


def run(argv: Sequence[str]) -> int:
    """`imece bench WHAT ...`: exit status 0, or 1 if a result was wrong."""
    commands: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
        "collectives": (run_collectives, "all_reduce and others beside Gloo, MPICH and DeepSpeed"),
        "hosts": (run_hosts, "two emulated hosts on a slow cable: hierarchical all_reduce, ring broadcast"),
        "ddp": (run_ddp, "a training step of torch's DistributedDataParallel on shm and on Gloo"),
        "step": (
            run_step,
            "what synchronisation adds to a step: imece, torch, Accelerate, Fabric; a timeline",
        ),
        "memory": (run_memory, "bytes of a rank by category in every strategy, predicted and counted; bars"),
        "save": (run_save, "what a checkpoint in the background costs training: time, bytes, memory"),
        "recovery": (run_recovery, "ranks of a real training are killed at random, beside torchrun"),
        "planner": (run_planner, "predictions of imece plan beside published measurements; nothing is run"),
        "train": (run_train, "imece train beside a plain loop with torch on Gloo, and the machine's limit"),
        "gpu": (run_gpu, "one GPU: imece beside the bare model and torch's DDP, compiled, loop, optimizer"),
    }
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: imece bench WHAT [options]\n")
        for name, (_, text) in commands.items():
            print(f"  {name:<12} {text}")
        print("\nimece bench WHAT --help lists the options of one of them.")
        return 0
    if argv[0] not in commands:
        near = nearest(argv[0], commands)
        hint = f"did you mean {near}?" if near else f"choose one of {', '.join(commands)}"
        raise UserError(f"imece bench {argv[0]!r} is not a benchmark: {hint}")
    return commands[argv[0]][0](argv[1:])


def run_collectives(argv: Sequence[str]) -> int:
    """`imece bench collectives`."""
    options = parse(
        CollectivesOptions, argv, "imece bench collectives",
        "Time the collectives of one host, one thread a rank, beside other libraries.",
    )  # fmt: skip
    plan = options.plan()
    report.check_writable(options.json)
    report.check_writable(options.plot)
    print(machine.describe())
    results = collectives.run(plan, _say)
    judged = targets.lines(targets.COLLECTIVES, collectives.ratio_in(results))
    _say_targets("what the plan of this project asks for, on an idle machine with two cores", judged)
    _write_figures(options.json, collectives.as_json(plan, results, targets.COLLECTIVES))
    if options.plot:
        from imece.bench import plot

        plot.draw(results, options.plot, machine.describe())
        print(f"plot     {options.plot}")
    wrong = [result for result in results if not result.right]
    for result in wrong:
        print(f"WRONG    {result.library} {result.op} of {report.size_text(result.size_bytes)}")
    return 1 if wrong else 0


def run_hosts(argv: Sequence[str]) -> int:
    """`imece bench hosts`: says so and leaves with status 0 where two hosts cannot be made."""
    options = parse(
        HostsOptions, argv, "imece bench hosts",
        "Two network namespaces with 2 ranks each, joined by a slow cable (needs root and iproute2).",
    )  # fmt: skip
    plan = options.plan()
    report.check_writable(options.json)
    try:
        results = hosts.run(plan, _say)
    except HostsUnavailable as error:
        print(f"skipped: {error}")
        return 0
    _say_targets("what the plan of this project asks for", targets.lines(targets.HOSTS, results.ratio))
    _write_figures(options.json, results.as_json())
    return 0 if all(results.right.values()) else 1


def run_ddp(argv: Sequence[str]) -> int:
    """`imece bench ddp`."""
    options = parse(
        DdpOptions, argv, "imece bench ddp",
        "Time a training step of torch's own data parallelism on the backends shm and gloo.",
    )  # fmt: skip
    plan = options.plan()
    report.check_writable(options.json)
    print(machine.describe())
    results = ddp.run(plan, _say)
    _write_figures(options.json, results.as_json())
    return 0 if results.same_losses else 1


def run_step(argv: Sequence[str]) -> int:
    """`imece bench step`."""
    options = parse(
        StepOptions, argv, "imece bench step",
        "Time a training step of imece.DistributedDataParallel beside no synchronisation and other wrappers.",
    )  # fmt: skip
    for path in (options.json, options.plot, options.trace):
        report.check_writable(path)
    if options.parameters:
        return _run_parameters(options)
    plan = options.plan()
    print(machine.describe())
    results = step.run(plan, _say)
    _say_targets(
        "what the plan of this project asks for, on an idle machine with two cores",
        targets.lines(plan.targets, results.found),
    )
    _write_figures(options.json, results.as_json())
    step.write_timelines(results, options.trace, options.plot, _say)
    return 1 if results.odd_ones else 0


def _run_parameters(options: StepOptions) -> int:
    plan = options.parameter_plan()
    if options.plot or options.trace:
        raise UserError("--parameters measures no timeline: leave --plot and --trace out")
    print(machine.describe())
    results = parameter_cost.run(plan, _say)
    _say_targets("what the plan of this project asks for", parameter_cost.judged(results))
    _write_figures(options.json, results.as_json())
    return 0


def run_memory(argv: Sequence[str]) -> int:
    """`imece bench memory`."""
    options = parse(
        MemoryOptions, argv, "imece bench memory",
        "Count the bytes that a rank holds in every strategy, beside what the layout predicts.",
    )  # fmt: skip
    plan = options.plan()
    for path in (options.json, options.plot):
        report.check_writable(path)
    print(machine.describe())
    results = memory.run(plan, _say)
    _write_figures(options.json, results.as_json())
    if options.plot is not None:
        memory.draw(results, options.plot, machine.describe().partition("; load")[0])
        print(f"plot     {options.plot}")
    return 1 if results.far else 0


def run_save(argv: Sequence[str]) -> int:
    """`imece bench save`."""
    options = parse(
        SaveOptions, argv, "imece bench save",
        "Save checkpoints beside training in every strategy: the delay, what each rank writes and holds.",
    )  # fmt: skip
    plan = options.plan()
    report.check_writable(options.json)
    print(machine.describe())
    results = save.run(plan, _say)
    _say_targets("what the plan of this project asks for", save.judged(results))
    _write_figures(options.json, results.as_json())
    return 0


def run_recovery(argv: Sequence[str]) -> int:
    """`imece bench recovery`."""
    options = parse(
        RecoveryOptions, argv, "imece bench recovery",
        "Kill ranks of a training at random instants in every strategy; recovery, goodput, cost, torchrun.",
    )  # fmt: skip
    plan = options.plan()
    report.check_writable(options.json)
    print(machine.describe())
    results = recovery.run(plan, _say)
    _say_targets("what the plan of this project asks for", recovery_targets.judged(results))
    _write_figures(options.json, results.as_json())
    return 0 if results.all_survived else 1


def run_planner(argv: Sequence[str]) -> int:
    """`imece bench planner`."""
    options = parse(
        PlannerOptions, argv, "imece bench planner",
        "Predict published step times and memory, and say how far off and how good a choice that would be.",
    )  # fmt: skip
    plan = options.plan()
    for path in (options.page, options.plot, options.json):
        report.check_writable(path)
    results = planner.run(plan, _say)
    _say_targets("what the plan of this project asks for", planner.judged(results))
    _write_figures(options.json, results.as_json())
    if options.plot is not None:
        planner_plot.draw(results.tables, options.plot)
        print(f"plot     {options.plot}")
    if options.page is not None:
        planner_page.write(results, options.page, options.plot)
        print(f"page     {options.page}")
    return 0


def run_train(argv: Sequence[str]) -> int:
    """`imece bench train`."""
    options = parse(
        TrainOptions, argv, "imece bench train",
        "Time the steps of imece train beside a plain loop with torch's DistributedDataParallel on Gloo.",
    )  # fmt: skip
    plan = options.plan()
    report.check_writable(options.json)
    print(machine.describe())
    results = train.run(plan, _say)
    _say_targets(
        "what the plan of this project asks for, on an idle machine with two cores",
        targets.lines(train_targets.TRAIN, results.found),
    )
    _write_figures(options.json, results.as_json())
    return 1 if results.odd_ones else 0


def run_gpu(argv: Sequence[str]) -> int:
    """`imece bench gpu`."""
    options = parse(
        GpuOptions, argv, "imece bench gpu",
        "Time a 1.3B model in bf16 on one GPU: bare, in imece's and in torch's DistributedDataParallel.",
    )  # fmt: skip
    plan = options.plan()
    report.check_writable(options.json)
    print(machine.describe())
    results = gpu.run(plan, _say)
    judged = targets.lines(gpu_targets.GPU, results.found)
    _say_targets("what the plan of this project asks for, on an idle GPU", judged)
    _write_figures(options.json, results.as_json())
    return 1 if results.odd_ones else 0


def _say(line: str) -> None:
    print(line, flush=True)


def _say_targets(whose: str, judged: Sequence[str]) -> None:
    print(f"\ntargets ({whose})", *judged, sep="\n")


def _write_figures(path: Path | None, content: Mapping[str, Any]) -> None:
    if path is not None:
        report.write_json(path, content)
        print(f"figures  {path}")
