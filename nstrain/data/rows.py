"""The rows of one prepared cycle, by position.

There is no iterator and no state: row i of a cycle is a function of the line, the cycle, the row length and i, read
from memory-mapped token files. Opening at any position costs the same.
"""

from __future__ import annotations

import dataclasses
import functools
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nstrain.base.commands import typed
from nstrain.base.disk import read_json, sha256_file
from nstrain.base.errors import NeedsOperator, Refusal
from nstrain.data.line import DataLine
from nstrain.data.manifest import cycle_manifest, refuse_edited_past
from nstrain.data.order import RowOrder


def row_order(manifest: dict[str, Any], row_tokens: int) -> RowOrder:
    """The order of a cycle's rows, from its manifest alone."""
    return RowOrder(
        seed=manifest["seed"],
        cycle=manifest["cycle"],
        sources=tuple(manifest["order"]),
        shares=tuple(manifest["recipe"][name] for name in manifest["order"]),
        segment_units=manifest["segment_units"],
        segments=manifest["segments"],
        unit_tokens=manifest["unit_tokens"],
        row_tokens=row_tokens,
    )


def read_cycle(line: DataLine, cycle: int) -> tuple[dict[str, Any], str]:
    """The manifest of a cycle that is READY, and its hash, its token files being there with their sizes.

    Raises `Refusal` if it is not READY, or its manifest is not what READY names, and `NeedsOperator` for a token file
    that is missing or has another size.
    """
    directory = line.cycle_directory(cycle)
    if not line.is_ready(cycle):
        if directory.exists():
            raise Refusal(without_ready(directory))
        state = "its tokens were deleted" if line.manifest_path(cycle).exists() else "it has not been prepared"
        raise Refusal(f"{directory}: cycle {cycle} is not on disk ({state})")
    sha256 = _hash_in_ready(directory / "READY")
    path = line.manifest_path(cycle)
    if path.exists() and sha256_file(path) != sha256:
        cycle_manifest(line, cycle)  # one that is none is named as such
        raise Refusal(
            f"{directory / 'READY'}: expected {path} with sha256 {sha256}, found {sha256_file(path)}: one of the two "
            f"is damaged; {prepared_again(directory)} from its manifest, and refuses that if it is the damaged one"
        )
    manifest = cycle_manifest(line, cycle, sha256)
    for name in manifest["order"]:
        file, expected = directory / f"{name}.bin", manifest["sources"][name]["files"]["bin"]["bytes"]
        found = file.stat().st_size if file.exists() else None
        if found != expected:
            found_text = "no file" if found is None else f"{found:,}"
            raise NeedsOperator(f"{file}: expected {expected:,} bytes, found {found_text}; {prepared_again(directory)}")
    return manifest, sha256


def _hash_in_ready(path: Path) -> str:
    try:
        ready: Any = read_json(path)
    except Refusal as error:
        raise Refusal(f"{error}; {prepared_again(path.parent)}") from None
    sha256 = ready.get("manifest_sha256") if isinstance(ready, dict) else None
    if not isinstance(sha256, str):
        raise Refusal(
            f"{path}: expected the hash of the cycle's manifest, found {ready!r}; {prepared_again(path.parent)}"
        )
    return sha256


def without_ready(directory: Path) -> str:
    """The message about a cycle that is there but for its READY: it came whole with it, so that it lost it since."""
    return f"{directory / 'READY'}: missing, though the cycle's directory is there; {prepared_again(directory)}"


def prepared_again(directory: Path) -> str:
    """How to have a cycle's damaged token files back."""
    return f"remove the cycle with `{typed('rm', '-r', directory)}`: the preparer makes it again"


def refuse_other_hash(path: Path, expected: str, remedy: str) -> None:
    """Refuse a file that is missing or has other bytes than are pinned, with what mends it."""
    found = sha256_file(path) if path.exists() else "no file"
    if found != expected:
        raise Refusal(f"{path}: expected sha256 {expected}, found {found}; {remedy}")


@dataclasses.dataclass(frozen=True)
class CycleRows:
    """An opened cycle at one row length."""

    line: DataLine
    cycle: int
    manifest: dict[str, Any]
    manifest_sha256: str
    order: RowOrder
    streams: tuple[npt.NDArray[Any], ...]
    """Each of the cycle's sources' memory-mapped tokens: its targets plus one."""
    files: tuple[FileIO, ...]
    """The files that they are mapped from."""
    source_ids: npt.NDArray[np.int64]
    """The cycle's sources as indices into the line's."""

    @classmethod
    def open(cls, line: DataLine, cycle: int, row_tokens: int) -> CycleRows:
        """Open a cycle that is READY. Raises like `read_cycle`, and for a schedule edited since.

        Of the token files that is their size; `TokenCheck` reads them.
        """
        manifest, sha256 = read_cycle(line, cycle)
        refuse_edited_past(line, manifest)
        streams, files = [], []
        for name in manifest["order"]:
            files.append(FileIO(line.cycle_directory(cycle) / f"{name}.bin"))
            streams.append(np.memmap(files[-1], np.dtype(manifest["token_dtype"]), "r"))
        ids = np.array([line.source_names.index(name) for name in manifest["order"]], np.int64)
        order = row_order(manifest, row_tokens)
        return cls(line, cycle, manifest, sha256, order, tuple(streams), tuple(files), ids)

    @property
    def rows(self) -> int:
        """Rows in the cycle."""
        return self.order.rows

    @property
    def row_tokens(self) -> int:
        """Target tokens of a row."""
        return self.order.row_tokens

    @functools.cached_property
    def order_digest(self) -> str:
        """Hash of the cycle's whole (source, window) sequence."""
        return self.order.digest()

    def sources_of(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Source of each of rows first ... last-1, as indices into the line's `source_names`."""
        return self.source_ids[self.order.sources_of(first, last)]

    def read(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Rows first ... last-1 as [last - first, row_tokens + 1]: inputs are [:, :-1], targets [:, 1:]."""
        sources, windows = self.order.locate(first, last)
        length = self.row_tokens
        out = np.empty((last - first, length + 1), dtype=np.int64)
        for place, (source, window) in enumerate(zip(sources, windows, strict=True)):
            start = int(window) * length
            out[place] = self.streams[source][start : start + length + 1]
        return out
