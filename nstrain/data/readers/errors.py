"""What can be wrong with a file of a source, told apart: it changed, it was uploaded damaged, it lacks a column.

A damaged upload has the bytes that were pinned, so fetching it again cannot help; a changed file has others. A single
bad row is neither: it is rejected by the rule in `rows` and counted. What the operating system reports (a read error, a
stale network handle) stays an OSError, for it may be gone at the next try.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa

from nstrain.base.errors import Refusal


class ChangedFile(Refusal):
    """A file whose bytes are not those that the line pinned, or that is gone."""


class BadUpload(Refusal):
    """A file with the pinned bytes that cannot be read: truncated, corrupt, or deadly to its reader."""


class MissingColumn(Refusal):
    """A file without the column that the recipe names, or with something else than text in it."""


def bad_upload(where: str, place: str, what: str) -> BadUpload:
    """The error for a file that is damaged at a place (a row group, a line) of it."""
    return BadUpload(
        f"{where}: {place}: {what}. The file has the bytes that were pinned, so it was damaged before it was uploaded; "
        "make a new line without it (exclude it by a glob in the recipe) or from a revision in which it is whole"
    )


@contextlib.contextmanager
def damage_is_named(where: str, place: str) -> Iterator[None]:
    """Turn pyarrow's complaints about a file's content into a `BadUpload`; the operating system's errors pass."""
    try:
        yield
    except pa.ArrowMemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise bad_upload(where, place, " ".join(str(error).split())) from None
