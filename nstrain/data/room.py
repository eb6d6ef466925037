"""The room on a data line's disk that its preparer leaves to the lines that train on it.

A trainer ends for a person when its next checkpoint does not fit; a preparer can wait. So where both are on one file
system the preparer begins a cycle only if there stays free beside it what those lines' checkpoints take up to the next
one that is kept, and one more. It gives a half-made cycle up if the very next checkpoint would no longer fit (files
that were opened took more than was thought, somebody else took the room): what was written of the cycle is free at
once. Then it waits, as for a full disk.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path

from nstrain.base.disk import bytes_below
from nstrain.base.errors import DiskFull
from nstrain.base.units import human_bytes
from nstrain.data.consumers import read_consumers
from nstrain.data.line import DataLine
from nstrain.data.manifest import states_before
from nstrain.data.opening import expected_opened
from nstrain.data.tables import cycle_tables_bytes, opened_token_bytes
from nstrain.line.room import RoomNeeded, room_for_checkpoints

LOOK_EVERY_S = 1.0
"""While a cycle is made the disk is looked at no more often than this."""

SURE_S = 0.5
"""Room that is short is looked at again after this: what is removed is not free at once."""

BESIDE_TOKENS_SHARE = 1 / 8
"""What a cycle may take beyond its tokens, its tables and the files that it is expected to open, as a share of the
tokens: what the estimates miss."""

GIVEN_UP_SHARE = 1 / 4
"""What it is to have in addition for each time that it was given up, so that this does not go on for ever."""

BETWEEN_LOOKS_SHARE = 1 / 64
"""The part of a cycle that may be written between two looks."""


@dataclasses.dataclass(frozen=True)
class DiskRoom:
    """A data line's disk as its preparer sees it."""

    free_bytes: int
    """Free on the data line's file system."""
    for_checkpoints: dict[str, int]
    """What the preparer leaves free for the next checkpoints of lines that train on it (`RoomNeeded.soon_bytes`), by
    their directory."""

    def describe(self) -> str:
        """In words."""
        free = f"{human_bytes(self.free_bytes)} free"
        if not self.for_checkpoints:
            return free
        left = human_bytes(sum(self.for_checkpoints.values()))
        return f"{free}, the preparer leaves {left} for the next checkpoints of {', '.join(self.for_checkpoints)}"


def disk_room(line: DataLine) -> DiskRoom:
    """A data line's disk, as it is now."""
    soon = {run: needed.soon_bytes for run, needed in room_of_lines(line).items()}
    return DiskRoom(shutil.disk_usage(line.work).free, soon)


def room_of_lines(line: DataLine) -> dict[str, RoomNeeded]:
    """What the lines that train on a data line need free on its file system, by directory."""
    room = {}
    device = line.work.stat().st_dev
    for consumer in read_consumers(line.work):
        run = Path(consumer.run)
        try:
            shared = run.stat().st_dev == device
        except OSError:  # removed; a line that was moved says where it is when it is run
            continue
        if shared and (needed := room_for_checkpoints(run, line.cycle_count)) is not None:
            room[consumer.run] = needed
    return room


class CheckpointRoom:
    """Sees that a preparer leaves that room."""

    def __init__(self, line: DataLine) -> None:
        self._line = line
        self._looked_at = 0.0
        self._given_up = (0, 0)
        """A cycle, and how often it was given up half-made."""
        self._opened: tuple[int, dict[str, int]] = (0, {})
        """A cycle, and the bytes of the files that will be open for it, by source."""

    def refuse_to_begin(self, cycle: int) -> None:
        """Raise `DiskFull` unless a cycle fits beside the room."""
        room = disk_room(self._line)
        if not room.for_checkpoints:
            return
        beside = BESIDE_TOKENS_SHARE + GIVEN_UP_SHARE * self._times_given_up(cycle)
        takes_bytes = round(self._line.cycle_bytes(cycle) * (1 + beside)) + self._opens_bytes(cycle)
        takes_bytes += cycle_tables_bytes(self._line, cycle)
        needed_bytes = takes_bytes + sum(room.for_checkpoints.values()) + self._between_looks(cycle)
        if room.free_bytes < needed_bytes:
            what = f"cycle {cycle} takes about {human_bytes(takes_bytes)}"
            raise self._full(what, room, needed_bytes - room.free_bytes)

    def refuse_to_go_on(self, cycle: int) -> None:
        """While a cycle is made: raise `DiskFull` if the next checkpoint would no longer fit."""
        if time.monotonic() < self._looked_at + LOOK_EVERY_S:
            return
        self._looked_at = time.monotonic()
        if self._short_bytes(cycle) <= 0:
            return
        time.sleep(SURE_S)
        short_bytes = self._short_bytes(cycle)
        if short_bytes > 0:
            self._given_up = (cycle, self._times_given_up(cycle) + 1)
            raise self._full(f"cycle {cycle} was given up half-made", disk_room(self._line), short_bytes)

    def _short_bytes(self, cycle: int) -> int:
        """By how much the room for the very next checkpoints is short; negative: it is not."""
        needed = [room.next_bytes for room in room_of_lines(self._line).values()]
        if not needed:
            return 0
        return sum(needed) + self._between_looks(cycle) - shutil.disk_usage(self._line.work).free

    def _opens_bytes(self, cycle: int) -> int:
        if self._opened[0] != cycle:
            self._opened = (cycle, _opened_bytes(self._line, cycle))
        return _bytes_to_open(self._line, self._opened[1])

    def _between_looks(self, cycle: int) -> int:
        return round(self._line.cycle_bytes(cycle) * BETWEEN_LOOKS_SHARE)

    def _times_given_up(self, cycle: int) -> int:
        return self._given_up[1] if self._given_up[0] == cycle else 0

    def _full(self, what: str, room: DiskRoom, short_bytes: int) -> DiskFull:
        return DiskFull(
            f"{self._line.work}: {what}; that disk has {room.describe()}. Free {human_bytes(short_bytes)} on it "
            "(`nstrain checkpoints RUN` shows what of a line may go); the preparer goes on by itself"
        )


def bytes_to_open(line: DataLine, cycle: int) -> int:
    """What open/ will take, about, until a cycle is done, beyond what lies there now."""
    return _bytes_to_open(line, _opened_bytes(line, cycle))


def _bytes_to_open(line: DataLine, bytes_by_source: dict[str, int]) -> int:
    return sum(max(0, size - bytes_below(line.work / "open" / name)) for name, size in bytes_by_source.items())


def _opened_bytes(line: DataLine, cycle: int) -> dict[str, int]:
    """Bytes of the files that are open, about, while a cycle is made: those open before and those opened for it."""
    plan, before, calibration = line.cycle_plan(cycle), states_before(line, cycle), line.calibration()
    found = {}
    for name, targets in zip(plan.sources, plan.source_tokens, strict=True):
        listing, state = line.listing_for(name, cycle), before[name]
        rates, open_files = calibration.rates(line.source(name), listing), line.settings.open_files
        tokens = sum(file.tokens for stratum in state.strata for file in stratum.open)
        tokens += expected_opened(listing, state, rates, targets, open_files)
        found[name] = int(tokens * opened_token_bytes(line, name, state))
    return found
