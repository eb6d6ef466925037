"""A data line as `status` sees it: schedule, preparer and what lies there, read as plain JSON (see status.py)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from nstrain.base.disk import read_json
from nstrain.base.errors import NstrainError
from nstrain.base.process import ran_at
from nstrain.base.units import human_bytes


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The cycles of a data line."""

    first_token: int
    """The position at which cycle 1 begins: of a branch the fork's."""
    pieces: tuple[tuple[int | None, int], ...]
    """Cycles and tokens of a cycle, piece by piece; the last may have no end (None)."""

    @property
    def cycle_count(self) -> int | None:
        """Cycles; None: open-ended."""
        return None if self.pieces[-1][0] is None else sum(cycles or 0 for cycles, _ in self.pieces)

    @property
    def total_tokens(self) -> int | None:
        """The position at its end; None: open-ended."""
        if self.pieces[-1][0] is None:
            return None
        return self.first_token + sum((cycles or 0) * tokens for cycles, tokens in self.pieces)

    def ends_at(self, tokens: int) -> bool:
        """Whether the schedule, as it is now, ends at this position."""
        return self.total_tokens is not None and tokens >= self.total_tokens

    def ready_beyond(self, position: int, ready: tuple[int, ...]) -> int:
        """Tokens of these cycles that lie beyond a position."""
        return sum(max(0, end - max(position, first)) for first, end in map(self._extent, ready))

    def _extent(self, cycle: int) -> tuple[int, int]:
        first = self.first_token
        for cycles, tokens in self.pieces:
            if cycles is None or cycle <= cycles:
                return first + (cycle - 1) * tokens, first + cycle * tokens
            first, cycle = first + cycles * tokens, cycle - cycles
        return first, first


def read_schedule(work: Path) -> Schedule | None:
    """A data line's schedule; None if it cannot be read."""
    line = read_plain(work / "line.json")
    try:
        pieces = tuple((piece["cycles"], int(piece["cycle_tokens"])) for piece in line["schedule"]) if line else ()
        if not line or not pieces:
            return None
        return Schedule(int((line.get("fork") or {}).get("tokens", 0)), pieces)
    except (KeyError, TypeError, ValueError):
        return None


@dataclasses.dataclass(frozen=True)
class PreparerNow:
    """preparer.json of a preparer that lives."""

    pid: int
    stage: str
    cycle: int
    progress: float
    error: str | None
    download: dict[str, Any]

    def describe(self) -> str:
        """What it does, in a few words."""
        fetched = f"{human_bytes(self.download.get('bytes_done', 0))} of {human_bytes(self.download.get('bytes', 0))}"
        words = {
            "downloading": f"fetching {self.download.get('source')} for cycle {self.cycle}, {fetched}"
            + (f" ({self.error})" if self.error else ""),
            "preparing": f"preparing cycle {self.cycle}, {100 * self.progress:.0f} %",
            "waiting_consumer": "enough cycles are ready",
            "waiting_disk": f"waiting for disk space: {self.error}",
        }
        return words.get(self.stage, self.stage)


def read_preparer(work: Path, of_supervisor: int | None = None) -> PreparerNow | None:
    """What the preparer does; None if none lives. `of_supervisor` is the pid of one that a supervisor says to run.

    Another one counts if it ran already when its file was written, by this machine's clock.
    """
    value = read_plain(work / "preparer.json")
    try:
        if not value or not (value["pid"] == of_supervisor or ran_at(int(value["pid"]), float(value["since"]))):
            return None
        return PreparerNow(
            int(value["pid"]),
            str(value["stage"]),
            int(value["cycle"]),
            float(value["progress"]),
            value["error"],
            dict(value.get("download") or {}),
        )
    except (KeyError, TypeError, ValueError):
        return None


def other_place(run: Path, work: Path, line_id: str) -> Path | None:
    """The directory that the data line follows in the place of `run`, if that holds the same line: one is a copy."""
    entry = (read_plain(work / "consumers" / f"{line_id}.json") or {}).get("run")
    if not isinstance(entry, str) or Path(entry).resolve() == run.resolve():
        return None
    return Path(entry) if (read_plain(Path(entry) / "run.json") or {}).get("id") == line_id else None


def ready_cycles(work: Path) -> tuple[int, ...]:
    """The cycles that lie there, prepared."""
    directory = work / "cycles"
    names = [path.parent.name for path in directory.glob("[0-9]*/READY")] if directory.is_dir() else []
    return tuple(sorted(int(name) for name in names if name.isdecimal()))


def read_plain(path: Path) -> dict[str, Any] | None:
    """A file's JSON object; None if it cannot be read."""
    try:
        value = read_json(path)
    except (NstrainError, OSError):
        return None
    return value if isinstance(value, dict) else None
