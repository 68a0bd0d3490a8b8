from __future__ import annotations

import pytest

from imece.data.bpe import train_bpe
from imece.data.corpus import Source
from imece.data.tokenizer import Tokenizer
from tests.data.helpers import write_functions


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_bpe([Source(write_functions(tmp_path_factory.mktemp("bpe")))], vocab_size=300)
