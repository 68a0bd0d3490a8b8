"""A run folder as training leaves it, made without ranks, for commands that read one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from imece.checkpoint.commit import METRIC_ON
from imece.checkpoint.save import Checkpoints
from imece.data.prepare import prepare
from imece.models.transformer import Transformer
from imece.train.config import DataSection, ModelSection, TrainConfig
from imece.train.run.folder import RunFolder, shape_as_json

TEXT = "The çığ of 🏔 number {number} fell on a village, and the village did one job together: imece.\n"
BEST_STEP, LAST_STEP = 1, 2


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For reading only. A byte model with two checkpoints, of which the first one is the best."""
    folder = tmp_path_factory.mktemp("trained")
    texts = folder / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(TEXT.format(number=number) * 3, encoding="utf-8")
    return make_run(folder / "run", DataSection(paths=(str(texts),), tokenizer="bytes", held_out=0.2))


def make_run(path: Path, data: DataSection) -> Path:
    config = TrainConfig(run=str(path), ranks=1, model=ModelSection(preset="tiny", width=32), data=data)
    config = dataclasses.replace(config, compute=dataclasses.replace(config.compute, dtype="fp32"))
    run = RunFolder(path)
    run.begin(config)
    prepared = prepare(config.data, run.tokenizer_file, run.tokens(config))
    shape = config.model.shape(prepared.tokenizer.vocab_size)
    generator = torch.Generator().manual_seed(0)
    best = Transformer(shape, generator=generator)
    with torch.no_grad():
        for parameter in best.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10)  # so that some tokens are clearly likelier than others
    alarms: list[str] = []
    checkpoints = Checkpoints(run.checkpoints, rank=0, world_size=1, alarm=alarms.append)
    for step, model, metric in (
        (BEST_STEP, best, 3.0),
        (LAST_STEP, Transformer(shape, generator=generator), 4.0),
    ):
        tensors = {f"model/{name}": each.detach() for name, each in model.named_parameters()}
        state = {
            "model": shape_as_json(shape),
            "tokenizer_hash": prepared.tokenizer.hash,
            METRIC_ON: prepared.tokens.identity,
        }
        checkpoints.save(step, tensors, state, {}, metric=metric)
        assert checkpoints.finish(), alarms
    checkpoints.close()
    return path
