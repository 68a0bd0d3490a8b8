"""A measured machine: the formulae reproduce the measurements, and the file is read back."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from imece.bench import here
from imece.errors import UserError
from imece.plan.hardware import Cluster
from imece.plan.here import cluster_of, keep, kept_cluster, measured_on, profile_file, shared_out, to_toml
from imece.plan.models.by_name import MODELS
from imece.plan.models.model import Model
from imece.plan.presets import find_cluster
from imece.plan.setup import Parallel, Precision, Recipe, Setup
from imece.plan.speed.communication import along, collective_s
from imece.plan.speed.compute import layer_time, product_s, stream_s
from imece.plan.speed.manner import IMECE
from imece.plan.speed.stage import stage_time
from imece.train.prediction import FIRST_STEP_BYTES
from tests.data.helpers import files_of_at_most
from tests.ranks import run_ranks

FIGURES: dict[str, Any] = {
    "device": 'A "quoted" CPU', "kind": "cpu", "backend": "shm", "ranks": 4, "cores": 4, "dtype": "bfloat16",
    "side": 1536, "product": 9e10, "product_fp32": 3e10, "moved_per_s": 8e9, "launch_s": 4e-6,
    "overhead_bytes": 242_000_000, "memory_bytes": 6_000_000_000, "multiprocessors": 1,
    "attention": (2, 4, 512, 64), "attention_forward_s": 0.025, "attention_backward_s": 0.08,
    "all_reduce_fixed_s": 4e-4, "all_reduce_s_per_byte": 2e-9,
}  # fmt: skip
NOW = datetime(2026, 11, 22, 1, 30)


def test_what_was_measured_comes_back() -> None:
    cluster = cluster_of(FIGURES)
    side = FIGURES["side"]
    assert product_s(cluster.gpu, side, side, side) == pytest.approx(2 * side**3 / 9e10, rel=1e-6)
    assert stream_s(cluster.gpu, 8e9) == pytest.approx(1.0)
    nbytes = 64 * 2**20
    took = collective_s(cluster, "all_reduce", nbytes, along(cluster, 4, 1))
    assert took == pytest.approx(4e-4 + nbytes * 2e-9, rel=0.01)
    assert (cluster.gpus, cluster.gpu.memory_bytes) == (4, 6_000_000_000)
    assert cluster.gpu.price_per_hour is None
    batch, heads, seq, width = FIGURES["attention"]
    model = Model("attention", 1, heads * width, heads, heads, width, 1, gated=False, vocab_size=1)
    attention = layer_time(cluster.gpu, model, IMECE, Recipe(seq, micro_batch=batch), 1, 1, False).core
    assert attention == pytest.approx(FIGURES["attention_forward_s"])


def test_what_an_optimizer_imports_is_in_a_process_that_trains() -> None:
    (found,) = run_ranks(beyond_an_optimizer, 1, backend=None, fresh=True)
    assert found == pytest.approx(FIRST_STEP_BYTES, abs=25 * 2**20)


def beyond_an_optimizer() -> int:
    """What is said of a process, less what it has with an optimizer. Both in bytes."""
    said = here._of_libraries()
    torch.optim.AdamW([torch.zeros(1)])
    return said - psutil.Process().memory_info().rss


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_file_is_read_back(tmp_path: Path, dtype: str) -> None:
    cluster, path = cluster_of(FIGURES | {"dtype": dtype}), tmp_path / "new" / "here.toml"
    keep(to_toml(cluster, FIGURES, NOW), path)
    found = find_cluster(hardware=path)
    assert found == cluster, "links between hosts too"
    assert found.gpu.bf16 == (dtype == "bfloat16")
    assert kept_cluster(path=path) == found
    two = kept_cluster(2, path)
    assert two == shared_out(cluster, 2) and two.gpus_per_host == 2
    assert "2026-11-22 01:30" in measured_on(path) and "4 ranks" in measured_on(path)
    assert list(path.parent.iterdir()) == [path]
    assert kept_cluster(path=tmp_path / "none.toml") is None


def test_a_file_of_another_imece_is_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    keep(to_toml(cluster_of(FIGURES), FIGURES, NOW) + "of_old = 0.0\n", path)
    with pytest.raises(UserError, match=r"\[between\] of_old is unknown.*; imece plan --here --again"):
        kept_cluster(path=path)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_ranks_have_together_what_the_machine_has(ranks: int) -> None:
    four = cluster_of(FIGURES)
    shared = shared_out(four, ranks)
    for name in ("peak", "peak_fp32", "memory_bandwidth", "memory_bytes"):
        assert ranks * getattr(shared.gpu, name) == pytest.approx(4 * getattr(four.gpu, name)), name
    assert shared.gpu.overhead_bytes == four.gpu.overhead_bytes, "libraries of each process"
    assert ranks * shared.inside.bandwidth <= 4 * four.inside.bandwidth
    setup = Setup(MODELS["small"], Parallel(), Recipe(256))
    alone = [stage_time(setup, replace(each, gpus_per_host=1), IMECE).compute for each in (four, shared)]
    assert alone[1] == pytest.approx(ranks / 4 * alone[0], rel=0.05)


def test_a_rank_has_no_more_than_one_gpu() -> None:
    four = find_cluster("A100-40", 4)
    assert shared_out(four, 2) == find_cluster("A100-40", 2)
    eight = shared_out(four, 8)
    assert (eight.gpu.peak, eight.gpu.memory_bytes) == (four.gpu.peak / 2, four.gpu.memory_bytes // 2)


def test_attention_that_is_faster_than_products_can_be_read_back(tmp_path: Path) -> None:
    cluster = cluster_of(FIGURES | {"attention_forward_s": 1e-4})
    assert cluster.gpu.flash[0] == 1.0 > cluster.gpu.flash[1]
    keep(to_toml(cluster, FIGURES, NOW), tmp_path / "here.toml")
    assert find_cluster(hardware=tmp_path / "here.toml").gpu == cluster.gpu


def test_one_rank_has_no_links_to_measure() -> None:
    alone = {name: value for name, value in FIGURES.items() if not name.startswith("all_reduce")} | {
        "ranks": 1
    }
    assert cluster_of(alone).gpus == 1


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("IMECE_HERE", str(tmp_path / "mine.toml"))
    assert profile_file() == tmp_path / "mine.toml"
    monkeypatch.delenv("IMECE_HERE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("socket.gethostname", lambda: "../a b")
    assert profile_file() == tmp_path / "imece" / "here-.._a_b.toml"
    (tmp_path / "imece").write_text("a file where a folder is to be")
    with pytest.raises(UserError, match="cannot write"):
        keep("", profile_file())


def test_where_nobody_knows_of_a_home_or_may_not_enter_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert kept_cluster(path=tmp_path / ("x" * 300) / "here.toml") is None  # an OSError, as at a shut door
    without_home(monkeypatch)
    with pytest.raises(UserError, match=r"no home folder .*: set HOME, or IMECE_HERE to a file"):
        kept_cluster()


def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no name."""
    for name in ("IMECE_HERE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", nobody)


def test_a_full_disk_keeps_nothing(tmp_path: Path) -> None:
    with files_of_at_most(100), pytest.raises(UserError, match=r"cannot write .*here\.toml: File too"):
        keep("x" * 1000, tmp_path / "here.toml")
    assert list(tmp_path.iterdir()) == []


def test_small_kernels_are_as_slow_as_a_model_shows() -> None:
    quick = cluster_of(FIGURES)
    slow = cluster_of(FIGURES | {"model": ["small", 2, 256], "model_s": 1.05 * seconds_of_small(quick)})
    assert seconds_of_small(slow) == pytest.approx(1.05 * seconds_of_small(quick), rel=0.01)
    assert slow.gpu.memory_bandwidth < quick.gpu.memory_bandwidth and slow.gpu.peak == quick.gpu.peak
    faster = cluster_of(FIGURES | {"model": ["small", 2, 256], "model_s": 1e-9})
    assert faster.gpu.memory_bandwidth == pytest.approx(quick.gpu.memory_bandwidth), (
        "never above that of a copy"
    )


def seconds_of_small(cluster: Cluster) -> float:
    precision = Precision(parameters=4, gradients=4, masters=0, moments=4, activations=2)
    setup = Setup(MODELS["small"], Parallel(), Recipe(256, micro_batch=2, precision=precision))
    alone = replace(cluster.gpu, name=f"{cluster.gpu.memory_bandwidth}")
    return stage_time(setup, replace(cluster, gpu=alone, gpus_per_host=1), IMECE).compute
