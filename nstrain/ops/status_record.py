"""What the journal says of a line's present: last losses and their trend, the last validation, alarms."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

from nstrain.base.errors import Refusal
from nstrain.line.paths import LinePaths
from nstrain.record.alarms import firing_alarms, loss_alarms
from nstrain.record.journal import Journal
from nstrain.record.journal_reader import PARENTS_GENERATION, JournalReader, Row

TREND_UPDATES = 100
"""The loss's trend is the mean of at most so many updates against the mean of as many before."""

CURVE_POINTS = 40
"""Points of the small loss curve."""

DEFAULT_LOSS_JUMP = 8.0
"""guards.loss_jump of a run.json that leaves it out."""

_LOSS_NAME = re.compile(r"(ema/)?val_\d+/[^/]+")


@dataclasses.dataclass(frozen=True)
class Record:
    """What the journal holds of interest."""

    last: Row | None = None
    """The last row."""
    losses: tuple[float, ...] = ()
    """The last 2 * TREND_UPDATES updates' losses, as means of equal stretches, oldest first."""
    loss_trend: float | None = None
    """Mean loss of the last `trend_updates` updates less that of as many before; None while there are too few."""
    trend_updates: int = 0
    """TREND_UPDATES, or half of the updates that there are."""
    tokens_per_s: float | None = None
    """Median speed of the last updates that were trained."""
    validation: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The last validation's losses by name: of sources, mix and mean, and of the averaged weights (`ema/`)."""
    validated_update: int | None = None
    validation_before: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The same of the regular validation before it, if there was one and it read the same rows."""
    validated_before: int | None = None
    """The update of that one."""
    alarms: tuple[str, ...] = ()
    """What a person should look at: of the last validation, and losses that jumped in the last updates."""
    differences: int = 0
    """Replayed updates that differed from their row."""
    unreadable: bool = False
    """Whether it is damaged where it was read; the alarm says what and what to do."""

    @property
    def is_parents(self) -> bool:
        """Whether all of it is a branch's parent's: the branch has no update of its own."""
        return self.last is not None and self.last["generation"] == PARENTS_GENERATION


def read_record(paths: LinePaths, validation_every: int, loss_jump: float) -> Record:
    """Read a line's journal; the last validation is searched as far back as one must be.

    A damaged one is an alarm: a line that trains can still be seen and stopped.
    """
    if not paths.journal.exists():
        return Record()
    try:
        return _read(paths, validation_every, loss_jump)
    except Refusal as damage:
        return Record(alarms=(str(damage),), unreadable=True)


def _read(paths: LinePaths, validation_every: int, loss_jump: float) -> Record:
    with Journal.open_for_reading(paths.journal) as journal, journal.snapshot():
        last = journal.last_row()
        if last is None:
            return Record(differences=journal.differences())
        update = int(last["update"])
        recent = list(journal.rows(from_update=max(0, update - 2 * TREND_UPDATES + 1)))
        validated = _last_validated(recent) or _last_validated(
            journal.rows(from_update=update - update % validation_every)
        )
        before = _validated_before(journal, validated, validation_every)
        losses = [row["train/loss"] for row in recent if _is_trained(row)]
        trend_updates = min(TREND_UPDATES, len(losses) // 2) if len(losses) >= TREND_UPDATES // 2 else 0
        speeds = [row["perf/tokens_per_s"] for row in recent[-20:] if "perf/tokens_per_s" in row]
        return Record(
            last=last,
            losses=_curve(losses),
            loss_trend=_trend(losses, trend_updates) if trend_updates else None,
            trend_updates=trend_updates,
            tokens_per_s=statistics.median(speeds) if speeds else None,
            validation=_losses_of(validated or {}),
            validated_update=None if validated is None else int(validated["update"]),
            validation_before=_losses_of(before or {}),
            validated_before=None if before is None else int(before["update"]),
            alarms=_alarms(recent, validated, loss_jump),
            differences=journal.differences(),
        )


def _is_trained(row: Row) -> bool:
    return not row.get("skipped") and math.isfinite(row.get("train/loss", math.nan))


def _last_validated(rows: Iterable[Row]) -> Row | None:
    found = None
    for row in rows:
        if any(name.startswith("val_") for name in row):
            found = row
    return found


def _validated_before(journal: JournalReader, validated: Row | None, every: int) -> Row | None:
    """The row of the last regular validation before another one, if both are of one row length.

    Where the length changes, a validation goes on under names of before with other rows (docs/reference/metrics.md).
    """
    if validated is None or validated["update"] < 1:
        return None
    earlier = int(validated["update"] - 1) // every * every
    row = next(journal.rows(from_update=earlier), None)
    if row is None or row["update"] != earlier or row.get("row_tokens") != validated.get("row_tokens"):
        return None
    return row


def _losses_of(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if _LOSS_NAME.fullmatch(name)}


def _curve(losses: Sequence[float]) -> tuple[float, ...]:
    points = min(CURVE_POINTS, len(losses))
    cuts = [len(losses) * point // points for point in range(points + 1)] if points else []
    return tuple(statistics.fmean(losses[a:b]) for a, b in itertools.pairwise(cuts))


def _trend(losses: Sequence[float], updates: int) -> float:
    return statistics.fmean(losses[-updates:]) - statistics.fmean(losses[-2 * updates : -updates])


def _alarms(recent: Sequence[Row], validated: Row | None, loss_jump: float) -> tuple[str, ...]:
    jumps = [
        f"u{int(row['update'])}: {alarm}" for row in recent[-TREND_UPDATES:] for alarm in loss_alarms(row, loss_jump)
    ]
    return (*jumps, *firing_alarms(validated or {}))
