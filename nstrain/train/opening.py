"""Opening a training line for training: lock, settings, data, model, and the checkpoint to go on from.

Everything that can be refused is refused here, before a row is recorded or a checkpoint is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from nstrain.base.disk import FileLock, atomic_write
from nstrain.base.errors import Refusal
from nstrain.data.line import DataLine
from nstrain.data.order import refuse_row_length
from nstrain.data.val import ValidationRows, held_out_digest
from nstrain.gpu.held import HeldGpu
from nstrain.gpu.lease import this_gpu
from nstrain.gpu.readings import GpuSource, gpu_of
from nstrain.line.abandoned import refuse_abandoned
from nstrain.line.checkpoint import (
    discard_partial_writes,
    load_newest_good,
    read_latest,
    refuse_lost_checkpoints,
    refuse_lost_rows,
)
from nstrain.line.paths import LinePaths
from nstrain.line.run_json import load_settings
from nstrain.line.state_files import Heartbeat, read_heartbeat, write_heartbeat
from nstrain.record.journal import Journal
from nstrain.record.journal_reader import FIRST_GENERATION
from nstrain.settings.changes import other_rows
from nstrain.settings.model import dump
from nstrain.settings.run import METRICS_VERSION, RunSettings
from nstrain.train.checkpointing import (
    LineState,
    changed_libraries,
    refuse_other_line,
    refuse_other_manifest,
    restore,
)
from nstrain.train.determinism import enter_deterministic_mode
from nstrain.train.device import refuse_missing_device
from nstrain.train.engine import EagerEngine
from nstrain.train.loop import Trainer
from nstrain.train.memory_errors import memory_told
from nstrain.train.model import TrainableModel, build, refuse_long_rows
from nstrain.train.plan import Position
from nstrain.train.stopping import StopRequests
from nstrain.train.tuned_kernels import use_line_kernels

ORPHAN_WAIT_S = 60.0
"""How long a trainer waits for one that another supervisor left behind to save and leave."""

LESS_MEMORY = "Free memory of the machine or its GPU, or raise the limit on it (`ulimit -v`, a container's)"
"""What to do if not even weights and moments fit."""


@contextlib.contextmanager
def opened_trainer(
    paths: LinePaths, stop: StopRequests, gpu: Callable[[RunSettings], GpuSource | None] = gpu_of
) -> Iterator[Trainer]:
    """The line's trainer, ready to run, holding the line's lock, its journal and its GPU; `gpu` says how that is read.

    Raises `Refusal` for settings, data or checkpoints that do not belong together, `GpuTaken` if somebody else is on
    the GPU, and `NstrainError` if another trainer holds the line for longer than ORPHAN_WAIT_S.
    """
    settings = load_settings(paths)
    lock = FileLock(paths.trainer_lock)

    def tell(pid: int | None) -> None:
        print(f"waiting up to {ORPHAN_WAIT_S:.0f} s for trainer {pid} of this line to end", flush=True)

    with lock.acquire(f"the trainer of {paths.root}", ORPHAN_WAIT_S, tell):
        _show_start(paths, settings.guards.start_s)
        enter_deterministic_mode(settings.threads)
        data = DataLine.open(Path(settings.data.work))
        refuse_unfit_settings(settings, data)
        held = _held_gpu(paths, settings, gpu(settings))
        with Journal.open(paths.journal, METRICS_VERSION) as journal:
            with memory_told("the line, as it was opened,", LESS_MEMORY):
                trainer, newest = _make_trainer(paths, settings, data, journal, stop, held)
            try:
                if newest is None:
                    trainer.start()
                else:
                    trainer.resume(newest)
                yield trainer
            finally:
                trainer.close()


def _held_gpu(paths: LinePaths, settings: RunSettings, source: GpuSource | None) -> HeldGpu | None:
    """The line's GPU, taken before anything touches it; None for a line on the CPU."""
    if source is None:
        return None
    held = HeldGpu.take(paths.root, source, settings.guards.gpu_check_every, _reserved_bytes)
    print(f"{held.uuid} is leased", flush=True)
    if settings.device == "cuda":
        held.confirm(this_gpu())
    return held


def _reserved_bytes() -> int:
    """Memory that this process holds on the GPU."""
    return torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0


def _show_start(paths: LinePaths, budget_s: float) -> None:
    """The first heartbeat of this process: it starts, from where the last one was seen."""
    seen = read_heartbeat(paths) or Heartbeat(0.0, 0, "starting", 0, 0)
    now = dataclasses.replace(seen, time=time.time(), pid=os.getpid(), stage="starting", budget_s=budget_s)
    write_heartbeat(paths, dataclasses.replace(now, waiting_for=None, waiting_since=None, gpu_others=None))


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


def make_engine(model: TrainableModel, settings: RunSettings) -> EagerEngine:
    """The engine of run.json's device: graphs on a GPU, eager on a CPU."""
    if settings.device == "cuda":
        from nstrain.train.graphs import GraphEngine

        return GraphEngine(model, settings.optimizer, with_ema=settings.ema is not None)
    return EagerEngine(model, settings.optimizer, with_ema=settings.ema is not None)


def _make_trainer(
    paths: LinePaths,
    settings: RunSettings,
    data: DataLine,
    journal: Journal,
    stop: StopRequests,
    gpu: HeldGpu | None,
) -> tuple[Trainer, Path | None]:
    """The trainer and the checkpoint it goes on from; None for a line that has not begun."""
    for line in discard_partial_writes(paths):
        print(line, flush=True)
    found = load_newest_good(paths, warn=lambda message: print(message, flush=True))
    newest, checkpoint = found or (None, None)
    refuse_lost_checkpoints(paths, newest, journal.last_update())
    refuse_lost_rows(paths, newest, journal.last_update())
    held_out = held_out_digest(data)
    state = LineState(Position(0, 1, 0), 0, FIRST_GENERATION, None, held_out=held_out)
    edited = True  # before its first checkpoint a line may be edited as one likes, though update 0 may be recorded
    if checkpoint is not None:
        refuse_abandoned(paths, checkpoint.state, journal.generation_at)
        state = LineState.from_json(checkpoint.state)
        before = state.changes
        changes = refuse_other_line(checkpoint.state, settings, str(newest), held_out)
        made = changes.applied[len(before.applied) :]
        for change in made:
            print(f"changed on purpose after update {change.update}: {change.describe()}", flush=True)
        edited = other_rows(checkpoint.state["settings"], dump(settings), made)
        state = dataclasses.replace(state, changes=changes, held_out=held_out)
        refuse_other_manifest(state, data)
        for difference in changed_libraries(checkpoint.state, settings.device):
            print(f"what the line is computed with has changed, its bits may: {difference}", flush=True)
    else:
        use_line_kernels(paths, None)
    # A checkpoint replaces every value: drawing two billion first takes longer than loading them.
    seed = settings.seed if checkpoint is None else None
    model = build(settings.model, data.vocab_size, settings.device, seed)
    engine = make_engine(model, settings)
    print(f"{engine.flat.elements:,} parameters on {settings.device}, {settings.threads} threads", flush=True)
    if checkpoint is not None and newest is not None:
        restore(engine, checkpoint, str(newest), None if settings.ema is None else settings.ema.from_tokens)
        print(f"going on from {newest.name}: cycle {state.position.cycle}, row {state.position.row}", flush=True)
        if read_latest(paths) is None and not paths.latest.is_dir():  # a line at its end writes no checkpoint any more
            atomic_write(paths.latest, newest.name + "\n")
    return Trainer(paths, settings, data, engine, journal, stop, state, gpu, edited), newest
