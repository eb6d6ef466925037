"""What the trainer's tests share: one deterministic torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nstrain.train.determinism import enter_deterministic_mode


@pytest.fixture(autouse=True, scope="session")
def _deterministic() -> None:
    enter_deterministic_mode(threads=2)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    yield
    torch.set_num_threads(2)
