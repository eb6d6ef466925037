"""What a dataset repository holds at a revision: listed page by page through the hub's library, nothing of it trusted.

The library waits and tries again by itself, a few times; beyond that, or when it hangs, the listing is begun anew after
a growing wait, for as long as it takes. Entries are checked as they come and kept as small tuples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from nstrain.base.disk import PARTIAL_SUFFIX
from nstrain.base.errors import NstrainError
from nstrain.data.globs import matcher
from nstrain.data.hub import client
from nstrain.data.hub.errors import AccessDenied, HubRefusal, NotOnHub, Offline, Transient, UntrustedListing
from nstrain.data.hub.patience import Patience, asked_wait_s, patience

MOST_ENTRIES = 2_000_000
"""Entries of a listing; the largest corpus known has 65,000."""
MOST_FILE_BYTES = 1 << 40
"""The hub itself takes no file of half that."""
MOST_PATH_BYTES = 1024
MOST_NAME_BYTES = 240
COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
PART_ENTRIES = 1000
T = TypeVar("T")
OnNotice = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class ListedFile:
    """A file of a repository."""

    path: str
    size: int
    sha256: str | None
    """Of its bytes, for files in large-file storage; None for small ones, of which git's hash is known."""
    blob_id: str
    """SHA-1 of git's blob: of the bytes if there is no sha256."""


def resolve_revision(repo: str, revision: str, on_notice: OnNotice = lambda text: None) -> str:
    """The commit that a branch, a tag or a commit stands for now. Raises `HubRefusal`."""
    found = _persistently(
        lambda: client.api().dataset_info(repo, revision=revision, expand=["sha"]).sha, f"{repo}@{revision}", on_notice
    )
    if not isinstance(found, str) or not COMMIT.fullmatch(found):
        raise UntrustedListing(f"{repo}@{revision}: the hub names {found!r} as its commit, expected 40 hex digits")
    if COMMIT.fullmatch(revision) and found != revision:
        raise UntrustedListing(f"{repo}@{revision}: the hub answers with another commit, {found}")
    return found


def list_files(
    repo: str,
    commit: str,
    include: Sequence[str],
    exclude: Sequence[str],
    on_notice: OnNotice = lambda text: None,
) -> list[ListedFile]:
    """The files of a repository at a commit that the globs take, sorted by path.

    Raises `HubRefusal` if none match - saying what is there - or if the listing cannot be trusted.
    """
    included, excluded = matcher(include), matcher(exclude)
    found: dict[str, ListedFile] = {}
    entries = 0
    for start in starting_directories(include):

        def take(entry: Any) -> None:
            nonlocal entries
            entries += 1
            if entries > MOST_ENTRIES:
                raise UntrustedListing(f"{repo}@{commit}: its listing has more than {MOST_ENTRIES:,} entries")
            if not hasattr(entry, "size"):
                return
            path = refuse_bad_path(repo, entry.path)
            if not included(path) or excluded(path):
                return
            if path in found:
                raise UntrustedListing(f"{repo}@{commit}: {path!r} is listed twice")
            found[path] = checked_file(repo, entry)

        def begin_anew(start: str = start) -> None:
            nonlocal entries
            entries = 0
            for path in [path for path in found if not start or path.startswith(start + "/")]:
                del found[path]

        _list_tree(repo, commit, start, take, begin_anew, on_notice)
    paths = sorted(found)
    if not paths:
        raise HubRefusal(
            f"{repo}@{commit}: no file matches {list(include)}"
            + (f" without {list(exclude)}" if exclude else "")
            + f"; it has {_what_is_there(repo, commit, include, on_notice)}. Correct the globs in the recipe"
        )
    for path in paths:
        for i in (i for i, character in enumerate(path) if character == "/"):
            if path[:i] in found:
                raise UntrustedListing(f"{repo}@{commit}: {path[:i]!r} is listed both as a file and as a directory")
    return [found[path] for path in paths]


def starting_directories(include: Sequence[str]) -> list[str]:
    """The directories that have to be listed for globs: what stands before their first wildcard; none in another."""
    starts = set()
    for pattern in include:
        fixed = []
        for part in pattern.split("/")[:-1]:
            if any(character in part for character in "*?["):
                break
            fixed.append(part)
        starts.add("/".join(fixed))
    return sorted(s for s in starts if not any(s != t and (not t or s.startswith(t + "/")) for t in starts))


def refuse_bad_path(repo: str, path: Any) -> str:
    """A listed path that may become a path on this disk. Raises `UntrustedListing`."""
    why = None
    if not isinstance(path, str) or not path:
        why = "is no path"
    elif any(ord(character) < 32 or 127 <= ord(character) < 160 for character in path):
        why = "has a control character"
    elif any("\ud800" <= character <= "\udfff" for character in path):
        why = "is not UTF-8"
    elif "\\" in path or re.match(r"[A-Za-z]:", path):
        why = "could mean a place elsewhere"
    elif any(part in ("", ".", "..") for part in path.split("/")):
        why = "leads out of the repository"
    elif len(path.encode()) > MOST_PATH_BYTES or any(len(n.encode()) > MOST_NAME_BYTES for n in path.split("/")):
        why = "is too long"
    elif path.endswith(PARTIAL_SUFFIX):
        why = f"ends with {PARTIAL_SUFFIX}, which our own unfinished files do"
    if why is not None:
        raise UntrustedListing(f"{repo}: its listing has the path {str(path)[:200]!r}, which {why}; it is not used")
    assert isinstance(path, str)
    return path


def checked_file(repo: str, entry: Any) -> ListedFile:
    """An entry of a listing as a file. Raises `UntrustedListing`."""
    lfs = getattr(entry, "lfs", None)
    sizes = {entry.size} if lfs is None else {entry.size, lfs.size}
    sha256 = None if lfs is None else lfs.sha256
    size = entry.size
    if len(sizes) != 1 or type(size) is not int or not 0 <= size <= MOST_FILE_BYTES:
        raise UntrustedListing(f"{repo}: {entry.path!r} is listed with the size {sorted(map(str, sizes))}")
    if sha256 is not None and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
        raise UntrustedListing(f"{repo}: {entry.path!r} is listed with the sha256 {str(sha256)[:80]!r}")
    if not (isinstance(entry.blob_id, str) and COMMIT.fullmatch(entry.blob_id)):
        raise UntrustedListing(f"{repo}: {entry.path!r} is listed with the blob id {str(entry.blob_id)[:80]!r}")
    return ListedFile(entry.path, size, sha256, entry.blob_id)


def _list_tree(
    repo: str,
    commit: str,
    start: str,
    take: Callable[[Any], None],
    begin_anew: Callable[[], None],
    on_notice: OnNotice,
    recursive: bool = True,
) -> None:
    """Give every entry below a directory to `take`; a directory that is not there has none."""

    def entries() -> Iterator[Any]:
        yield from client.api().list_repo_tree(
            repo, start or None, recursive=recursive, revision=commit, repo_type="dataset"
        )

    def once() -> None:
        begin_anew()
        for entry in _watched(entries, f"{repo}@{commit[:12]}/{start}", on_notice):
            take(entry)

    from huggingface_hub.errors import EntryNotFoundError

    with contextlib.suppress(EntryNotFoundError):
        _persistently(once, f"{repo}@{commit[:12]}/{start}", on_notice, direct=True)


def _what_is_there(repo: str, commit: str, include: Sequence[str], on_notice: OnNotice) -> str:
    """The entries beside which a glob's files were looked for, as words."""
    parts = starting_directories(include)[0].split("/") if starting_directories(include)[0] else []
    for depth in range(len(parts), -1, -1):
        start = "/".join(parts[:depth])
        found: list[str] = []
        _list_tree(
            repo,
            commit,
            start,
            lambda entry, found=found: found.append(  # type: ignore[misc]
                refuse_bad_path(repo, entry.path) + ("" if hasattr(entry, "size") else "/")
            ),
            found.clear,
            on_notice,
            recursive=False,
        )
        if found:
            more = f" and {len(found) - 12} more" if len(found) > 12 else ""
            return f"under {start or 'its root'}: " + ", ".join(sorted(found)[:12]) + more
    return "no file at all"


def _watched(entries: Callable[[], Iterator[Any]], what: str, on_notice: OnNotice) -> Iterator[Any]:
    """Entries as another thread gets them, as long as it shows signs of life. Raises `Transient` when it does not."""
    limits = patience()
    parts: queue.Queue[list[Any] | BaseException | None] = queue.Queue(4)
    ended = threading.Event()

    def put(item: list[Any] | BaseException | None) -> None:
        while not ended.is_set():
            with contextlib.suppress(queue.Full):
                parts.put(item, timeout=0.5)
                return

    def run() -> None:
        part: list[Any] = []
        try:
            for entry in entries():
                part.append(entry)
                if len(part) == PART_ENTRIES:
                    put(part)
                    part = []
                if ended.is_set():
                    return
            put(part)
            put(None)
        except BaseException as error:
            put(error)

    client.library()
    client.SIGNS.last_s, client.SIGNS.quiet_until_s, client.SIGNS.trouble = time.monotonic(), 0.0, None
    threading.Thread(target=run, daemon=True).start()
    told = None
    try:
        while True:
            try:
                item = parts.get(timeout=0.2)
            except queue.Empty:
                told = _tell(client.SIGNS.trouble, told, what, on_notice)
                signs, now = client.SIGNS, time.monotonic()
                # Beyond what the server asked for, the library's own waits are at most 8 s.
                if now > max(signs.last_s, signs.quiet_until_s) + limits.page_s + 8:
                    raise Transient(f"{what}: no sign of life for {limits.page_s:.0f} s") from None
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield from item
    finally:
        ended.set()


def _tell(trouble: str | None, told: str | None, what: str, on_notice: OnNotice) -> str | None:
    if trouble is not None and trouble != told:
        on_notice(f"listing {what}: {trouble}; trying again")
    return trouble


def _persistently(call: Callable[[], T], what: str, on_notice: OnNotice, direct: bool = False) -> T:
    """What a call of the library returns, tried again while its failures are transient. Raises `HubRefusal`."""
    limits: Patience = patience()
    tries = 0
    while True:
        try:
            if direct:
                return call()
            result: T = next(iter(_watched(lambda: iter([call()]), what, on_notice)))
            return result
        except Exception as error:
            transient = _judged(error, what)
            tries += 1
            wait_s = limits.wait_s(tries, transient.wait_s)
            on_notice(f"listing {what}: {transient.cause}; trying again in {wait_s:.0f} s (failure {tries} in a row)")
            time.sleep(wait_s)


def _judged(error: Exception, what: str) -> Transient:
    """A failure that may be gone at the next try; any other is raised as what it is."""
    from huggingface_hub import errors

    if isinstance(error, Transient):
        return error
    if isinstance(error, (NstrainError, errors.EntryNotFoundError)):
        raise error
    if isinstance(error, errors.OfflineModeIsEnabled):
        raise Offline(
            f"{what} has to be listed, but HF_HUB_OFFLINE is set; unset it, or make the source one of kind local over "
            "what you have of it"
        ) from None
    if isinstance(error, errors.GatedRepoError):
        raise AccessDenied(
            f"{what}: its terms have to be accepted on its page first, and HF_TOKEN set to a token that may read it"
        ) from None
    if isinstance(error, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)):
        kind = "revision" if isinstance(error, errors.RevisionNotFoundError) else "repository"
        raise NotOnHub(
            f"{what}: {client.endpoint()} has no such {kind} (or hides it from this token); correct the recipe, or set "
            "HF_TOKEN"
        ) from None
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if isinstance(error, errors.HfHubHTTPError) and status is not None:
        if status in (408, 425, 429) or status >= 500:
            return Transient(f"HTTP {status}", asked_wait_s(response.headers) if response is not None else None)
        raise (AccessDenied if status in (401, 403) else HubRefusal)(
            f"{what}: {client.endpoint()} answers HTTP {status}"
        ) from None
    if isinstance(error, (OSError, ValueError)) or type(error).__module__.split(".")[0].startswith("httpx"):
        if isinstance(error, errors.HFValidationError):
            raise HubRefusal(f"{what}: {error}") from None
        return Transient(" ".join(f"{type(error).__name__}: {error}".split())[:300])
    if isinstance(error, (LookupError, TypeError, AttributeError, RecursionError)):
        raise UntrustedListing(
            f"{what}: {client.endpoint()} answers with what its API does not have ({type(error).__name__}: {error})"
        ) from error
    raise error
