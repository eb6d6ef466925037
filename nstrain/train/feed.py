"""The rows of the cycle in use, the next update's read ahead in a thread.

Reading ahead is a guess about what will be asked for; what is handed out is decided by the update alone.
"""

from __future__ import annotations

import concurrent.futures
from typing import Protocol

from nstrain.train.engine import TokenRows
from nstrain.train.plan import Update


class Rows(Protocol):
    """What the feed needs of `nstrain.data.rows.CycleRows`."""

    def read(self, first: int, last: int) -> TokenRows:
        """Rows first ... last-1 of the cycle's order."""


class RowFeed:
    """Reads one cycle's rows by update."""

    def __init__(self, rows: Rows, read_ahead: bool = True) -> None:
        self._rows = rows
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "row reader") if read_ahead else None
        self._ahead: tuple[tuple[int, int], concurrent.futures.Future[TokenRows]] | None = None

    def take(self, update: Update) -> TokenRows:
        """The update's rows, [rows, row_tokens + 1]. Raises what reading them raised."""
        wanted = (update.first_row, update.last_row)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == wanted:
            return ahead[1].result()
        return self._rows.read(*wanted)

    def expect(self, update: Update) -> None:
        """Begin to read an update's rows, which will probably be taken next."""
        if self._pool is not None:
            wanted = (update.first_row, update.last_row)
            self._ahead = wanted, self._pool.submit(self._rows.read, *wanted)

    def close(self) -> None:
        """End the reading thread."""
        self._ahead = None
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
