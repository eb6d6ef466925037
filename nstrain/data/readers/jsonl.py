"""Rows of a file of JSON lines, plain or compressed, read in blocks.

Every line is a row, also a blank one (rejected); what follows the last newline is a row if there is anything. A line is
what Python's decoder takes for JSON - so NaN, which other tools write, is no fault - except where that depends on the
interpreter: numbers are kept as they are written, and a line nested deeper than MAX_NESTING is rejected. A compressed
file must end where a frame of it ends, and a last line without a newline must be whole: else the upload was cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from nstrain.data.readers.errors import bad_upload, damage_is_named
from nstrain.data.readers.rows import MAX_DOCUMENT_BYTES, Position, Row, is_utf8, stratum_name
from nstrain.data.readers.settings import LIST, ColumnPath, ReaderSettings

BLOCK_BYTES = 1 << 20
MAX_NESTING = 100
"""Well below every interpreter's limit, so that whether a line parses does not depend on one."""

RATIO_BYTES = 16 << 20
"""Decompressed bytes from which a file's compression is judged."""

_CODECS = {".gz": "gzip", ".zst": "zstd"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_INVALID = object()
"""Stands for the value of a line that is no JSON."""


class _Number(str):
    """A JSON number as it is written; not a string of the document."""


_DECODER = json.JSONDecoder(parse_int=_Number, parse_float=_Number, parse_constant=_Number)


def read_jsonl(reader: ReaderSettings, path: Path, where: str, only: str | None, position: Position) -> Iterator[Row]:
    """The rows of a file. Raises `BadUpload` for one that is cut or corrupt."""
    text, stratum = reader.text, reader.stratum
    lines = _Lines(path, where, position)
    for line in lines:
        value = _INVALID if line is None else _parse(line)
        if value is _INVALID and line and lines.unfinished and _is_cut(line):
            raise bad_upload(where, f"line {lines.number:,}", "the file ends within it")
        yield from _rows(value, text, stratum, only)


def jsonl_columns(path: Path, where: str, lines: int = 100) -> dict[str, str]:
    """The paths in a file's first lines, each with the JSON types seen there.

    A path that only nulls were found at is left out if there is something below it.
    """
    found: dict[str, set[str]] = {}
    for number, line in enumerate(_Lines(path, where, Position())):
        if number == lines:
            break
        value = _INVALID if line is None else _parse(line)
        if isinstance(value, dict):
            _collect(value, "", found)
    inner = {name[:end] for name in found for end in range(len(name)) if name[end] in ".["}
    return {
        name: "|".join(sorted(found[name])) for name in sorted(found) if not (name in inner and found[name] <= {"null"})
    }


def stored_bytes(path: Path, where: str, position: int) -> int:
    """How many bytes of a file the first `position` bytes of its lines take, by the ratio at its beginning."""
    size = path.stat().st_size
    if path.suffix not in _CODECS:
        return position
    with _Stream(path, where) as stream:
        read = raw = 0
        while read < RATIO_BYTES and (block := stream.read("its beginning")):
            read, raw = read + len(block), stream.raw_bytes
        return min(size, raw * position // max(1, read))


class _Lines:
    """The lines of a file without their newlines, None for one that is too long to hold."""

    def __init__(self, path: Path, where: str, position: Position) -> None:
        self._path, self._where, self._position = path, where, position
        self.number = 0
        """The line given last, from 1."""
        self.unfinished = False
        """Whether that one ended with the file instead of a newline."""

    def __iter__(self) -> Iterator[bytes | None]:
        begun: list[bytes] = []  # the parts of the line that the blocks so far left open
        size = consumed = 0  # bytes of that line; decompressed bytes of the lines given
        with _Stream(self._path, self._where) as stream:
            while block := stream.read(f"after line {self.number:,}"):
                *ends, rest = block.split(b"\n")
                for end in ends:
                    size += len(end)
                    consumed += size + 1
                    self._position.bytes = consumed
                    yield self._line([*begun, end], size)
                    begun, size = [], 0
                size += len(rest)
                begun = [*begun, rest] if size <= MAX_DOCUMENT_BYTES else []
        if size:
            self.unfinished = True
            self._position.bytes = consumed + size
            yield self._line(begun, size)

    def _line(self, parts: list[bytes], size: int) -> bytes | None:
        self.number += 1
        if size > MAX_DOCUMENT_BYTES:
            return None
        line = b"".join(parts)
        return line.removeprefix(_BYTE_ORDER_MARK) if self.number == 1 else line


class _Stream:
    """A file's bytes, decompressed. Raises `BadUpload` where they are cut or corrupt."""

    def __init__(self, path: Path, where: str) -> None:
        self._where = where
        codec = _CODECS.get(path.suffix)
        with damage_is_named(where, "its beginning"):
            self._raw = pa.OSFile(str(path), "rb")
        if codec and self._raw.size() == 0:
            raise bad_upload(where, "its beginning", f"an empty file is no {codec} stream")
        self._stream = pa.CompressedInputStream(self._raw, codec) if codec else self._raw

    def read(self, place: str) -> bytes:
        """The next bytes, none at the end; `place` names where they are in messages."""
        with damage_is_named(self._where, place):
            block: bytes = self._stream.read(BLOCK_BYTES)
        return block

    @property
    def raw_bytes(self) -> int:
        """Bytes of the file that were read for it."""
        return int(self._raw.tell())

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._raw.close()


def _parse(line: bytes) -> Any:
    """A line's value; None if it is nested too deep, _INVALID if it is no JSON."""
    try:
        value = _DECODER.decode(line.decode())
    except ValueError:
        return _INVALID
    except RecursionError:
        return None
    may_be_deep = line.count(b"[") + line.count(b"{") > MAX_NESTING
    return None if may_be_deep and _nesting(value) > MAX_NESTING else value


def _is_cut(line: bytes) -> bool:
    """Whether a last line without a newline, which is no JSON, is more than blank and not just of wrong bytes."""
    return bool(line.strip()) and _parse(line.decode(errors="replace").encode()) is _INVALID


def _nesting(value: Any) -> int:
    """How many lists and objects lie in each other."""
    depth, level = 0, [value]
    while level := [container for container in level if type(container) in (dict, list)]:
        level = [child for parent in level for child in (parent.values() if type(parent) is dict else parent)]
        depth += 1
    return depth


def _rows(value: Any, text: ColumnPath, stratum: ColumnPath | None, only: str | None) -> Iterator[Row]:
    of_row = None if stratum is None else stratum_name(_string_or_scalar(_at(value, stratum.outer)))
    if text.inner is None:
        yield _row(_at(value, text.outer), of_row, only)
        return
    elements = _at(value, text.outer)
    if type(elements) is not list:
        yield _row(None, of_row, only)
        return
    for element in elements:
        if stratum is not None and stratum.inner is not None:
            of_row = stratum_name(_string_or_scalar(_at(element, stratum.inner)))
        yield _row(_at(element, text.inner), of_row, only)


def _row(text: Any, stratum: str | None, only: str | None) -> Row:
    wanted = only is None or stratum == only
    return Row(text if wanted and type(text) is str and text and is_utf8(text) else None, stratum)


def _at(value: Any, names: tuple[str, ...]) -> Any:
    """The value under names one in another, None if it is not there."""
    for name in names:
        if type(value) is not dict:
            return None
        value = value.get(name)
    return value


def _string_or_scalar(value: Any) -> Any:
    return str(value) if type(value) is _Number else value


def _collect(value: Any, name: str, found: dict[str, set[str]]) -> None:
    """Add the paths below a value: fields of objects, the elements of a list as one."""
    if type(value) is dict:
        for key, child in value.items():
            _collect(child, f"{name}.{key}" if name else key, found)
    elif type(value) is list and LIST not in name:
        found.setdefault(name + LIST, set())
        for element in value[:100]:
            _collect(element, name + LIST, found)
    else:
        types = {str: "string", _Number: "number", bool: "bool", list: "list", type(None): "null"}
        found.setdefault(name, set()).add(types[type(value)])
