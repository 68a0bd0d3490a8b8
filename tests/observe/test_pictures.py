"""Pictures are written whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import IO, Any

import pytest

from imece.observe.pictures import save


class _FullDisk:
    """A figure that is too large for the disk."""

    def savefig(self, to: Path | IO[bytes], **_: Any) -> None:
        with to.open("wb") if isinstance(to, Path) else to as file:
            file.write(b"\x89PNG")
            file.flush()
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_no_part_of_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    with pytest.raises(OSError, match="No space left"):
        save(_FullDisk(), picture)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
