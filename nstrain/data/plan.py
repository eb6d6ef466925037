"""`nstrain data plan`: what the schedule takes of every source, and what it costs, before anything is read.

And what the lines that train on it will take for their checkpoints: kept ones grow by one a data cycle.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from nstrain.base.commands import typed
from nstrain.base.disk import bytes_below, read_json
from nstrain.base.errors import DiskFull, NstrainError
from nstrain.base.units import human_bytes, human_count
from nstrain.data.consumers import read_consumers
from nstrain.data.line import DataLine
from nstrain.data.manifest import states_before
from nstrain.data.opening import expected_left, expected_opened
from nstrain.data.room import CheckpointRoom, DiskRoom, disk_room
from nstrain.data.supply import DOWNLOADS
from nstrain.data.tables import cycle_tables_bytes, opened_token_bytes
from nstrain.line.listing import DiskForecast, forecast_of, keeping_of, list_checkpoints
from nstrain.line.paths import LinePaths

OPEN_ENDED_CYCLES = 10_000
"""Cycles of an open-ended schedule that are looked at; what lasts longer is said to last."""


@dataclasses.dataclass(frozen=True)
class SourcePlan:
    """One source under the schedule; tokens are estimates wherever files have not been opened."""

    source: str
    left_tokens: int
    """Trainable tokens left after what is prepared."""
    cycle_tokens: int
    """What the next cycle takes of it (0 if its recipe leaves it out)."""
    takes_tokens: int | None
    """What the cycles not yet prepared take of it; None if the schedule is open-ended."""
    opens_tokens: int
    """Tokens of the files that the next cycle opens of it, beside those that are open."""
    runs_out_in_cycle: int | None
    """The first cycle that it is not expected to fill; None if it lasts."""

    @property
    def short(self) -> bool:
        """Whether the closed schedule takes more than there is."""
        return self.takes_tokens is not None and self.runs_out_in_cycle is not None


@dataclasses.dataclass(frozen=True)
class CheckpointPlan:
    """What a line that trains on the data line takes for its checkpoints, on the disk of its own directory."""

    run: str
    kept_bytes: int
    """Of those that stay for ever, as of now."""
    forecast: DiskForecast
    """What they will take, up to the end of the data line's schedule; all sizes are 0 before the first is written."""

    def describe(self) -> str:
        """In words."""
        found = self.forecast
        free = f"{human_bytes(found.free_bytes)} free there"
        if not found.checkpoint_bytes:
            return f"checkpoints of {self.run}: none yet (`nstrain check` says what they will take); {free}"
        now = f"{found.kept} kept ({human_bytes(self.kept_bytes)})"
        if found.end_bytes is None:
            more = f"{human_bytes(found.checkpoint_bytes)} more a data cycle"
        else:
            more = f"{human_bytes(found.end_bytes)} more at most up to the schedule's end"
        short = "" if found.fits_end and found.fits_next else ": NOT enough, thin them in time (`nstrain checkpoints`)"
        fit = f"room for the ends of {found.cycles_that_fit:,} more cycles"
        return f"checkpoints of {self.run}: {now}, {more}; {free}, {fit}{short}"


@dataclasses.dataclass(frozen=True)
class LinePlan:
    """A data line's schedule from the first cycle that is not prepared."""

    next_cycle: int
    cycle_count: int | None
    cycle_bytes: int
    """Token files of the next cycle (a cycle in use and one ahead are on disk together)."""
    tables_bytes: int
    """Its tables of documents, about; 0 while nothing is known of how long documents are."""
    opens_bytes: int
    """What is opened for it, about, in open/ until it is done."""
    open_bytes: int = dataclasses.field(compare=False)
    """What lies in open/ now."""
    downloads_bytes: int = dataclasses.field(compare=False)
    """Fetched files of hub sources that are not open yet, now."""
    prepare_s: float
    """Seconds to encode it with one process, at the speed of the calibration."""
    sources: tuple[SourcePlan, ...]
    checkpoints: tuple[CheckpointPlan, ...] = dataclasses.field(compare=False)
    """Of the lines that train on it."""
    disk: DiskRoom = dataclasses.field(compare=False)
    """As it is now; the plan itself follows from the line alone."""
    no_room: str | None = dataclasses.field(compare=False)
    """Why the preparer would not begin the next cycle now, but wait for disk; None if it would."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dataclasses.asdict(self)


def plan_line(line: DataLine) -> LinePlan | None:
    """Look ahead; None if every cycle of the schedule is prepared. No source's file is read."""
    calibration = line.calibration()
    count = line.cycle_count
    upcoming = 1
    while line.manifest_path(upcoming).exists():
        upcoming += 1
    if count is not None and upcoming > count:
        return None
    before = states_before(line, upcoming)
    plans, open_files = [], line.settings.open_files
    for name in line.source_names:
        listing = line.listing_for(name, upcoming)
        rates = calibration.rates(line.source(name), listing)
        left = expected_left(listing, before[name], rates)
        takes, out_in = 0, None
        for cycle in range(upcoming, (count or upcoming + OPEN_ENDED_CYCLES) + 1):
            plan = line.cycle_plan(cycle)
            targets = dict(zip(plan.sources, plan.source_tokens, strict=True)).get(name, 0)
            takes += targets
            if targets and takes + 1 > left and out_in is None:
                out_in = cycle
                if count is None:
                    break
        first = line.cycle_plan(upcoming)
        in_first = dict(zip(first.sources, first.source_tokens, strict=True)).get(name, 0)
        opens = expected_opened(listing, before[name], rates, in_first, open_files) if in_first else 0
        plans.append(SourcePlan(name, left, in_first, takes if count is not None else None, opens, out_in))
    first = line.cycle_plan(upcoming)
    no_room = None
    try:
        CheckpointRoom(line).refuse_to_begin(upcoming)
    except DiskFull as error:
        no_room = str(error)
    return LinePlan(
        next_cycle=upcoming,
        cycle_count=count,
        cycle_bytes=line.cycle_bytes(upcoming),
        tables_bytes=cycle_tables_bytes(line, upcoming),
        opens_bytes=int(sum(p.opens_tokens * opened_token_bytes(line, p.source, before[p.source]) for p in plans)),
        open_bytes=bytes_below(line.work / "open"),
        downloads_bytes=bytes_below(line.work / DOWNLOADS),
        prepare_s=first.tokens / calibration.tokens_per_s,
        sources=tuple(plans),
        checkpoints=checkpoint_plans(line),
        disk=disk_room(line),
        no_room=no_room,
    )


def shortages(line: DataLine) -> tuple[str, ...]:
    """A sentence for each source that a closed schedule takes more of than there is, by what is known now.

    None for a line that is damaged: that is for others to tell.
    """
    try:
        plan = plan_line(line)
    except NstrainError:
        return ()
    return tuple(
        f"source {found.source}: about {human_count(found.left_tokens)} tokens of it are left, and the data line takes "
        f"{human_count(found.takes_tokens or 0)}: it runs out in cycle {found.runs_out_in_cycle} "
        f"(`{typed('nstrain', 'data', 'plan', '--work', line.work)}`)"
        for found in (plan.sources if plan is not None else ())
        if found.short
    )


def checkpoint_plans(line: DataLine) -> tuple[CheckpointPlan, ...]:
    """What the lines that train on a data line take for their checkpoints; one whose directory is gone is left out."""
    plans = []
    for consumer in read_consumers(line.work):
        paths = LinePaths(Path(consumer.run))
        try:
            keeping = keeping_of(read_json(paths.run_json))
            own = [item for item in list_checkpoints(paths) if not item.set_aside]
            free_bytes = shutil.disk_usage(paths.root).free
        except (NstrainError, OSError, KeyError, TypeError, ValueError):
            continue
        kept_bytes = sum(item.bytes for item in own if item.kept is not False)
        outlook = forecast_of(own, keeping, line.cycle_count, 0, free_bytes)
        plans.append(CheckpointPlan(consumer.run, kept_bytes, outlook))
    return tuple(plans)
