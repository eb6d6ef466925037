"""Which rows the next update takes: a pure function of (run.json, the cycle's plan, a position).

An update takes consecutive rows of one cycle. How many is read from the batch ramp at the position before it; it never
spans a cycle's end, so the rows left there form one smaller update. Nothing here is counted up from an earlier
update: planning the next one costs the same anywhere, and a resumed line plans what the uninterrupted one did.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from nstrain.base.errors import Refusal
from nstrain.settings.run import RunSettings


class CycleExtent(Protocol):
    """What planning needs to know of a data cycle (`nstrain.data.schedule.CyclePlan` has it)."""

    @property
    def cycle(self) -> int:
        """Its number, from 1."""

    @property
    def tokens(self) -> int:
        """Target tokens in it."""

    @property
    def first_token(self) -> int:
        """Target tokens of the cycles before it."""


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a line stands between two updates."""

    update: int
    """Number of the last update, skipped ones counted; 0 before the first."""
    cycle: int
    """Cycle of the next row to train."""
    row: int
    """Index of the next row in that cycle; 0 at its start."""


@dataclasses.dataclass(frozen=True)
class Update:
    """One planned update."""

    number: int
    """From 1, continued over cycles."""
    cycle: int
    """The cycle whose rows it takes."""
    first_row: int
    """Its first row in the cycle."""
    last_row: int
    """The row after its last one."""
    row_tokens: int
    """Target tokens of a row."""
    batch_tokens: int
    """Tokens of an update at this position by the ramp; more than `tokens` if this one is smaller."""
    tokens_before: int
    """The position in tokens before it."""
    ends_cycle: bool
    """Whether it takes the cycle's last row."""

    @property
    def rows(self) -> int:
        """Rows it takes."""
        return self.last_row - self.first_row

    @property
    def tokens(self) -> int:
        """Target tokens it trains."""
        return self.rows * self.row_tokens

    @property
    def tokens_after(self) -> int:
        """The position in tokens after it."""
        return self.tokens_before + self.tokens

    @property
    def smaller(self) -> bool:
        """Whether the cycle had fewer rows left than the ramp asks for."""
        return self.tokens < self.batch_tokens

    @property
    def position_after(self) -> Position:
        """Where the line stands after it; a finished cycle's is row 0 of the next one."""
        if self.ends_cycle:
            return Position(self.number, self.cycle + 1, 0)
        return Position(self.number, self.cycle, self.last_row)


def cycle_rows(cycle: CycleExtent, row_tokens: int) -> int:
    """Rows in a cycle. Raises `Refusal` if it is not a whole number of them."""
    if cycle.tokens % row_tokens:
        raise Refusal(
            f"cycle {cycle.cycle} has {cycle.tokens:,} tokens, which is not a whole number of rows of {row_tokens:,} "
            "tokens; the row length must divide the data line's unit"
        )
    return cycle.tokens // row_tokens


def plan_update(settings: RunSettings, cycle: CycleExtent, position: Position) -> Update:
    """The update after `position`, which lies in `cycle` (its plan).

    Raises `Refusal` if the position is not a row of the cycle.
    """
    assert position.cycle == cycle.cycle, f"position in cycle {position.cycle}, plan of cycle {cycle.cycle}"
    row_tokens = settings.row_tokens_at(cycle.cycle)
    rows = cycle_rows(cycle, row_tokens)
    if not 0 <= position.row < rows:
        raise Refusal(
            f"cycle {cycle.cycle} has rows 0 ... {rows - 1} of {row_tokens:,} tokens; the position is row "
            f"{position.row}, which only another row length or another schedule can have written"
        )
    tokens_before = cycle.first_token + position.row * row_tokens
    batch_tokens = settings.batch_tokens_at(tokens_before)
    last_row = min(position.row + batch_tokens // row_tokens, rows)
    return Update(
        number=position.update + 1,
        cycle=cycle.cycle,
        first_row=position.row,
        last_row=last_row,
        row_tokens=row_tokens,
        batch_tokens=batch_tokens,
        tokens_before=tokens_before,
        ends_cycle=last_row == rows,
    )
