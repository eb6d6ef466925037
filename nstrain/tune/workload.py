"""What a line's schedule asks of one row length, and what a micro-batch size makes of it.

Every update takes exactly the rows that its batch asks for, whatever `micro_rows` is: the engine pads the last
micro-batch of an update with rows that carry no loss. So a size that does not divide the rows of an update changes no
token that is trained; it costs the time of the padding, which is counted here to the row."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping

from nstrain.settings.run import RunSettings
from nstrain.train.plan import CycleExtent, Position, cycle_rows, plan_update

OPEN_ENDED_CYCLES = 100
"""An open-ended schedule counts as this many cycles beyond the first one of its last row length."""

SMALLEST_GROWTH = 1.5
"""Each size that is tried is at least so many times the one before."""

LARGEST_GAP = 2
"""Where the sizes without padding lie further apart than this, one with padding stands between them."""

MOST_PADDING = 0.2
"""A size is not tried if more than this share of what it computes is padding."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """All updates that a schedule makes of rows of one length."""

    row_tokens: int
    """Target tokens of a row."""
    updates: Mapping[int, int]
    """How many updates there are, by their rows: those of the batch's pieces, and the smaller ones at cycles' ends."""
    batch_rows: tuple[int, ...]
    """Rows of the batch's pieces that occur, sorted."""

    @property
    def rows(self) -> int:
        """Rows of all updates."""
        return sum(rows * count for rows, count in self.updates.items())

    def micro_batches(self, micro_rows: int) -> int:
        """Micro-batches of all updates."""
        return sum(math.ceil(rows / micro_rows) * count for rows, count in self.updates.items())

    def divides(self, micro_rows: int) -> bool:
        """Whether the batch's updates need no padding; smaller ones at cycles' ends may still."""
        return all(rows % micro_rows == 0 for rows in self.batch_rows)

    def padding(self, micro_rows: int) -> float:
        """Share of the computed rows that is padding."""
        return 1 - self.rows / (self.micro_batches(micro_rows) * micro_rows)

    def tokens_per_s(self, micro_rows: int, micro_batch_s: float, finish_s: float) -> float:
        """Trained tokens a second over all updates: each takes its micro-batches' time and, once, that of its end."""
        seconds = self.micro_batches(micro_rows) * micro_batch_s + sum(self.updates.values()) * finish_s
        return self.rows * self.row_tokens / seconds

    def sizes(self) -> list[int]:
        """The sizes to try, growing: those that need no padding, and between them where they lie far apart."""
        largest = self.batch_rows[-1]
        exact = [size for size in range(1, largest + 1) if self.divides(size)]
        chosen: list[int] = []
        for size in exact:
            if chosen:
                chosen += self._between(chosen[-1], size)
            if not chosen or size >= SMALLEST_GROWTH * chosen[-1]:
                chosen.append(size)
        return chosen + self._between(chosen[-1], largest + 1)

    def _between(self, low: int, high: int) -> list[int]:
        """Sizes with little padding between two, if these lie more than LARGEST_GAP apart."""
        found: list[int] = []
        while high > LARGEST_GAP * low:
            room = range(math.ceil(SMALLEST_GROWTH * low), min(LARGEST_GAP * low, int(high / SMALLEST_GROWTH)) + 1)
            fitting = [size for size in room if self.padding(size) <= MOST_PADDING]
            if fitting:
                found.append(min(fitting, key=lambda size: (self.padding(size), -size)))
            low *= LARGEST_GAP
        return found


def workload(
    settings: RunSettings, row_tokens: int, cycle_plan: Callable[[int], CycleExtent], cycle_count: int | None
) -> Workload:
    """The updates of a row length in a schedule of `cycle_count` cycles (None: open-ended), as the trainer plans them.

    Raises `Refusal` if a cycle is not a whole number of rows, or if `rows` goes beyond the schedule.
    """
    last = cycle_count or settings.rows[-1].from_cycle + OPEN_ENDED_CYCLES - 1
    for piece in settings.rows:
        cycle_plan(piece.from_cycle)  # refuses one beyond the schedule
    updates: Counter[int] = Counter()
    batches: set[int] = set()
    for number in range(1, last + 1):
        if settings.row_tokens_at(number) == row_tokens:
            _count(settings, cycle_plan(number), row_tokens, updates, batches)
    return Workload(row_tokens, dict(sorted(updates.items())), tuple(sorted(batches)))


def _count(
    settings: RunSettings, cycle: CycleExtent, row_tokens: int, updates: Counter[int], batches: set[int]
) -> None:
    """Add a cycle's updates; one in which the batch changes is planned update by update."""
    rows = cycle_rows(cycle, row_tokens)
    inside = (
        cycle.first_token < piece.from_tokens < cycle.first_token + cycle.tokens for piece in settings.batch_pieces
    )
    if not any(inside):
        batch_rows = settings.batch_tokens_at(cycle.first_token) // row_tokens
        batches.add(batch_rows)
        if rows // batch_rows:
            updates[batch_rows] += rows // batch_rows
        if rows % batch_rows:
            updates[rows % batch_rows] += 1
        return
    position = Position(0, cycle.cycle, 0)
    while position.cycle == cycle.cycle:
        update = plan_update(settings, cycle, position)
        updates[update.rows] += 1
        batches.add(update.batch_tokens // row_tokens)
        position = update.position_after
