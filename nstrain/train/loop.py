"""The trainer's loop over updates, and the order of what happens in one:

    rows -> forward and backward, norm, AdamW or the skip -> validation if due
         -> its row committed to the journal -> checkpoint if due, written in the background

So the journal is never behind a checkpoint, and a kill at any instant costs the updates since the newest one: they
are trained again from there, to the same bits, and each is compared with its row. Requests to stop are looked at
between two updates and while waiting for data.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nstrain.base.errors import ExitCode, NstrainError
from nstrain.base.killpoints import kill_point
from nstrain.data.consumers import write_consumer
from nstrain.data.line import DataLine
from nstrain.data.rows import CycleRows
from nstrain.data.val import ValidationRow, ValidationRows
from nstrain.line.checkpoint import BackgroundWriter
from nstrain.line.paths import LinePaths
from nstrain.line.retention import apply_retention
from nstrain.line.state_files import Heartbeat, Stage, write_heartbeat
from nstrain.record.journal import Journal
from nstrain.settings.run import RunSettings
from nstrain.train.checkpointing import CycleOrder, LineState, make_checkpoint, refuse_other_order
from nstrain.train.engine import Engine, UpdateReadings, train_update
from nstrain.train.feed import RowFeed
from nstrain.train.plan import Update, plan_update
from nstrain.train.readings import Rates, Row, printed, start_row, update_row
from nstrain.train.schedule import learning_rate, weight_decay
from nstrain.train.stopping import StopRequests
from nstrain.train.validation import validate

DATA_POLL_S = 0.5
"""How often a trainer that waits for a cycle looks for it."""


@dataclasses.dataclass
class _OpenCycle:
    """The cycle that rows are taken from."""

    rows: CycleRows
    feed: RowFeed
    order: CycleOrder


class Trainer:
    """A line being trained. Owns its state between updates, the open cycle, the checkpoint writer and the heartbeat."""

    def __init__(
        self,
        paths: LinePaths,
        settings: RunSettings,
        data: DataLine,
        engine: Engine,
        journal: Journal,
        stop: StopRequests,
        state: LineState,
    ) -> None:
        """`state` is where the line stands and `engine` holds what belongs to it."""
        self.paths, self.settings, self.data = paths, settings, data
        self.engine, self.journal, self.stop = engine, journal, stop
        self.state = state
        self._cycle: _OpenCycle | None = None
        self._row_tokens = 0
        self._validation_rows: dict[int, tuple[ValidationRow, ...]] = {}
        self._writer = BackgroundWriter(paths, self._committed)
        self._newest_checkpoint: str | None = None
        self._saved_update: int | None = None
        self._saved_at = time.monotonic()
        self._launched_at = time.monotonic()
        self._launch_tokens = state.tokens
        self._heartbeat = Heartbeat(
            time.time(), os.getpid(), "starting", state.position.update, state.tokens, data.total_tokens
        )

    # ---- the two ways to begin -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a new line: the first validation as row 0, then the checkpoint of the line's start, durable."""
        self._set_length(self.settings.row_tokens_at(1))
        row = start_row(1, self._row_tokens)
        self._commit(0, row | self._validate(1))
        self._checkpoint("start")
        # Update 1 is recorded only after this one is on disk: a journal beyond 0 proves that checkpoints were lost.
        self._writer.wait()

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, which the engine holds already."""
        self._saved_update = self.state.position.update
        self._newest_checkpoint = checkpoint.name
        # Killed between a commit and this entry, the last launch left it one checkpoint behind.
        self._write_consumer(self.state.position.cycle, self.state.position.row, self.state.tokens)

    # ---- the loop --------------------------------------------------------------------------------------------------

    def run(self) -> ExitCode:
        """Train until the schedule is done or somebody asks to stop.

        Raises `NstrainError` for what ends a line early: too many skipped updates, a checkpoint that cannot be
        written, a data line that is not what it was.
        """
        while not self._finished():
            self._writer.poll()
            if self.stop.reason() is not None:
                return self._leave_early()
            self._refuse_endless_skips()
            cycle = self._open_cycle()
            if cycle is None:
                return self._leave_early()
            self._train_one(cycle)
        return self._leave(ExitCode.DONE, "done")

    def close(self) -> None:
        """End the threads; only then may the line's lock be given back. Never raises a writer's error: it prints it."""
        self._close_cycle()
        try:
            self._writer.wait()
        except Exception as error:
            print(f"the checkpoint that was being written is lost: {error}", flush=True)

    def _finished(self) -> bool:
        count = self.data.cycle_count
        if count is not None and self.state.position.cycle > count:
            self.data = DataLine.open(self.data.work)  # the schedule may have grown
            count = self.data.cycle_count
        return count is not None and self.state.position.cycle > count

    def _train_one(self, cycle: _OpenCycle) -> None:
        """One update and all that belongs to it."""
        plan = self.data.cycle_plan(self.state.position.cycle)
        update = plan_update(self.settings, plan, self.state.position)
        began = time.monotonic()
        rows = cycle.feed.take(update)
        if not update.ends_cycle:
            cycle.feed.expect(plan_update(self.settings, plan, update.position_after))
        rates = Rates(
            learning_rate(self.settings.learning_rate, update.tokens_after),
            weight_decay(self.settings.optimizer, update.batch_tokens),
        )
        readings = train_update(self.engine, rows, self._micro_rows, rates.learning_rate, rates.weight_decay)
        update_s = time.monotonic() - began
        self.state = LineState(update.position_after, update.tokens_after, self.state.generation, cycle.order)
        kill_point("train:update done")

        row = update_row(update, readings, rates, self._rows_by_source(cycle, update), update_s)
        self._note(update, readings, rates, row["perf/tokens_per_s"])
        ends_line = update.ends_cycle and self._is_last_cycle(update.cycle)
        # At every cycle's end, the schedule's included: what is validated must not depend on a later extension.
        if update.number % self.settings.validation.every_updates == 0 or update.ends_cycle:
            row |= self._validate(update.cycle)
        self._commit(update.number, row)
        kill_point("train:row committed")
        if reason := self._checkpoint_due(update, ends_line):
            self._checkpoint(reason)
        self.beat("training")
        if update.ends_cycle:
            self._close_cycle()

    def _rows_by_source(self, cycle: _OpenCycle, update: Update) -> dict[str, int]:
        names = self.data.source_names
        counts = np.bincount(cycle.rows.sources_of(update.first_row, update.last_row), minlength=len(names))
        return {name: int(count) for name, count in zip(names, counts, strict=True)}

    def _refuse_endless_skips(self) -> None:
        skips, limit = self.engine.counts.consecutive_skips, self.settings.guards.max_consecutive_skips
        if skips >= limit:
            self._checkpoint_here("rolling")
            raise NstrainError(
                f"{skips} updates in a row were skipped because their gradient norm is not finite "
                f"(guards.max_consecutive_skips is {limit}); the weights are as they were before the first of them. Go "
                "back to an earlier checkpoint, or raise the limit in run.json to go on past them"
            )

    # ---- data ------------------------------------------------------------------------------------------------------

    def _open_cycle(self) -> _OpenCycle | None:
        """The cycle of the next row, waiting for it if it is not prepared; None if asked to stop meanwhile."""
        number = self.state.position.cycle
        if self._cycle is not None:
            return self._cycle
        self._set_length(self.settings.row_tokens_at(number))
        if not self._wait_for_cycle(number):
            return None
        rows = CycleRows.open(self.data, number, self._row_tokens)
        order = CycleOrder(number, self._row_tokens, rows.manifest_sha256, rows.order_digest)
        refuse_other_order(self.state, order, str(self.data.work))
        self._cycle = _OpenCycle(rows, RowFeed(rows), order)
        self.beat("training")
        return self._cycle

    def _wait_for_cycle(self, number: int) -> bool:
        """Wait, visibly, until a cycle is ready; False if asked to stop before it is."""
        if self.data.is_ready(number):
            return True
        what, since = f"cycle {number} of {self.data.work}", time.time()
        print(f"waiting for {what} to be prepared", flush=True)
        while not self.data.is_ready(number):
            self.beat("waiting_data", waiting_for=what, waiting_since=since)
            self._writer.poll()
            if self.stop.wait(DATA_POLL_S):
                return False
        print(f"{what} is ready after {time.time() - since:.1f} s", flush=True)
        return True

    def _close_cycle(self) -> None:
        if self._cycle is not None:
            self._cycle.feed.close()
            self._cycle = None

    def _set_length(self, row_tokens: int) -> None:
        if row_tokens != self._row_tokens:
            self._row_tokens = row_tokens
            self.engine.set_length(self.settings.lengths[str(row_tokens)])

    @property
    def _micro_rows(self) -> int:
        return self.settings.lengths[str(self._row_tokens)].micro_rows

    def _is_last_cycle(self, cycle: int) -> bool:
        """Whether the schedule, as it is on disk now, ends with this cycle."""
        if self.data.cycle_count == cycle:
            self.data = DataLine.open(self.data.work)
        return self.data.cycle_count == cycle

    # ---- validation, journal, checkpoints --------------------------------------------------------------------------

    def _validate(self, cycle: int) -> Row:
        """Validate at the present row length; the mix is weighted by the recipe of the cycle just trained."""
        self.beat("validating")
        began = time.monotonic()
        if self._row_tokens not in self._validation_rows:
            wanted = self.settings.validation.rows_per_source
            self._validation_rows[self._row_tokens] = ValidationRows.open(self.data, self._row_tokens, wanted).rows
        plan = self.data.cycle_plan(cycle)
        recipe = dict(zip(plan.sources, plan.shares, strict=True))
        readings = validate(self.engine, self._validation_rows[self._row_tokens], self._micro_rows, recipe)
        return readings | {"time/validation_s": time.monotonic() - began}

    def _commit(self, update: int, row: Row) -> None:
        """Record an update; one that was recorded before is compared with its row."""
        row["time/wall"] = time.time()
        found = self.journal.commit(self.state.generation, update, row)
        if found == "different":
            print(f"u{update}: differs from the row recorded before; both are kept (see `nstrain status`)", flush=True)
        validated = any(name.startswith("val_") for name in row)
        if validated or update % self.settings.print_every == 0 or row["skipped"] or row["smaller"]:
            print(printed(update, row), flush=True)

    def _checkpoint_due(self, update: Update, ends_line: bool) -> str | None:
        """Why to save after an update, or None."""
        if ends_line:
            return "end"
        if update.ends_cycle:
            following = self.settings.row_tokens_at(update.cycle + 1)
            return "cycle_end" if following == update.row_tokens else "length_change"
        every = self.settings.checkpoints
        by_count = every.every_updates is not None and update.number % every.every_updates == 0
        by_time = every.every_minutes is not None and time.monotonic() - self._saved_at >= 60 * every.every_minutes
        return "rolling" if by_count or by_time else None

    def _checkpoint(self, reason: str) -> None:
        """Copy the state to the host and have it written in the background (after a write that is under way)."""
        self.beat("saving")
        self._writer.wait()
        self._writer.submit(make_checkpoint(self.engine, self.settings, self.state, reason))
        self._saved_update, self._saved_at = self.state.position.update, time.monotonic()

    def _checkpoint_here(self, reason: str) -> None:
        """Have the present state on disk when this returns."""
        if self._saved_update != self.state.position.update:
            self._checkpoint(reason)
        self._writer.wait()

    def _committed(self, path: Path, state: Mapping[str, Any]) -> None:
        """Runs in the writer's thread once a checkpoint is durable and `latest` names it."""
        self._write_consumer(state["position"]["cycle"], state["position"]["row"], state["tokens"])
        for name in apply_retention(self.paths, self.settings.checkpoints.keep_last):
            print(f"checkpoint {name} removed", flush=True)
        self._newest_checkpoint = path.name

    def _write_consumer(self, cycle: int, row: int, tokens: int) -> None:
        write_consumer(self.data.work, self.settings.id, cycle, row, tokens, self.paths.root)

    # ---- leaving, and being seen -----------------------------------------------------------------------------------

    def _leave_early(self) -> ExitCode:
        print(f"stopping: {self.stop.reason()}", flush=True)
        self._checkpoint_here("stop")
        return self._leave(ExitCode.STOPPED, "stopping")

    def _leave(self, code: ExitCode, stage: Stage) -> ExitCode:
        self._writer.wait()
        self.beat(stage)
        print(f"{code.name.lower()} at u{self.state.position.update}, {self.state.tokens:,} tokens", flush=True)
        return code

    def _note(self, update: Update, readings: UpdateReadings, rates: Rates, tokens_per_s: float) -> None:
        """Take an update's readings into the heartbeat."""
        cycle_tokens = self.data.cycle_plan(update.cycle).tokens
        elapsed = time.monotonic() - self._launched_at
        total = self.data.total_tokens
        speed = (update.tokens_after - self._launch_tokens) / elapsed
        self._heartbeat = dataclasses.replace(
            self._heartbeat,
            update=update.number,
            tokens=update.tokens_after,
            tokens_total=total,
            loss=readings.loss,
            tokens_per_s=tokens_per_s,
            learning_rate=rates.learning_rate,
            cycle=update.cycle,
            cycle_progress=update.last_row * update.row_tokens / cycle_tokens,
            eta_s=None if total is None else (total - update.tokens_after) / speed,
        )

    def beat(self, stage: Stage, waiting_for: str | None = None, waiting_since: float | None = None) -> None:
        """Write the heartbeat: what this process does now."""
        self._heartbeat = dataclasses.replace(
            self._heartbeat,
            time=time.time(),
            stage=stage,
            checkpoint=self._newest_checkpoint,
            waiting_for=waiting_for,
            waiting_since=waiting_since,
        )
        write_heartbeat(self.paths, self._heartbeat)
