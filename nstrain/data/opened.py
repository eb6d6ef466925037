"""The trainable documents of one file as token ids, in the file's keyed order: a cache under open/.

Opening a file reads it, holds out and rejects rows, permutes the rest by a key of the file alone, and encodes them.
The result is a pure function of pinned inputs, so the cache may be lost or deleted at any time; an entry carries a hash
of itself and one that does not verify (a power cut) is made again.

Entry: 8 bytes little-endian header length, the header (canonical JSON), the document table, the tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nstrain.base.disk import PARTIAL_SUFFIX, canonical_json, disk_full_is_named
from nstrain.base.errors import DiskFull
from nstrain.data.encode import ENCODING_VERSION, Encoder
from nstrain.data.order import derive_key, keyed_permutation
from nstrain.data.readers import read_documents
from nstrain.data.sources import Listing, PinnedFile, SourceSettings

DOCUMENT = np.dtype([("end", "<u8"), ("row", "<u4")])
"""A document in the table: where its tokens end among the file's, and its row in the file."""

MAPPED_FILES = 1024
"""Opened files kept mapped at once; the others are mapped again when their turn comes."""


@dataclasses.dataclass(frozen=True)
class FileTokens:
    """An opened file."""

    file: PinnedFile
    rows: int
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


class OpenedFiles:
    """The opened files of one source."""

    def __init__(
        self,
        directory: Path,
        source: SourceSettings,
        listing: Listing,
        encoder: Encoder,
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_open` is called before a file is read and encoded, the slow step; it may raise to stop there."""
        self.directory, self.source, self.listing, self.encoder = directory, source, listing, encoder
        self._on_open = on_open
        self._markers = encoder.marker_ids(source.markers, source.name)
        self._mapped: OrderedDict[tuple[int, int], FileTokens] = OrderedDict()
        self._verified: set[tuple[int, int]] = set()

    def get(self, stratum: int, order: int) -> FileTokens:
        """The file: mapped already, from the cache, or read and encoded now. Raises `Refusal` if it has changed."""
        key = (stratum, order)
        if key in self._mapped:
            self._mapped.move_to_end(key)
            return self._mapped[key]
        file = self.listing.files[stratum][order]
        path = self._entry(file)
        opened = _load(path, file, verify=key not in self._verified)
        if opened is None:
            self._on_open()
            self._open(file, path)
            opened = _load(path, file, verify=False)
            assert opened is not None, f"{path} was written a moment ago"
        self._verified.add(key)
        self._mapped[key] = opened
        if len(self._mapped) > MAPPED_FILES:
            self._mapped.popitem(last=False)
        return opened

    def forget(self, keep: set[tuple[int, int]]) -> None:
        """Drop every entry but those of the named (stratum, order) pairs, from memory and from the disk."""
        for key in [key for key in self._mapped if key not in keep]:
            del self._mapped[key]
        names = {self._entry(self.listing.files[s][o]).name for s, o in keep}
        if self.directory.exists():
            for path in self.directory.iterdir():
                if path.name not in names:
                    path.unlink()

    def _entry(self, file: PinnedFile) -> Path:
        return self.directory / f"{file.stratum:05d}-{file.order:07d}-{file.sha256[:16]}.tokens"

    def _open(self, file: PinnedFile, path: Path) -> None:
        rows = rejected = held_out = 0
        kept: list[tuple[int, str]] = []
        for row, text in enumerate(read_documents(self.source, file)):
            rows += 1
            if text is None:
                rejected += 1
            elif self.source.is_held_out(text):
                held_out += 1
            else:
                kept.append((row, text))
        permuted = [kept[i] for i in keyed_permutation(derive_key("documents", file.path, file.sha256), len(kept))]
        encoded = self.encoder.encode([text for _, text in permuted], self._markers)
        eos = np.array([self.encoder.eos_id], np.int64)
        dtype = self.encoder.vocabulary.dtype
        tokens = np.concatenate([part for ids in encoded for part in (ids, eos)] or [eos[:0]]).astype(dtype)
        table = np.zeros(len(permuted), dtype=DOCUMENT)
        table["end"] = np.cumsum([len(ids) + 1 for ids in encoded], dtype=np.uint64)
        table["row"] = [row for row, _ in permuted]
        _save(path, FileTokens(file, rows, held_out, rejected, table, tokens))


def _save(path: Path, opened: FileTokens) -> None:
    body = opened.table.tobytes() + opened.tokens.tobytes()
    fields = {
        "encoding_version": ENCODING_VERSION,
        "sha256": opened.file.sha256,
        "rows": opened.rows,
        "held_out": opened.held_out,
        "rejected": opened.rejected,
        "documents": opened.documents,
        "dtype": opened.tokens.dtype.str,
    }
    header = canonical_json({**fields, "blake2b": _digest(fields, body)})
    temporary = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        with disk_full_is_named(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as out:
                out.write(len(header).to_bytes(8, "little") + header + body)
            os.replace(temporary, path)  # no fsync: a torn entry does not verify and is made again
    except DiskFull:
        temporary.unlink(missing_ok=True)
        raise


def _digest(fields: dict[str, Any], body: bytes | memoryview) -> str:
    digest = hashlib.blake2b(canonical_json(fields), digest_size=32)
    digest.update(body)
    return digest.hexdigest()


def _load(path: Path, file: PinnedFile, verify: bool) -> FileTokens | None:
    """A cache entry, or None if there is none or it does not verify (or, not to be verified, is no entry at all)."""
    try:
        with path.open("rb") as entry:
            header_bytes = int.from_bytes(entry.read(8), "little")
            header = json.loads(entry.read(header_bytes))
        expected = header.pop("blake2b")
        if header["sha256"] != file.sha256 or header["encoding_version"] != ENCODING_VERSION:
            return None
        # An entry without documents has an empty body, which cannot be mapped.
        size = path.stat().st_size - 8 - header_bytes
        body = np.memmap(path, np.uint8, "r", offset=8 + header_bytes) if size else np.zeros(0, np.uint8)
        if verify and _digest(header, body.data) != expected:
            return None
        split = header["documents"] * DOCUMENT.itemsize
        table, tokens = body[:split].view(DOCUMENT), body[split:].view(np.dtype(header["dtype"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError):
        return None
    return FileTokens(file, header["rows"], header["held_out"], header["rejected"], table, tokens)
