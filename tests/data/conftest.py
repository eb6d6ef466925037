"""One small tokenizer with MiniCPM5's added tokens for every test of the data line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_helpers import rows_of, train_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.json of a byte-level BPE; id 1 is `</s>`, `<think>` and `</think>` are special: false."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_tokenizer())
    return path


@pytest.fixture(autouse=True)
def no_power_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync guards against power cuts alone, which no test makes; without it these tests take a third of the time."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def many_rows() -> Iterator[None]:
    """Files of several documents, as later readers have them: rows end with a form feed; an empty one is rejected."""
    from nstrain.data.readers import Row, formats
    from nstrain.data.readers.rows import Position, read_text

    def read(path: Path, position: Position) -> Iterator[Row]:
        for row in read_text(path, position):
            yield from [row] if row.text is None else [Row(text or None, None) for text in rows_of(row.text)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "read_text", read)
        yield
