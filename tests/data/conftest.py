"""One small tokenizer with MiniCPM5's added tokens for every test of the data line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from data_helpers import rows_of, train_tokenizer

from nstrain.data.sources import PinnedFile, SourceSettings


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
    from nstrain.data import opened, readers, val

    def read(source: SourceSettings, file: PinnedFile) -> Iterator[str | None]:
        for text in readers.read_documents(source, file):
            yield from [None] if text is None else [row or None for row in rows_of(text)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opened, "read_documents", read)
        patch.setattr(val, "read_documents", read)
        yield
