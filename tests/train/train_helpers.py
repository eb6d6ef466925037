"""Settings, rows and comparisons that the trainer's tests start from."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rate_pieces import rate_pieces

from nstrain.settings.model import validate
from nstrain.settings.run import OptimizerSettings, RunSettings


def run_settings(**changes: Any) -> RunSettings:
    """Settings of a small line; `changes` replace top-level fields of run.json."""
    fields: dict[str, Any] = {
        "id": "line-1",
        "data": {"work": "/nowhere"},
        "model": {"preset": "tiny", "config": {}},
        "seed": 1,
        "threads": 2,
        "device": "cpu",
        "tokens_per_update": 64,
        "rows": [{"from_cycle": 1, "row_tokens": 8}],
        "lengths": {"8": {"micro_rows": 3}},
        "learning_rate": rate_pieces(1e-2, 256),
        "optimizer": {"clip_norm": 1.0},
        "validation": {"every_updates": 5, "rows_per_source": 2},
        "checkpoints": {"every_updates": 4, "every_minutes": None},
    }
    return validate(RunSettings, fields | changes, "run.json")


def optimizer_settings(**changes: Any) -> OptimizerSettings:
    """AdamW's settings; `changes` replace fields."""
    return validate(OptimizerSettings, {"clip_norm": 1.0} | changes, "optimizer")


def random_rows(rows: int, row_tokens: int = 8, vocab_size: int = 64, seed: int = 0) -> npt.NDArray[np.int64]:
    """Rows of token ids, [rows, row_tokens + 1]."""
    return np.random.default_rng(seed).integers(0, vocab_size, size=(rows, row_tokens + 1), dtype=np.int64)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fp32 tensors hold the same bytes (NaN equals itself, -0 differs from 0)."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
