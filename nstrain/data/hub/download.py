"""One file from a hub to the disk: resumed where it stopped, verified by its pinned hash, in place as a whole.

The bytes go to a part file, which outlives the process: the next try, or the next process, hashes what is there and
asks for the rest (Range). At the end the hash must be the pinned one; else the part is thrown away and fetched anew.

transient   the network, timeouts, a stall, 5xx, 408, 429: tried again for as long as it takes, after a jittered and
            growing wait or the one that the server asks for; `Watch.trouble` tells what is waited for
suspect     wrong bytes, wrong length, an address of the file's that leads nowhere or that its host refuses: a few
            times, the last time from the file's beginning; only wrong bytes cost what has come of it
permanent   no access; the file is gone: the next place is asked (another revision, a mirror). A file is the same
            wherever it comes from if its size and hash are. When no place is left, an error names what each one said
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from nstrain.base.disk import disk_full_is_named, fsync_dir
from nstrain.base.errors import DiskFull
from nstrain.base.killpoints import kill_point
from nstrain.data.hub.errors import AccessDenied, FileVanished, HubRefusal, Suspect, Transient, WrongBytes
from nstrain.data.hub.http import Answer, Cancel, get
from nstrain.data.hub.patience import Patience, asked_wait_s

BLOCK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a file's bytes may be had."""

    name: str
    """For messages."""
    url: str
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    """Sent to this address's own host only."""


@dataclasses.dataclass(frozen=True)
class WantedFile:
    """What is to be fetched."""

    name: str
    """For messages."""
    size: int
    sha256: str
    target: Path
    """Where it goes, as a whole."""
    part: Path
    """Where its bytes are gathered; on the same file system."""


class Watch:
    """What a download tells while it goes; every call may come from another thread."""

    def received(self, size: int) -> None:
        """So many bytes have been written to the part."""

    def lost(self, size: int) -> None:
        """So many bytes of the part have been thrown away."""

    def trouble(self, cause: str | None) -> None:
        """It waits to try again because of this; None: it goes on."""

    def room_for(self, part: Path, size: int) -> None:
        """Raise `DiskFull` unless so many bytes more fit on the disk."""
        refuse_full_disk(part, size, 0)


class _NotHere(Exception):
    """A place does not have the file, or not for us."""

    def __init__(self, cause: str, kind: type[HubRefusal]) -> None:
        super().__init__(cause)
        self.cause, self.kind = cause, kind


def refuse_full_disk(path: Path, needed: int, reserve: int) -> None:
    """Raise `DiskFull` unless so many bytes fit beside a reserve."""
    free = shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
    if free < needed + reserve:
        raise DiskFull(
            f"{path.parent}: {free:,} bytes are free there, fetching takes {needed:,} and leaves {reserve:,} free. "
            "Free space on that file system; what was fetched so far is kept"
        )


def download(
    wanted: WantedFile, places: Sequence[Callable[[], Place]], patience: Patience, cancel: Cancel, watch: Watch
) -> None:
    """Fetch a file from the first place that has it.

    Raises `AccessDenied`, `FileVanished` or `WrongBytes` when no place gives the pinned bytes, `DiskFull`, or
    `Cancelled`.
    """
    with disk_full_is_named(wanted.part):
        wanted.part.parent.mkdir(parents=True, exist_ok=True)
    failures: list[tuple[str, type[HubRefusal]]] = []
    for make in places:
        place = make()
        try:
            _from_place(wanted, place, patience, cancel, watch)
            return
        except _NotHere as error:
            failures.append((f"{place.name}: {error.cause}", error.kind))
        except Suspect as error:
            failures.append((f"{place.name}: {error.cause}", WrongBytes))
    said = "; ".join(cause for cause, _ in failures)
    kind = failures[0][1]
    remedy = {
        AccessDenied: "set HF_TOKEN to a token that may read it (and accept the repository's terms on its page)",
        FileVanished: "name a place that still has it in the source's `mirrors` (line.json), or make a new line",
        WrongBytes: "a proxy or cache in between may be at fault; else name another place in the source's `mirrors`",
    }[kind]
    raise kind(f"{wanted.name} ({wanted.size:,} bytes, sha256 {wanted.sha256}) cannot be had: {said}. Remedy: {remedy}")


def _from_place(wanted: WantedFile, place: Place, patience: Patience, cancel: Cancel, watch: Watch) -> None:
    """Try one place until it gives the file. Raises `_NotHere`, or `Suspect` when it gave wrong bytes too often."""
    failed = suspect = 0
    while True:
        cancel.check()
        before = _size(wanted.part)
        try:
            with disk_full_is_named(wanted.part), wanted.part.open("a+b") as part:
                _complete(wanted, place, part, patience, cancel, watch, afresh=suspect == patience.wrong_fetches - 1)
            os.replace(wanted.part, wanted.target)
            fsync_dir(wanted.target.parent)
            kill_point("hub:in place")
            watch.trouble(None)
            return
        except Transient as error:
            failed = 1 if _size(wanted.part) > before else failed + 1
            cause, wait_s = error.cause, patience.wait_s(failed, error.wait_s)
        except Suspect as error:
            if error.spoils:
                watch.lost(_size(wanted.part))
                wanted.part.unlink(missing_ok=True)
            suspect += 1
            if suspect >= patience.wrong_fetches:
                raise
            cause, wait_s = error.cause, patience.wait_s(suspect)
        watch.trouble(f"{cause}; trying again in {wait_s:.0f} s (failure {max(failed, suspect)} in a row)")
        cancel.wait(wait_s)


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _complete(
    wanted: WantedFile, place: Place, part: BinaryIO, patience: Patience, cancel: Cancel, watch: Watch, afresh: bool
) -> None:
    """Bring a part to its end and verify it; `afresh`: from the beginning. Raises `Transient`, `Suspect` or `_NotHere`.

    What has come is given up only for an answer that is the file from its beginning: a proxy's page is not.
    """
    have, digest = _rehash(part, wanted, cancel, watch)
    if have < wanted.size:
        watch.room_for(wanted.part, wanted.size - have)
        headers = {**place.headers, **({"Range": f"bytes={have}-"} if have and not afresh else {})}
        with get(place.url, headers, patience, cancel) as answer:
            _judge(answer, place, wanted)
            whole = bool(have) and answer.status == 200  # not asked for a range, or the server gives none
            _refuse_other_length(answer, wanted, 0 if whole else have)
            if whole:
                again = _beginning(answer, part, have)
                watch.lost(have - len(again))
                part.truncate(len(again))
                have, digest = len(again), hashlib.sha256(again)
            watch.trouble(None)
            _receive(answer, wanted, part, have, digest, patience, watch)
    part.flush()
    os.fsync(part.fileno())
    kill_point("hub:part complete")
    if digest.hexdigest() != wanted.sha256:
        raise Suspect(f"its bytes have sha256 {digest.hexdigest()}", spoils=True)


def _rehash(part: BinaryIO, wanted: WantedFile, cancel: Cancel, watch: Watch) -> tuple[int, hashlib._Hash]:
    """The part's size and the hash of its bytes; one larger than the file is emptied."""
    digest = hashlib.sha256()
    have = os.fstat(part.fileno()).st_size
    if have > wanted.size:
        watch.lost(have)
        part.truncate(0)
        return 0, digest
    part.seek(0)
    while block := part.read(BLOCK_BYTES):
        digest.update(block)
        cancel.check()
    return have, digest


def _judge(answer: Answer, place: Place, wanted: WantedFile) -> None:
    """Return if the answer gives bytes; else say what kind of refusal it is."""
    status = answer.status
    linked = (answer.first_headers.get("X-Linked-ETag") or "").strip('"').lower()
    if status in (200, 206):
        if re.fullmatch(r"[0-9a-f]{64}", linked) and linked != wanted.sha256:
            raise _NotHere(f"it has another file there now (sha256 {linked})", FileVanished)
        return
    told = f"{answer.host}: HTTP {status}"
    code = answer.headers.get("X-Error-Code") or ""
    if status in (408, 425, 429) or status >= 500:
        raise Transient(told, asked_wait_s(answer.headers))
    if status == 416:
        raise Suspect(f"{told} for a range inside the file")
    if answer.host != urlsplit(place.url).netloc:  # a link signed for a while; the hub gives a new one
        raise Suspect(f"{told} from the host that stores the file")
    if status == 404 or code in ("EntryNotFound", "RevisionNotFound", "RepoNotFound"):
        raise _NotHere(f"HTTP {status} {code}".rstrip(), FileVanished)
    if status in (401, 403, 451):
        raise _NotHere(f"HTTP {status} {code}".rstrip(), AccessDenied)
    raise Suspect(told)


_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")


def _beginning(answer: Answer, part: BinaryIO, have: int) -> bytes:
    """Of an answer that gives a whole file again: what was read of it to see that it is that file, if it has no length.

    Raises `Suspect` if it begins otherwise than what has come, `Transient` if it ends before a byte.
    """
    if answer.headers.get("Content-Length") is not None:
        return b""
    data = answer.read_some(min(BLOCK_BYTES, have))
    if not data:
        raise Transient(f"{answer.host}: closed the connection before a byte of the file")
    part.seek(0)
    if part.read(len(data)) != data:
        raise Suspect(f"it gives {data[:20]!r} ... in the place of the file's beginning")
    return data


def _refuse_other_length(answer: Answer, wanted: WantedFile, have: int) -> None:
    """Raise `Suspect` unless the answer's own figures are those of the rest of the file."""
    if (answer.headers.get("Content-Encoding") or "identity").lower() != "identity":
        raise Suspect(f"it comes encoded as {answer.headers.get('Content-Encoding')}, which was not asked for")
    if answer.status == 206:
        found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range") or "")
        if found is None or int(found[1]) != have or found[3] not in ("*", str(wanted.size)):
            raise Suspect(
                f"asked for bytes {have} ... of {wanted.size}, got range {answer.headers.get('Content-Range')!r}"
            )
    length = answer.headers.get("Content-Length")
    if length is not None and length != str(wanted.size - have):
        raise Suspect(f"it says {length[:30]} bytes follow, expected {wanted.size - have}")


def _receive(
    answer: Answer,
    wanted: WantedFile,
    part: BinaryIO,
    have: int,
    digest: hashlib._Hash,
    patience: Patience,
    watch: Watch,
) -> None:
    """Append what arrives to the part, never more than the file has. Raises `Transient` if it stops before the end."""
    window_began, window_bytes = time.monotonic(), 0
    while have < wanted.size:
        data = answer.read_some(min(BLOCK_BYTES, wanted.size - have))
        if not data:
            raise Transient(f"{answer.host}: closed the connection after {have:,} of {wanted.size:,} bytes")
        part.write(data)
        part.flush()
        digest.update(data)
        have += len(data)
        watch.received(len(data))
        kill_point("hub:block written")
        window_bytes += len(data)
        now = time.monotonic()
        if now - window_began > patience.stall_s:
            if window_bytes < patience.stall_bytes and have < wanted.size:
                raise Transient(f"{answer.host}: stalled, {window_bytes:,} bytes in {now - window_began:.0f} s")
            window_began, window_bytes = now, 0
