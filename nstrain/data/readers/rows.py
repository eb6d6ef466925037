"""A file's rows, and the one rule by which a row is rejected.

A row has no text - it is rejected and only counted - if its text is missing, null, not a string, empty, not valid
UTF-8 (a lone surrogate from a JSON escape is not), or longer than MAX_DOCUMENT_BYTES, or if its JSON line does not
parse. A row whose list of documents is missing or null is one rejected row; an empty list has no rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MAX_DOCUMENT_BYTES = 256 << 20
"""A text, or a JSON line, beyond this is rejected: no row takes more memory than a few times this."""

NO_STRATUM = "(none)"
"""The stratum of rows whose stratum column is missing, null, empty or no single value."""


class Row(NamedTuple):
    """One row of a file."""

    text: str | None
    """The document; None if the row is rejected, or of another stratum than was asked for."""
    stratum: str | None
    """The stratum column's value as text; None if the reader has no such column."""


@dataclasses.dataclass
class Position:
    """How far a reader is."""

    bytes: int = 0
    """Bytes of its file that the rows so far stand for; of a compressed one, of what it decompresses to."""


def stratum_name(value: Any) -> str:
    """The stratum that a value of the stratum column names."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, (str, int, float)):
        return NO_STRATUM
    name = str(value)
    return name if name and is_utf8(name) else NO_STRATUM


def is_utf8(text: str) -> bool:
    """Whether a text can be written as UTF-8: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def decoded(data: bytes | None) -> str | None:
    """Bytes as text, or None if they are not valid UTF-8."""
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return None


def read_text(path: Path, position: Position) -> Iterator[Row]:
    """A file as one document."""
    position.bytes = path.stat().st_size
    text = decoded(path.read_bytes()) if position.bytes <= MAX_DOCUMENT_BYTES else None
    yield Row(text or None, None)
