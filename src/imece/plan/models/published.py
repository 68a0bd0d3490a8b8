"""Published models by name, from published.csv: the numbers of their config.json on Hugging Face.

From papers: Llama 2 and before (2302.13971, 2307.09288), GPT-3, and Narayanan et al. 2021, table 1.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from importlib import resources

from imece.plan.models.from_config import fields_of, from_content
from imece.plan.models.model import Model


def published() -> dict[str, Model]:
    """All of them, in the file's order."""
    text = resources.files("imece.plan.models").joinpath("published.csv").read_text(encoding="utf-8")
    return {row["name"]: _model(row) for row in csv.DictReader(text.splitlines())}


def _model(row: Mapping[str, str]) -> Model:
    kind, name = row["model_type"], row["name"]
    numbers = {field: int(row[column]) for column, field in fields_of(kind).items() if row[column]}
    others = dict(each.split("=") for each in (row["others"] or "").split())
    content = {"model_type": kind, "tie_word_embeddings": bool(row["tied"])} | numbers
    return from_content(content | {field: json.loads(value) for field, value in others.items()}, name, name)
