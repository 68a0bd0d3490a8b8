"""The picture of a plan shows all of what it is about."""

from __future__ import annotations

from matplotlib.figure import Figure

from imece.plan.answer.picture import draw_all
from imece.plan.answer.search import search, settled
from imece.plan.models.by_name import find_model
from tests.plan.asked import ask


def test_the_chosen_way_lies_inside_of_its_panel() -> None:
    answer = settled(
        search(ask(find_model("1.3b"), gpus=1, batch=4, seq=2048))
    )  # of few ways, all about as fast
    axes = Figure().subplots()
    draw_all(axes, answer)
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 1.05 * answer.best.timed.tokens_per_s
