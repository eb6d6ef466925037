"""Rows of a parquet file, a small batch of a row group at a time, only the columns that are asked for.

Memory follows the batch, not the file or its row groups: no prefetching, a read buffer of 1 MiB, one thread, and as
many rows at once as come to BATCH_BYTES by the row group's own figures. Page checksums are verified where the writer
stored them. A string that is not valid UTF-8 is one rejected row, the rest of its batch is read.

Native code may crash on a malformed file: files are opened in worker processes (`opener_pool`), which name the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nstrain.data.readers.errors import bad_upload, damage_is_named, missing_column
from nstrain.data.readers.rows import MAX_DOCUMENT_BYTES, Position, Row, decoded, stratum_name
from nstrain.data.readers.settings import LIST, ColumnPath, ReaderSettings

BATCH_BYTES = 4 << 20
"""Uncompressed bytes that a batch of rows should come to."""
MAX_BATCH_ROWS = 256
"""For columns whose figures say little because their values repeat."""
BUFFER_BYTES = 1 << 20


def read_parquet(reader: ReaderSettings, path: Path, where: str, only: str | None, position: Position) -> Iterator[Row]:
    """The rows of a file. Raises `BadUpload` for a corrupt one, `MissingColumn` for one without the columns."""
    size = path.stat().st_size
    with _opened(path, where) as file:
        columns = _Columns.find(reader, file, where)
        done, rows = 0, file.metadata.num_rows
        for group in range(file.metadata.num_row_groups):
            place = f"row group {group} of {file.metadata.num_row_groups}"
            expected, before = file.metadata.row_group(group).num_rows, done
            for batch in _batches(file, group, columns, where, place):
                for row, parents in columns.rows(batch, only):
                    position.bytes = size * (done + parents) // rows
                    yield row
                done += batch.num_rows
            if done - before != expected:
                raise bad_upload(where, place, f"it has {done - before:,} rows, its footer says {expected:,}")
    position.bytes = size


def parquet_columns(path: Path, where: str) -> dict[str, str]:
    """The paths of a file's columns, each with its type."""
    with _opened(path, where) as file, damage_is_named(where, "its footer"):
        return {leaf.name: str(leaf.type) for leaf in _leaves(file)}


def refuse_parquet_columns(reader: ReaderSettings, path: Path, where: str) -> None:
    """Raise `MissingColumn` for a file without the reader's columns."""
    with _opened(path, where) as file:
        _Columns.find(reader, file, where)


@contextlib.contextmanager
def _opened(path: Path, where: str) -> Iterator[pq.ParquetFile]:
    with damage_is_named(where, "its footer"):
        file = pq.ParquetFile(
            str(path), pre_buffer=False, buffer_size=BUFFER_BYTES, memory_map=False, page_checksum_verification=True
        )
    try:
        yield file
    finally:
        file.close()
        pa.default_memory_pool().release_unused()


def _batches(file: pq.ParquetFile, group: int, columns: _Columns, where: str, place: str) -> Iterator[pa.RecordBatch]:
    figures = file.metadata.row_group(group)
    if figures.num_rows == 0:
        return
    group_bytes = sum(figures.column(index).total_uncompressed_size for index in columns.leaf_indices)
    rows = max(1, min(MAX_BATCH_ROWS, BATCH_BYTES * figures.num_rows // max(1, group_bytes)))
    with damage_is_named(where, place):
        batches = file.iter_batches(rows, row_groups=[group], columns=columns.leaf_paths, use_threads=False)
    while True:
        with damage_is_named(where, place):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A column that holds values, not other columns."""

    index: int
    name: str
    """Its path as a recipe writes it."""
    stored_name: str
    """Its path in the file, which names the levels of a list too."""
    type: pa.DataType


def _leaves(file: pq.ParquetFile) -> list[_Leaf]:
    """Every leaf of the schema; those that Arrow and the file count alike, from the first to the last."""
    named = [leaf for field in file.schema_arrow for leaf in _below(field.name, field.type)]
    stored = [file.schema.column(index).path for index in range(len(file.schema))]
    if len(named) != len(stored):
        raise pa.ArrowInvalid(f"its schema has {len(stored)} columns, Arrow sees {len(named)} of them")
    return [
        _Leaf(index, name, path, type) for index, ((name, type), path) in enumerate(zip(named, stored, strict=True))
    ]


def _below(name: str, type: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    if isinstance(type, pa.BaseExtensionType):
        type = type.storage_type
    if pa.types.is_struct(type):
        for index in range(type.num_fields):
            yield from _below(f"{name}.{type.field(index).name}", type.field(index).type)
    elif pa.types.is_map(type):
        yield from _below(f"{name}{{key}}", type.key_type)
        yield from _below(f"{name}{{value}}", type.item_type)
    elif pa.types.is_list(type) or pa.types.is_large_list(type):
        yield from _below(name + LIST, type.value_type)
    elif pa.types.is_fixed_size_list(type):
        yield from _below(f"{name}[{type.list_size}]", type.value_type)
    else:
        yield name, type


def _is_text(type: pa.DataType) -> bool:
    if pa.types.is_dictionary(type):
        type = type.value_type
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(check(type) for check in checks) or pa.types.is_null(type)


def _is_scalar(type: pa.DataType) -> bool:
    checks = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return _is_text(type) or any(check(type) for check in checks)


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Where the text and the stratum lie in a file."""

    text: ColumnPath
    stratum: ColumnPath | None
    leaf_indices: tuple[int, ...]
    leaf_paths: list[str]

    @classmethod
    def find(cls, reader: ReaderSettings, file: pq.ParquetFile, where: str) -> _Columns:
        """Find the reader's columns. Raises `MissingColumn`, naming what is there."""
        with damage_is_named(where, "its footer"):
            leaves = _leaves(file)
        found = []
        for name, fits, what in (
            (reader.text_column, _is_text, "strings"),
            (reader.stratum_column, _is_scalar, "strings, numbers or booleans"),
        ):
            if name is None:
                continue
            same_name = [leaf for leaf in leaves if leaf.name == name]
            if len(same_name) != 1 or not fits(same_name[0].type):
                problem = (
                    f"has no column {name!r}" if not same_name
                    else f"has {len(same_name)} columns {name!r}" if len(same_name) > 1
                    else f"column {name!r} has type {same_name[0].type}; expected {what}"
                )  # fmt: skip
                there = ", ".join(f"{leaf.name} ({leaf.type})" for leaf in leaves)
                raise missing_column(where, problem, there)
            found.append(same_name[0])
        indices, paths = tuple(leaf.index for leaf in found), [leaf.stored_name for leaf in found]
        return cls(reader.text, reader.stratum, indices, paths)

    def rows(self, batch: pa.RecordBatch, only: str | None) -> Iterator[tuple[Row, int]]:
        """The rows of a batch, each with the number of the batch's own rows up to and with the one it lies in."""
        outer = _field(batch.column(self.text.outer[0]), self.text.outer[1:])
        by_row = self.stratum is not None and self.stratum.inner is None
        strata = self._strata(batch, outer) if self.stratum is not None else None
        if self.text.inner is None:
            texts = _texts(outer, strata, only)
            for place, text in enumerate(texts):
                yield Row(text or None, strata[place] if strata else None), place + 1
            return
        lengths = pc.list_value_length(outer).to_pylist()
        parents = [place for place, length in enumerate(lengths) for _ in range(length or 0)]
        of_elements = [strata[parent] for parent in parents] if strata and by_row else strata
        texts = _texts(_field(outer.flatten(), self.text.inner), of_elements, only)
        element = 0
        for place, length in enumerate(lengths):
            if length is None:
                missing = None if self.stratum is None else strata[place] if strata and by_row else stratum_name(None)
                yield Row(None, missing), place + 1
            for _ in range(length or 0):
                yield Row(texts[element] or None, of_elements[element] if of_elements else None), place + 1
                element += 1

    def _strata(self, batch: pa.RecordBatch, outer: pa.Array) -> list[str]:
        """The strata of the batch's rows, or of its lists' elements where the column lies there."""
        assert self.stratum is not None
        if self.stratum.inner is None:
            values = _field(batch.column(self.stratum.outer[0]), self.stratum.outer[1:])
        else:
            values = _field(outer.flatten(), self.stratum.inner)
        return [stratum_name(value) for value in (_strings(values) if _is_text(values.type) else values.to_pylist())]


def _field(array: pa.Array, names: tuple[str, ...]) -> pa.Array:
    """A field of a struct, of a field of it, ...; null where any of them is."""
    for name in names:
        array = pc.struct_field(_plain(array), name)
    return _plain(array)


def _plain(array: pa.Array) -> pa.Array:
    """An array without extension or dictionary."""
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _texts(array: pa.Array, strata: list[str] | None, only: str | None) -> list[str | None]:
    """Values as texts; None for those of another stratum than `only`."""
    if only is None or strata is None:
        return _strings(array)
    wanted = [place for place, stratum in enumerate(strata) if stratum == only]
    texts: list[str | None] = [None] * len(array)
    if wanted:
        for place, text in zip(wanted, _strings(array.take(pa.array(wanted, pa.int64()))), strict=True):
            texts[place] = text
    return texts


def _strings(array: pa.Array) -> list[str | None]:
    """Values of a string or binary array; None for null, too long, or not valid UTF-8."""
    if pa.types.is_null(array.type):
        return [None] * len(array)
    lengths = pc.binary_length(array)
    if (pc.max(lengths).as_py() or 0) > MAX_DOCUMENT_BYTES:
        array = pc.if_else(pc.greater(lengths, MAX_DOCUMENT_BYTES), pa.scalar(None, array.type), array)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        try:
            strings: list[str | None] = array.to_pylist()
            return strings
        except UnicodeDecodeError:
            array = array.cast(pa.large_binary() if pa.types.is_large_string(array.type) else pa.binary())
    values: list[Any] = array.to_pylist()
    return [decoded(value) for value in values]
