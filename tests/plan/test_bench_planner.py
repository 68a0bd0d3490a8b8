"""`imece bench planner`: its words about tables, targets and mistakes; the page and the picture."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib.image
import pytest

from imece.bench.planner import page as planner_page
from imece.bench.planner import planner
from imece.bench.planner import plot as planner_plot
from imece.cli.bench import run
from imece.errors import UserError
from imece.plan.accuracy.memory import Fits
from imece.plan.accuracy.published import read
from imece.plan.accuracy.statistics import Row


def table_of(name: str, *rows: tuple[float, float], held_out: bool = True) -> planner.Table:
    return planner.Table(
        name, "s", tuple(Row(f"row {n}", m, p, 1.0, "cell", held_out) for n, (m, p) in enumerate(rows))
    )


def results_of(*tables: planner.Table) -> planner.Results:
    return planner.Results(planner.Plan(), list(tables))


def test_worst_rows_are_named_with_both_figures() -> None:
    shown = planner.lines(table_of("some", (10, 11), (10, 5), (10, 10)), worst=1)
    assert shown[0].strip() == "some"
    assert "3 rows   MAPE  20.0%   median  10.0%" in shown[1]
    assert shown[-1].split() == ["-50%", "row", "1:", "10", "s,", "not", "5"]
    assert "skill over the constant" in shown[-2]
    named = planner.lines(table_of("some", (10, 11), (10, 5), (10, 10.4)), worst=3)[-2:]
    assert named == [shown[-1], "       +10%  row 0: 10 s, not 11"], "what is nearly right is not named"


def test_rows_that_were_fitted_are_told_apart() -> None:
    both = planner.Table("some", "s", (Row("a", 10, 11), Row("b", 10, 12, held_out=True)))
    assert [what for what, _ in both.parts] == ["all rows", "fitted on", "held out"]
    assert not both.has_rival
    alone = table_of("some", (10, 11))
    assert [what for what, _ in alone.parts] == ["all rows"] and alone.has_rival


def lines_of(results: planner.Results) -> list[str]:
    return [each.line for each in planner.judged(results)]


def test_targets_are_met_missed_or_not_measured() -> None:
    good, bad = table_of("vtrain", (10, 11)), table_of("sc21", (10, 12))
    judged = lines_of(results_of(good, bad))
    assert "  met     vtrain, one host: MAPE at most 20 %: 10.0%" in judged
    assert "  MISSED  SC21 table 1: MAPE at most 6 %: 20.0%" in judged
    assert "  --      llm_foundry: MAPE at most 8 %: not measured in this run" in judged


def test_order_and_regret_are_judged_by_cell() -> None:
    turned = table_of("ultrascale", (10, 3), (20, 2), (30, 1))
    judged = "\n".join(lines_of(results_of(turned)))
    assert (
        "MISSED  ultrascale, order in every cell: Kendall tau at least 0.7: -1.00 to -1.00; below: cell"
        in judged
    )
    assert "MISSED  ultrascale, regret of a choice: median at most 10 %, p90 25 %: 200.0%, 200.0%" in judged


def test_order_is_told_with_what_it_were_without_the_version() -> None:
    turned = table_of("ultrascale", (10, 3), (20, 2), (30, 1))
    told = re.compile(r"; below: cell -1.00; 0\.[67]\d if nanotron's version were not known$", re.M)
    assert told.search("\n".join(lines_of(results_of(turned))))
    of_ones_own = planner.Results(planner.Plan(rows=Path("mine.csv")), [turned])
    assert "were not known" not in "\n".join(lines_of(of_ones_own))


def test_runs_that_do_not_fit_are_counted() -> None:
    results = results_of()
    results.fits = {"ultrascale": Fits(100, 97, 50, 40, 38)}
    judged = "\n".join(lines_of(results))
    assert "MISSED  ultrascale: at least 98 % of successes fit: 97.0%" in judged
    assert "met     ultrascale: at least 85 % of too large ones do not: 95.0%" in judged


def test_page_has_targets_tables_and_picture(tmp_path: Path) -> None:
    results = results_of(table_of("vtrain", (10, 11), (20, 24)))
    page, plot = tmp_path / "docs" / "page.md", tmp_path / "docs" / "images" / "plot.png"
    planner_page.write(results, page, plot)
    text = page.read_text()
    assert "![predicted against measured](images/plot.png)" in text
    assert "met     vtrain, one host" in text and "row 1: 20 s, not 24" in text


@pytest.mark.parametrize(("tables", "panels"), [(1, 1), (2, 2), (4, 3)])
def test_the_picture_is_as_wide_as_its_tables(tables: int, panels: int, tmp_path: Path) -> None:
    rows = [(float(n), n * 1.1) for n in range(1, 7)]
    shown = [table_of(f"table {n}", *rows) for n in range(tables)]
    planner_plot.draw([*shown, table_of("small", (1, 1))], tmp_path / "plot.png")
    assert matplotlib.image.imread(tmp_path / "plot.png").shape[1] == 420 * panels


def test_a_small_table_alone_has_a_picture(tmp_path: Path) -> None:
    planner_plot.draw([table_of("small", (1, 1))], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_one_table_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["planner", "--tables", "sc21", "--json", str(tmp_path / "rows.json")]) == 0
    said = capsys.readouterr().out
    assert "10 rows   MAPE" in said and "s, not" in said
    assert "met     SC21 table 1" in said and "ultrascale\n" not in said
    assert '"name": "sc21"' in (tmp_path / "rows.json").read_text()


def test_rows_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = list(read("sc21").rows[0])
    values = read("sc21").rows[-1] | {"params_b": "mine", "step_s": "205.26"}
    own = tmp_path / "own.csv"
    own.write_text(f"# measured by me\n{','.join(columns)}\n{','.join(str(values[c]) for c in columns)}\n")
    assert run(["planner", "--tables", "sc21", "--rows", str(own)]) == 0
    said = capsys.readouterr().out
    assert "1 rows" in said and "-50%  mineB x3072: 205.3 s" in said
    own.write_text("# measured by me\nparams_b,heads\n1,2\n")
    with pytest.raises(UserError, match="has no column width"):
        run(["planner", "--tables", "sc21", "--rows", str(own)])
    with pytest.raises(UserError, match="No such file"):
        run(["planner", "--tables", "sc21", "--rows", str(tmp_path / "none.csv")])


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--tables vtrian", "--tables 'vtrian' is not one of"),
        ("--tables nccl --rows x.csv", "--rows needs --tables with one of ultrascale"),
        ("--worst -1", "--worst -1: 0 or more"),
        ("--tables sc21 --page page.md", "--page is of all tables"),
    ],
)
def test_mistakes(typed: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        run(["planner", *typed.split()])
