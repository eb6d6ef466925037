"""What open/ holds: the trainable documents of one file as token ids, in the file's keyed order.

Opening a file reads it, holds out and rejects rows, encodes the rest and permutes them by a key of the file alone (and
of the stratum where strata are by column, since then the file gives each stratum its own documents). The result is a
pure function of pinned inputs, so an entry may be lost or deleted at any time; it carries a hash of itself, and one
that does not verify (a power cut) is made again.

Memory follows a batch of documents, not the file: the ids go to a temporary file in the order of the rows, and from
there into the entry in the keyed order. A table of 12 bytes a document is all that is held.

Entry: 8 bytes little-endian header length, the header (canonical JSON), the document table, the tokens.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nstrain.base.disk import PARTIAL_SUFFIX, canonical_json, disk_full_is_named
from nstrain.base.killpoints import kill_point
from nstrain.data.encode import ENCODING_VERSION, Encoder
from nstrain.data.order import derive_key, keyed_permutation
from nstrain.data.readers import read_pinned
from nstrain.data.sources import PinnedFile, SourceSettings

DOCUMENT = np.dtype([("end", "<u8"), ("row", "<u4")])
"""A document in the table: where its tokens end among the file's, and its row in the file."""

SPILL_BYTES = 32 << 20
"""Tokens of a file that are kept in memory; those of a larger one go to a temporary file."""
BLOCK_BYTES = 1 << 20
TICK_TOKENS = 1 << 20
"""`open_file` calls its `tick` after about so many tokens."""


@dataclasses.dataclass(frozen=True)
class FileTokens:
    """An opened file."""

    file: PinnedFile
    rows: int
    """Of the entry's stratum: documents + held_out + rejected."""
    held_out: int
    rejected: int
    table: npt.NDArray[Any]
    """DOCUMENT records in the keyed order."""
    tokens: npt.NDArray[Any]
    """All documents' ids one after another, each followed by EOS."""

    @property
    def documents(self) -> int:
        """Trainable documents."""
        return len(self.table)

    def start(self, document: int) -> int:
        """Where a document begins among the tokens."""
        return int(self.table["end"][document - 1]) if document else 0

    def document(self, document: int) -> npt.NDArray[Any]:
        """One document's ids, EOS included."""
        return self.tokens[self.start(document) : int(self.table["end"][document])]

    def longest_from(self, document: int) -> int:
        """Tokens of the longest document from one on; 0 if there is none."""
        ends = self.table["end"][document:].astype(np.int64)
        return int(np.diff(ends, prepend=self.start(document)).max(initial=0)) if ends.size else 0


@dataclasses.dataclass(frozen=True)
class FileRequest:
    """A file to be opened: all that its entry depends on but the encoder, and where the entry goes."""

    source: SourceSettings
    file: PinnedFile
    stratum: str
    """The stratum's name; where strata are by column, only its rows are taken."""
    entry: Path

    @property
    def key(self) -> bytes:
        """Key of the order of the documents."""
        of_stratum = [] if self.source.rows.stratum_column is None else [self.stratum]
        return derive_key("documents", self.file.path, self.file.sha256, *of_stratum)


def open_file(request: FileRequest, encoder: Encoder, tick: Callable[[int], None] = lambda tokens: None) -> None:
    """Read and encode a file, and put its entry in place as a whole.

    `tick` is called now and then, and at the end, with the tokens that were encoded since; it may raise.

    Raises what `read_pinned` does, and `DiskFull`.
    """
    dtype = encoder.vocabulary.dtype
    eos = np.array([encoder.eos_id], dtype).tobytes()
    markers = encoder.marker_ids(request.source.markers, request.source.name)
    documents, lengths, since_tick = _Trainable(request), array.array("Q"), 0
    with disk_full_is_named(request.entry):
        request.entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.SpooledTemporaryFile(SPILL_BYTES, dir=str(request.entry.parent)) as spill:
            for ids in encoder.encode_each(documents, markers):
                spill.write(ids.tobytes() + eos)
                lengths.append(len(ids) + 1)
                since_tick += len(ids) + 1
                if since_tick > TICK_TOKENS:
                    tick(since_tick)
                    since_tick = 0
            tick(since_tick)
            order = keyed_permutation(request.key, len(lengths))
            spilled = np.array(lengths, np.int64)
            table = np.zeros(len(order), DOCUMENT)
            table["end"] = np.cumsum(spilled[order])
            table["row"] = np.array(documents.kept, np.int64)[order]
            fields = {
                "encoding_version": ENCODING_VERSION,
                "sha256": request.file.sha256,
                "rows": documents.rows,
                "held_out": documents.held_out,
                "rejected": documents.rejected,
                "documents": len(table),
                "dtype": dtype.str,
            }
            kill_point("open:tokens spilled")
            _write(request.entry, fields, table, _permuted(spill, spilled * dtype.itemsize, order))


class _Trainable:
    """The texts of a file's trainable documents; counts every row on the way."""

    def __init__(self, request: FileRequest) -> None:
        self._request = request
        self.rows = self.held_out = self.rejected = 0
        self.kept = array.array("I")
        """The rows in the file of the documents given so far."""

    def __iter__(self) -> Iterator[str]:
        source, stratum = self._request.source, self._request.stratum
        for number, row in enumerate(read_pinned(source, self._request.file, stratum)):
            if row.stratum is not None and row.stratum != stratum:
                continue
            self.rows += 1
            if row.text is None:
                self.rejected += 1
            elif source.is_held_out(row.text):
                self.held_out += 1
            else:
                self.kept.append(number)
                yield row.text


def _permuted(spill: Any, sizes: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> Iterator[bytes]:
    """The documents of the spill, whose sizes in bytes are given in its order, in another order."""
    starts = np.cumsum(sizes) - sizes
    for first in range(0, len(order), 1 << 16):
        part = order[first : first + (1 << 16)]
        for start, size in zip(starts[part].tolist(), sizes[part].tolist(), strict=True):
            spill.seek(start)
            yield spill.read(size)


def _write(path: Path, fields: dict[str, Any], table: npt.NDArray[Any], documents: Iterator[bytes]) -> None:
    digest = hashlib.blake2b(canonical_json(fields), digest_size=32)
    temporary = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        with temporary.open("wb", buffering=BLOCK_BYTES) as out:
            unknown = canonical_json({**fields, "blake2b": digest.hexdigest()})  # as long as the header will be
            out.write(len(unknown).to_bytes(8, "little") + unknown)
            for part in (table.tobytes(), *documents):
                out.write(part)
                digest.update(part)
            out.seek(8)
            out.write(canonical_json({**fields, "blake2b": digest.hexdigest()}))
        kill_point("open:entry written")
        os.replace(temporary, path)  # no fsync: a torn entry does not verify and is made again
        kill_point("open:entry in place")
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load_entry(path: Path, file: PinnedFile, verify: bool) -> FileTokens | None:
    """An entry, or None if there is none or it does not verify (or, not to be verified, is no entry at all)."""
    try:
        with path.open("rb") as entry:
            header_bytes = int.from_bytes(entry.read(8), "little")
            header = json.loads(entry.read(header_bytes))
            expected = header.pop("blake2b")
            if header["sha256"] != file.sha256 or header["encoding_version"] != ENCODING_VERSION:
                return None
            if verify:
                digest = hashlib.blake2b(canonical_json(header), digest_size=32)
                while block := entry.read(BLOCK_BYTES):
                    digest.update(block)
                if digest.hexdigest() != expected:
                    return None
        # An entry without documents has an empty body, which cannot be mapped.
        size = path.stat().st_size - 8 - header_bytes
        body = np.memmap(path, np.uint8, "r", offset=8 + header_bytes) if size else np.zeros(0, np.uint8)
        split = header["documents"] * DOCUMENT.itemsize
        table, tokens = body[:split].view(DOCUMENT), body[split:].view(np.dtype(header["dtype"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError):
        return None
    return FileTokens(file, header["rows"], header["held_out"], header["rejected"], table, tokens)
