"""A source: a dataset with one text per document, divided into strata, and the pinned list of its files.

What is pinned at `data init` never changes for the line: each file's path, size, SHA-256, stratum and place in the
order in which its stratum opens files. Where a local source lies on this machine is the only part that may move.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pydantic

from nstrain.base.disk import canonical_json, sha256_bytes, sha256_file
from nstrain.base.errors import Refusal
from nstrain.data.globs import matcher
from nstrain.data.order import derive_key
from nstrain.settings.model import Settings


class DirectoryStrata(Settings):
    """Strata by directory: the first `depth` directories of a file's path ('.' for a file above them)."""

    by: Literal["directory"] = "directory"
    depth: int = pydantic.Field(default=1, ge=0)
    """Directories that make a stratum's name; 0 makes the whole source one stratum."""


class SourceSettings(Settings):
    """One source of a data line, as a recipe file or line.json has it."""

    name: str = pydantic.Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")
    """Its name in this line: file names and readings (val_<L>/<name>) carry it."""
    kind: Literal["local"]
    """Where its files come from: local, a directory of this machine."""
    path: str
    """The directory (kind local)."""
    include: tuple[str, ...] = pydantic.Field(min_length=1)
    """Globs of the files that belong to it, relative to the directory; ** is any number of directories."""
    exclude: tuple[str, ...] = ()
    """Globs of files that do not, though included."""
    reader: Literal["text"] = "text"
    """How a file becomes documents: text, one document a file, UTF-8."""
    stratum: DirectoryStrata = DirectoryStrata()
    """What its strata are."""
    markers: tuple[str, ...] = ()
    """The control markers of its own that encode as those tokens; all other text is plain."""
    held_out: float = pydantic.Field(default=0.01, gt=0, lt=1)
    """Share of its documents, by a hash of their text, that is never trained on."""

    @functools.cached_property
    def identity(self) -> bytes:
        """What makes it this source and no other, in any line and anywhere on a disk: a blake2b-256 key."""
        return derive_key("source", self.kind, self.name, list(self.include), list(self.exclude), None)

    @functools.cached_property
    def held_out_threshold(self) -> int:
        """A document is held out if its 64-bit hash is below this."""
        return int(Fraction(repr(self.held_out)) * 2**64)

    def is_held_out(self, text: str) -> bool:
        """Whether a document belongs to the held-out text: the same answer in every line of this source."""
        digest = hashlib.blake2b(text.encode(), key=self.identity, digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.held_out_threshold


@dataclasses.dataclass(frozen=True)
class PinnedFile:
    """A file of a source, as it was when the line was made."""

    path: str
    """Relative to the source's root, with forward slashes."""
    size: int
    """Bytes."""
    sha256: str
    stratum: int
    """Index among the source's strata, which are sorted by name."""
    order: int
    """Its place in the order in which the stratum opens its files."""


@dataclasses.dataclass(frozen=True)
class Listing:
    """A source's pinned files: `files[stratum][order]`."""

    strata: tuple[str, ...]
    files: tuple[tuple[PinnedFile, ...], ...]

    @property
    def bytes_by_stratum(self) -> tuple[int, ...]:
        """Pinned bytes of each stratum."""
        return tuple(sum(file.size for file in files) for files in self.files)

    @property
    def count(self) -> int:
        """All files."""
        return sum(len(files) for files in self.files)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the list's content, whatever file it is kept in."""
        rows = [canonical_json([f.path, f.size, f.sha256, f.stratum, f.order]) for files in self.files for f in files]
        return sha256_bytes(canonical_json(list(self.strata)) + b"\n" + b"\n".join(rows))

    def save(self, path: Path) -> None:
        """Write as a parquet table."""
        files = [file for of_stratum in self.files for file in of_stratum]
        table = pa.table(
            {
                "path": pa.array([f.path for f in files], pa.string()),
                "size": pa.array([f.size for f in files], pa.int64()),
                "sha256": pa.array([f.sha256 for f in files], pa.string()),
                "stratum": pa.array([self.strata[f.stratum] for f in files], pa.string()),
                "order": pa.array([f.order for f in files], pa.int64()),
            }
        )
        pq.write_table(table, path)

    @classmethod
    def load(cls, path: Path, digest: str) -> Listing:
        """Read back; raises `Refusal` if the content is not what line.json pins."""
        try:
            columns = pq.read_table(path, columns=["path", "size", "sha256", "stratum", "order"]).to_pydict()
        except (OSError, pa.ArrowException) as error:
            raise Refusal(f"{path}: the pinned file list cannot be read ({error})") from None
        strata = tuple(sorted(set(columns["stratum"])))
        ids = {name: index for index, name in enumerate(strata)}
        files: list[list[PinnedFile]] = [[] for _ in strata]
        for name, size, sha, stratum, order in zip(
            *(columns[key] for key in ("path", "size", "sha256", "stratum", "order")), strict=True
        ):
            files[ids[stratum]].append(PinnedFile(name, size, sha, ids[stratum], order))
        listing = cls(strata, tuple(tuple(sorted(of_stratum, key=lambda f: f.order)) for of_stratum in files))
        if listing.digest != digest:
            raise Refusal(
                f"{path}: its content has digest {listing.digest}, line.json pins {digest}; restore the original file"
            )
        return listing


def list_local(source: SourceSettings, seed: int, on_file: Callable[[int], None] = lambda size: None) -> Listing:
    """List and hash the files of a local source; `on_file(bytes)` is called after each.

    Raises `Refusal` for a directory that is not there, a file that cannot be read, or a source without any text.
    """
    root = Path(source.path)
    if not root.is_dir():
        raise Refusal(f"source {source.name}: {root} is not a directory; correct its path in the recipe")
    included, excluded = matcher(source.include), matcher(source.exclude)
    paths = [path for path in _walk(root, source.name) if included(path) and not excluded(path)]
    if not paths:
        raise Refusal(
            f"source {source.name}: no file under {root} matches {list(source.include)}"
            + (f" without {list(source.exclude)}" if source.exclude else "")
            + "; correct its globs in the recipe"
        )
    pinned = []
    for path in paths:
        size, sha256 = _pin(root / path, source.name)
        pinned.append((path, size, sha256))
        on_file(size)
    if sum(size for _, size, _ in pinned) == 0:
        raise Refusal(f"source {source.name}: all {len(pinned)} files under {root} are empty")
    return arrange(source, pinned, seed)


def arrange(source: SourceSettings, files: Sequence[tuple[str, int, str]], seed: int) -> Listing:
    """Strata and opening order of files given as (path, size, sha256): a keyed permutation of their paths."""
    by_stratum: dict[str, list[tuple[str, int, str]]] = {}
    for file in files:
        directories = file[0].split("/")[:-1]
        by_stratum.setdefault("/".join(directories[: source.stratum.depth]) or ".", []).append(file)
    key = derive_key("file order", seed, source.identity.hex())
    strata = tuple(sorted(by_stratum))
    arranged = []
    for index, name in enumerate(strata):
        ordered = sorted(
            by_stratum[name],
            key=lambda f: (hashlib.blake2b(f[0].encode(), key=key, digest_size=16).digest(), f[0]),
        )
        arranged.append(tuple(PinnedFile(*file, index, order) for order, file in enumerate(ordered)))
    return Listing(strata, tuple(arranged))


def _walk(root: Path, source: str) -> list[str]:
    """Every entry below a directory that is not a directory, sorted; links to directories are not followed."""
    found = []

    def refuse(error: OSError) -> None:
        raise Refusal(f"source {source}: {error.filename} cannot be listed ({error.strerror}); make it readable")

    for directory, directories, names in os.walk(root, onerror=refuse):
        directories.sort()
        for name in names:
            path = os.path.relpath(os.path.join(directory, name), root).replace(os.sep, "/")
            found.append(path)
    return sorted(found)


def _pin(path: Path, source: str) -> tuple[int, str]:
    remedy = "make it a readable file, remove it, or exclude it by a glob in the recipe"
    try:
        path.as_posix().encode()
    except UnicodeEncodeError:
        raise Refusal(f"source {source}: {os.fsencode(path)!r}: the file's name is not UTF-8; {remedy}") from None
    if not path.is_file():
        what = "not a regular file" if path.exists() else "a link to nothing"
        raise Refusal(f"source {source}: {path} is {what}; {remedy}")
    try:
        return path.stat().st_size, sha256_file(path)
    except OSError as error:
        raise Refusal(f"source {source}: {path} cannot be read ({error.strerror}); {remedy}") from None


_DRIVE = re.compile(r"^[A-Za-z]:")


def resolve_inside(root: Path, relative: str) -> Path:
    """The file of a pinned path; refuses one that would lead out of the source's root."""
    parts = relative.split("/")
    if relative.startswith("/") or ".." in parts or _DRIVE.match(relative):
        raise Refusal(f"{relative!r} leads out of its source; pinned paths are relative and hold no '..'")
    return root.joinpath(*parts)
