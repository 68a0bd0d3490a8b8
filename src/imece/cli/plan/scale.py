"""`imece plan --scale weak|strong`: answers the same question for ever more hosts."""

from __future__ import annotations

import json

from imece.cli.plan.options import PlanOptions
from imece.errors import UserError
from imece.plan.answer.scale import MOST_GPUS, Point, curve, draw_scale, scale_json, scale_lines, slower
from imece.plan.answer.space import Question
from imece.plan.answer.text import subject, too_long, wrapped
from imece.writing import asked_for

_WORDS = (
    "left: tokens a second of a GPU over that of the first line; waits: part of a step in which GPUs wait "
    "for messages or for the pipeline; the plan ends with micro-batch x accumulation"
)


def show(options: PlanOptions, question: Question, width: int) -> int:
    """Print the table; exit status 0. UserError if nothing fits on any number of hosts. width: in columns."""
    assert options.scale is not None
    if question.cluster.gpus > MOST_GPUS:
        raise UserError(f"--scale begins with {question.cluster.gpus:,} GPUs: it goes up to {MOST_GPUS:,}")
    if options.html is not None:
        raise UserError("--scale has no page: --plot FILE.png draws it")
    if options.top:
        raise UserError(f"--top {options.top} lists plans for one number of GPUs: leave out it or --scale")
    if options.tokens != PlanOptions.tokens:
        raise UserError(
            f"--tokens {options.tokens} is for time and price, which --scale does not tell: leave it out"
        )
    points: list[Point] = list(curve(question, options.scale))
    if not any(point.candidate for point in points):
        raise UserError(
            f"{question.model.name} fits on no number of GPUs up to {points[-1].gpus:,} that can share the "
            "batch; without --scale it says what is missing"
        )
    if options.json:
        print(json.dumps(scale_json(points, options.scale), indent=1))
    else:
        print("\n".join(wrapped("", f"{options.scale} scaling of {subject(question)}", width)) + "\n")
        print("\n".join(scale_lines(points, width)) + "\n")
        for text in (*slower(points), _WORDS, *too_long(question)):
            print("\n".join(wrapped("", text, width)))
    if options.plot is not None:
        with asked_for(options.plot):
            draw_scale(points, options.scale, options.plot)
    return 0
