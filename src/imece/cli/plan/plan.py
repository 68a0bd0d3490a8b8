"""`imece plan MODEL --gpus 8xH100 ...`: says what fits, how fast and why, before anything is rented."""

from __future__ import annotations

import functools
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from imece.bench import report
from imece.cli.options import parse
from imece.cli.plan.options import PlanOptions, precision_of, read_tokens
from imece.errors import UserError
from imece.plan.answer.call import next_of
from imece.plan.answer.explain import gains, others
from imece.plan.answer.search import Answer, search, settled
from imece.plan.answer.shortfall import least, ways
from imece.plan.answer.space import Question, check
from imece.plan.answer.text import (
    Explained,
    explained_json,
    hidden_scores,
    lines,
    shortfall_json,
    shortfall_lines,
    table,
    too_long,
    wrapped,
)
from imece.plan.check import check_json, check_lines, read_plan
from imece.plan.hardware import Cluster, Gpu
from imece.plan.here import kept_cluster
from imece.plan.models.by_name import find_model
from imece.plan.presets import describes_gpu, find_cluster, gpu_names, gpus_of_a_host, parse_gpus
from imece.plan.setup import Precision
from imece.saying import say

PROG = "imece plan"
DESCRIPTION = (
    "Which way of training fits into the GPUs' memory, how fast each is, and why: imece plan llama-8b --gpus "
    "8xA100-40 --global-batch 128. Nothing is run; all of it is arithmetic, with its errors told in "
    "docs/planner-accuracy.md. Exit status 2 if nothing fits."
)
_DEFAULT_TOKENS = 2**20  # per step, by default
_DEFAULT_SEQ = 4096  # tokens, by default; fewer if the model has fewer positions
_WIDTH = 110  # columns, if the output is not a terminal
_LISTED = 50  # at least as many plans of the ranking in JSON


def run(argv: Sequence[str]) -> int:
    """`imece plan ARGV`: exit status 0, or 2 if nothing fits."""
    options = parse(PlanOptions, argv, PROG, DESCRIPTION)
    _check_files(options)
    options.check_together()
    if options.check is not None:
        return _check_run(options.check, options.json)
    question = question_of(options)
    check(question)
    if options.scale is not None:
        from imece.cli.plan.scale import show

        return show(options, question, width())
    answer = settled(search(question))
    if answer.winner is None:
        return _nothing_fits(options, answer)
    precision = options.precision_on(question.cluster.gpu)
    explained = explain(answer, read_tokens(options.tokens), precision)
    if options.json:
        print(json.dumps(explained_json(explained, max(_LISTED, options.top)), indent=1))
    else:
        print("\n".join(lines(explained, width())))
        if options.top:
            print("\n" + "\n".join(table(answer.ranked, options.top, width())))
    if options.plot is not None or options.html is not None:
        from imece.cli.plan.page import write_pictures

        write_pictures(explained, options.plot, options.html)
    return 0


def _check_files(options: PlanOptions) -> None:
    """Check all output files before anything is computed. UserError for a wrong kind of file, or one that
    cannot be written."""
    report.check_ending("--plot", options.plot, report.PICTURES)
    report.check_ending("--html", options.html, (".html", ".htm"))
    for path in (options.plot, options.html):
        report.check_writable(path)


def question_of(options: PlanOptions) -> Question:
    """The question that the options ask. UserError for a model, GPU, network or number that cannot be."""
    if options.hosts < 0:
        raise UserError(f"--hosts is {options.hosts}: how many hosts, 0 for as many as --gpus needs")
    if not options.model:
        raise UserError(
            f"no model is named: {PROG} MODEL --gpus 8xH100, and MODEL like llama-8b, 7B or config.json"
        )
    read_tokens(options.tokens)
    if options.top < 0:
        raise UserError(f"--top is {options.top}: how many of the ranking to list, 0 for none")
    model = find_model(options.model)
    cluster = cluster_of(options)
    if options.offload and cluster.gpu.is_cpu:
        raise UserError(
            f"--offload {options.offload} moves to the host's memory what is in a GPU's, and ranks compute "
            "on CPUs here: leave it out"
        )
    seq = options.seq or min(_DEFAULT_SEQ, model.positions or model.made_for or _DEFAULT_SEQ)
    sequences = options.global_batch or default_batch(cluster, seq, options.micro_batch or 1)
    return Question(
        model, cluster, sequences, seq, options.strategy_of_ours, options.tensor,
        options.pipeline, options.interleave, options.context, options.micro_batch, options.recompute,
        options.optimizer, options.adapters, options.adapter_rank, options.offload, options.attention,
        options.compile, _precision(options, cluster.gpu), options.reserve, options.wire,
    )  # fmt: skip


def cluster_of(options: PlanOptions) -> Cluster:
    """The hardware that the options name, or that was measured."""
    if options.here:
        from imece.cli.plan.here import cluster_here

        return cluster_here(options)
    if not options.gpus and options.hardware is None:
        raise UserError(
            "--gpus is missing: how many of which in a host, as in --gpus 8xH100; there are "
            f"{', '.join(gpu_names())}"
        )
    number, name = parse_gpus(options.gpus) if options.gpus else (None, None)
    hosts = options.hosts or 1
    number = 1 if number is None and name is not None else number
    if number is not None and name is not None and not options.hosts:
        full = gpus_of_a_host(name)
        if number > full and number % full:
            raise UserError(
                f"--gpus {options.gpus}: {number} are not whole hosts of {full}; say how many each host has, "
                "and --hosts"
            )
        if number > full:
            number, hosts = full, number // full
    return find_cluster(name, number, hosts, options.network, options.hardware)


def default_batch(cluster: Cluster, seq: int, micro_batch: int = 1) -> int:
    """Sequences of about a million tokens, rounded so that the GPUs divide them into whole micro-batches."""
    at_once = cluster.gpus * max(micro_batch, 1)
    return max(1, round(_DEFAULT_TOKENS / max(seq, 1) / at_once)) * at_once


def explain(answer: Answer, tokens: float, precision: str) -> Explained:
    """Everything that is said of the winner. precision: as --precision names it."""
    notes, gpu = tuple(answer.best.memory.notes), answer.question.cluster.gpu
    if not gpu.bf16 and answer.question.precision.activations == 2:
        notes = (*notes, f"{gpu.name} has no bf16: parameters and activations are in fp16")
    if answer.question.precision.fp8:
        notes = (*notes, "FP8 in the layers' products alone; MFU is told of the peak in bf16")
    notes += too_long(answer.question) + hidden_scores(answer)
    if experts := answer.question.model.experts:
        each = answer.question.model.active_experts
        notes = (
            *notes,
            f"each token goes through {each} of {experts} experts, as if all had as many tokens and one "
            "kernel multiplied for all; they lie where other parameters do: expert parallelism is not "
            "planned",
        )
    return Explained(answer, others(answer), gains(answer), tokens, next_of(answer, precision), notes)


def width() -> int:
    """Columns of the terminal, or of a usual page."""
    return shutil.get_terminal_size((_WIDTH, 24)).columns if sys.stdout.isatty() else _WIDTH


def _precision(options: PlanOptions, gpu: Gpu) -> Precision:
    precision = precision_of(options.precision_on(gpu))
    return replace(precision, moments=1) if options.optimizer == "adamw-8bit" else precision


def _check_run(run: Path, as_json: bool) -> int:
    """Compare what was predicted of a run with what was measured. UserError if it has no prediction."""
    content = read_plan(run)
    if as_json:
        print(json.dumps(check_json(content), indent=1))
    else:
        predicted = content["predicted"]
        hardware = predicted.get("hardware") or "hardware that is not measured"
        print(f"{run}: {predicted.get('plan', '')} on {hardware}\n")
        print("\n".join(check_lines(content)))
    return 0


def _nothing_fits(options: PlanOptions, answer: Answer) -> int:
    """Say which plan comes nearest to fitting, how much it lacks, and what would help."""
    question = answer.question
    find = functools.partial(_cluster_with, options, question.cluster)
    found = ways(question, gpu_names(), find, options.here)
    smallest = least(answer)
    if options.json:
        print(json.dumps(shortfall_json(question, smallest, found), indent=1))
    else:
        print("\n".join(shortfall_lines(question, smallest, found, width())))
        for note in too_long(question):
            print("\n".join(wrapped("note", note, width())))
    if options.plot is not None:
        say(f"nothing fits, so nothing is drawn: {options.plot} is not written")
    if options.html is not None:
        from imece.cli.plan.page import write_shortfall

        write_shortfall(question, smallest, found, options.html)
    return 2


def _cluster_with(options: PlanOptions, asked: Cluster, gpu: str, gpus_per_host: int, hosts: int) -> Cluster:
    """The options' hardware with this GPU, number per host and hosts, with the links that come with them or
    are named."""
    if options.here:
        kept = kept_cluster(gpus_per_host)
        assert kept is not None, "it was measured before anything was asked of it"
        return kept
    if gpu == asked.gpu.name and options.hardware is not None:  # the file describes this GPU
        return replace(asked, gpus_per_host=gpus_per_host, hosts=hosts)
    # The file describes its own GPU only, not another one.
    of_another = options.hardware is not None and describes_gpu(options.hardware)
    hardware = None if of_another else options.hardware
    return find_cluster(gpu, gpus_per_host, hosts, options.network, hardware)
