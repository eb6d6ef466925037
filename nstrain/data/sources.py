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
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pydantic

from nstrain.base.disk import canonical_json, sha256_bytes, sha256_file
from nstrain.base.errors import Refusal
from nstrain.data.globs import matcher
from nstrain.data.order import derive_key
from nstrain.settings.model import Natural, Settings

if TYPE_CHECKING:
    from nstrain.data.readers import ReaderSettings


class DirectoryStrata(Settings):
    """Strata by directory: the first `depth` directories of a file's path ('.' for a file above them)."""

    by: Literal["directory"] = "directory"
    depth: Natural = 1
    """Directories that make a stratum's name; 0 makes the whole source one stratum."""


class FileStrata(Settings):
    """Every file is a stratum: where each file holds a kind of text of its own."""

    by: Literal["file"]


class ColumnStrata(Settings):
    """Strata by the value that a column has in a document's row; a row without one is of stratum '(none)'."""

    by: Literal["column"]
    column: str = pydantic.Field(min_length=1)
    """Its path: `language`, `meta.language`, or `files[].language` beside a text column `files[].content`."""


_REPO_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
_MIRROR = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?|" + rf"{_REPO_NAME}/{_REPO_NAME}(@[A-Za-z0-9][A-Za-z0-9_./-]*)?")

Reader = Literal["text", "jsonl", "parquet"]
"""How a file becomes documents."""


class SourceSettings(Settings):
    """One source of a data line, as a recipe file or line.json has it."""

    name: str = pydantic.Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")
    """Its name in this line: file names and readings (val_<L>/<name>) carry it."""
    kind: Literal["local", "hub"]
    """Where its files come from: local, a directory of this machine; hub, a dataset repository."""
    path: str | None = None
    """The directory (kind local)."""
    repo: str | None = pydantic.Field(default=None, pattern=rf"^{_REPO_NAME}/{_REPO_NAME}$")
    """The dataset repository, OWNER/NAME (kind hub)."""
    revision: str | None = pydantic.Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,199}$")
    """Its branch, tag or commit; in line.json the commit that it was at `data init` (kind hub; default main)."""
    mirrors: tuple[str, ...] = ()
    """Where else its files may be had if they vanish: OWNER/NAME@REVISION, or https://HOST of another hub."""
    include: tuple[str, ...] = pydantic.Field(min_length=1)
    """Globs of the files that belong to it, relative to its root; ** is any number of directories."""
    exclude: tuple[str, ...] = ()
    """Globs of files that do not, though included."""
    reader: Reader = "text"
    """How a file becomes documents: text, one document a file; jsonl (also .gz and .zst) or parquet, one a row."""
    text_column: str | None = None
    """Where a row's text is (jsonl, parquet): `content`, `meta.text`, or `files[].content`, a document an element."""
    stratum: DirectoryStrata | FileStrata | ColumnStrata = DirectoryStrata()
    """What its strata are."""
    markers: tuple[str, ...] = ()
    """The control markers of its own that encode as those tokens; all other text is plain."""
    held_out: float = pydantic.Field(default=0.01, gt=0, lt=1)
    """Share of its documents, by a hash of their text, that is never trained on."""

    @pydantic.model_validator(mode="after")
    def _kind_fits(self) -> SourceSettings:
        if self.kind == "local":
            if self.path is None:
                raise ValueError(f"source {self.name}: kind local needs a path")
            if self.repo is not None or self.revision is not None or self.mirrors:
                raise ValueError(f"source {self.name}: repo, revision and mirrors are for kind hub, found kind local")
        else:
            if self.repo is None:
                raise ValueError(f"source {self.name}: kind hub needs a repo")
            if self.path is not None:
                raise ValueError(f"source {self.name}: path is for kind local, found kind hub")
            if isinstance(self.stratum, ColumnStrata):
                raise ValueError(
                    f"source {self.name}: strata by column need every row read at `data init`; download the repository "
                    "and use kind local, or take strata by directory or file"
                )
        for mirror in self.mirrors:
            if not _MIRROR.fullmatch(mirror):
                raise ValueError(
                    f"source {self.name}: mirror {mirror!r}: expected OWNER/NAME, OWNER/NAME@REVISION or https://HOST"
                )
        return self

    @pydantic.model_serializer(mode="wrap")
    def _without_the_other_kind(self, handler: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What a local source does not have is not written, so that its lines and manifests are what they were."""
        fields: dict[str, Any] = handler(self)
        if self.kind == "local":
            for name in ("repo", "revision", "mirrors"):
                fields.pop(name, None)
        return fields

    @pydantic.model_validator(mode="after")
    def _columns_fit(self) -> SourceSettings:
        if self.reader == "text" and self.text_column is not None:
            raise ValueError(f"source {self.name}: text_column is for the readers jsonl and parquet, found reader text")
        if self.reader != "text" and not self.text_column:
            raise ValueError(f"source {self.name}: reader {self.reader} needs a text_column")
        if self.reader == "text" and isinstance(self.stratum, ColumnStrata):
            raise ValueError(f"source {self.name}: strata by column need the reader jsonl or parquet")
        return self

    @functools.cached_property
    def identity(self) -> bytes:
        """What makes it this source and no other, in any line and anywhere on a disk: a blake2b-256 key."""
        globs = (list(self.include), list(self.exclude))
        where = self.name if self.kind == "local" else self.repo
        return derive_key("source", self.kind, where, *globs, self.text_column)

    @property
    def root(self) -> Path:
        """The directory in which its files lie on this machine."""
        assert self.path is not None, f"source {self.name} of kind hub has no place on this disk yet"
        return Path(self.path)

    def pinned(self) -> dict[str, Any]:
        """What of it stays for a line's life, as JSON values: all but where its files are to be had."""
        fields: dict[str, Any] = {**self.model_dump(mode="json"), "path": None}
        return fields if self.kind == "local" else {**fields, "mirrors": []}

    @property
    def rows(self) -> ReaderSettings:
        """How its files are read."""
        from nstrain.data.readers import ReaderSettings

        column = self.stratum.column if isinstance(self.stratum, ColumnStrata) else None
        return ReaderSettings(self.reader, self.text_column, column)

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
    text_bytes: int
    """What it counts for its stratum's share until it is opened: its size, or for strata by column the bytes of the
    texts that are of this stratum (the file is then in the list once for each of its strata)."""


RESTORE_LISTING = (
    "put a copy of it back: that of a branch or the trunk is the same, and so is that of `nstrain data init` into "
    "another directory with the recipe, tokenizer and options of then"
)
"""What mends a list of pinned files."""

_LISTING_COLUMNS = ("path", "size", "sha256", "stratum", "order", "text_bytes")


@dataclasses.dataclass(frozen=True)
class Listing:
    """A source's pinned files: `files[stratum][order]`."""

    strata: tuple[str, ...]
    files: tuple[tuple[PinnedFile, ...], ...]
    left_out: frozenset[tuple[int, int]] = frozenset()
    """(stratum, order) of the files that are not to be opened any more (`DataLine.listing_for`). They keep their place,
    and are no part of what is pinned."""

    @property
    def bytes_by_stratum(self) -> tuple[int, ...]:
        """Pinned bytes of each stratum (`PinnedFile.text_bytes`)."""
        return tuple(sum(file.text_bytes for file in files) for files in self.files)

    def file(self, stratum: int, order: int) -> PinnedFile:
        """A stratum's file by its place in the opening order."""
        return self.files[stratum][order]

    def unopened(self, stratum: int, first: int) -> Iterator[PinnedFile]:
        """A stratum's files from a place in its opening order on, as they are opened: without those left out."""
        files = self.files[stratum]
        return (files[order] for order in range(first, len(files)) if (stratum, order) not in self.left_out)

    @property
    def count(self) -> int:
        """All files."""
        return sum(len(files) for files in self.files)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the list's content, whatever file it is kept in."""
        rows = [
            canonical_json([f.path, f.size, f.sha256, f.stratum, f.order, f.text_bytes])
            for files in self.files
            for f in files
        ]
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
                "text_bytes": pa.array([f.text_bytes for f in files], pa.int64()),
            }
        )
        pq.write_table(table, path)

    @classmethod
    def load(cls, path: Path, digest: str) -> Listing:
        """Read back; raises `Refusal` if the content is not what line.json pins."""
        try:
            columns = pq.read_table(path, columns=list(_LISTING_COLUMNS)).to_pydict()
        except (OSError, ValueError, pa.ArrowException) as error:  # a string that is no UTF-8
            raise Refusal(f"{path}: the pinned file list cannot be read ({error}); {RESTORE_LISTING}") from None
        strata = tuple(sorted(set(columns["stratum"])))
        ids = {name: index for index, name in enumerate(strata)}
        files: list[list[PinnedFile]] = [[] for _ in strata]
        for name, size, sha, stratum, order, text in zip(*(columns[key] for key in _LISTING_COLUMNS), strict=True):
            files[ids[stratum]].append(PinnedFile(name, size, sha, ids[stratum], order, text))
        listing = cls(strata, tuple(tuple(sorted(of_stratum, key=lambda f: f.order)) for of_stratum in files))
        if listing.digest != digest:
            raise Refusal(
                f"{path}: its content has digest {listing.digest}, line.json pins {digest}; {RESTORE_LISTING}"
            )
        return listing


def list_local(
    source: SourceSettings,
    seed: int,
    on_file: Callable[[int], None] = lambda size: None,
    on_notice: Callable[[str], None] = lambda text: None,
) -> Listing:
    """List and hash the files of a local source; `on_file(bytes)` is called after each, `on_notice` with what is left
    out although it is there.

    Raises `Refusal` for a directory that is not there, a file that cannot be read, or a source without any text.
    """
    root = source.root
    if not root.is_dir():
        raise Refusal(f"source {source.name}: {root} is not a directory; correct its path in the recipe")
    included, excluded = matcher(source.include), matcher(source.exclude)
    paths = [path for path in _walk(root, source.name, on_notice) if included(path) and not excluded(path)]
    for path in paths:
        resolve_inside(root, path)
    if not paths:
        raise Refusal(
            f"source {source.name}: no file under {root} matches {list(source.include)}"
            + (f" without {list(source.exclude)}" if source.exclude else "")
            + "; correct its globs in the recipe"
        )
    from nstrain.data.readers import refuse_missing_columns

    refuse_missing_columns(source.rows, root / paths[0], f"source {source.name}: {root / paths[0]}")
    found = []
    for path in paths:
        size, sha256 = _pin(root / path, source.name)
        found.append(FoundFile(path, size, sha256, _text_bytes(source, root, path, size)))
        on_file(size)
    if sum(file.size for file in found) == 0:
        raise Refusal(f"source {source.name}: all {len(found)} files under {root} are empty")
    return arrange(source, found, seed)


@dataclasses.dataclass(frozen=True)
class FoundFile:
    """A file of a source before it has its place."""

    path: str
    size: int
    sha256: str
    text_bytes: Mapping[str, int]
    """By the stratum its documents are of: what the file counts there (see `PinnedFile.text_bytes`)."""


def stratum_of_path(strata: DirectoryStrata | FileStrata, path: str) -> str:
    """The stratum of a file by its path alone, the same for a directory of this machine and for a repository."""
    return path if isinstance(strata, FileStrata) else "/".join(path.split("/")[:-1][: strata.depth]) or "."


def _text_bytes(source: SourceSettings, root: Path, path: str, size: int) -> dict[str, int]:
    """The strata of a local file, and what it counts in each; with strata by column every row is read."""
    if not isinstance(source.stratum, ColumnStrata):
        return {stratum_of_path(source.stratum, path): size}
    from nstrain.data.readers import NO_STRATUM, read_rows

    sizes: dict[str, int] = {}
    for row in read_rows(source.rows, root / path, f"source {source.name}: {root / path}"):
        stratum = row.stratum or NO_STRATUM
        sizes[stratum] = sizes.get(stratum, 0) + len((row.text or "").encode())
    return sizes or {NO_STRATUM: 0}


def arrange(source: SourceSettings, files: Sequence[FoundFile], seed: int) -> Listing:
    """Strata and opening order of files: in each stratum a keyed permutation of their paths."""
    by_stratum: dict[str, list[FoundFile]] = {}
    for file in files:
        for stratum in file.text_bytes:
            by_stratum.setdefault(stratum, []).append(file)
    key = derive_key("file order", seed, source.identity.hex())

    def keyed(file: FoundFile) -> tuple[bytes, str]:
        return hashlib.blake2b(file.path.encode(), key=key, digest_size=16).digest(), file.path

    strata = tuple(sorted(by_stratum))
    arranged = [
        tuple(
            PinnedFile(file.path, file.size, file.sha256, index, order, file.text_bytes[name])
            for order, file in enumerate(sorted(by_stratum[name], key=keyed))
        )
        for index, name in enumerate(strata)
    ]
    return Listing(strata, tuple(arranged))


def _walk(root: Path, source: str, on_notice: Callable[[str], None]) -> list[str]:
    """Every entry below a directory that is not a directory, sorted; links to directories are not followed.

    What they lead to may be listed already, or have no end; that they are there is told.
    """
    found: list[str] = []
    links: list[str] = []

    def refuse(error: OSError) -> None:
        raise Refusal(f"source {source}: {error.filename} cannot be listed ({error.strerror}); make it readable")

    for directory, directories, names in os.walk(root, onerror=refuse):
        directories.sort()
        links += (path for name in directories if os.path.islink(path := os.path.join(directory, name)))
        for name in names:
            path = os.path.relpath(os.path.join(directory, name), root).replace(os.sep, "/")
            found.append(path)
    if links:
        more = f" and {len(links) - 1:,} more" if len(links) > 1 else ""
        on_notice(
            f"source {source}: {links[0]}{more}: a link to a directory, which is not followed; if its text is to be "
            "taken, make the directory a source of its own, or mount it there"
        )
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
        raise Refusal(
            f"{relative!r} under {root} leads out of its source: a pinned path is relative, holds no '..' and does not "
            "begin with a drive as in 'c:'; rename the file, or exclude it by a glob in the recipe"
        )
    return root.joinpath(*parts)
