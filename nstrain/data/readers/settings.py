"""How a source's files are read: their format, and the columns of the text and of the stratum.

A column is named by its path: `content`; `meta.text`, a field of a struct; `files[].content`, a field in each element
of a list. With a list each element is a document, and rows are numbered over all elements in order.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from nstrain.base.errors import Refusal

LIST = "[]"


@dataclasses.dataclass(frozen=True)
class ColumnPath:
    """A column's path, taken apart."""

    outer: tuple[str, ...]
    """Names from a row to the value, or to the list if the path has one."""
    inner: tuple[str, ...] | None
    """Names from an element of the list to the value; None without a list."""

    @classmethod
    def parse(cls, name: str) -> ColumnPath:
        """From its written form. Raises `Refusal` for one that is no path."""
        outer, has_list, inner = name.partition(LIST)
        fields = tuple(outer.split("."))
        within = tuple(inner.removeprefix(".").split(".")) if inner else ()
        if not all((*fields, *within)) or LIST in inner or (inner and not inner.startswith(".")):
            raise Refusal(
                f"column {name!r} is no path: expected names joined by '.', one of them followed by '[]' where a row "
                "holds a list of documents, as in content, meta.text, files[].content"
            )
        return cls(fields, within if has_list else None)


@dataclasses.dataclass(frozen=True)
class ReaderSettings:
    """How the files of a source become rows."""

    format: Literal["text", "jsonl", "parquet"]
    """text: a file is one document. jsonl: a line is a JSON object; a name that ends in .gz or .zst is compressed."""
    text_column: str | None = None
    """Path of the column that holds the text; None for the format text alone."""
    stratum_column: str | None = None
    """Path of the column whose value is a row's stratum; beside the text (in the same list) or in the row itself."""

    def __post_init__(self) -> None:
        if self.format == "text":
            if self.text_column is not None or self.stratum_column is not None:
                raise Refusal("files of format text have no columns; leave text_column and a column's strata out")
            return
        if self.text_column is None:
            raise Refusal(f"files of format {self.format} have columns; name the one with the text (text_column)")
        text, stratum = self.text, self.stratum
        if stratum is not None and stratum.inner is not None and (text.inner is None or text.outer != stratum.outer):
            raise Refusal(
                f"the stratum column {self.stratum_column!r} lies in a list, the text column {self.text_column!r} not "
                "in the same; name a column in the text's list or in the row itself"
            )

    @property
    def text(self) -> ColumnPath:
        """The text's path."""
        assert self.text_column is not None, "the format text has no columns"
        return ColumnPath.parse(self.text_column)

    @property
    def stratum(self) -> ColumnPath | None:
        """The stratum's path."""
        return None if self.stratum_column is None else ColumnPath.parse(self.stratum_column)
