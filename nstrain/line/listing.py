"""What checkpoints a line has, for people: read from their state.json alone, without numpy, hashes or locks.

And what they will take: kept ones stay for ever and grow with the data cycles, so a line's disk is bounded by its
schedule, and this says by how much.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nstrain.line.paths import LinePaths, parse_checkpoint_name, parse_set_aside_name


@dataclasses.dataclass(frozen=True)
class ListedCheckpoint:
    """A checkpoint directory."""

    name: str
    update: int
    bytes: int
    """What its files take."""
    bytes_with_average: int
    """What they would take with the weights' moving average among them, which is so once that has begun."""
    latest: bool
    """Whether the line goes on from it: the one that `latest` names, or if that is lost the newest that may be it."""
    set_aside: bool
    """Whether a rollback has taken it out of the line; it goes once the line is as far again."""
    kept: bool | None
    """Whether it stays for ever; None if its state.json cannot be read."""
    reason: str | None
    """Why it was written (see docs/reference/checkpoint.md)."""
    tokens: int | None
    """The position in tokens."""
    cycle: int | None
    """The data cycle of the next row."""
    after_cycle: int | None
    """The data cycle that ends with it; None for one in the middle of a cycle, and for a line's first."""
    written_at: float
    """When it was finished (unix seconds)."""


def list_checkpoints(paths: LinePaths) -> list[ListedCheckpoint]:
    """The line's checkpoints in order of their update, then what rollbacks have set aside. What vanishes meanwhile
    (the trainer's retention) is left out."""
    named = _named(paths)
    latest = max((update for update in paths.checkpoint_updates() if named is None or update <= named), default=None)
    found = []
    for directory, set_aside in ((paths.checkpoints, False), (paths.set_aside, True)):
        entries = sorted(directory.iterdir()) if directory.is_dir() else []
        listed = (_listed(entry, set_aside, latest) for entry in entries)
        found += sorted((item for item in listed if item is not None), key=lambda item: (item.update, item.name))
    return found


def _named(paths: LinePaths) -> int | None:
    """The update of the checkpoint that `latest` names (checkpoint.py reads it too, but imports numpy)."""
    try:
        return parse_checkpoint_name(paths.latest.read_text(errors="replace").strip())
    except OSError:
        return None


def _listed(directory: Path, set_aside: bool, latest: int | None) -> ListedCheckpoint | None:
    update = (parse_set_aside_name if set_aside else parse_checkpoint_name)(directory.name)
    if update is None:
        return None
    try:
        files = {file.name: file.stat() for file in directory.iterdir()}
    except OSError:
        return None
    state = _state(directory)
    size = sum(file.st_size for file in files.values())
    has_average = "ema.safetensors" in files or "weights.safetensors" not in files
    return ListedCheckpoint(
        name=directory.name,
        update=update,
        bytes=size,
        bytes_with_average=size if has_average else size + files["weights.safetensors"].st_size,
        latest=not set_aside and update == latest,
        set_aside=set_aside,
        kept=state.get("kept"),
        reason=state.get("reason"),
        tokens=state.get("tokens"),
        cycle=_cycle(state, "cycle"),
        after_cycle=_cycle(state, "previous", "cycle"),
        written_at=max((file.st_mtime for file in files.values()), default=0.0),
    )


def _state(directory: Path) -> dict[str, Any]:
    try:
        state = json.loads((directory / "state.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _cycle(state: dict[str, Any], *place: str) -> int | None:
    """A cycle's number at a place in the position; None if there is nothing."""
    value: Any = state.get("position")
    for name in place:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, int) else None


# ---- what they will take ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DiskForecast:
    """What a line's checkpoints take, and will take at most, on the disk of its directory."""

    checkpoint_bytes: int
    """One checkpoint."""
    kept: int
    """Checkpoints that stay for ever, as of now."""
    rolling: int
    """The others, as of now."""
    kept_to_come: int | None
    """Kept ones that the rest of the schedule adds (one a cycle); None: open-ended."""
    next_bytes: int
    """The most that is taken beyond now up to the next kept checkpoint, the one being written included."""
    end_bytes: int | None
    """The most that is taken beyond now up to the schedule's end; None: open-ended."""
    free_bytes: int
    """Free on that file system."""
    cycles_that_fit: int
    """Ends of data cycles that can still be kept until the disk is full."""

    @property
    def fits_next(self) -> bool:
        """Whether the next kept checkpoint has room."""
        return self.next_bytes <= self.free_bytes

    @property
    def fits_end(self) -> bool:
        """Whether all of the schedule's have room."""
        return self.end_bytes is None or self.end_bytes <= self.free_bytes


def disk_forecast(
    checkpoint_bytes: int, kept: int, rolling: int, keep_last: int, cycles_to_come: int | None, free_bytes: int
) -> DiskForecast:
    """What checkpoints will take.

    `kept` and `rolling` are those that a line has, `keep_last` the rolling ones that it may have, `cycles_to_come` the
    data cycles whose end it has not reached (None: open-ended). A line without a checkpoint writes one more, its start.
    At most `keep_last` rolling ones lie there while the next is written; older ones go after it.
    """
    start = 1 if kept == rolling == 0 else 0
    beside = max(0, keep_last - rolling)

    def most(cycles: int) -> int:
        """Checkpoints beyond those of now until so many more ends of cycles are kept."""
        return start + beside + cycles if cycles else start

    to_come = None if cycles_to_come is None else start + cycles_to_come
    soon = 1 if cycles_to_come is None else min(1, cycles_to_come)
    fit = max(0, free_bytes // max(1, checkpoint_bytes) - start - beside)
    return DiskForecast(
        checkpoint_bytes=checkpoint_bytes,
        kept=kept,
        rolling=rolling,
        kept_to_come=to_come,
        next_bytes=most(soon) * checkpoint_bytes,
        end_bytes=None if cycles_to_come is None else most(cycles_to_come) * checkpoint_bytes,
        free_bytes=free_bytes,
        cycles_that_fit=fit,
    )


@dataclasses.dataclass(frozen=True)
class Keeping:
    """What run.json says of the checkpoints to come."""

    keep_last: int
    """Rolling ones that stay."""
    with_average: bool
    """Whether the weights are averaged, now or later on: those to come hold the average too, if these do not yet."""


def keeping_of(run_json: Mapping[str, Any]) -> Keeping:
    """From the JSON alone. Raises `KeyError`, `TypeError` or `ValueError` for what is no run.json."""
    return Keeping(int(run_json["checkpoints"]["keep_last"]), run_json.get("ema") is not None)


def forecast_of(
    checkpoints: list[ListedCheckpoint],
    keeping: Keeping,
    cycle_count: int | None,
    checkpoint_bytes: int,
    free_bytes: int,
) -> DiskForecast:
    """`disk_forecast` of a line's checkpoints, as `list_checkpoints` gives them.

    `cycle_count` is the schedule's (None: open-ended); `checkpoint_bytes` counts while the line has none of its own.
    """
    own = [item for item in checkpoints if not item.set_aside]
    done = next((item.cycle - 1 for item in own if item.latest and item.cycle), 0)
    return disk_forecast(
        checkpoint_bytes=max(
            (item.bytes_with_average if keeping.with_average else item.bytes for item in own), default=checkpoint_bytes
        ),
        kept=sum(1 for item in own if item.kept is not False),
        rolling=sum(1 for item in own if item.kept is False),
        keep_last=keeping.keep_last,
        cycles_to_come=None if cycle_count is None else max(0, cycle_count - done),
        free_bytes=free_bytes,
    )
