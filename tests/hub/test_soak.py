"""A short soak; long ones are `python tests/hub_soak.py --seed S --faults N`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from fake_hub import FakeHub


@pytest.mark.parametrize(
    ("seed", "faults", "kills"),
    [pytest.param(7, 3, 1), *(pytest.param(seed, 300, 4, marks=pytest.mark.slow) for seed in (20, 21))],
)
def test_soak(hub: FakeHub, tmp_path: Path, seed: int, faults: int, kills: int) -> None:
    spec = importlib.util.spec_from_file_location("hub_soak", Path(__file__).parents[1] / "hub_soak.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hub_soak"] = module
    spec.loader.exec_module(module)
    found = module.soak(tmp_path, hub, seed, faults, kills, everything=False)
    assert found["same"], found
    assert found["kills"] > 0
    assert sum(found["faults"].values()) == faults
