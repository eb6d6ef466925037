"""Files of rows in every format that the readers know, for the tests named test_readers_*."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nstrain.base.disk import sha256_file
from nstrain.data.entries import FileRequest
from nstrain.data.readers import ReaderSettings, Row, read_rows
from nstrain.data.sources import PinnedFile, SourceSettings

FORMATS = ("rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.parquet")
"""File names; the format follows from the ending."""


def reader_of(name: str, text: str | None = "content", stratum: str | None = None) -> ReaderSettings:
    """The reader for a file's name."""
    return ReaderSettings("parquet" if name.endswith(".parquet") else "jsonl", text, stratum)


def json_lines(records: Sequence[Any]) -> bytes:
    """Records as lines."""
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def compressed(name: str, data: bytes, frame_bytes: int = 1 << 16) -> bytes:
    """Bytes as the file of that name holds them: compressed ones in several frames, as parallel writers make them."""
    frames = [data[start : start + frame_bytes] for start in range(0, len(data), frame_bytes)] or [b""]
    if name.endswith(".gz"):
        return b"".join(gzip.compress(frame, 1, mtime=0) for frame in frames)
    if name.endswith(".zst"):
        return b"".join(pa.Codec("zstd").compress(frame, asbytes=True) for frame in frames)
    return data


def write_records(path: Path, records: Sequence[dict[str, Any]], **options: Any) -> Path:
    """Records as a file of the format that its name says; options are of the parquet writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(list(records)), path, **options)
    else:
        path.write_bytes(compressed(path.name, json_lines(records)))
    return path


def write_texts(path: Path, texts: Sequence[str], **options: Any) -> Path:
    """Texts as rows with the column `content`."""
    return write_records(path, [{"content": text, "n": n} for n, text in enumerate(texts)], **options)


def rows(path: Path, text: str = "content", stratum: str | None = None, only: str | None = None) -> list[Row]:
    """All rows of a file."""
    return list(read_rows(reader_of(path.name, text, stratum), path, f"file {path.name}", only))


def texts(path: Path, text: str = "content") -> list[str | None]:
    """The texts of all rows of a file."""
    return [row.text for row in rows(path, text)]


def source_of(root: Path, reader: str = "text", **fields: Any) -> SourceSettings:
    """A source over a directory, all of whose files belong to it."""
    column = {} if reader == "text" else {"text_column": "content"}
    return SourceSettings(
        name="web", kind="local", path=str(root), include=("**/*",), reader=reader, **{**column, **fields}
    )


def pin(root: Path, path: Path, order: int = 0, stratum: int = 0) -> PinnedFile:
    """A file as it is pinned now."""
    size = path.stat().st_size
    return PinnedFile(path.relative_to(root).as_posix(), size, sha256_file(path), stratum, order, size)


def request(source: SourceSettings, path: Path, entry: Path, stratum: str = ".") -> FileRequest:
    """A request to open a file as it is now."""
    return FileRequest(source, pin(Path(source.path), path), stratum, entry)
