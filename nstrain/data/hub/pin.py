"""A hub source as a line pins it: its commit, and of each file the size and sha256.

A repository keeps large files by their sha256; of small ones it tells git's SHA-1 only. Those are fetched now, checked
against git's hash, and pinned by their sha256 too: one kind of pin, wherever the bytes come from later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from nstrain.base.errors import Refusal
from nstrain.data.hub import client
from nstrain.data.hub.errors import AccessDenied, FileVanished, HubRefusal, Offline, Suspect, Transient, WrongBytes
from nstrain.data.hub.http import Answer, Cancel, get
from nstrain.data.hub.listing import ListedFile, OnNotice, list_files, resolve_revision
from nstrain.data.hub.patience import asked_wait_s, patience
from nstrain.data.sources import (
    ColumnStrata,
    FoundFile,
    Listing,
    SourceSettings,
    arrange,
    stratum_of_path,
)

EMPTY_SHA256 = hashlib.sha256().hexdigest()
MOST_SMALL_BYTES = 64 << 20
"""A file that is not in large-file storage; the hub takes no larger one than 10 MiB there."""


def pin_revision(source: SourceSettings, on_notice: OnNotice = lambda text: None) -> SourceSettings:
    """The source with its commit in the place of its branch or tag. Raises `HubRefusal`."""
    assert source.repo is not None, "a hub source"
    commit = resolve_revision(source.repo, source.revision or "main", on_notice)
    return source.model_copy(update={"revision": commit})


def list_hub(
    source: SourceSettings,
    seed: int,
    on_file: Callable[[int], None] = lambda size: None,
    on_notice: OnNotice = lambda text: None,
) -> Listing:
    """List the files of a source whose commit is pinned; `on_file(bytes)` is called for each.

    Raises `HubRefusal` if nothing matches its globs, or `Refusal` if all that does is empty.
    """
    assert source.repo is not None, "a hub source"
    assert source.revision is not None, "pinned"
    assert not isinstance(source.stratum, ColumnStrata), "refused with the recipe"
    found = []
    for file in list_files(source.repo, source.revision, source.include, source.exclude, on_notice):
        sha256 = file.sha256 or (EMPTY_SHA256 if file.size == 0 else _small_sha256(source, file, on_notice))
        stratum = stratum_of_path(source.stratum, file.path)
        found.append(FoundFile(file.path, file.size, sha256, {stratum: file.size}))
        on_file(file.size)
    if sum(file.size for file in found) == 0:
        raise Refusal(f"source {source.name}: all {len(found)} files of {source.repo} that its globs take are empty")
    return arrange(source, found, seed)


def _small_sha256(source: SourceSettings, file: ListedFile, on_notice: OnNotice) -> str:
    """The sha256 of a small file's bytes, which are checked against git's hash."""
    repo, revision = str(source.repo), str(source.revision)
    what = f"source {source.name}: {repo}@{revision[:12]}/{file.path}"
    if file.size > MOST_SMALL_BYTES:
        raise WrongBytes(f"{what}: {file.size:,} bytes and not in large-file storage: no hub has that")
    if client.is_offline():
        raise Offline(f"{what} has to be fetched, but HF_HUB_OFFLINE is set; unset it")
    limits, cancel, tries = patience(), Cancel(), 0
    while True:
        try:
            with get(
                client.file_url(client.endpoint(), repo, revision, file.path), client.hub_headers(), limits, cancel
            ) as answer:
                _refuse_refused(answer, what)
                data = b""
                while len(data) <= file.size and (more := answer.read_some(1 << 20)):
                    data += more
            if hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == file.blob_id:
                return hashlib.sha256(data).hexdigest()
            cause, wait_s = "its bytes are not those of its git hash", None
        except Transient as error:
            cause, wait_s = error.cause, error.wait_s
        except Suspect as error:
            cause, wait_s = error.cause, None
        tries += 1
        if tries >= 10:
            raise WrongBytes(f"{what}: cannot be fetched: {cause}")
        seconds = limits.wait_s(tries, wait_s)
        on_notice(f"{what}: {cause}; trying again in {seconds:.0f} s")
        cancel.wait(seconds)


def _refuse_refused(answer: Answer, what: str) -> None:
    """Return if an answer gives the file. Raises `Transient`, or a `HubRefusal` if the next would be the same."""
    if answer.status == 200:
        return
    told = f"{what}: {answer.host} answers HTTP {answer.status} {answer.headers.get('X-Error-Code') or ''}".rstrip()
    kinds: dict[int, type[HubRefusal]] = {401: AccessDenied, 403: AccessDenied, 404: FileVanished, 451: AccessDenied}
    if answer.status in kinds:
        raise kinds[answer.status](f"{told}; it is listed, so its files need HF_TOKEN, or were just removed: try again")
    raise Transient(f"HTTP {answer.status}", asked_wait_s(answer.headers))
