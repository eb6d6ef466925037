"""The opened files of a source: mapped from the cache under open/, or read and encoded when they are first needed."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from nstrain.data.encode import Encoder
from nstrain.data.entries import DOCUMENT, FileRequest, FileTokens, load_entry, open_file
from nstrain.data.opener_pool import OpenerPool
from nstrain.data.sources import PinnedFile, SourceSettings
from nstrain.data.supply import LocalFiles, Supply

__all__ = ["DOCUMENT", "FileTokens", "OpenedFiles", "OpenerPool"]

MAPPED_FILES = 1024
"""Opened files kept mapped at once; the others are mapped again when their turn comes."""


class FileTable(Protocol):
    """A source's pinned files by (stratum, order): its whole list, or what one manifest names of it."""

    @property
    def strata(self) -> tuple[str, ...]:
        """Names of the strata."""

    def file(self, stratum: int, order: int) -> PinnedFile:
        """A stratum's file by its place in the opening order."""


class OpenedFiles:
    """The opened files of one source."""

    def __init__(
        self,
        directory: Path,
        source: SourceSettings,
        listing: FileTable,
        encoder: Encoder,
        on_open: Callable[[], None] = lambda: None,
        pool: OpenerPool | None = None,
        supply: Supply | None = None,
    ) -> None:
        """`on_open` is called before and while a file is read and encoded; it may raise to stop there.

        `supply` brings the files that are not open yet to the disk, and is told when they are.
        """
        self._supply = supply or LocalFiles()
        self.directory, self.source, self.listing, self.encoder = directory, source, listing, encoder
        self._on_open, self._pool = on_open, pool
        self._mapped: OrderedDict[tuple[int, int], FileTokens] = OrderedDict()
        self._verified: set[tuple[int, int]] = set()

    def get(self, stratum: int, order: int) -> FileTokens:
        """The file: mapped already, from the cache, or read and encoded now. Raises what `open_file` does."""
        key = (stratum, order)
        if key in self._mapped:
            self._mapped.move_to_end(key)
            return self._mapped[key]
        request = self._request(stratum, order)
        opened = load_entry(request.entry, request.file, verify=key not in self._verified)
        if opened is None:
            self._on_open()
            self._supply.fetch([request.file])
            open_file(request, self.encoder, self._encoded)
            opened = load_entry(request.entry, request.file, verify=False)
            assert opened is not None, f"{request.entry} was written a moment ago"
            self._supply.release(request.file)
        self._verified.add(key)
        self._mapped[key] = opened
        if len(self._mapped) > MAPPED_FILES:
            self._mapped.popitem(last=False)
        return opened

    def prefetch(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Have the pool's processes open those of the (stratum, order) pairs that are not in the cache, each as soon as
        it is fetched.

        Without a pool nothing happens: `get` opens a file when it is needed. Raises what `open_file` does.
        """
        pool = self._pool
        if pool is None:
            return
        requests = [self._request(*pair) for pair in pairs if pair not in self._mapped]
        missing = [r for r in requests if load_entry(r.entry, r.file, verify=False) is None]
        if not missing:
            return
        by_file = {request.file: request for request in missing}
        with contextlib.closing(self._supply.fetched(list(by_file), lambda: pool.busy)) as coming:
            arrivals = ([by_file[file] for file in files] for files in coming)
            pool.open_as_they_come(arrivals, lambda done, total: self._on_open(), self._release)

    def _encoded(self, tokens: int) -> None:
        if self._pool is not None:
            self._pool.encoded_tokens += tokens
        self._on_open()

    def _release(self, opened: Sequence[FileRequest]) -> None:
        for request in opened:
            self._supply.release(request.file)

    def stratum_name(self, stratum: int) -> str:
        """Name of a stratum by its index."""
        return self.listing.strata[stratum]

    def forget(self, keep: set[tuple[int, int]], next_files: Sequence[int] = ()) -> None:
        """Drop every entry but those of the named (stratum, order) pairs, from memory and from the disk.

        With `next_files` - the first file of each stratum that is not opened yet - what was read ahead stays too.
        Files that were fetched - to be sampled, or for their held-out text - and are open by now or not due soon are
        deleted.
        """
        self._supply.clear()
        for key in [key for key in self._mapped if key not in keep]:
            del self._mapped[key]
        if self.directory.exists():
            for path in self.directory.iterdir():
                stratum, order = entry_place(path)
                ahead = 0 <= stratum < len(next_files) and order >= next_files[stratum]
                if not ((stratum, order) in keep or ahead) or path != self._request(stratum, order).entry:
                    path.unlink()

    def _request(self, stratum: int, order: int) -> FileRequest:
        file = self.listing.file(stratum, order)
        name = f"{file.stratum:05d}-{file.order:07d}-{file.sha256[:16]}.tokens"  # see entry_place
        return FileRequest(self.source, file, self.listing.strata[stratum], self.directory / name)


def entry_place(path: Path) -> tuple[int, int]:
    """The (stratum, order) that an entry's name says; (-1, -1) for any other file."""
    parts = path.name.split("-")
    if len(parts) != 3 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return -1, -1
    return int(parts[0]), int(parts[1])
