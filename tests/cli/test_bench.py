"""`imece bench`: promises about its figures, sizes as they are typed, and small runs."""

from __future__ import annotations

import json
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from imece.bench import report
from imece.bench.collectives import collectives, plot
from imece.bench.collectives.collectives import Result
from imece.bench.collectives.contenders import OPS, Contender, numel_of
from imece.bench.collectives.limit import CHUNKS_BYTES, Limit
from imece.bench.crew import Crew, CrewError
from imece.bench.hosts import hosts
from imece.bench.options import read_sizes
from imece.bench.targets import at_least
from imece.cli.bench import BENCHMARKS
from imece.cli.main import main
from imece.errors import UserError

EVERY = "imece.cli.doctor.rank"


class Alone(Contender):
    """One rank without peers, whose all_reduce adds `wrong` to the right result."""

    def __init__(self, wrong: float) -> None:
        super().__init__(0, 1)
        self._wrong = wrong

    def barrier(self) -> None:
        """Nobody to wait for."""

    def bind(self, op: str) -> Callable[[], Any]:
        whole, part = self.whole, self.part
        return {
            "all_reduce": lambda: whole.add_(self._wrong),
            "broadcast": lambda: whole.add_(self._wrong),
            "reduce_scatter": lambda: part.copy_(whole + self._wrong),
            "all_gather": lambda: whole.copy_(part + self._wrong),
        }[op]


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_result_is_noticed(op: str) -> None:
    assert Alone(0.0).prepare(op, 4096)
    assert not Alone(1.0).prepare(op, 4096)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_limit_does_the_work_of_the_operation(op: str, ranks: int) -> None:
    numel = numel_of(100_000, ranks)
    part = numel // ranks
    everyone = [Limit(rank, ranks) for rank in range(ranks)]
    offers = [(os.getpid(), *limit.offer(op, 100_000)) for limit in everyone]
    for limit in everyone:
        limit.attach(offers)
    work = [limit.bind(CHUNKS_BYTES[0]) for limit in everyone]
    tensors = [limit._tensors[rank] for rank, limit in enumerate(everyone)]
    before = [torch.arange(numel) % 13 + float(rank) for rank in range(ranks)]
    for tensor, values in zip(tensors, before, strict=True):
        tensor.copy_(values)
    for step in work:
        step()
    if op == "all_reduce":
        assert all(torch.equal(tensor, torch.stack(before).sum(0)) for tensor in tensors)
    elif op == "broadcast":
        assert all(torch.equal(tensor, before[0]) for tensor in tensors)
    elif op == "all_gather":  # everyone has what each rank's own part holds after its copy
        for rank in range(ranks):
            mine = slice(rank * part, (rank + 1) * part)
            assert all(torch.equal(tensor[mine], tensors[rank][mine]) for tensor in tensors)
    else:  # the sums went to the ranks' own outputs; inputs stay
        assert all(torch.equal(tensor, values) for tensor, values in zip(tensors, before, strict=True))
    for limit in everyone:
        limit.release()


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    for op, factor in (
        ("all_reduce", 1.5),
        ("reduce_scatter", 0.75),
        ("all_gather", 0.75),
        ("broadcast", 1.0),
    ):
        result = Result(4, op, 1000, "shm", True, 1, [1e-6, 5e-6, 2e-6])
        assert result.median_s == 2e-6
        assert result.algorithm_gbps == pytest.approx(0.5)
        assert result.bus_gbps == pytest.approx(0.5 * factor)


def test_targets_are_judged_by_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def at(seconds: float, library: str) -> Result:
        return Result(2, "all_reduce", 64 * 2**20, library, True, 1, [seconds])

    plan = collectives.Plan()
    measured = [at(1.0, "shm"), at(7.9, "gloo"), at(4.1, "mpich"), at(0.85, "limit")]
    results = collectives.Results(plan, measured)
    shown = [each.line for each in collectives.judged(results)]
    assert "MISSED  2 ranks, 64 MiB, shm: at least 8 x gloo: 7.9 x" in shown[0]
    assert "met     2 ranks, 64 MiB, shm: at least 4 x mpich: 4.1 x" in shown[1]
    assert "not measured in this run" in shown[2]
    assert "met     2 ranks, 64 MiB, shm: at least 80% of the limit: 85%" in shown[-1]
    played = replace(BENCHMARKS["collectives"], run=lambda plan, say: results)
    monkeypatch.setitem(BENCHMARKS, "collectives", played)
    for options, word in (([], "MISSED"), (["--quick"], "--    ")):  # which is not to quote
        assert main(["bench", "collectives", *options]) == 0
        out = capsys.readouterr().out
        assert f"\n  {word}  2 ranks, 64 MiB, shm: at least 8 x gloo: 7.9 x\n" in out
        assert ("none is judged" in out) == ("MISSED" not in out and "met  " not in out) == bool(options)


def test_figures_for_programs_are_json(tmp_path: Path) -> None:
    """A ratio to nothing is infinite, and a loss may be NaN: JSON has neither."""
    file = tmp_path / "figures.json"
    report.write_json(file, {"seconds": [1.5, math.inf], "of": {128: (math.nan, 3)}, "text": "inf"})
    assert json.loads(file.read_text()) == {"seconds": [1.5, None], "of": {"128": [None, 3]}, "text": "inf"}


@pytest.mark.parametrize(
    "found, bound, text",
    [(7.9, 8, "7.9 x"), (1.4493, 1.45, "1.449 x"), (1.45, 1.45, "1.45 x"), (0.96996, 0.97, "0.96996 x")],
)
def test_what_misses_by_little_does_not_read_as_met(found: float, bound: float, text: str) -> None:
    assert at_least("", found, bound).figure == text


def test_sizes_are_read_as_people_write_them() -> None:
    assert read_sizes("1KiB..64KiB,6MiB", "--sizes") == (2**10, 2**12, 2**14, 2**16, 6 * 2**20)
    assert read_sizes("8, 2k,2K", "--sizes") == (8, 2048)
    for bad in ("", "0", "-1", "1TiB", "1KiB..", "2KiB..1KiB", "1KiB;2KiB", "9" * 40):
        with pytest.raises(UserError):
            read_sizes(bad, "--sizes")


def test_an_interface_that_is_not_there_is_told_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch")
    assert main(["bench", "step", "--quick"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(
        "imece: GLOO_SOCKET_IFNAME=nosuch names no interface: unset it, or use one of"
    )
    assert captured.err.count("\n") == 1 and not captured.out


def test_where_no_library_is_left_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    here: dict[str, Any] = {collectives.LIMIT: None}
    monkeypatch.setattr(collectives, "_crews", lambda *_: here)
    said: list[str] = []
    plan = collectives.Plan(ops=("broadcast",), against=("mpich", "deepspeed"), shared=False, ordinary=False)
    told = (
        r"^nothing to measure: no library of mpich, deepspeed is here that knows broadcast: name another in "
    )
    for _ in range(2):
        with pytest.raises(UserError, match=told):
            collectives.run(plan, said.append)
        here["deepspeed"] = None  # which knows all_reduce only
    assert not said


def test_a_quick_run_measures_every_library_in_every_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, plot = tmp_path / "new" / "figures.json", tmp_path / "plot.png"
    argv = ["--quick", "--sizes", "1KiB,64KiB", "--rounds", "2", "--against", "gloo"]
    assert main(["bench", "collectives", *argv, "--json", str(figures), "--plot", str(plot)]) == 0
    text = capsys.readouterr().out
    for op in OPS:
        assert f"{op}, float32" in text
    assert "targets" in text and "WRONG" not in text
    content = json.loads(figures.read_text())
    assert content["machine"]["torch"] == torch.__version__
    results = content["results"]
    measured = {(r["op"], r["size_bytes"], r["library"]) for r in results}
    libraries = ("shm", "shm ordinary", "gloo", "limit")
    assert measured == {(op, size, name) for op in OPS for size in (1024, 65536) for name in libraries}
    for result in results:
        assert result["right"] and len(result["seconds"]) == 2
        assert 1e-7 < result["median_s"] < 1.0
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 20_000


def test_what_is_wrong_is_said_where_the_status_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, report.Results] = {
        "hosts": hosts.Results(hosts.Plan(), {}, right={"gloo": True, "broadcast": False}),
        "collectives": collectives.Results(
            collectives.Plan(), [Result(2, "broadcast", 1024, "shm", False, 1)]
        ),
    }
    for name, results in found.items():
        run = mock.Mock(return_value=results)
        monkeypatch.setitem(BENCHMARKS, name, replace(BENCHMARKS[name], run=run, judged=lambda _: ()))
        assert main(["bench", name]) == 1
    said = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert said == [
        "WRONG    broadcast: its result",
        "WRONG    shm broadcast of 1 KiB among 2 ranks: its result",
    ]


def test_ranks_that_wait_for_an_order_take_no_processor_time() -> None:
    if collectives.missing("mpich"):
        crew = Crew.of_ranks(
            "torch", "imece.bench.collectives.rank", 2, extra=[{"IMECE_BENCH_RANK": "torch"}] * 2
        )
        library = "gloo"
    else:  # MPICH's waits spin, so it is the one that could disturb the others
        mpiexec = collectives._mpiexec()
        assert mpiexec is not None
        crew, library = Crew.of_mpi("imece.bench.collectives.rank", 2, mpiexec), "mpich"
    with crew:
        answers = crew.ask("prepare", library=library, op="all_reduce", size_bytes=4096, calls=3)
        assert all(answer["right"] for answer in answers)
        ranks = [psutil.Process(pid) for pid in crew.pids]
        begin = [sum(rank.cpu_times()[:2]) for rank in ranks]
        time.sleep(0.5)
        assert [sum(rank.cpu_times()[:2]) for rank in ranks] == pytest.approx(begin, abs=0.05)
        segments = {line.split()[-1] for pid in crew.pids for line in _maps(pid) if "/dev/shm/" in line}
        pids = crew.pids
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not [path for path in segments if Path(path).exists()]


def test_a_rank_that_fails_or_dies_is_told_and_nobody_stays() -> None:
    with Crew.of_ranks("ranks", EVERY, 2) as crew:
        with pytest.raises(
            CrewError, match=r"rank 0 failed in order 'run'\n(.|\n)*KeyError: 'no such thing'"
        ):
            crew.ask("run", collective="no such thing")
        pids = crew.pids
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(CrewError, match=r"rank 0 ended|could not be given"):
            crew.ask("run", collective="all_reduce")
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_rank_that_hangs_is_told_and_killed() -> None:
    with Crew.of_ranks("ranks", EVERY, 1) as crew:
        os.kill(crew.pids[0], signal.SIGSTOP)
        with pytest.raises(CrewError, match=r"rank 0 did not finish order 'open' in 1 s"):
            crew.ask("open", backend="gloo", timeout_s=1.0)
    assert not any(psutil.pid_exists(pid) for pid in crew.pids)


def test_interrupted_once_more_it_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    crew, rank = Crew("ranks", 1), mock.Mock()
    rank.wait.side_effect = KeyboardInterrupt
    crew._children.append(rank)
    with pytest.raises(KeyboardInterrupt):
        crew.close()
    assert rank.wait.called and not os.listdir(tmp_path)


def test_a_module_that_does_not_start_is_told() -> None:
    with pytest.raises(CrewError, match=r"No module named imece\.bench\.absent"):
        Crew.of_ranks("ranks", "imece.bench.absent", 1)


def _maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def test_the_title_of_a_plot_is_inside_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[tuple[float, float]] = []

    def measured(figure: Any, *_: object, **__: object) -> None:
        canvas: Any = FigureCanvasAgg(figure)
        widths.append((figure._suptitle.get_window_extent(canvas.get_renderer()).width, figure.bbox.width))

    monkeypatch.setattr(Figure, "savefig", measured)
    busy = "load 12.3 (busy: figures will be worse than they could be)"
    machine = f"AMD EPYC 7B13 64-Core Processor, 64 cores, 512 GB; Python 3.11.7, torch 2.13.0+cpu; {busy}"
    plot.draw([Result(2, "all_reduce", 1024, "shm", True, 1, [1e-5])], tmp_path / "plot.png", machine)
    ((title, whole),) = widths
    assert title < whole
