"""The baselines are no installed package: host.json names their directory, and here the path does.

Tests run on one thread: small products gain nothing from more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
for directory in (TESTS / "train", TESTS.parent / "benchmarks" / "models"):
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
