"""The soak of tests/soak.py, short; by hand it is run with 200 faults and fresh seeds."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import soak


def test_three_random_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSTRAIN_HOST", "")  # restored at the end
    soak.soak(11, 3, tmp_path)


def test_a_seed_is_a_row_of_faults() -> None:
    import random

    draws = [[soak.draw_fault(random.Random(seed)) for _ in range(3)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
