"""A run.json to vary."""

from __future__ import annotations

import copy
from typing import Any

from nstrain.settings.model import validate
from nstrain.settings.run import RunSettings

BASE: dict[str, Any] = {
    "id": "a1",
    "data": {"work": "/work"},
    "model": {"preset": "tiny", "config": {"layers": 2}},
    "seed": 1,
    "threads": 1,
    "device": "cpu",
    "tokens_per_update": 1024,
    "rows": [{"from_cycle": 1, "row_tokens": 256}],
    "lengths": {"256": {"micro_rows": 2}, "512": {"micro_rows": 1}},
    "learning_rate": [{"from": 0, "shape": "constant", "start": 0.001}],
    "optimizer": {"clip_norm": 1.0},
    "validation": {"every_updates": 10, "rows_per_source": 2},
    "checkpoints": {},
}
RATES = [
    {"from": 0, "to": 100, "shape": "linear", "start": 0.0, "end": 0.01},
    {"from": 100, "shape": "constant", "start": 0.01},
    {"from": 900, "to": 1000, "shape": "cosine", "start": 0.01, "end": 0.001},
]
RAMP = [{"from": 0, "to": 10_240, "tokens": 1024}, {"from": 10_240, "to": None, "tokens": 2048}]


def changed(*place: Any, to: Any) -> dict[str, Any]:
    """The base with the value at a place replaced."""
    value = copy.deepcopy(BASE)
    inner = value
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = to
    return value


def settings(value: dict[str, Any] | None = None) -> RunSettings:
    return validate(RunSettings, value or BASE, "run.json")
