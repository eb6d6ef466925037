"""The formats together: rows, columns, and a sample of any file."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

from nstrain.data.readers.errors import missing_column
from nstrain.data.readers.jsonl import jsonl_columns, read_jsonl, stored_bytes
from nstrain.data.readers.parquet import parquet_columns, read_parquet, refuse_parquet_columns
from nstrain.data.readers.rows import MAX_DOCUMENT_BYTES, Position, Row, read_text
from nstrain.data.readers.settings import ReaderSettings

SAMPLE_BATCH_BYTES = 4 << 20
"""Text of a sample that is encoded at once."""


def read_rows(
    reader: ReaderSettings, path: Path, where: str, only: str | None = None, position: Position | None = None
) -> Iterator[Row]:
    """Every row of a file in its own order, with memory bounded whatever the file.

    `where` names the file in messages. With `only`, rows of other strata than that one keep their place but have no
    text. `position` is kept up to date. Raises `BadUpload` for a file that is cut or corrupt, naming the place, and
    `MissingColumn` for a parquet file without the reader's columns; the operating system's errors pass.
    """
    position = position or Position()
    if reader.format == "text":
        return read_text(path, position)
    read = read_jsonl if reader.format == "jsonl" else read_parquet
    return read(reader, path, where, only, position)


def scan_columns(reader: ReaderSettings, path: Path, where: str | None = None) -> dict[str, str]:
    """The paths of a file's columns as a recipe writes them, each with its type; of JSON lines those in the first 100.

    Empty for text. Raises `BadUpload`.
    """
    if reader.format == "text":
        return {}
    scan = jsonl_columns if reader.format == "jsonl" else parquet_columns
    return scan(path, where or str(path))


def refuse_missing_columns(reader: ReaderSettings, path: Path, where: str) -> None:
    """Raise `MissingColumn`, naming what is there, for a file without a column of the reader, or no text in it.

    A file of JSON lines in whose first lines there is no object lacks rows, not columns.
    """
    if reader.format == "parquet":
        refuse_parquet_columns(reader, path, where)
        return
    there = scan_columns(reader, path, where)
    for name in (reader.text_column, reader.stratum_column):
        if name is None or not there:
            continue
        problem = f"has no column {name!r}" if name not in there else None
        if name == reader.text_column and name in there and not {"string", "null"} & set(there[name].split("|")):
            problem = f"column {name!r} holds {there[name]}; expected strings"
        if problem is not None:
            columns = ", ".join(f"{column} ({type})" for column, type in there.items())
            raise missing_column(where, problem, columns)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a sample from a file's beginning gave."""

    tokens: int
    """Of the sampled documents, as the caller counts them."""
    file_bytes: int
    """Bytes of the file that they stand for."""


def estimate(
    reader: ReaderSettings,
    path: Path,
    encode: Callable[[list[str]], int],
    max_bytes: int,
    where: str | None = None,
    only: str | None = None,
) -> Estimate:
    """Encode the documents at a file's beginning until their text comes to `max_bytes` bytes, at least one.

    `encode` says how many tokens the texts of a batch are to count, an EOS each included. With `only`, only the texts
    of that stratum are encoded, but the bytes stand for all rows. Raises as `read_rows` does.
    """
    if reader.format == "text":
        return _estimate_text(path, encode, max_bytes)
    position, where = Position(), where or str(path)
    tokens = sampled = waiting_bytes = 0
    waiting: list[str] = []
    for row in read_rows(reader, path, where, only, position):
        if row.text is not None:
            waiting.append(row.text)
            waiting_bytes += len(row.text.encode())
        if waiting_bytes >= min(SAMPLE_BATCH_BYTES, max_bytes - sampled):
            tokens, sampled = tokens + encode(waiting), sampled + waiting_bytes
            waiting, waiting_bytes = [], 0
        if sampled >= max_bytes:
            jsonl = reader.format == "jsonl"
            return Estimate(tokens, stored_bytes(path, where, position.bytes) if jsonl else position.bytes)
    return Estimate(tokens + (encode(waiting) if waiting else 0), path.stat().st_size)


def _estimate_text(path: Path, encode: Callable[[list[str]], int], max_bytes: int) -> Estimate:
    """A document's beginning stands for itself."""
    size = path.stat().st_size
    if size > MAX_DOCUMENT_BYTES:
        return Estimate(0, size)
    with path.open("rb") as file:
        data = file.read(min(size, max(1, max_bytes)))
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) == size)
    except UnicodeDecodeError:
        return Estimate(0, size)
    return Estimate(encode([text]) if text else 0, len(data) if text else size)
