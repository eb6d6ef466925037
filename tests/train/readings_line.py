"""A tiny NeuronSpark line with every kind of reading: long rows, a moving average, a memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from real_line import StopAfter, make_run

from nstrain.base.errors import ExitCode
from nstrain.data.line import DataLine
from nstrain.line.paths import LinePaths
from nstrain.settings.run import RunSettings
from nstrain.train import opening
from nstrain.train.engine import EagerEngine
from nstrain.train.graphs import GraphEngine
from nstrain.train.model import TrainableModel

HELD_BYTES = 3 << 30
ROW_TOKENS, LONG_TOKENS = 16, 32
CONFIG: dict[str, Any] = {
    "vocab_size": 384,
    "width": 32,
    "layers": "DHH",
    "rope_max_seq_len": 64,
    "ffn_width": 48,
    "dendritic_head_width": 16,
    "state_width": 8,
    "pool_head_width": 16,
    "trace_width": 8,
    "match_width": 8,
    "memory_layers": [2],
    "memory_keys": 8,
    "memory_top_k": 3,
    "memory_heads": 2,
    "memory_query_width": 16,
    "memory_value_width": 12,
}
FIELDS: dict[str, Any] = {
    "model": {"preset": "tiny-32k", "config": CONFIG},
    "tokens_per_update": 10 * ROW_TOKENS,
    "rows": [{"from_cycle": 1, "row_tokens": ROW_TOKENS}],
    "lengths": {"16": {"micro_rows": 4}},
    "ema": {"horizon_tokens": 640, "from_tokens": 320},
    "validation": {"every_updates": 4, "rows_per_source": 3, "long_rows_per_source": 3},
}


def make_readings_line(root: Path, data: DataLine, **changes: Any) -> LinePaths:
    """A line that has not started; `changes` replace top-level fields of run.json."""
    return make_run(root, data, **(FIELDS | changes))


def train(paths: LinePaths, stop_after: int) -> ExitCode:
    """Train in this process, with the real model, until an update is done.

    Without the lease of a GPU: a process keeps it for life, and these train several lines. And without the rest of its
    memory: other tests run there beside it.
    """
    stop = StopAfter(paths, stop_after)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "make_engine", make_small_engine)
        with opening.opened_trainer(paths, stop, lambda settings: None) as trainer:
            stop.trainer = trainer
            return trainer.run()


def make_small_engine(model: TrainableModel, settings: RunSettings) -> EagerEngine:
    """As the trainer's, but for how much of a GPU it holds."""
    if settings.device == "cpu":
        return really_make_engine(model, settings)
    return GraphEngine(model, settings.optimizer, HELD_BYTES, with_ema=settings.ema is not None)


really_make_engine = opening.make_engine
