"""A fake hub for every test; the hub's library reads its address when it is imported, so one server serves them all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub

from nstrain.data.hub import patience

sys.path.append(str(Path(__file__).parents[1] / "data"))  # data_helpers

IMPATIENT = patience.Patience(
    connect_s=1.0,
    read_s=0.5,
    stall_s=1.0,
    stall_bytes=1000,
    page_s=2.0,
    first_wait_s=0.02,
    longest_wait_s=0.1,
    parallel_files=4,
    reserve_bytes=0,
)


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    with FakeHub(page_entries=100, stall_s=5.0) as hub:
        os.environ.update(HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path_factory.mktemp("hf")), NO_PROXY="*")
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_DOWNLOAD_TIMEOUT"):
            os.environ.pop(name, None)
        from huggingface_hub import constants

        assert hub.endpoint == constants.ENDPOINT, "huggingface_hub was imported before the tests of the hub began"
        yield hub


@pytest.fixture
def hub(_server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """An empty hub without faults, and little patience with it."""
    _server.empty()
    monkeypatch.setattr(patience, "PATIENCE", IMPATIENT)
    return _server


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.json of a byte-level BPE; id 1 is `</s>`."""
    from data_helpers import train_tokenizer

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_tokenizer())
    return path


@pytest.fixture(autouse=True)
def no_power_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync guards against power cuts alone, which no test makes; without it these tests take a third of the time."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory of downloads."""
    return tmp_path / "downloads"
