"""How a source's files come to lie on this disk: a local source's lie there, a hub's are fetched and deleted again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nstrain.data.sources import PinnedFile, SourceSettings

if TYPE_CHECKING:
    from nstrain.data.hub.downloads import DownloadProgress

DOWNLOADS = "downloads"
"""The directory of a line that holds what was fetched."""


class Supply(Protocol):
    """Puts files of one source where its settings' `root` says, and takes them away."""

    def fetch(self, files: Sequence[PinnedFile]) -> None:
        """Have files there; they stay. Raises what `fetched` does."""

    def fetched(
        self, files: Sequence[PinnedFile], busy: Callable[[], bool] = lambda: False
    ) -> Generator[list[PinnedFile], None, None]:
        """Give files, each once, as they come; `release` each when it is used, for only some may lie there unused.

        What has come is given at once; while `busy()`, that is an empty list if nothing has. Close it if you do not
        take all (`contextlib.closing`): what is on its way is then called off. Raises a `Refusal` for a file that
        cannot be had, or `DiskFull`.
        """

    def release(self, file: PinnedFile) -> None:
        """Nobody will read the file again."""

    def clear(self) -> None:
        """Nobody will read again any file that is there now."""


class LocalFiles:
    """Files that lie where they are."""

    def fetch(self, files: Sequence[PinnedFile]) -> None:
        """They are there."""

    def fetched(
        self, files: Sequence[PinnedFile], busy: Callable[[], bool] = lambda: False
    ) -> Generator[list[PinnedFile], None, None]:
        """All are there."""
        if files:
            yield list(files)

    def release(self, file: PinnedFile) -> None:
        """It stays: it is not ours."""

    def clear(self) -> None:
        """They stay."""


def fetched_nothing(progress: DownloadProgress) -> None:
    """For callers who do not look at the progress of downloads."""


OnDownload = Callable[["DownloadProgress"], None]


@dataclasses.dataclass(frozen=True)
class SuppliedSource:
    """A source with a place on this disk, and what brings its files there."""

    settings: SourceSettings
    supply: Supply


def supplied(source: SourceSettings, downloads: Path, on_download: OnDownload = fetched_nothing) -> SuppliedSource:
    """A source ready to be read; a hub's files are fetched into `downloads`/NAME."""
    if source.kind == "local":
        return SuppliedSource(source, LocalFiles())
    from nstrain.data.hub.downloads import Downloads

    return SuppliedSource(placed(source, downloads), Downloads(downloads, source, on_download))


def placed(source: SourceSettings, downloads: Path) -> SourceSettings:
    """A source's settings with the place of its files on this disk."""
    if source.kind == "local":
        return source
    return source.model_copy(update={"path": str(downloads / source.name)})
