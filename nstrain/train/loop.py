"""The trainer's loop over updates, and the order of what happens in one:

    rows -> forward and backward, norm, AdamW or the skip -> validation if due
         -> its row committed to the journal -> checkpoint if due, written in the background

So the journal is never behind a checkpoint, and a kill at any instant costs the updates since the newest one: they
are trained again from there, to the same bits, and each is compared with its row. Requests to stop are looked at
between two updates and while waiting for data.

Neither rows nor checkpoints are committed that a damaged token file had a part in: while the cycle's files are still
being hashed (cycles.py) its rows are held back, and a checkpoint waits.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import numpy as np

from nstrain.base.errors import ExitCode, GpuTaken, NeedsOperator, Refusal
from nstrain.base.killpoints import kill_point
from nstrain.data.line import DataLine
from nstrain.gpu.held import HeldGpu
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import Heartbeat, Stage, write_heartbeat
from nstrain.record.alarms import LossWatch
from nstrain.record.journal import Journal
from nstrain.settings.run import RunSettings
from nstrain.train.alarming import Alarming
from nstrain.train.checkpointing import LineState, refuse_other_order
from nstrain.train.cycles import CycleAhead, OpenCycle
from nstrain.train.engine import Engine, TokenRows, UpdateReadings, train_update
from nstrain.train.memory_errors import OutOfMemory, memory_told
from nstrain.train.plan import Update, plan_update
from nstrain.train.readings import Rates, Row, start_row, update_row
from nstrain.train.run_log import printed, validation_lines
from nstrain.train.saving import Saver
from nstrain.train.schedule import ema_step, learning_rate, weight_decay
from nstrain.train.stopping import StopRequests
from nstrain.train.validation import Moment, Validation

DATA_POLL_S = 0.5
"""How often a trainer that waits for a cycle looks for it."""

VALIDATING_BEAT_S = 1.0
"""How often a long validation shows that it goes on."""

HASHING_BEAT_S = 1.0
"""How often a wait for the hashes of a cycle's files does; so long its first update waits for them, at most."""


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
        gpu: HeldGpu | None = None,
        edited: bool = False,
    ) -> None:
        """`state` is where the line stands, `engine` holds what belongs to it, `gpu` is the line's if it has one.

        `edited`: run.json is another than the checkpoint's; rows of updates that are trained again may differ.
        """
        self.paths, self.settings, self.data = paths, settings, data
        self.engine, self.journal, self.stop = engine, journal, stop
        self.state, self.gpu, self._edited = state, gpu, edited
        self._cycle: OpenCycle | None = None
        self._ahead = CycleAhead()
        self._row_tokens = 0
        self._captured: set[int] = set()
        """Row lengths at which this process has done an update: nothing is left to compile or to capture for them."""
        self._validation = Validation(engine, settings, data, self._still_validating)
        self._losses = LossWatch.at(journal, state.position.update)
        self._alarming = Alarming(paths, settings)
        self._problems: list[str] = []
        """What is to be told with the next row, beside what it shows."""
        self._held: list[tuple[int, Row, list[str]]] = []
        """Updates, their rows and what is to be told with them, that wait for the hashes of the cycle's files."""
        self._saver = Saver(paths, settings, data.work, engine, vouch=self._vouch)
        self._launched_at = time.monotonic()
        self._launch_tokens = state.tokens
        self._leaving = False
        """Whether the next checkpoint is the last of this process."""
        self._heartbeat = Heartbeat(
            time.time(), os.getpid(), "starting", state.position.update, state.tokens, data.total_tokens
        )
        self._beaten_at = time.monotonic()  # the heartbeat's own time is a clock's, which may be set back

    # ---- the two ways to begin -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a new line: the first validation as row 0, then the checkpoint of the line's start, durable."""
        self._saver.open(None, self.state)
        self._set_length(self.settings.row_tokens_at(1))
        row = start_row(1, self._row_tokens)
        self._commit(0, row | self._validate(self._moment(1, learning_rate(self.settings.learning_rate, 0))))
        # Update 1 is recorded only after this one is on disk: a journal beyond 0 proves that checkpoints were lost.
        self._save_now("start")

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, which the engine holds already."""
        self._saver.open(checkpoint, self.state)

    # ---- the loop --------------------------------------------------------------------------------------------------

    def run(self) -> ExitCode:
        """Train until the schedule is done or somebody asks to stop.

        Raises `NstrainError` for what ends a line early: too many skipped updates, a checkpoint that cannot be
        written, a data line that is not what it was.
        """
        while not self._finished():
            self._saver.poll()
            if self.stop.reason_at(self.state.position.cycle) is not None:
                return self._leave_early()
            self._yield_taken_gpu()
            self._refuse_endless_skips()
            self._saver.stop_on_full_disk(self.state)
            cycle = self._open_cycle()
            if cycle is None:
                return self._leave_early()
            self._train_one(cycle)
            self._look_ahead()
        return self._leave(ExitCode.DONE, "done")

    def close(self) -> None:
        """End the threads; only then may the line's lock be given back. Never raises a writer's error: it prints it."""
        self._close_cycle()
        self._ahead.close()
        self._saver.close()
        self._alarming.close()

    def _finished(self) -> bool:
        count = self.data.cycle_count
        if count is not None and self.state.position.cycle > count:
            self.data = DataLine.open(self.data.work)  # the schedule may have grown
            count = self.data.cycle_count
        return count is not None and self.state.position.cycle > count

    def _train_one(self, cycle: OpenCycle) -> None:
        """One update and all that belongs to it."""
        plan = self.data.cycle_plan(self.state.position.cycle)
        update = plan_update(self.settings, plan, self.state.position)
        began = time.monotonic()
        rows = cycle.feed.take(update)
        if not update.ends_cycle:
            cycle.feed.expect(plan_update(self.settings, plan, update.position_after))
        rates = Rates(
            learning_rate(self.settings.learning_rate, update.tokens_after),
            weight_decay(self.settings.optimizer, update.tokens),
        )
        self._warm_probes(update, rates)
        readings = self._trained(update, rows, rates)
        self._captured.add(self._row_tokens)
        update_s = time.monotonic() - began
        self.state = dataclasses.replace(
            self.state,
            position=update.position_after,
            tokens=update.tokens_after,
            order=cycle.order,
        )
        kill_point("train:update done")

        row = update_row(update, readings, rates, self._rows_by_source(cycle, update), update_s)
        row |= self._losses.read(row)
        self._note(update, readings, rates, row["perf/tokens_per_s"])
        ends_line = update.ends_cycle and self._is_last_cycle(update.cycle)
        # At every cycle's end, the schedule's included: what is validated must not depend on a later extension.
        if update.number % self.settings.validation.every_updates == 0 or update.ends_cycle:
            row |= self._validate(self._moment(update.cycle, rates.learning_rate))
        self._commit(update.number, row)
        kill_point("train:row committed")
        if reason := self._saver.due(update, ends_line):
            self.beat("saving")
            self._saver.save(self.state, reason)
        self.beat("training")
        if update.ends_cycle:
            self._close_cycle()

    def _trained(self, update: Update, rows: TokenRows, rates: Rates) -> UpdateReadings:
        """The update itself. One that does not find its memory leaves the state as it was, and that is saved.

        Unless it was being applied by then: such a state is that of no update.
        """
        what = f"update {update.number}, with micro-batches of {self._micro_rows} x {update.row_tokens:,} tokens,"
        ema = ema_step(self.settings.ema, update)
        try:
            with memory_told(what, self._less_memory()):
                return train_update(self.engine, rows, self._micro_rows, rates.learning_rate, rates.weight_decay, ema)
        except OutOfMemory:
            if self.engine.is_whole:
                self._save_now("stop")
            raise

    def _less_memory(self) -> str:
        """What to do if the present shape does not fit."""
        return (
            f"Set fewer micro_rows, or recompute more, in run.json's lengths['{self._row_tokens}']; `nstrain tune RUN` "
            "finds the fastest that fits (with --measure-only for a line that has trained)"
        )

    def _rows_by_source(self, cycle: OpenCycle, update: Update) -> dict[str, int]:
        names = self.data.source_names
        counts = np.bincount(cycle.rows.sources_of(update.first_row, update.last_row), minlength=len(names))
        return {name: int(count) for name, count in zip(names, counts, strict=True)}

    def _refuse_endless_skips(self) -> None:
        skips, limit = self.engine.counts.consecutive_skips, self.settings.guards.max_consecutive_skips
        if skips >= limit:
            self._save_now("rolling")
            raise NeedsOperator(
                f"{skips} updates in a row were skipped because their gradient norm is not finite "
                f"(guards.max_consecutive_skips is {limit}); the weights are as they were before the first of them. Go "
                "back to an earlier checkpoint, or raise the limit in run.json to go on past them"
            )

    # ---- data ------------------------------------------------------------------------------------------------------

    def _open_cycle(self) -> OpenCycle | None:
        """The cycle of the next row, waiting for it if it is not prepared; None if asked to stop meanwhile."""
        number = self.state.position.cycle
        if self._cycle is not None:
            return self._cycle
        self._set_length(self.settings.row_tokens_at(number))
        if not self._wait_for_cycle(number):
            return None
        self._cycle = cycle = self._ahead.take(self.data, number, self._row_tokens)
        refuse_other_order(self.state, cycle.order, str(self.data.work))
        if cycle.doubtful or cycle.check.wait(HASHING_BEAT_S):
            self._wait_for_hashes(cycle, "training")
            self._refuse_damaged()
        self.beat("training" if self._row_tokens in self._captured else "capturing")
        return self._cycle

    def _wait_for_cycle(self, number: int) -> bool:
        """Wait, visibly, until a cycle is ready; False if asked to stop before it is."""
        if self.data.is_ready(number):
            return True
        what, since = f"cycle {number} of {self.data.work}", time.time()
        print(f"waiting for {what} to be prepared", flush=True)
        while not self.data.is_ready(number):
            late = self._saver.entry_trouble
            self.beat("waiting_data", waiting_for=f"{what}; {late}" if late else what, waiting_since=since)
            self._saver.poll()
            if self.stop.wait(DATA_POLL_S) or self.stop.reason_at(number) is not None:
                return False
        print(f"{what} is ready after {time.time() - since:.1f} s", flush=True)
        return True

    def _close_cycle(self) -> None:
        if self._cycle is not None:
            self._cycle.close()
            self._cycle = None

    def _look_ahead(self) -> None:
        """Have the next cycle's files hashed; what is wrong with them is told with the next row."""
        if self._cycle is not None and self._cycle.check.ended:
            following = self._cycle.order.cycle + 1
            problem = self._ahead.look(self.data, following, self.settings.row_tokens_at(following))
            if problem is not None:
                self._problems.append(f"cycle {following}, which is next, is damaged: {problem}")

    def _wait_for_hashes(self, cycle: OpenCycle, stage: Stage) -> None:
        """Wait until a cycle's files are hashed, visibly as long as that gets on."""
        began, bytes_read = time.monotonic(), -1
        while not cycle.check.wait(HASHING_BEAT_S):
            if cycle.check.bytes_read != bytes_read:
                bytes_read = cycle.check.bytes_read
                self.beat(stage)
        if (waited_s := time.monotonic() - began) >= 1:
            print(f"waited {waited_s:.1f} s for the hashes of cycle {cycle.order.cycle}'s token files", flush=True)

    def _vouch(self, state: LineState) -> LineState:
        """Record what is held back, once the cycle's files are hashed; the state with its row's generation.

        Raises `NeedsOperator` if they are damaged.
        """
        if self._cycle is not None:
            self._wait_for_hashes(self._cycle, "saving")
        self._record()
        return dataclasses.replace(state, generation=self.journal.generation_at(state.position.update))

    def _refuse_damaged(self) -> None:
        """Raise what is wrong with the files of the open cycle, if that is known by now."""
        problem = None if self._cycle is None else self._cycle.check.problem
        if isinstance(problem, NeedsOperator):
            raise NeedsOperator(f"{problem}; then run the line again. Nothing that was trained on the damage is kept")
        if problem is not None:
            raise problem

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

    def _moment(self, cycle: int, rate: float) -> Moment:
        """Now, at the present row length, with the recipe of the cycle just trained and the last update's rate."""
        plan = self.data.cycle_plan(cycle)
        recipe = dict(zip(plan.sources, plan.shares, strict=True))
        return Moment(self._row_tokens, self._micro_rows, recipe, rate)

    def _validate(self, moment: Moment) -> Row:
        """A validation's readings. Others than the line must have are refused before it trains, and told after."""
        self.beat("validating")
        with memory_told(f"the validation after update {self.state.position.update}", self._less_memory()):
            row = self._validation.read(moment)
        if problem := self._validation.other_names(row, moment):
            if self.state.position.update == 0:
                raise Refusal(problem)
            self._problems.append(problem)
        return row

    def _warm_probes(self, update: Update, rates: Rates) -> None:
        """On a GPU, before a capture: the memory and the kernels of the probes, once at each length."""
        if self.settings.device != "cuda":
            return
        with memory_told("a row through each probe", self._less_memory()):
            row = self._validation.warm(self._moment(update.cycle, rates.learning_rate))
        if row:
            print("\n".join(["one row through each probe:", *validation_lines(row)]), flush=True)

    def _still_validating(self) -> None:
        if self._heartbeat.stage == "capturing":  # one row through each probe is a part of that
            return
        if time.monotonic() - self._beaten_at >= VALIDATING_BEAT_S:
            self.beat("validating")

    def _commit(self, update: int, row: Row) -> None:
        """Record an update, now or with the first one after the cycle's files are hashed."""
        row["time/wall"] = time.time()
        self._held.append((update, row, self._problems))
        self._problems = []
        if self._cycle is None or self._cycle.check.ended:
            self._record()

    def _record(self) -> None:
        """Record and print what is held back; a row that was recorded before is compared with that."""
        self._refuse_damaged()
        for update, row, problems in self._held:
            found = self.journal.commit(update, row, self._edited)
            if found == "anew":
                generation = self.journal.generation_at(update)
                print(f"u{update}: run.json was edited; generation {generation} of the record begins here", flush=True)
            elif found == "different":
                text = f"u{update}: differs from the row recorded before; both are kept (see `nstrain status`)"
                print(text, flush=True)
            alarms = self._alarming.alarms(update, row, problems)
            validated = any(name.startswith("val_") for name in row)
            if validated or alarms or update % self.settings.print_every == 0 or row["skipped"] or row["smaller"]:
                print(printed(update, row, alarms), flush=True)
        self._held.clear()

    def _save_now(self, reason: str) -> None:
        """Have the present state on disk when this returns."""
        self.beat("saving")
        self._saver.save_now(self.state, reason)

    # ---- leaving, and being seen -----------------------------------------------------------------------------------

    def _yield_taken_gpu(self) -> None:
        """Save and raise `GpuTaken` if another process is on the GPU."""
        others = None if self.gpu is None else self.gpu.taken_by(self.state.position.update)
        if others is not None:
            print(f"{others}: saving, to make room", flush=True)
            self._leaving = True
            self._save_now("stop")
            raise GpuTaken(f"{others}; saved at u{self.state.position.update}, to go on once the GPU is free")

    def _leave_early(self) -> ExitCode:
        print(f"stopping: {self.stop.reason_at(self.state.position.cycle)}", flush=True)
        self._leaving = True
        self._save_now("stop")
        return self._leave(ExitCode.STOPPED, "stopping")

    def _leave(self, code: ExitCode, stage: Stage) -> ExitCode:
        self._saver.wait()
        if code == ExitCode.DONE:
            self._saver.refuse_late_entry()
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
        """Write the heartbeat: what this process does now, and within how long the next one comes."""
        if self._leaving and stage == "saving":
            stage = "stopping"  # which has a bound of its own
        self._heartbeat = dataclasses.replace(
            self._heartbeat,
            time=time.time(),
            stage=stage,
            checkpoint=self._saver.newest,
            waiting_for=waiting_for,
            waiting_since=waiting_since,
            budget_s=self.settings.guards.budget_s(stage),
            gpu_others=None if self.gpu is None else self.gpu.others,
            slow_saving=self._saver.slow,
        )
        self._beaten_at = time.monotonic()
        write_heartbeat(self.paths, self._heartbeat)
