"""What figures were measured on, and what must not be revealed of the machine."""

from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path

import psutil
import pytest
import torch

from imece.bench import machine
from imece.observe import environment
from imece.observe.environment import cpu_model, version
from imece.system.control_groups import usable_cores


def test_the_facts_of_this_machine() -> None:
    facts = environment.environment()
    assert facts["torch"] == torch.__version__
    assert facts["memory_bytes"] == psutil.virtual_memory().total
    assert facts["cores"] == usable_cores() == len(psutil.Process().cpu_affinity() or [])
    assert facts["imece"] and facts["tokenizers"]
    assert len(facts["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert json.loads(json.dumps(facts)) == facts


def test_nothing_says_whose_machine_it_is() -> None:
    values = [str(value) for value in environment.environment().values()]
    for secret in (socket.gethostname(), str(Path.home()), str(Path(__file__).parent)):
        assert not any(secret in value for value in values)
    assert getpass.getuser() not in values


def test_gpus_have_name_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name = "a card"
        total_memory = 150 * 10**9

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    facts = environment.environment()
    assert facts["gpus"] == 2 * [{"name": "a card", "memory_bytes": 150 * 10**9}]
    assert facts["nccl"] == "2.27.5"
    assert "cuda" in facts


def test_a_package_that_is_not_there_is_none() -> None:
    assert version("no-such-package-anywhere") is None
    assert version("torch") is not None


def test_a_processor_without_a_name_has_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_model()

    def missing(self: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert cpu_model() == "riscv64"


def test_benchmarks_say_the_same_and_who_they_were_measured_beside() -> None:
    facts = machine.facts()
    assert facts.items() >= environment.environment().items()
    assert {"mpi4py", "mpich", "deepspeed", "load_before"} <= facts.keys()
