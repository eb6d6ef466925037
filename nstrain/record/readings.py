"""One update's readings: numbers by name, as the journal packs, compares and prints them.

A reading is an int or a float. Both are packed as 64-bit floats; which of the two a name holds is part of its key set
(the names and kinds of a row, stored once), so that an int comes back as an int. Ints are therefore limited to those
that such a float holds exactly.

Two readings are equal when they have the same kind and the same bits; all NaNs are equal, and 0.0 differs from -0.0.
Names under `time/` and `perf/` depend on the clock and the machine and take no part.
"""

from __future__ import annotations

import functools
import json
import math
import numbers
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from nstrain.base.errors import Refusal

Readings = Mapping[str, float]
"""Readings of one update: ints and floats by name."""

KEY_NAMES = ("update", "generation")
"""The key of a row; not readings."""

LEADING_NAMES = ("update", "tokens", "generation", "cycle", "row_tokens", "rows", "skipped", "smaller")
"""Names that come first, in this order, wherever rows are printed; the others follow in alphabetical order."""

CLOCK_PREFIXES = ("time/", "perf/")
"""Readings that may differ between two runs of the same update."""

MAX_INT = 2**53
"""Every int up to here, either side of 0, has a 64-bit float of its own."""

_NAN_BITS = struct.pack("<d", float("nan"))


def refuse_unrecordable(readings: Mapping[str, Any], where: str) -> None:
    """Raise `Refusal` for a name or value that is no reading."""
    for name, value in readings.items():
        if not isinstance(name, str) or not name or not name.isprintable() or name in KEY_NAMES:
            raise Refusal(
                f"{where}: {name!r} cannot name a reading: expected a printable string other than "
                + " and ".join(KEY_NAMES)
            )
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise Refusal(f"{where}: reading {name!r}: expected a number, found {value!r}")
        if isinstance(value, numbers.Integral) and abs(int(value)) > MAX_INT:
            raise Refusal(f"{where}: reading {name!r}: expected an int within +-2**53, found {value!r}")


def _kind(value: object) -> str:
    return "i" if isinstance(value, numbers.Integral) else "f"


def pack(readings: Readings) -> tuple[str, bytes]:
    """A row's key set (JSON: names and kinds in order of the names) and its values (little-endian 64-bit floats)."""
    names = sorted(readings)
    kinds = [[name, _kind(readings[name])] for name in names]
    values = struct.pack(f"<{len(names)}d", *(readings[name] for name in names))
    return json.dumps(kinds, separators=(",", ":"), ensure_ascii=False), values


def unpack(key_set: str, values: bytes) -> dict[str, float]:
    """What `pack` packed, names in alphabetical order."""
    kinds = _kinds_of(key_set)
    numbers_ = struct.unpack(f"<{len(kinds)}d", values)
    return {name: int(value) if kind == "i" else value for (name, kind), value in zip(kinds, numbers_, strict=True)}


def names_of(key_set: str) -> list[str]:
    """The names of a key set."""
    return [name for name, _ in _kinds_of(key_set)]


@functools.lru_cache(maxsize=64)
def _kinds_of(key_set: str) -> list[tuple[str, str]]:
    """A key set's names and kinds; a journal has few sets, and thousands of rows of each."""
    return [(name, kind) for name, kind in json.loads(key_set)]


def comparable(readings: Readings) -> bytes:
    """One byte string for all readings that count as equal to these."""
    parts = []
    for name in sorted(readings):
        if name.startswith(CLOCK_PREFIXES):
            continue
        value = readings[name]
        bits = _NAN_BITS if math.isnan(value) else struct.pack("<d", value)
        parts.append(f"{name}\0{_kind(value)}".encode() + bits)
    return b"".join(parts)


def in_printing_order(names: Iterable[str]) -> list[str]:
    """Names as columns: the leading ones first, then the others in alphabetical order."""
    names = set(names)
    return [name for name in LEADING_NAMES if name in names] + sorted(names - set(LEADING_NAMES))
