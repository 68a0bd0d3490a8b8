"""Where the documents of a row of tokens begin: as far back as attention sees if each is read as if alone."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def begins_of(starts: Iterable[int], length: int) -> npt.NDArray[np.int64]:
    """For each of a row's places, [length], the last of the ascending `starts` up to it, or 0.

    starts: of documents, of which those in front of the row and behind it do not matter.
    """
    begins = np.zeros(length, np.int64)
    for start in starts:
        if start > 0:
            begins[start:] = start
    return begins
