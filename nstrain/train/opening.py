"""Opening a training line for training: lock, settings, data, model, and the checkpoint to go on from.

Everything that can be refused is refused here, before a row is recorded or a checkpoint is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from nstrain.base.disk import FileLock
from nstrain.base.errors import Refusal
from nstrain.data.line import DataLine
from nstrain.data.order import refuse_row_length
from nstrain.data.val import ValidationRows
from nstrain.line.checkpoint import (
    discard_partial_writes,
    load_checkpoint,
    newest_good,
    refuse_lost_checkpoints,
)
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import Heartbeat, read_heartbeat, write_heartbeat
from nstrain.record.journal import Journal
from nstrain.settings.run import METRICS_VERSION, RunSettings, load_run
from nstrain.train.checkpointing import (
    FIRST_GENERATION,
    LineState,
    changed_libraries,
    refuse_other_line,
    refuse_other_manifest,
    restore,
)
from nstrain.train.determinism import enter_deterministic_mode
from nstrain.train.engine import EagerEngine
from nstrain.train.loop import Trainer
from nstrain.train.model import TrainableModel, build, refuse_long_rows
from nstrain.train.plan import Position
from nstrain.train.stopping import StopRequests

ORPHAN_WAIT_S = 60.0
"""How long a trainer waits for one that another supervisor left behind to save and leave."""


@contextlib.contextmanager
def opened_trainer(paths: LinePaths, stop: StopRequests) -> Iterator[Trainer]:
    """The line's trainer, ready to run, holding the line's lock and its journal.

    Raises `Refusal` for settings, data or checkpoints that do not belong together, and `NstrainError` if another
    trainer holds the line for longer than ORPHAN_WAIT_S.
    """
    settings = load_run(paths.run_json)
    lock = FileLock(paths.trainer_lock)

    def tell(pid: int | None) -> None:
        print(f"waiting up to {ORPHAN_WAIT_S:.0f} s for trainer {pid} of this line to end", flush=True)

    with lock.acquire(f"the trainer of {paths.root}", ORPHAN_WAIT_S, tell):
        _show_start(paths)
        enter_deterministic_mode(settings.threads)
        data = DataLine.open(Path(settings.data.work))
        refuse_unfit_settings(settings, data)
        with Journal.open(paths.journal, METRICS_VERSION) as journal:
            trainer, newest = _make_trainer(paths, settings, data, journal, stop)
            try:
                if newest is None:
                    trainer.start()
                else:
                    trainer.resume(newest)
                yield trainer
            finally:
                trainer.close()


def _show_start(paths: LinePaths) -> None:
    """The first heartbeat of this process: it starts, from where the last one was seen."""
    seen = read_heartbeat(paths) or Heartbeat(0.0, 0, "starting", 0, 0)
    now = dataclasses.replace(seen, time=time.time(), pid=os.getpid(), stage="starting")
    write_heartbeat(paths, dataclasses.replace(now, waiting_for=None, waiting_since=None))


def refuse_unfit_settings(settings: RunSettings, data: DataLine) -> None:
    """Raise `Refusal` for what run.json alone cannot know to be wrong: device, metrics, rows, held-out text."""
    if settings.metrics != METRICS_VERSION:
        raise Refusal(
            f"run.json: field 'metrics' is {settings.metrics}, this nstrain records version {METRICS_VERSION}; a line "
            "keeps its set of readings: go on with the nstrain that began it, or make a new line"
        )
    refuse_missing_device(settings)
    refuse_long_rows(settings)
    for piece in settings.rows:
        refuse_row_length(piece.row_tokens, data.unit_tokens)
        ValidationRows.open(data, piece.row_tokens, settings.validation.rows_per_source)


def refuse_missing_device(settings: RunSettings) -> None:
    """Raise `Refusal` if run.json names a device that this machine does not have; occupies none."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise Refusal("run.json: field 'device' is 'cuda', but torch finds no CUDA device here")


def make_engine(model: TrainableModel, settings: RunSettings) -> EagerEngine:
    """The engine of run.json's device: graphs on a GPU, eager on a CPU."""
    if settings.device == "cuda":
        from nstrain.train.graphs import GraphEngine

        return GraphEngine(model, settings.optimizer)
    return EagerEngine(model, settings.optimizer)


def _make_trainer(
    paths: LinePaths, settings: RunSettings, data: DataLine, journal: Journal, stop: StopRequests
) -> tuple[Trainer, Path | None]:
    """The trainer and the checkpoint it goes on from; None for a line that has not begun."""
    for line in discard_partial_writes(paths):
        print(line, flush=True)
    newest = newest_good(paths, warn=lambda message: print(message, flush=True))
    refuse_lost_checkpoints(paths, newest, journal.last_update())
    checkpoint = None if newest is None else load_checkpoint(newest)
    state = LineState(Position(0, 1, 0), 0, FIRST_GENERATION, None)
    if checkpoint is not None:
        state = LineState.from_json(checkpoint.state)
        refuse_other_line(checkpoint.state, settings, str(newest))
        refuse_other_manifest(state, data)
        for change in changed_libraries(checkpoint.state):
            print(f"the line's libraries changed, its bits may: {change}", flush=True)
    model = build(settings.model, data.vocab_size, settings.device, settings.seed)
    engine = make_engine(model, settings)
    print(f"{engine.flat.elements:,} parameters on {settings.device}, {settings.threads} threads", flush=True)
    if checkpoint is not None and newest is not None:
        restore(engine, checkpoint, str(newest))
        print(f"going on from {newest.name}: cycle {state.position.cycle}, row {state.position.row}", flush=True)
    return Trainer(paths, settings, data, engine, journal, stop, state), newest
