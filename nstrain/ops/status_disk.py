"""What a line takes of its disk, by kind (see status.py)."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterable
from pathlib import Path

from nstrain.base.disk import bytes_below
from nstrain.line.listing import Keeping, ListedCheckpoint, forecast_of
from nstrain.line.paths import LinePaths
from nstrain.line.room import room_for_checkpoints


@dataclasses.dataclass(frozen=True)
class DiskUse:
    """Bytes that a line takes, and that are left for it."""

    kept_bytes: int
    """Checkpoints that stay for ever."""
    rolling_bytes: int
    """The other checkpoints."""
    set_aside_bytes: int
    """Checkpoints that rollbacks have set aside."""
    journal_bytes: int
    logs_bytes: int
    """run.log and its older parts."""
    tune_bytes: int
    """What `nstrain tune` has measured, and its log."""
    tracker_bytes: int
    """What the tracker's client keeps of its sessions."""
    cycles_bytes: int
    """Prepared cycles of its data line (other lines may use them too)."""
    opened_bytes: int
    """Opened files of the data line, as tokens: what the next cycles are drawn from."""
    downloads_bytes: int
    """Fetched files of hub sources that are not open yet."""
    free_bytes: int
    """Free on the file system of the line."""
    reserved_bytes: int
    """What of that the data line's preparer leaves for its next checkpoints; 0 if their disks are not the same."""
    end_bytes: int | None
    """What its checkpoints will take at most beyond now, up to the schedule's end; None: open-ended."""


def disk_use(
    paths: LinePaths, work: Path, keeping: Keeping, checkpoints: list[ListedCheckpoint], cycle_count: int | None
) -> DiskUse:
    """Of a line whose data line is in `work`; `cycle_count` is its schedule's (None: open-ended)."""

    def bytes_of(files: Iterable[Path]) -> int:
        total = 0
        for path in files:
            with contextlib.suppress(OSError):  # SQLite's log and a log that is rotated go while one looks
                total += path.stat().st_size
        return total

    free_bytes = shutil.disk_usage(paths.root).free
    own = [item for item in checkpoints if not item.set_aside]
    forecast = forecast_of(checkpoints, keeping, cycle_count, 0, free_bytes)
    room = room_for_checkpoints(paths.root, cycle_count) if _one_disk(paths.root, work) else None
    return DiskUse(
        kept_bytes=sum(item.bytes for item in own if item.kept is not False),
        rolling_bytes=sum(item.bytes for item in own if item.kept is False),
        set_aside_bytes=sum(item.bytes for item in checkpoints if item.set_aside),
        journal_bytes=bytes_of(paths.root.glob(f"{paths.journal.name}*")),
        logs_bytes=bytes_of(paths.root.glob(f"{paths.run_log.name}*")),
        tune_bytes=bytes_below(paths.tune),
        tracker_bytes=bytes_below(paths.wandb_directory),
        cycles_bytes=bytes_below(work / "cycles"),
        opened_bytes=bytes_below(work / "open"),
        downloads_bytes=bytes_below(work / "downloads"),
        free_bytes=free_bytes,
        reserved_bytes=0 if room is None else room.soon_bytes,
        end_bytes=forecast.end_bytes if own else None,
    )


def _one_disk(run: Path, work: Path) -> bool:
    """Whether a line and its data line are on one file system."""
    try:
        return run.stat().st_dev == work.stat().st_dev
    except OSError:
        return False
