"""From a pinned file to its documents' texts.

A reader yields a file's rows in their own order, each a text or None: a row that is not valid text, or is empty, is
rejected by this fixed rule and only counted. Bytes that differ from the pinned hash are never read as data.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nstrain.base.disk import sha256_bytes
from nstrain.base.errors import Refusal
from nstrain.data.sources import PinnedFile, SourceSettings, resolve_inside


def read_documents(source: SourceSettings, file: PinnedFile) -> Iterator[str | None]:
    """The rows of a file: its text, or None for a rejected row. Raises `Refusal` if the file is not as pinned."""
    data = _read_pinned(resolve_inside(Path(source.path), file.path), file, source.name)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = ""
    yield text or None


def _read_pinned(path: Path, file: PinnedFile, source: str) -> bytes:
    remedy = (
        f"restore the file as it was when the line was made (sha256 {file.sha256}), or make a new line from the "
        "source as it is now"
    )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Refusal(f"source {source}: {path} cannot be read ({error.strerror}); {remedy}") from None
    if len(data) != file.size or sha256_bytes(data) != file.sha256:
        raise Refusal(
            f"source {source}: {path} has changed: pinned {file.size:,} bytes, found {len(data):,} with sha256 "
            f"{sha256_bytes(data)}; {remedy}"
        )
    return data
