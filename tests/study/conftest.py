"""The study's tests: its arms at a toy size on the CPU, on data made here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
for directory in (ROOT, ROOT / "benchmarks" / "models"):
    if str(directory) not in sys.path:
        sys.path.append(str(directory))

from benchmarks.study.data import Held, StudyData, read_data, write_data  # noqa: E402

PERIOD = 40
"""The toy text repeats after so many tokens, so that a few updates lower its loss."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def data_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of repeating text: 4 updates of 8 rows of 32 tokens."""
    text = np.tile(np.random.default_rng(0).integers(1, 128, PERIOD), 30).astype(np.uint16)
    rows = np.stack([text[32 * row : 32 * row + 33] for row in range(4)])
    held = [Held("python", rows), Held("formal", rows[:2]), Held("long-64", np.stack([text[:65]] * 2))]
    directory = tmp_path_factory.mktemp("data")
    write_data(
        directory, '{"model": {"vocab": {"a": 0, "b": 1}}}', text[: 32 * 8 * 4 + 1], held, {"made of": "a period"}
    )
    return directory


@pytest.fixture(scope="session")
def data(data_directory: Path) -> StudyData:
    """The same, read."""
    return read_data(data_directory)
