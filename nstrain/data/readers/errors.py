"""What can be wrong with a file of a source, told apart: it changed, it was uploaded damaged, it lacks a column.

A damaged upload has the bytes that were pinned, so fetching it again cannot help; a changed file has others. A single
bad row is neither: it is rejected by the rule in `rows` and counted. What the operating system reports (a read error, a
stale network handle) stays an OSError, for it may be gone at the next try.

What is to be done about a file that cannot be used depends on who meets it: before a line is made the recipe can leave
it out, later the line can (`nstrain.data.exclude`). So such an error keeps what is wrong and of which file apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa

from nstrain.base.errors import Refusal


class FileRefusal(Refusal):
    """A file of a source of which no text can be had now; a person may decide to leave it out (`data exclude`)."""

    source = path = ""
    """Its source's name and its pinned path, once they are known (`found_in`)."""

    def found_in(self, source: str, path: str) -> None:
        """Note which pinned file it is."""
        self.source, self.path = source, path


class ChangedFile(FileRefusal):
    """A file whose bytes are not those that the line pinned, or that is gone."""


class UnusableFile(FileRefusal):
    """A file with the pinned bytes of which no text can be had, however often it is tried."""

    may_pass = False
    """Whether it may be the machine's fault all the same: the reader was killed, as it is when memory runs out."""

    def __init__(self, fault: str, remedy: str = "") -> None:
        """`fault` names the file, the place in it and what is wrong; `remedy` holds until a line was made with it."""
        super().__init__(fault, remedy)
        self.fault, self.remedy = fault, remedy

    def __str__(self) -> str:
        return self.fault + self.remedy


class BadUpload(UnusableFile):
    """A file with the pinned bytes that cannot be read: truncated, corrupt, or deadly to its reader."""


class MissingColumn(UnusableFile):
    """A file without the column that the recipe names, or with something else than text in it."""


def bad_upload(where: str, place: str, what: str) -> BadUpload:
    """The error for a file that is damaged at a place (a row group, a line) of it."""
    return BadUpload(
        f"{where}: {place}: {what}. The file has the bytes that were pinned, so it was damaged before it was uploaded",
        "; make a new line without it (exclude it by a glob in the recipe) or from a revision in which it is whole",
    )


def reader_died(where: str, place: str, what: str) -> BadUpload:
    """The error for a file whose reader was killed, or gave up, perhaps by no fault of the file: it may pass."""
    died = BadUpload(
        f"{where}: {place}: {what}. Either this machine had too little memory for it, or the file is damaged",
        "; try again with more memory free, or make a new line without it (exclude it by a glob in the recipe)",
    )
    died.may_pass = True
    return died


def missing_column(where: str, problem: str, there: str) -> MissingColumn:
    """The error for a file whose columns, `there`, are not those of the recipe."""
    return MissingColumn(f"{where}: {problem}; it has {there}", ". Correct the column in the recipe")


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
