"""The room that a line's next checkpoints take, for whoever else writes on the same disk to leave free.

What is being written or removed takes its part of that room already, so what is free beside it stays the same while
rolling checkpoints come and go.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nstrain.base.disk import PARTIAL_SUFFIX, bytes_below, read_json
from nstrain.base.errors import NstrainError
from nstrain.line.listing import ListedCheckpoint, forecast_of, keeping_of, list_checkpoints
from nstrain.line.paths import REPLACED_SUFFIX, LinePaths

ROOM_BESIDE_BYTES = 16 << 20
"""What is to stay free beside the next checkpoint, for the journal and the log of the updates up to it."""


@dataclasses.dataclass(frozen=True)
class RoomNeeded:
    """Bytes that a line needs free, as of now."""

    next_bytes: int
    """For its next checkpoint. With less free the line ends for a person to make room."""
    soon_bytes: int
    """So that this does not happen up to the next checkpoint that is kept, nor after it: the checkpoints up to that
    one, and one more; journal and log grow meanwhile."""


def room_for_checkpoints(run: Path, cycle_count: int | None) -> RoomNeeded | None:
    """What the line in `run` needs free for its checkpoints; `cycle_count` is its schedule's.

    None for a line at the end of its schedule, for one that has no checkpoint yet (how large they are is not known
    before its trainer has written the first, which it does before it trains), and for what is no line (any more).
    """
    paths = LinePaths(run)
    try:
        keeping = keeping_of(read_json(paths.run_json))
        own = [item for item in list_checkpoints(paths) if not item.set_aside]
        forecast = forecast_of(own, keeping, cycle_count, 0, 0)
        if forecast.kept_to_come == 0 or not own:
            return None
        in_motion = _in_motion_bytes(paths, own, keeping.keep_last)
        one_more = 0 if forecast.kept_to_come == 1 else forecast.checkpoint_bytes
        return RoomNeeded(
            max(0, forecast.checkpoint_bytes - in_motion) + ROOM_BESIDE_BYTES,
            max(0, forecast.next_bytes + one_more - in_motion) + 2 * ROOM_BESIDE_BYTES,
        )
    except (NstrainError, OSError, KeyError, TypeError, ValueError):
        return None


def _in_motion_bytes(paths: LinePaths, own: list[ListedCheckpoint], keep_last: int) -> int:
    """What checkpoints take that are being written or removed, or will be removed as the next is written."""
    rolling = [item.bytes for item in own if item.kept is False]
    found = sum(rolling[: max(0, len(rolling) - keep_last)])
    for entry in paths.checkpoints.iterdir():
        if entry.name.endswith((PARTIAL_SUFFIX, REPLACED_SUFFIX)) and entry.is_dir():
            found += bytes_below(entry)
    return found
