"""Options of `imece bench` that are refused."""

from __future__ import annotations

import shlex

import pytest
import torch

from tests.cli.refused import refused


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("collectivs", "did you mean collectives?"),
        ("collectives --sizes 3XB", "--sizes '3XB' is not a size like 64KiB or 6MiB"),
        ("collectives --sizes 6MiB..1KiB", "--sizes '6MiB..1KiB': 1KiB is less than 6MiB"),
        ("collectives --ranks 1", "from 2 to 64 ranks"),
        ("collectives --ranks two", "'two' is not a whole number"),
        ("collectives --ops allreduce", "is not one of all_reduce"),
        ("collectives --against nccl", "is not one of gloo, mpich"),
        ("collectives --rounds 0", "at least 1"),
        ("collectives --ops ,", "--ops ',' names none: name at least one of all_reduce, "),
        ("collectives --plot tl", "--plot tl: name a file that ends in .png or .svg or .pdf"),
        ("collectives --no-shared --no-ordinary --against ''", "nothing to measure"),
        ("collectives --json /proc/nowhere/x.json", "cannot write /proc/nowhere/x.json"),
        ("collectives --json /dev/null/x.json", "cannot write /dev/null/x.json: Not a directory"),
        ("hosts --size 0", "--size '0' is not a size like 64KiB or 6MiB"),
        ("hosts --rate fast", "--rate 'fast' is not a rate like 1gbit"),
        ("hosts --rate 0gbit", "'0gbit' is not a rate like 1gbit"),
        ("hosts --rate 0.0mbit", "'0.0mbit' is not a rate like 1gbit"),
        ("step --plot out.xyz", "--plot out.xyz: name a file that ends in .png"),
        ("step --ranks 0", "from 2 to 64 ranks"),
        ("step --strategy zero9", "zero9"),
        ("step --tokens 300", "--tokens 300: more than 256 must be a multiple of 256"),
        ("step --tokens 0", "--tokens 0: at least 1 is needed"),
        ("step --tokens many", "'many' is not a whole number"),
        ("step --tokens 128 512", "a value of several words stands in quotes: --tokens '...'"),
        ("step --ways torch-nccl", "'torch-nccl' is not one of no-sync, wait-only, imece, imece-overlap"),
        ("step --ranks 1", "from 2 to 64 ranks"),
        ("step --rounds 0", "--rounds 0: at least 1"),
        ("step --steps 0", "--steps 0: at least 1"),
        ("step --parameters 1000,-1", "--parameters -1: at least 1"),
        ("step --parameters 1000 --plot x.png", "leave --plot and --trace out"),
        ("step --trace /proc/nowhere/x.json", "cannot write /proc/nowhere/x.json"),
        ("pipeline --stages 1", "--stages 1: from 2 to 8"),
        ("pipeline --stages 2,9", "--stages 9: from 2 to 8"),
        ("pipeline --micro-batches 1000", "--micro-batches 1000: 256 at most"),
        ("pipeline --schedules zb", "--schedules 'zb' is not one of gpipe, 1f1b, interleaved"),
        ("pipeline --steps 0", "--steps 0: at least 1"),
        ("tensor --ranks 1", "--ranks 1: at least 2 are needed to divide a matrix"),
        ("tensor --ranks 4", "heads 6 cannot be divided among the 4 ranks"),
        ("tensor --vocabularies 513", "--vocabularies 513 cannot be divided among the 2 ranks"),
        ("tensor --tokens 300", "--tokens 300: up to 256, or a multiple of it, and for 2 ranks to divide"),
        ("tensor --tokens 63", "--tokens 63: up to 256"),
        ("tensor --steps 0", "--steps 0: at least 1"),
        ("memory --ranks 1", "--ranks 1: from 2 to 64"),
        ("memory --models 7B", "7B"),
        ("memory --strategies zero9", "zero9"),
        ("memory --strategies zero1 --offload parameters", "--offload parameters cannot be with"),
        ("memory --bf16 --strategies replicate", "--bf16 cannot be with --strategies replicate: name one of"),
        ("memory --models ''", "--models '' names none: name at least one of 10.9M, 29.5M, 97M"),
        ("memory --strategies ''", "--strategies '' names none"),
        ("memory --plot /dev/null/all.png", "/dev/null"),
        ("save --ranks 1", "--ranks 1: an even number from 2 to 64"),
        ("save --ranks 3", "--ranks 3: an even number from 2 to 64"),
        ("save --rounds 0", "--rounds 0: at least 1"),
        ("save --strategies zero9", "zero9"),
        ("save --strategies ''", "--strategies '' names none: name at least one of replicate, "),
        ("save --model 7B", "7B"),
        ("save --folder /dev/null/below", "--folder /dev/null/below: no folder that can be written to"),
        ("save --json /dev/null/all.json", "/dev/null"),
        ("recovery --ranks 1", "--ranks 1: from 2 to 12"),
        ("recovery --ranks 13", "--ranks 13: from 2 to 12"),
        ("recovery --kills 0", "--kills 0: at least 1"),
        ("recovery --torchrun-runs 0", "--torchrun-runs 0: at least 1"),
        ("recovery --checkpoint-every 0", "--checkpoint-every 0: at least 1"),
        ("recovery --steps 1", "--steps 1: at least 2"),
        ("recovery --every-s 0", "--every-s 0: more than 0"),
        ("recovery --strategies zero9", "zero9"),
        ("recovery --strategies ,", "--strategies ',' names none: name at least one of replicate"),
        ("recovery --parts kill", "kill"),
        ("recovery --json /dev/null/all.json", "/dev/null"),
        ("train --ways torch", "'torch' is not one of imece-bf16, imece-fp32, imece-compiled-bf16"),
        ("train --ranks 1", "from 2 to 64 ranks"),
        ("train --ranks 3", "--ranks 3: they cannot share the 16 sequences of a step"),
        ("train --rounds 0", "--rounds 0: at least 1"),
        ("train --steps 0", "--steps 0: at least 1"),
        ("train --json /proc/nowhere/x.json", "cannot write /proc/nowhere/x.json"),
        ("gpu --device cpu", "only --model tiny"),
        ("gpu", "needs a CUDA device"),
        ("gpu --device cpu --model tiny --rounds 0", "--rounds 0: at least 1"),
        ("gpu --parts optimiser", "--parts 'optimiser'"),
        ("gpu --device cpu --model tiny --trace trace.json", "--trace: it is of steps on a GPU"),
    ],
)
def test_a_mistake_is_one_line(
    typed: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert said in refused(capsys, "bench", *shlex.split(typed))
