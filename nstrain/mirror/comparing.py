"""The service's copy of rows, held against the journal's.

A reading is equal if it is the same number; a NaN equals a NaN, and 1 equals 1.0, since a service keeps no kinds. What
begins with "_" is the service's own. A reading that one side lacks is a difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from nstrain.mirror.contract import ServiceAway
from nstrain.record.journal_reader import Row


def compared(mine: Iterator[Row], theirs: Iterator[Row]) -> Iterator[tuple[int, list[str] | None]]:
    """For each of the journal's rows its update, and the readings that the service has otherwise: None if it does not
    have the row, empty if it is equal. Both come in the order of their updates; raises `ServiceAway` if theirs do not.
    """
    theirs = _in_order(theirs)
    following = next(theirs, None)
    for row in mine:
        copies = []
        while following is not None and following["update"] <= row["update"]:
            if following["update"] == row["update"]:
                copies.append(following)
            following = next(theirs, None)
        if not copies:
            yield int(row["update"]), None
        else:
            names = {name for copy in copies for name in differing(row, copy)}
            more = [f"(there {len(copies)} times)"] if len(copies) > 1 else []
            yield int(row["update"]), more + sorted(names)


def _in_order(rows: Iterator[Row]) -> Iterator[Row]:
    """The same rows. A service that began anew again and again would otherwise be read for ever."""
    last = -1.0
    for row in rows:
        if row["update"] < last:
            raise ServiceAway(f"the service gives back update {row['update']} after update {last:.0f}")
        last = row["update"]
        yield row


def differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """The names of the readings that are not equal, in alphabetical order."""
    names = {name for row in (mine, theirs) for name in row if not name.startswith("_")}
    return sorted(name for name in names if not _equal(mine.get(name), theirs.get(name)))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return type(a) is not bool and type(b) is not bool and bool(a == b)
