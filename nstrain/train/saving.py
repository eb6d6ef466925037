"""When a training line saves, and what follows once a checkpoint is on disk.

    copy to the host (host_copy.py) -> files written in the background (nstrain/line) -> `latest`
        -> the consumer's entry among those of the data line -> retention -> what a rollback had set aside

The order matters for kills: the data line keeps every cycle that the checkpoint named by `latest` needs, and an older
checkpoint goes only when a newer one is on disk. What a kill leaves undone is done after the next commit (for the
consumer's entry: at the next start).

The disk is looked at after every update. As soon as the next checkpoint would no longer fit, the line saves where it
stands, as long as that still fits, and ends for a person to make room: later, the updates since the last checkpoint
would be lost.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nstrain.base.commands import typed
from nstrain.base.errors import DiskFull
from nstrain.base.units import human_bytes
from nstrain.data.consumers import consumer_path, read_consumer, write_consumer
from nstrain.line.background import BackgroundWriter
from nstrain.line.paths import LinePaths
from nstrain.line.retention import apply_retention, remove_set_aside
from nstrain.line.room import ROOM_BESIDE_BYTES
from nstrain.line.tensor_file import tensor_file_size
from nstrain.settings.run import CheckpointSettings, RunSettings
from nstrain.train.checkpointing import LineState, make_checkpoint
from nstrain.train.engine import Engine
from nstrain.train.flat import FlatParameters
from nstrain.train.host_copy import HostCopy, kinds_ever, open_host_copy
from nstrain.train.plan import Update

ENTRY_RETRY_S = 1.0
"""A consumer's entry that found no room is tried again after so long."""


def save_reason(
    settings: CheckpointSettings, update: Update, next_row_tokens: int, ends_line: bool, since_s: float
) -> str | None:
    """Why to save after an update, or None.

    `next_row_tokens` is the row length of the cycle after the update's, `since_s` the time since the last checkpoint.
    """
    if ends_line:
        return "end"
    if update.ends_cycle:
        return "cycle_end" if next_row_tokens == update.row_tokens else "length_change"
    by_count = settings.every_updates is not None and update.number % settings.every_updates == 0
    by_time = settings.every_minutes is not None and since_s >= 60 * settings.every_minutes
    return "rolling" if by_count or by_time else None


def room_for(flat: FlatParameters) -> int:
    """What has to be free before a checkpoint is written; those that are there go only after it."""
    shapes = {cut.name: cut.shape for group in flat.groups for cut in group.slices}
    return len(kinds_ever(flat)) * tensor_file_size(shapes) + ROOM_BESIDE_BYTES


def say_now(text: str) -> None:
    """A line for run.log, at once."""
    print(text, flush=True)


class Saver:
    """Saves a line's state. Owns the host copy and the background writer.

    An error of the writer is raised by whatever is called next, once.
    """

    def __init__(
        self,
        paths: LinePaths,
        settings: RunSettings,
        work: Path,
        engine: Engine,
        say: Callable[[str], None] = say_now,
        vouch: Callable[[LineState], LineState] = lambda state: state,
    ) -> None:
        """`work` is the data line's directory; `say` takes lines for the log, also from the writer's thread.

        `vouch(state)` is what is saved of a state; it raises if nothing must be.
        """
        self._paths, self._settings, self._work, self._engine, self._say = paths, settings, work, engine, say
        self._vouch = vouch
        self._writer = BackgroundWriter(paths, self._committed)
        self._copy: HostCopy | None = None
        self._needed_bytes = room_for(engine.flat)
        self._saved_update: int | None = None
        self._saved_at = time.monotonic()
        self._began = time.monotonic()
        self._entry_due: tuple[int, int, int] | None = None
        """The consumer's entry (cycle, row, tokens) that found no room on the data line's disk."""
        self._entry_tried_at = 0.0
        self.entry_trouble: str | None = None
        """Why that entry could not be written, for people; None if it was."""
        self.newest: str | None = None
        """The name of the newest committed checkpoint."""
        self.slow: str | None = None
        """For how long and why the line stands still at every checkpoint, for people; None if it does not."""

    def open(self, newest: Path | None, state: LineState) -> None:
        """Take the host copy's memory. `newest` is the checkpoint that `state` was loaded from, if it was.

        Raises `DiskFull` if a new line's first checkpoint has no room (others: `stop_on_full_disk`).
        """
        if newest is not None:
            self._saved_update, self.newest = state.position.update, newest.name
            # Killed between a commit and what follows it, the last launch left that undone.
            self._move_entry(state.position.cycle, state.position.row, state.tokens)
            remove_set_aside(self._paths, state.position.update)
        else:
            self._refuse_full_disk("the line does not begin")
        began = time.monotonic()
        self._copy = open_host_copy(self._engine)
        self.slow = self._copy.slow
        if self.slow is not None:
            self._say(f"checkpoints stop the line, {self.slow}")
        elif self._engine.flat.device.type == "cuda":
            self._say(f"host memory for checkpoints pinned in {time.monotonic() - began:.1f} s")

    def due(self, update: Update, ends_line: bool) -> str | None:
        """Why to save after an update, or None (`save_reason`)."""
        following = self._settings.row_tokens_at(update.cycle + 1)
        since_s = time.monotonic() - self._saved_at
        return save_reason(self._settings.checkpoints, update, following, ends_line, since_s)

    def save(self, state: LineState, reason: str) -> None:
        """Have the engine's state written, after a write that is under way; the line may train on at once."""
        assert self._copy is not None, "a saver is opened before it saves"
        state = self._vouch(state)
        began = time.monotonic()
        self._writer.wait()  # the host copy is the writer's until then
        taken = self._copy.take()
        checkpoint = make_checkpoint(self._engine, self._settings, state, reason, taken.by_kind)
        self._began = began
        self._writer.submit(checkpoint, taken.ready)
        if not self._copy.in_background:
            self._writer.wait()
        waited_s = time.monotonic() - began
        if waited_s >= 1:
            self._say(f"the line stood still for {waited_s:.1f} s at the checkpoint of u{state.position.update}")
        self._saved_update, self._saved_at = state.position.update, time.monotonic()

    def save_now(self, state: LineState, reason: str) -> None:
        """Have the present state on disk when this returns."""
        if self._saved_update != state.position.update:
            self.save(state, reason)
        self._writer.wait()

    def stop_on_full_disk(self, state: LineState) -> None:
        """To be called between updates: raise `DiskFull`, with the present state saved, if another would not fit."""
        if self._writer.busy or self._room_left():
            return
        self.save_now(state, "stop")
        self._refuse_full_disk(f"the line is saved at u{state.position.update} and stops")

    def poll(self) -> None:
        """Raise the error of a write that failed; never waits."""
        self._writer.poll()
        tried_s = time.monotonic() - self._entry_tried_at
        if self._entry_due is not None and not self._writer.busy and tried_s >= ENTRY_RETRY_S:
            self._move_entry(*self._entry_due)

    def wait(self) -> None:
        """Wait until nothing is being written."""
        self._writer.wait()

    def refuse_late_entry(self) -> None:
        """Raise `DiskFull` if the consumer's entry is late still: after a line's end nobody would write it any more."""
        if self._entry_due is not None:
            self._move_entry(*self._entry_due)
        if self.entry_trouble is not None:
            raise DiskFull(
                f"{self.entry_trouble} The line is trained to its end, but its entry there still holds cycles: run it "
                "once more when there is room"
            )

    def close(self) -> None:
        """End the thread and give the memory back. Never raises: it says what was lost."""
        try:
            self._writer.wait()
        except Exception as error:
            self._say(f"the checkpoint that was being written is lost: {error}")
        if self._entry_due is not None:
            with contextlib.suppress(Exception):
                self._move_entry(*self._entry_due)
        if self._copy is not None:
            with contextlib.suppress(RuntimeError):  # a GPU in error; the process that holds it ends
                self._copy.close()

    # ---- room ------------------------------------------------------------------------------------------------------

    def _room_left(self) -> bool:
        return shutil.disk_usage(self._paths.root).free >= self._needed_bytes

    def _refuse_full_disk(self, what: str) -> None:
        free_bytes, needed_bytes = shutil.disk_usage(self._paths.root).free, self._needed_bytes
        if free_bytes < needed_bytes:
            raise DiskFull(
                f"{self._paths.root}: the next checkpoint needs {human_bytes(needed_bytes)} there, "
                f"{human_bytes(free_bytes)} are free; {what}. Free {human_bytes(needed_bytes - free_bytes)} on that "
                f"file system (`{typed('nstrain', 'checkpoints', self._paths.root)}` shows what may go), then run the "
                "line again."
            )

    # ---- after a commit --------------------------------------------------------------------------------------------

    def _committed(self, path: Path, state: Mapping[str, Any]) -> None:
        """Runs in the writer's thread once a checkpoint is durable and `latest` names it."""
        took_s = time.monotonic() - self._began
        self._move_entry(state["position"]["cycle"], state["position"]["row"], state["tokens"])
        gone = apply_retention(self._paths, self._settings.checkpoints.keep_last)
        passed = None if state["reason"] == "end" else state["update"]
        gone += [f"{self._paths.set_aside.name}/{name}" for name in remove_set_aside(self._paths, passed)]
        self.newest = path.name
        size = human_bytes(sum(file.stat().st_size for file in path.iterdir()))
        removed = f"; removed {', '.join(gone)}" if gone else ""
        self._say(f"checkpoint {path.name} ({state['reason']}): {size} in {took_s:.1f} s{removed}")

    def _move_entry(self, cycle: int, row: int, tokens: int) -> None:
        """Write the consumer's entry. One that finds no room on the data line's disk, which may be another than the
        line's, is tried again: an older entry keeps more cycles than are needed. One that is ahead must go back."""
        self._entry_tried_at = time.monotonic()
        try:
            write_consumer(self._work, self._settings.id, cycle, row, tokens, self._paths.root)
        except DiskFull as error:
            entry = consumer_path(self._work, self._settings.id)
            if not entry.exists() or read_consumer(entry).cycle > cycle:
                raise
            if self._entry_due is None:
                self._say(f"{error} The line trains on; this is tried again, until then more cycles are kept")
            self._entry_due, self.entry_trouble = (cycle, row, tokens), str(error)
        else:
            self._entry_due = self.entry_trouble = None
