"""Too little memory is reported with both sizes, and live ranks leak nothing."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import imece
from imece.collectives.shared_memory import arena, segment, shared_empty
from imece.errors import UserError
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[3]


def test_too_little_memory_names_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "available_bytes", lambda: 17 * 2**20)
    with pytest.raises(UserError, match=r"a shared tensor needs 40 MiB .* and 17 MiB are available"):
        shared_empty(10 * 2**20)
    assert shared_empty(10).numel() == 10
    monkeypatch.setattr(segment, "available_bytes", lambda: 1000)
    with pytest.raises(UserError, match=r"a group of the shm backend needs .* MiB .* and 1000 bytes are"):
        dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)


def test_more_than_this_machine_has() -> None:
    """The real figure, not a made-up one: asking for more must not end in a kill."""
    with pytest.raises(UserError, match=r"needs [\d.]+ GiB of shared memory and [\d.]+ .iB are available"):
        shared_empty(segment.available_bytes() // 4 + 2**30)


def test_a_segment_outlives_the_mode_of_who_made_it() -> None:
    with torch.inference_mode():
        made = segment.create(64, "a test")
    made.memory.fill_(1)
    made.close()


def hit_a_limit(name: str) -> list[str]:
    """A real limit of the kernel on this process; what the error says. The group still works after it."""
    told = []
    kept = shared_empty(1)  # of the last call's arena: a spare would be given back, which hides a leak
    before = len(os.listdir("/proc/self/fd"))
    kind = getattr(resource, name)
    used = 0 if name == "RLIMIT_FSIZE" else int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    old = resource.getrlimit(kind)
    resource.setrlimit(kind, (used + 64 * 2**20, old[1]))
    try:
        shared_empty(256 * 2**20, torch.uint8)
    except UserError as error:
        told.append(str(error))
    resource.setrlimit(kind, old)
    assert len(os.listdir("/proc/self/fd")) == before, "the descriptor of the failed segment leaked"
    del kept
    tensor = shared_empty(100_000).fill_(1)
    dist.all_reduce(tensor)
    assert tensor[0] == dist.get_world_size()
    return told


def hit_both_limits() -> list[str]:
    return hit_a_limit("RLIMIT_FSIZE") + hit_a_limit("RLIMIT_AS")


def test_real_limits_are_a_users_mistake() -> None:
    told = run_ranks(hit_both_limits, 2)
    for rank in told:
        assert len(rank) == 2, rank
        for text in rank:
            assert "a shared tensor needs 256 MiB of shared memory" in text and "\n" not in text
            assert "(ulimit -f for its files, ulimit -v for its memory)" in text


# A full /dev/shm.


def all_reduce_8_mib() -> float:
    with pytest.raises(OSError), open("/dev/shm/full", "wb") as file:  # the control: it really is too small
        os.posix_fallocate(file.fileno(), 0, 8 * 2**20)
    tensors = [torch.ones(2**21), shared_empty(2**21).fill_(1)]
    for tensor in tensors:
        dist.all_reduce(tensor)
    return float(sum(tensor.sum().item() for tensor in tensors)) / 2**22


def why_no_mounts() -> str | None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "a /dev/shm of its own needs root and unshare"
    probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False, timeout=30)
    return None if probe.returncode == 0 else "no mount namespaces here"


def test_works_with_a_full_dev_shm() -> None:
    if reason := why_no_mounts():
        pytest.skip(reason)
    program = (
        "from tests.ranks import run_ranks\n"
        "from tests.collectives.shared_memory.test_memory import all_reduce_8_mib\n"
        "print(run_ranks(all_reduce_8_mib, 2, fresh=True))\n"
    )
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$0" -c "$1"'
    found = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, sys.executable, program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert found.stdout.strip() == "[2.0, 2.0]", found.stdout + found.stderr


# Leaks.


def counts() -> dict[str, int]:
    maps = Path("/proc/self/maps").read_text()
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return {
        "fds": len(names),
        "memfds": sum("imece-segment" in name for name in names),
        "maps": maps.count("memfd:imece-segment"),
    }


def settled() -> dict[str, int]:
    """Counts at a moment when all ranks have let go: any collective tells what was freed meanwhile."""
    tensor = shared_empty(50_000).fill_(1)
    dist.all_reduce(tensor)
    dist.barrier()
    found = counts()
    dist.barrier()
    return found


def make_and_drop() -> list[dict[str, int]]:
    seen = []
    for _ in range(2):  # what the first round leaves may be caches; the second must add nothing
        for at in range(20):
            use_a_group(used=at % 2 == 1)
        seen.append(settled())
    for given_back in (False, True):
        if given_back:
            arena._SPARE_BYTES = 0
        before = arena.ARENAS.freed
        for at in range(25):
            use_a_tensor(at)
        assert (arena.ARENAS.freed - before > 5) == given_back, arena.ARENAS.freed - before
        seen.append(settled())
    return seen


def use_a_tensor(number: int) -> None:
    """Made, used and dropped: the next one may lie at the same place, or in another arena there."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = shared_empty(100_000).fill_(rank + number)
    dist.all_reduce(tensor)
    assert tensor.eq(size * number + size * (size - 1) / 2).all()
    dist.broadcast(tensor, src=size - 1)
    pass_on(tensor, shared_empty(100_000), dist.group.WORLD)


def use_a_group(used: bool) -> None:
    """Made, used or not, and destroyed at once: a rank may be gone from it before others have joined."""
    group = dist.new_group(backend="shm")
    if used:
        tensor = torch.ones(200_000)
        dist.all_reduce(tensor, group=group, async_op=True)
        dist.barrier(group=group)
        pass_on(tensor, torch.zeros(200_000), group)
    dist.destroy_process_group(group)


def groups_beyond_the_soft_limit() -> None:
    """More files than a shell gives its programs, where the system admits them."""
    used = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for _ in range(3):
        use_a_group(used=True)


def test_groups_beyond_the_soft_limit_of_open_files() -> None:
    run_ranks(groups_beyond_the_soft_limit, 3, backend="shm")


def slots_bytes(group: Any) -> int:
    """What this rank's segment of a group takes."""
    board = group._engine.board
    return os.fstat(board._segments[board.rank].fd).st_blocks * 512


def give_back_after_use() -> tuple[int, int, int]:
    """Bytes after large calls, after all that was used is given back, and after a model was wrapped."""
    group: Any = dist.group.WORLD
    tensor = torch.arange(8 * 2**20, dtype=torch.float32)
    for _ in range(2):
        expected = tensor.clone() * dist.get_world_size()
        imece.all_reduce(tensor)
        used = slots_bytes(group)
        group.give_back()
        given_back = slots_bytes(group)
        assert torch.equal(tensor, expected), "what comes after it is right too"
    model = nn.Linear(2048, 2048)
    ones = torch.ones_like(model.weight)
    nn.init.constant_(model.weight, 1.0 if group.rank() == 0 else 0.0)
    imece.DistributedDataParallel(model, process_group=group)
    assert torch.equal(model.weight, ones)
    return used, given_back, slots_bytes(group)


def test_what_large_calls_used_is_given_back() -> None:
    for used, given_back, with_model in run_ranks(give_back_after_use, 2):
        assert used >= 4 * 2**20
        assert given_back < 2**20, f"{given_back} bytes are kept"
        assert with_model < 2**20, f"{with_model} bytes are kept from the broadcast of a model"


def pass_on(tensor: torch.Tensor, room: torch.Tensor, group: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    calls = [
        dist.P2POp(dist.isend, tensor, (rank + 1) % size, group),
        dist.P2POp(dist.irecv, room, (rank - 1) % size, group),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()


def test_groups_and_tensors_that_come_and_go_leave_nothing() -> None:
    results: list[Any] = run_ranks(make_and_drop, 3, timeout_s=200)
    for rank, (first, second, kept, given_back) in enumerate(results):
        # One board and one arena of its own and of both others. Each mapping holds a descriptor (Python's
        # mmap does), the own ones another by which the others open them.
        assert first["maps"] <= 6 and first["memfds"] <= 8, (rank, first)
        assert second == first, (rank, first, second)
        assert kept == first, (rank, first, kept)
        assert given_back == first, (rank, first, given_back)
