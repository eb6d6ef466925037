"""The data cycles of a trainer: each opened when it is its turn, and its token files hashed beside the training.

A cycle that lies ready is opened, and its files are hashed, while the one before it is trained: what is wrong with them
is told then, and a person may mend it before the line gets there. Where there was nothing to hash ahead (a launch, a
preparer that is just in time) updates go on meanwhile, and nothing of them is committed before the hashes are those of
the manifest (loop.py).
"""

from __future__ import annotations

import dataclasses
import time

from nstrain.base.errors import NstrainError
from nstrain.data.line import DataLine
from nstrain.data.rows import CycleRows
from nstrain.data.token_check import TokenCheck
from nstrain.train.checkpointing import CycleOrder
from nstrain.train.feed import RowFeed

LOOK_S = 10.0
"""How often it is looked whether the next cycle is ready."""


@dataclasses.dataclass(frozen=True)
class OpenCycle:
    """A cycle that rows are taken from."""

    rows: CycleRows
    feed: RowFeed
    order: CycleOrder
    check: TokenCheck
    doubtful: bool = False
    """Whether its files were damaged when they were hashed ahead: nothing of it is to be trained before they are hashed
    again."""

    @classmethod
    def open(cls, data: DataLine, cycle: int, row_tokens: int, doubtful: bool = False) -> OpenCycle:
        """Open a cycle that is ready, and begin to hash its files. Raises `Refusal` if it is not what it should be."""
        rows = CycleRows.open(data, cycle, row_tokens)
        order = CycleOrder(cycle, row_tokens, rows.manifest_sha256, rows.order_digest)
        return cls(rows, RowFeed(rows), order, TokenCheck(rows), doubtful)

    def close(self) -> None:
        """End its threads, and close its files."""
        self.feed.close()
        self.check.close()
        for file in self.rows.files:
            file.close()


class CycleAhead:
    """The next cycle, hashed before it is its turn."""

    def __init__(self) -> None:
        self._cycle: OpenCycle | None = None
        self._looked_at = -LOOK_S
        self._damaged: int | None = None
        """The cycle that was found to be damaged."""

    def look(self, data: DataLine, cycle: int, row_tokens: int) -> str | None:
        """Have a cycle hashed as soon as it is ready; what is wrong with it, once."""
        if self._cycle is None and cycle != self._damaged and time.monotonic() - self._looked_at >= LOOK_S:
            self._looked_at = time.monotonic()
            if data.is_ready(cycle):
                try:
                    self._cycle = OpenCycle.open(data, cycle, row_tokens)
                except NstrainError as error:
                    self._damaged = cycle
                    return str(error)
        if self._cycle is not None and (problem := self._cycle.check.problem) is not None:
            self._damaged = cycle
            self.close()
            return str(problem)
        return None

    def take(self, data: DataLine, cycle: int, row_tokens: int) -> OpenCycle:
        """The cycle whose turn it is, opened before or now. Raises `Refusal` if it is not what it should be."""
        self._looked_at = -LOOK_S  # for the one after it
        ahead, self._cycle = self._cycle, None
        if ahead is not None:
            if (ahead.order.cycle, ahead.order.row_tokens) == (cycle, row_tokens) and ahead.check.problem is None:
                return ahead
            ahead.close()
        return OpenCycle.open(data, cycle, row_tokens, doubtful=ahead is not None or cycle == self._damaged)

    def close(self) -> None:
        """End its threads."""
        if self._cycle is not None:
            self._cycle.close()
            self._cycle = None
