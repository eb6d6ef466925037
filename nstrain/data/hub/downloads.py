"""The files of one hub source on this disk: fetched a few at once and a few ahead of whoever reads them, then deleted.

`DIRECTORY/NAME/` holds whole files under their paths in the repository, `DIRECTORY/.parts/` those on their way. One
process at a time works in a directory (the holder of the preparer's lock).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from nstrain.base.disk import canonical_json, disk_full_is_named
from nstrain.base.units import human_bytes, human_seconds
from nstrain.data.hub import client
from nstrain.data.hub.download import Place, WantedFile, Watch, download, refuse_full_disk
from nstrain.data.hub.errors import Offline
from nstrain.data.hub.http import Cancel
from nstrain.data.hub.patience import Patience, patience
from nstrain.data.readers.errors import FileRefusal
from nstrain.data.sources import PinnedFile, SourceSettings, resolve_inside

PARTS = ".parts"
"""No source's name begins with a dot."""
TICK_S = 0.2
RATE_WINDOW_S = 20.0


@dataclasses.dataclass(frozen=True)
class DownloadProgress:
    """How far the files are that are being fetched."""

    source: str
    files_done: int
    files: int
    bytes_done: int
    bytes: int
    bytes_per_s: float
    """Over the last seconds."""
    seconds_left: float | None
    """At that rate; None while nothing comes."""
    trouble: str | None
    """What a file waits for, if one does."""

    def describe(self) -> str:
        """In words: bytes, files, rate, time left."""
        left = "" if self.seconds_left is None else f", {human_seconds(self.seconds_left)} left"
        return (
            f"{human_bytes(self.bytes_done)} of {human_bytes(self.bytes)}, file {self.files_done:,} of {self.files:,}, "
            f"{human_bytes(self.bytes_per_s)}/s{left}"
        )


OnProgress = Callable[[DownloadProgress], None]


class Downloads:
    """Fetches the files of one source, and deletes them."""

    def __init__(
        self,
        directory: Path,
        source: SourceSettings,
        on_progress: OnProgress = lambda progress: None,
        limits: Patience | None = None,
    ) -> None:
        """`directory` holds the downloads of all sources. `on_progress` is called several times a second while files
        are being fetched, in the caller's thread; it may raise to call the fetching off."""
        self.directory, self.source = directory, source
        self._on_progress, self._limits = on_progress, limits or patience()
        self._verified: set[str] = set()
        self._unused: dict[str, PinnedFile] = {}
        """What `fetched` has fetched and given, by path, until it is released."""

    @property
    def root(self) -> Path:
        """Where the source's files lie."""
        return self.directory / self.source.name

    def fetch(self, files: Sequence[PinnedFile]) -> None:
        """Have files on the disk, several at once; they stay. Raises as `fetched` does."""
        for _ in self._arriving(files, None, lambda: False):
            pass

    def fetched(
        self, files: Sequence[PinnedFile], busy: Callable[[], bool] = lambda: False
    ) -> Generator[list[PinnedFile], None, None]:
        """Give files as they come, while more come: no more than may be fetched and not released at a time.

        While `busy()` it does not wait, and gives none if none has come. Closed before its end, it calls off what is
        still coming. Raises `AccessDenied`, `FileVanished`, `WrongBytes`, `Offline`, or `DiskFull`.
        """
        self._unused = {}
        yield from self._arriving(files, self._unused, busy)

    def _arriving(
        self, files: Sequence[PinnedFile], unused: dict[str, PinnedFile] | None, busy: Callable[[], bool]
    ) -> Generator[list[PinnedFile], None, None]:
        """The loop of `fetch`, which keeps no account of what is `unused`, and of `fetched`."""
        come = [file for file in files if file.path in self._verified]
        waiting = deque(file for file in files if file.path not in self._verified)
        if not waiting:
            if come:
                yield come
            return
        cancel, meter = Cancel(), _Meter(self.source.name, list(waiting), self._limits, self._part)
        with ThreadPoolExecutor(self._limits.parallel_files, "download") as threads:
            coming: dict[Future[None], PinnedFile] = {}
            try:
                while waiting or coming or come:
                    while waiting and (
                        (not coming and not busy())  # whoever gets them waits for one
                        or self._fits(waiting[0], [*coming.values(), *(unused or {}).values()])
                    ):
                        file = waiting.popleft()
                        coming[threads.submit(self._download, file, cancel, meter)] = file
                    self._on_progress(meter.now())
                    yield come
                    done = wait(coming, 0.0 if busy() else TICK_S, FIRST_COMPLETED).done
                    come = []
                    for future in [future for future in coming if future in done]:
                        future.result()
                        come.append(coming.pop(future))
                    self._verified.update(file.path for file in come)
                    if unused is not None:
                        unused.update((file.path, file) for file in come)
            finally:
                cancel.cancel()
                for future in coming:
                    future.cancel()

    def release(self, file: PinnedFile) -> None:
        """Delete a file that nobody will read again (not its directory: the next file may be on its way there)."""
        self._verified.discard(file.path)
        self._unused.pop(file.path, None)
        resolve_inside(self.root, file.path).unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete every whole file of the source; parts stay, to be gone on with."""
        self._verified.clear()
        self._unused.clear()
        shutil.rmtree(self.root, ignore_errors=True)

    def _fits(self, file: PinnedFile, ahead: Sequence[PinnedFile]) -> bool:
        """Whether a file may come beside those that come or lie there unused."""
        total = sum(other.size for other in ahead) + file.size
        return total <= self._limits.ahead_bytes and len(ahead) < self._limits.ahead_files

    def _part(self, file: PinnedFile) -> Path:
        key = hashlib.blake2b(canonical_json([self.source.name, file.path, file.sha256]), digest_size=16)
        return self.directory / PARTS / key.hexdigest()

    def _download(self, file: PinnedFile, cancel: Cancel, meter: _Meter) -> None:
        source = self.source
        assert source.repo is not None, "a hub source"
        assert source.revision is not None, "pinned"
        target = resolve_inside(self.root, file.path)
        with disk_full_is_named(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        wanted = WantedFile(
            f"source {source.name}: {source.repo}@{source.revision[:12]}/{file.path}",
            file.size,
            file.sha256,
            target,
            self._part(file),
        )
        if _is_here(wanted, cancel) or _from_cache(wanted, source.repo, source.revision, file.path, cancel):
            meter.received(file.size)
            meter.finished(wanted.part)
            return
        if client.is_offline():
            raise Offline(
                f"{wanted.name} has to be fetched, but HF_HUB_OFFLINE is set; unset it, or put the file there"
            )
        try:
            download(wanted, places(source, file.path), self._limits, cancel, meter.of(wanted))
        except FileRefusal as error:
            error.found_in(source.name, file.path)
            raise
        meter.finished(wanted.part)


def _is_here(wanted: WantedFile, cancel: Cancel) -> bool:
    """Whether the whole file lies there already; one with other bytes is removed."""
    if not wanted.target.is_file():
        return False
    if wanted.target.stat().st_size == wanted.size and _sha256(wanted.target, cancel) == wanted.sha256:
        return True
    wanted.target.unlink()
    return False


def _sha256(path: Path, cancel: Cancel) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            cancel.check()
    return digest.hexdigest()


def _from_cache(wanted: WantedFile, repo: str, revision: str, path: str, cancel: Cancel) -> bool:
    """Copy the file out of the hub library's own cache, if it is there with the pinned bytes."""
    cached = client.cached_file(repo, revision, path)
    if cached is None or not cached.is_file() or cached.stat().st_size != wanted.size:
        return False
    refuse_full_disk(wanted.part, wanted.size, 0)
    with disk_full_is_named(wanted.part):
        wanted.part.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(cached, wanted.part)
    if _sha256(wanted.part, cancel) != wanted.sha256:
        wanted.part.unlink()
        return False
    wanted.part.replace(wanted.target)
    return True


def places(source: SourceSettings, path: str) -> list[Callable[[], Place]]:
    """Where a file may be had: its pinned revision, the repository's main branch, and the source's mirrors."""
    repo, revision = str(source.repo), str(source.revision)
    base = client.endpoint()

    def of_hub(repo: str, revision: str) -> Place:
        url = client.file_url(base, repo, revision, path)
        return Place(f"{repo}@{revision}", url, client.hub_headers())

    def of_mirror(mirror: str) -> Place:
        if "://" in mirror:  # another hub: the user's token is not for it
            return Place(mirror, client.file_url(mirror.rstrip("/"), repo, revision, path))
        name, _, at = mirror.partition("@")
        return of_hub(name, at or "main")

    found: list[Callable[[], Place]] = [lambda: of_hub(repo, revision), lambda: of_hub(repo, "main")]
    return found + [lambda mirror=mirror: of_mirror(mirror) for mirror in source.mirrors]


class _Meter:
    """Counts the bytes of several downloads, the room that they will still take, and their troubles."""

    def __init__(
        self, source: str, files: Sequence[PinnedFile], limits: Patience, part_of: Callable[[PinnedFile], Path]
    ) -> None:
        self._source, self._limits = source, limits
        self._files, self._bytes = len(files), sum(file.size for file in files)
        self._lock = threading.Lock()
        self._done = 0
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                self._done += min(file.size, part_of(file).stat().st_size)
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self._came = 0
        self._room: dict[Path, int] = {}
        """Bytes that the files being fetched will still take."""
        self._troubles: dict[Path, str] = {}
        self._files_done = 0

    def of(self, wanted: WantedFile) -> Watch:
        """The watch of one download."""
        return _OneFile(self, wanted)

    def received(self, size: int, part: Path | None = None) -> None:
        """So many bytes have come."""
        with self._lock:
            self._done += size
            self._came += size
            if part in self._room:
                self._room[part] -= size

    def lost(self, size: int) -> None:
        """So many bytes have to come again."""
        with self._lock:
            self._done -= size

    def trouble(self, part: Path, cause: str | None) -> None:
        """A file waits, or goes on."""
        with self._lock:
            if cause is None:
                self._troubles.pop(part, None)
            else:
                self._troubles[part] = cause

    def finished(self, part: Path) -> None:
        """A file is whole."""
        with self._lock:
            self._files_done += 1
            self._room.pop(part, None)

    def room_for(self, part: Path, size: int) -> None:
        """Set room aside. Raises `DiskFull` if it does not fit beside what the other files will take."""
        with self._lock:
            others = sum(needed for path, needed in self._room.items() if path != part)
            refuse_full_disk(part, size + others, self._limits.reserve_bytes)
            self._room[part] = size

    def now(self) -> DownloadProgress:
        """How things stand."""
        with self._lock:
            moment = time.monotonic()
            self._marks.append((moment, self._came))
            while len(self._marks) > 2 and moment - self._marks[0][0] > RATE_WINDOW_S:
                self._marks.popleft()
            began, came = self._marks[0]
            rate = (self._came - came) / max(1e-3, moment - began)
            left = self._bytes - self._done
            return DownloadProgress(
                source=self._source,
                files_done=self._files_done,
                files=self._files,
                bytes_done=self._done,
                bytes=self._bytes,
                bytes_per_s=rate,
                seconds_left=left / rate if rate > 0 else None,
                trouble=next(iter(self._troubles.values()), None),
            )


class _OneFile(Watch):
    """One download's part in the meter."""

    def __init__(self, meter: _Meter, wanted: WantedFile) -> None:
        self._meter, self._part = meter, wanted.part

    def received(self, size: int) -> None:
        self._meter.received(size, self._part)

    def lost(self, size: int) -> None:
        self._meter.lost(size)

    def trouble(self, cause: str | None) -> None:
        self._meter.trouble(self._part, cause)

    def room_for(self, part: Path, size: int) -> None:
        self._meter.room_for(part, size)
