"""Ten sources and more of real text: what every machine that runs the tests has on its disk.

The standard library, the installed packages' sources, stubs, C headers and metadata; as text trees, and written again
as parquet (flat, and nested like repositories of files) and as JSON lines (plain, gzip, zstandard), with strata by
directory, file and column. Where a Debian system's documentation and manual pages lie, they are two sources more.
Files keep their own, very unequal sizes; those of rows are made unequal. Every row is known here without the readers
under test.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DEBIAN_DOCS = Path("/usr/share/doc")
DEBIAN_MANUALS = Path("/usr/share/man")
BLOCK = re.compile(r"\n\n+(?=\S)")


@dataclasses.dataclass(frozen=True)
class RealRow:
    """A row as the test wrote or found it."""

    text: str | None
    """None where no document can come of it: not UTF-8, null, empty."""
    stratum: str


@dataclasses.dataclass(frozen=True)
class RealSource:
    """A source on disk, its recipe's entry, and its rows by file."""

    entry: dict[str, Any]
    files: dict[str, list[RealRow]]

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.entry["name"])

    def is_held_out(self, text: str) -> bool:
        """Invariant 5 from its words: a keyed hash of the text below the share of 2^64."""
        fields = ["source", "local", self.name, self.entry["include"], [], self.entry.get("text_column")]
        identity = json.dumps(fields, separators=(",", ":"))
        key = hashlib.blake2b(identity.encode(), digest_size=32).digest()
        digest = hashlib.blake2b(text.encode(), key=key, digest_size=8).digest()
        return int.from_bytes(digest, "big") < Fraction(str(self.entry["held_out"])) * 2**64


@lru_cache(maxsize=8)
def _walk(root: Path) -> tuple[tuple[str, int], ...]:
    """The regular files below a directory: relative paths, sorted, and sizes. Links are left out."""
    found, directories = [], [("", str(root))]
    while directories:
        prefix, directory = directories.pop()
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != "__pycache__":
                        directories.append((f"{prefix}{entry.name}/", entry.path))
                elif entry.is_file(follow_symlinks=False) and entry.name.isascii():
                    found.append((prefix + entry.name, entry.stat(follow_symlinks=False).st_size))
    return tuple(sorted(found))


def _sample(root: Path, wanted: Callable[[str], bool], budget: int, seed: int) -> list[str]:
    """Files in a seeded order until they come to `budget` bytes; none that is more than a twentieth of it."""
    names = [(name, size) for name, size in _walk(root) if wanted(name) and size <= budget // 20]
    random.Random(seed).shuffle(names)
    taken, total = [], 0
    for name, size in names:
        if total >= budget:
            break
        taken.append(name)
        total += size
    return sorted(taken)


def _text(data: bytes) -> str | None:
    try:
        return data.decode() or None
    except UnicodeDecodeError:
        return None


@dataclasses.dataclass
class _Builder:
    """Writes sources below a directory, each of about `budget` bytes."""

    out: Path
    budget: int
    held_out: float
    seed: int

    packages = Path(sysconfig.get_paths()["purelib"])
    library = Path(sysconfig.get_paths()["stdlib"])

    def named(self, root: Path, pattern: str, salt: int) -> Iterator[tuple[str, bytes]]:
        """A sample of the files whose path matches, with their bytes; gzip files as what they hold."""
        matches = re.compile(pattern).search
        for name in _sample(root, lambda name: matches(name) is not None, self.budget, self.seed * 100 + salt):
            data = (root / name).read_bytes()
            yield (name[:-3], gzip.decompress(data)) if name.endswith(".gz") else (name, data)

    def tree(self, name: str, files: Iterator[tuple[str, bytes]], depth: int) -> RealSource:
        """A text tree with strata by directory."""
        rows: dict[str, list[RealRow]] = {}
        for path, data in files:
            target = self.out / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            rows[path] = [RealRow(_text(data), "/".join(path.split("/")[:-1][:depth]) or ".")]
        stratum = {"by": "directory", "depth": depth}
        return RealSource(self._entry(name, "**/*", "text", None, stratum), rows)

    def rows(
        self,
        name: str,
        suffix: str,
        records: list[tuple[str, dict[str, Any], list[RealRow]]],
        column: str,
        stratum: dict[str, Any],
    ) -> RealSource:
        """Records - (a directory or file stem, the record, its rows) - as files of unequal numbers of them."""
        draw = random.Random(self.seed)
        by_place: dict[str, list[tuple[dict[str, Any], list[RealRow]]]] = {}
        for place, record, rows in records:
            by_place.setdefault(place, []).append((record, rows))
        files: dict[str, list[RealRow]] = {}
        for place, members in sorted(by_place.items()):
            first, number = 0, 0
            while first < len(members):
                count = len(members) if stratum["by"] == "file" else 1 + int(draw.expovariate(1 / 8))
                part = members[first : first + count]
                path = f"{place}-{number}{suffix}"
                (self.out / name / path).parent.mkdir(parents=True, exist_ok=True)
                _write(self.out / name / path, [record for record, _ in part])
                files[path] = [_in_stratum(row, path, stratum) for _, rows in part for row in rows]
                first, number = first + count, number + 1
        reader = "parquet" if suffix == ".parquet" else "jsonl"
        return RealSource(self._entry(name, f"**/*{suffix}", reader, column, stratum), files)

    def _entry(
        self, name: str, include: str, reader: str, column: str | None, stratum: dict[str, Any]
    ) -> dict[str, Any]:
        entry = {"name": name, "kind": "local", "path": str(self.out / name), "include": [include], "reader": reader}
        return {**entry, "text_column": column, "stratum": stratum, "held_out": self.held_out}

    def blocks(self, files: Iterator[tuple[str, bytes]], column: str, kind: Callable[[str], str]) -> list[Any]:
        """Files cut at blank lines into records with a text and a kind."""
        found: list[Any] = []
        for path, data in files:
            for block in BLOCK.split(data.decode(errors="replace")):
                record = {column: block, "kind": kind(block), "from": {"path": path}}
                found.append((path.split("/")[0].split(".")[0], record, [RealRow(block or None, kind(block))]))
        return found

    def repositories(self, files: Iterator[tuple[str, bytes]]) -> list[Any]:
        """Directories as rows that hold a list of files."""
        by_directory: dict[str, list[tuple[str, str | None]]] = {}
        for path, data in files:
            by_directory.setdefault(os.path.dirname(path) or ".", []).append((path, _text(data)))
        found: list[Any] = []
        for directory, members in sorted(by_directory.items()):
            inner = [{"language": os.path.splitext(p)[1] or "none", "content": t} for p, t in members]
            rows = [RealRow(file["content"], str(file["language"])) for file in inner]
            found.append((f"part{len(found) % 5}", {"repository": directory, "files": inner}, rows))
        return found


def _in_stratum(row: RealRow, path: str, stratum: dict[str, Any]) -> RealRow:
    if stratum["by"] == "column":
        return row
    return RealRow(row.text, path if stratum["by"] == "file" else path.split("/")[0])


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=7, compression="zstd")
        return
    data = b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    elif path.suffix == ".zst":
        data = pa.Codec("zstd").compress(data, asbytes=True)
    path.write_bytes(data)


def _first_word(block: str) -> str:
    word = re.match(r"\w+", block)
    return word[0] if word and word[0] in ("def", "class", "import", "from", "if", "async") else "other"


def real_sources(out: Path, budget: int, held_out: float, seed: int = 0) -> list[RealSource]:
    """Ten sources, and two more on a machine with Debian's documentation, of about `budget` bytes each (or all).

    `held_out` must be large enough that a small source holds out something at all.
    """
    make = _Builder(out, budget, held_out, seed)
    by_kind = {"by": "column", "column": "kind"}
    library = r"^(?!site-packages|dist-packages).*\.py$"
    sources = [
        make.tree("library", make.named(make.library, library, 1), depth=1),
        make.tree("packages", make.named(make.packages, r"\.py$", 2), depth=1),
        make.tree("stubs", make.named(make.packages, r"\.pyi$", 3), depth=2),
        make.tree("headers", make.named(make.packages, r"\.(h|hpp|cuh)$", 4), depth=3),
        make.tree("metadata", make.named(make.packages, r"dist-info/", 5), depth=0),
        make.rows(
            "blocks",
            ".parquet",
            [
                ("part", r, rows)
                for _, r, rows in make.blocks(make.named(make.library, library, 6), "code", _first_word)
            ],
            "code",
            by_kind,
        ),
        make.rows(
            "repositories",
            ".parquet",
            make.repositories(make.named(make.packages, r"\.(py|pyi|h|c|txt|json|md|pxd|pyx)$", 7)),
            "files[].content",
            {"by": "column", "column": "files[].language"},
        ),
        make.rows(
            "stub_blocks",
            ".jsonl.gz",
            make.blocks(make.named(make.packages, r"\.pyi$", 8), "meta", lambda block: "none"),
            "meta",
            {"by": "file"},
        ),
        make.rows(
            "header_blocks",
            ".jsonl.zst",
            [
                (f"{record['from']['path'].split('/')[-2][:1]}/part", record, rows)
                for _, record, rows in make.blocks(make.named(make.packages, r"/.*\.h$", 9), "text", lambda block: "")
            ],
            "text",
            {"by": "directory", "depth": 1},
        ),
        make.rows(
            "paragraphs",
            ".jsonl",
            make.blocks(
                make.named(make.packages, r"dist-info/(METADATA|.*LICENSE.*)$", 10),
                "text",
                lambda block: block[0].upper() if block[:1].isalpha() and block.isascii() else "other",
            ),
            "text",
            by_kind,
        ),
    ]
    if DEBIAN_DOCS.is_dir():
        sources.append(make.tree("debian_docs", make.named(DEBIAN_DOCS, r"(copyright|changelog|README)", 11), depth=1))
    if DEBIAN_MANUALS.is_dir():
        pages = make.named(DEBIAN_MANUALS, r"^(\w+/)?man\d/.*\.gz$", 12)
        records = [
            ("page", {"page": _text(data), "language": language}, [RealRow(_text(data), language)])
            for path, data in pages
            for language in [path.split("/")[0] if path.count("/") == 2 else "en"]
        ]
        if records:
            sources.append(make.rows("manuals", ".jsonl.gz", records, "page", {"by": "column", "column": "language"}))
    return sources
