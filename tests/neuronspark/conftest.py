"""Tests run on one thread: small products gain nothing from more.

Tests about threads have processes of their own; a second thread started here would keep this process from being set up
the way the trainer's tests need it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
