"""`imece plan --here`: measures this machine once and keeps the figures."""

from __future__ import annotations

import os
import re
import sys
from datetime import datetime
from pathlib import Path

from imece.bench.report import check_writable
from imece.cli.plan.options import PlanOptions
from imece.errors import UserError
from imece.listing import many
from imece.plan.hardware import Cluster
from imece.plan.here import cluster_of, keep, kept_cluster, measured_on, profile_file, to_toml


def cluster_here(options: PlanOptions) -> Cluster:
    """This machine: all ranks that it was measured with, or those of --gpus. UserError if it cannot be
    measured."""
    if options.gpus and not re.fullmatch(r"[1-9][0-9]{0,5}", options.gpus):
        raise UserError(f"--here --gpus {options.gpus}: with --here it is a number of ranks")
    ranks = int(options.gpus) if options.gpus else None
    path = profile_file()
    if options.again or not os.path.isfile(path):
        _measure(path)
    cluster = kept_cluster(ranks, path)
    assert cluster is not None
    print(f"{measured_on(path)}; kept in {path}\n", file=sys.stderr)
    return cluster


def _measure(path: Path) -> None:
    """Measure, and write the file."""
    try:
        check_writable(path)
    except UserError as error:
        raise UserError(f"{error}; set IMECE_HERE to a file that can be written") from None
    from imece.bench.here import measure_here  # imports torch
    from imece.launch.spawn import RankFailedError
    from imece.train.start import default_ranks

    ranks = default_ranks()
    print(f"measuring this machine with {many(ranks, 'rank')}, about 10 seconds", file=sys.stderr)
    try:
        figures = measure_here(ranks)
    except (RankFailedError, TimeoutError) as error:
        raise UserError(
            f"--here: this machine could not be measured: {str(error).splitlines()[-1]}"
        ) from error
    keep(to_toml(cluster_of(figures), figures, datetime.now()), path)
