"""report.html and loss.png: from whatever a run has left, and safe whatever the model wrote."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import struct
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from imece.observe.chart import Axis, Chart, tick_text
from imece.observe.curves import Curve, curve, frame, piecewise_mean, smoothed, thinned
from imece.observe.loss_plot import write_loss_plot
from imece.observe.report import catch_up, write_report
from imece.observe.run_files import CHECKPOINT, ENDED

EVIL = "<script>alert(1)</script>&\"'"


def record(step: int, **more: Any) -> dict[str, Any]:
    parts = {"data_s": 0.002, "forward_s": 0.08, "backward_s": 0.15, "exposed_s": 0.005}
    return {
        "step": step,
        "loss": 2.5 + 5.5 * math.exp(-step / 50) + 0.1 * math.sin(step),
        "tokens": 4096,
        "tokens_per_s": 16_000.0 + step % 7,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "time": 1_795_270_000.0 + step,
        "step_s": 0.25,
        **parts,
        "optimizer_s": 0.011,
        "other_s": 0.002,
        "memory_bytes": 304_000_000,
        **more,
    }


def write(
    run: Path, records: Sequence[dict[str, Any]], summary: dict[str, Any] | None = None, **files: str
) -> None:
    run.mkdir(parents=True, exist_ok=True)
    run.joinpath("metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    if summary is not None:
        run.joinpath("summary.json").write_text(json.dumps(summary))
    for name, text in files.items():
        run.joinpath(name.replace("_", ".")).write_text(text)


SUMMARY = {
    "steps": 300,
    "tokens": 1_228_800,
    "seconds": 91.0,
    "tokens_per_s": 13_503.0,
    "val_loss": 2.613,
    "val_bits_per_byte": 1.083,
    "baselines": {"bigram": 3.712, "uniform": 8.318, "unigram": 6.021},
    "sample": {"prompt": "class", "text": f"class Queue:\n\t{EVIL}\x1b[31m\n"},
    "parameters": 6_820_000,
    "best_val_loss": 2.613,
}


class Page(HTMLParser):
    """Checks that all elements are closed in their order; gathers tags, attributes and texts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(self.source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta",):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def test_a_finished_run_is_told_whole(tmp_path: Path) -> None:
    run = tmp_path / "2026-11-21-small"
    records = [record(step) for step in range(1, 301)]
    records[99] |= {"val_loss": 3.2, "val_s": 1.3, "save_s": 0.1}
    records[111] |= {"loss": None, "grad_norm": None, "skipped": "a NaN on rank 1: json/decoder.py"}
    facts = {
        "cpu": "a processor",
        "memory_bytes": 25_000_000_000,
        "gpus": [{"name": "a card", "memory_bytes": 8e10}],
    }
    write(run, records, SUMMARY, config_toml="steps = 300\n[model]\n", environment_json=json.dumps(facts))
    assert write_report(run) == run / "report.html"
    page = Page(run / "report.html")
    for said in (
        "2026-11-21-small",
        "Finished: 300 of 300 steps.",
        "UTC",
        "2.613",
        "1.083",
        "13.5k",
        "1:31",
        "6.8M",
        "0.30 GB",
        "unigram 6.02",
        "a NaN on rank 1: json/decoder.py",
        "a processor",
        "25.0 GB",
        "a card (80.0 GB)",
        "[model]",
        "--steps 600",
        "exposed communication",
        "waiting for saves",
    ):
        assert said in page.text, said
    places = [
        page.text.index(name) for name in ("\nuniform\n", "\nunigram\n", "\nbigram\n", "\nthis model\n")
    ]
    assert places == sorted(places)
    assert page.tags.count("svg") == 5
    assert ("class", "dot") in page.attributes


def test_the_page_asks_nobody_and_runs_nothing(tmp_path: Path) -> None:
    run = tmp_path / f"run {EVIL.replace('/', '')}"
    skipped = [record(1), record(2, skipped=EVIL)]
    write(
        run,
        skipped,
        SUMMARY,
        config_toml=f"# {EVIL}",
        environment_json=json.dumps({EVIL: EVIL, "gpus": [EVIL]}),
    )
    write_report(run)
    page = Page(run / "report.html")
    assert "script" not in page.tags
    assert page.text.count("<script>alert(1)</script>&\"'") >= 5
    assert not [name for name, _ in page.attributes if name in ("src", "href") or name.startswith("on")]
    assert not re.search(r"https?://|url\(|@import", page.source)
    assert "default-src 'none'" in dict(page.attributes)["content"] or "default-src 'none'" in page.source
    assert "prefers-color-scheme: dark" in page.source
    assert "\x1b" not in page.source and "\\x1b[31m" in page.text


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"step": 1}],
        [record(1)],
        [record(1, loss=None), record(2, loss=None)],
        [record(1, loss=1e30), record(2, loss=-1.0, lr=0.0, grad_norm=0.0)],
        [record(1), {"step": 2, "loss": 1.0, "data_s": 0.1}],
    ],
)
def test_whatever_there_is_of_a_run_is_enough(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    write(tmp_path / "run", records, environment_json='{"cpu": "cut', config_toml="steps = [not toml")
    write_report(tmp_path / "run")
    page = Page(tmp_path / "run" / "report.html")
    assert "nan" not in re.sub(r"<style.*</style>", "", page.source, flags=re.DOTALL).lower()
    assert ("No step is recorded yet." in page.text) == (not records)
    assert ("\nLearning\n" in page.text) == any("lr" in each for each in records)


def test_a_run_that_goes_on_says_so(tmp_path: Path) -> None:
    write(tmp_path, [record(step, val_loss=3.5) for step in range(1, 11)], config_toml="steps = 800")
    write_report(tmp_path)
    text = Page(tmp_path / "report.html").text
    assert "Step 10 of 800" in text
    assert "3.500" in text
    assert "baselines" not in text


def test_a_run_that_ended_early_says_why(tmp_path: Path) -> None:
    records = [record(step) for step in range(1, 11)]
    write(tmp_path, records, {"steps": 10, ENDED: EVIL}, config_toml="steps = 10")
    text = Page(write_report(tmp_path)).text
    assert "Ended after step 10 of 10: " + EVIL in "".join(text.splitlines())
    assert f"imece train --run {tmp_path}\n" in text and "--steps 20" not in text


@pytest.mark.parametrize(
    ("kept", "ended", "said", "commands"),
    [
        (
            None,
            {},
            "Made 10 of 10 steps, but the last checkpoint could not be saved: none is on",
            ["Begin anew"],
        ),
        (
            5,
            {},
            "Made 10 of 10 steps, but the last checkpoint could not be saved: the newest is of step 5.",
            [],
        ),
        (None, {ENDED: "NaN"}, "Ended after step 10 of 10: NaN.", ["Begin anew"]),
        (10, {}, "Finished: 10 of 10 steps.", ["Train for longer"]),
    ],
)
def test_what_is_on_the_disk_decides_how_to_go_on(
    tmp_path: Path, kept: int | None, ended: dict[str, str], said: str, commands: list[str]
) -> None:
    summary = {"steps": 10, CHECKPOINT: kept, **ended}
    write(tmp_path, [record(step) for step in range(1, 11)], summary, config_toml="steps = 10")
    text = Page(write_report(tmp_path)).text
    assert said in text
    for command in ("imece sample", "imece eval", "imece export"):
        assert (command in text) == (kept is not None)
    for name in ("Begin anew", "Train for longer", "Train on"):
        assert (f"{name}" in text.split("\n")) == (name in (commands or ["Train on"]))


def test_the_summary_of_an_end_after_which_the_run_went_on_is_old(tmp_path: Path) -> None:
    records = [record(step) for step in range(1, 302)]
    write(tmp_path, records[:300], SUMMARY, config_toml="steps = 300")
    assert "13.5k" in Page(write_report(tmp_path)).text
    write(tmp_path, records, SUMMARY, config_toml="steps = 800")
    text = Page(write_report(tmp_path)).text
    assert "Step 301 of 800: the run goes on, or was killed here." in text
    assert "13.5k" not in text and "A sample" not in text


def test_what_the_ranks_could_not_write(tmp_path: Path) -> None:
    catch_up(tmp_path)
    assert not list(tmp_path.iterdir()), "there is nothing to tell of"
    write(tmp_path, [record(1)])
    catch_up(tmp_path)
    assert (tmp_path / "loss.png").exists() and "1 of 1 steps" in Page(tmp_path / "report.html").text
    before = (tmp_path / "report.html").stat()
    catch_up(tmp_path)
    assert (tmp_path / "report.html").stat() == before, "as new as the last step"
    write(tmp_path, [record(1), record(2)])
    os.utime(tmp_path / "metrics.jsonl", ns=(before.st_mtime_ns + 10**6,) * 2)
    catch_up(tmp_path)
    assert "2 of 2 steps" in Page(tmp_path / "report.html").text


def test_one_step_is_seen(tmp_path: Path) -> None:
    write(tmp_path, [record(1)])
    page = Page(write_report(tmp_path))
    assert (
        sum(style.endswith(" point") for name, style in page.attributes if name == "class") == 2 + 1 + 2 + 2
    )
    areas = [value.split() for name, value in page.attributes if name == "points"]
    assert len(areas) == 6 and all(area[0].split(",")[0] == "0.0" for area in areas), "as wide as the step"
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert labels[1:3] == ["Learning rate; 0.001 at step 1", "Gradient norm, before clipping; 0.5 at step 1"]
    assert labels[0].startswith("Loss, nats a token, by step; each step 7.975 at step 1; smoothed ")
    write(tmp_path, [record(step, val_loss=1.0) for step in range(1, 9)])
    (label, *_) = [value for name, value in Page(write_report(tmp_path)).attributes if name == "aria-label"]
    assert label.endswith("; validation 1 at step 1 to 1 at step 8"), label


def test_baselines_of_a_part_of_the_tokens_say_so(tmp_path: Path) -> None:
    for counted, also in (("", ""), ("101 of 3,000 million", " Counted in 101 of 3,000 million.")):
        write(tmp_path, [record(1)], summary=SUMMARY | {"baselines_counted_in": counted})
        write_report(tmp_path)
        assert f"Bigram: by the one before it.{also}\n" in Page(tmp_path / "report.html").text + "\n"


def test_the_loss_of_each_source_is_told(tmp_path: Path) -> None:
    write(tmp_path, [record(1)], summary=SUMMARY | {"val_loss_by_source": {"web": 2.5, "a<b": 3.25}})
    assert "By source: web 2.500, a<b 3.250." in Page(write_report(tmp_path)).text


def test_the_loss_of_each_source_has_a_curve(tmp_path: Path) -> None:
    names = ["web", f"a{EVIL}", *(f"s{number}" for number in range(7))]
    steps = {step: {f"val_loss/{name}": 2.0 + at for at, name in enumerate(names)} for step in (2, 4)}
    write(tmp_path, [record(step, **steps.get(step, {})) for step in range(1, 5)])
    page = Page(write_report(tmp_path))
    (told,) = [
        value
        for name, value in page.attributes
        if name == "aria-label" and value.startswith("Validation loss by")
    ]
    assert f"; web 2 at step 2 to 2 at step 4; a{EVIL} 3 at step 2 to 3 at step 4; s0 4 at" in told
    assert "Of 9 sources the first 8; metrics.jsonl has all." in page.text


def test_a_model_that_cannot_write_has_no_sample(tmp_path: Path) -> None:
    write(tmp_path, [record(1)], summary=SUMMARY | {"sample": None})
    write_report(tmp_path)
    assert "None: what the model computes is not finite any more." in Page(tmp_path / "report.html").text


def test_a_long_run_has_a_small_page(tmp_path: Path) -> None:
    write(tmp_path, [record(step) for step in range(1, 12_001)])
    write_report(tmp_path)
    page = Page(tmp_path / "report.html")
    assert "12,000 losses are drawn with 2,000 points" in page.text
    lines = [value.split() for name, value in page.attributes if name == "points"]
    assert len(lines) == 6 + 1 + 2 + 2 + 2
    assert max(map(len, lines)) <= 2000
    assert len(page.source) < 400_000


def test_commands_name_the_folder_as_a_shell_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "it's mine"
    write(run, [record(1)])
    monkeypatch.chdir(tmp_path)
    write_report(run)
    assert """imece sample 'runs/it'"'"'s mine' --prompt "Once\"""" in Page(run / "report.html").text


@pytest.mark.filterwarnings("error")
def test_the_loss_plot_is_a_picture_of_its_size(tmp_path: Path) -> None:
    run = tmp_path / "run $\\x$ 日本"  # a formula to matplotlib, and letters that its font lacks
    write(run, [record(step, val_loss=3.0) for step in range(1, 50)], SUMMARY)
    write_loss_plot(run)
    png = (run / "loss.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", png[16:24]) == (1200, 700)


def test_without_a_loss_there_is_no_plot(tmp_path: Path) -> None:
    write(tmp_path, [record(1, loss=None)])
    write_loss_plot(tmp_path)
    assert not (tmp_path / "loss.png").exists()


def test_who_reads_the_page_while_it_is_written_sees_one_of_both(tmp_path: Path) -> None:
    write(tmp_path, [record(1)])
    write_report(tmp_path)
    with (tmp_path / "report.html").open() as reader:
        write(tmp_path, [record(1), record(2)])
        write_report(tmp_path)
        assert "Finished: 1 of 1 steps" in reader.read()
    assert "Finished: 2 of 2 steps" in Page(tmp_path / "report.html").text


def test_a_full_disk_leaves_the_page_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [record(1)])
    write_report(tmp_path)
    before = (tmp_path / "report.html").read_bytes()
    write(tmp_path, [record(1), record(2)])

    def full(beside: Path, target: Path) -> None:
        assert beside.stat().st_size
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before
    assert not list(tmp_path.glob("*.partial"))


def test_a_thinned_curve_keeps_its_outliers() -> None:
    values = np.zeros(100_000)
    values[[77_777, 3]] = 5.0, -2.0
    thin = thinned(Curve(np.arange(100_000.0), values))
    assert len(thin) <= 2000
    assert {(3.0, -2.0), (77_777.0, 5.0)} <= set(zip(thin.steps, thin.values, strict=True))
    assert (np.diff(thin.steps) > 0).all()


def test_a_smoothed_curve_is_the_mean_around_each_point() -> None:
    values = np.arange(1000.0) ** 2
    smooth = smoothed(Curve(np.arange(1000.0), values))
    assert smooth.values[0] == values[0]
    assert smooth.values[500] == pytest.approx(values[485:516].mean())
    assert smooth.values[999] == pytest.approx(values[984:].mean())


def test_null_and_missing_figures_are_no_points() -> None:
    found = curve(
        [{"step": 1}, {"step": 2, "loss": None}, {"step": 3, "loss": 4}, {"step": 4, "loss": math.nan}],
        "loss",
    )
    assert (found.steps.tolist(), found.values.tolist()) == ([3.0], [4.0])
    assert len(piecewise_mean(curve([], "loss"), 10)) == 0


def test_one_loss_gone_astray_does_not_press_the_others_together() -> None:
    values = np.full(1000, 3.0)
    values[0], values[500] = 8.0, 1e9
    raw = Curve(np.arange(1000.0), values)
    assert frame([raw], [8.3]) == pytest.approx((3 - 0.265, 8.3 + 0.265))
    validation = Curve(np.array([250.0, 500.0]), np.array([3.1, 1e4]))
    assert frame([raw, validation], [8.3]) == pytest.approx((3 - 0.265, 8.3 + 0.265))
    assert frame([Curve(raw.steps[:1], values[:1])], []) == (7.0, 9.0)
    assert frame([Curve(raw.steps[:3], values[:3])], []) == pytest.approx((2.75, 8.25))


@pytest.mark.parametrize(
    ("axis", "most", "ticks"),
    [
        (Axis(0, 800), 8, ["0", "100", "200", "300", "400", "500", "600", "700", "800"]),
        (Axis(0, 1010), 8, ["0", "200", "400", "600", "800", "1000"]),
        (Axis(0, 0.0032), 5, ["0", "0.001", "0.002", "0.003"]),
        (Axis(0, 101_000), 5, ["0", "25k", "50k", "75k", "100k"]),
        (Axis(2.4, 2.4), 5, ["2.5", "3", "3.5", "4", "4.5"]),
        (Axis(0.02, 600, log=True), 5, ["0.1", "1", "10", "100"]),
        (Axis(0, 1.01, whole=True), 8, ["0", "1"]),
        (Axis(0, 12, whole=True), 5, ["0", "5", "10"]),
        (Axis(0, 101_000, whole=True), 5, ["0", "25k", "50k", "75k", "100k"]),
    ],
)  # fmt: skip
def test_ticks_are_round(axis: Axis, most: int, ticks: list[str]) -> None:
    assert [tick_text(value) for value in axis.ticks(most)] == ticks


def test_names_of_levels_do_not_lie_on_each_other() -> None:
    chart = Chart("x", "", Axis(0, 1), Axis(0, 10))
    chart.level(5.0, "one")
    chart.level(5.1, "two")
    chart.level(9.0, "three")
    tops = [float(top) for top in re.findall(r'"name" style="top:([\d.]+)%"', chart.html())]
    assert tops == pytest.approx([10.0, 49.0, 56.5])
    assert chart.html().rindex("<i ") < chart.html().index('"name"') < chart.html().index("<svg")


def test_ranks_that_were_not_like_the_others(tmp_path: Path) -> None:
    slow = {"slowest_rank": 2, "slowest_phase": "backward", "slowest_s": 0.31, "others_s": 0.105}
    records = [record(step, **(slow if 4 <= step < 8 else {})) for step in range(1, 11)]
    records[8]["drift"] = f"{EVIL} of rank 1 differed from that of 2 others"
    write(tmp_path, records)
    source = Page(write_report(tmp_path)).source
    assert source.count("rank 2 is slow in backward: 310 ms, the others 105 ms") == 1
    assert source.count("of rank 1 differed from that of 2 others") == 1 and EVIL not in source
    write(tmp_path, [record(step, drift="seen", skipped="NaN") for step in range(1, 104)])
    assert Page(write_report(tmp_path)).text.count("And 3 more.") == 2, "of skipped steps too"
    write(tmp_path, records[:3])
    assert "not like the others" not in Page(write_report(tmp_path)).source


def test_copies_are_a_part_of_a_step_where_all_steps_have_them(tmp_path: Path) -> None:
    write(tmp_path, [record(step, copy_s=0.001) for step in range(1, 11)])
    assert "copies for recovery" in Page(write_report(tmp_path)).source
    write(tmp_path, [record(step, **({"copy_s": 0.001} if step > 5 else {})) for step in range(1, 11)])
    source = Page(write_report(tmp_path)).source
    assert "copies for recovery" not in source and "exposed communication" in source
