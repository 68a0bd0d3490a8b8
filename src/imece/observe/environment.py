"""What figures were measured on: facts of the machine, and versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from imece.system.control_groups import allowed_bytes, usable_cores

_PACKAGES = ("numpy", "safetensors", "tokenizers")


def environment() -> dict[str, Any]:
    """Machine and versions, ready for JSON: without host names, paths and users.

    memory_bytes: of the host, or what this process may have of it. gpus: those that this process sees, each
    with name and memory_bytes. Asking for them makes a context in the GPU's memory, so only a process that
    computes on them should ask. cuda and nccl: only if there are GPUs. A package that is not installed is
    None.
    """
    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "vector": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": allowed_bytes(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "imece": version("imece"),
        **{package: version(package) for package in _PACKAGES},
        "gpus": _gpus(),
    }
    if facts["gpus"]:
        facts["cuda"] = torch.version.cuda
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None
    return facts


def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The CPU's name in the kernel's words."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in found]
