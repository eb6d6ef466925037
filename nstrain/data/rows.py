"""The rows of one prepared cycle, by position.

There is no iterator and no state: row i of a cycle is a function of the line, the cycle, the row length and i, read
from memory-mapped token files. Opening at any position costs the same.
"""

from __future__ import annotations

import dataclasses
import functools
from io import FileIO
from typing import Any

import numpy as np
import numpy.typing as npt

from nstrain.base.disk import read_json
from nstrain.base.errors import Refusal
from nstrain.data.line import DataLine
from nstrain.data.manifest import load_manifest, refuse_edited_past
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
        """Open a cycle that is READY. Raises `Refusal` if it is not, or if it is not what its manifest describes.

        Of the token files that is their size; `TokenCheck` reads them.
        """
        directory = line.cycle_directory(cycle)
        if not line.is_ready(cycle):
            state = "its tokens were deleted" if line.manifest_path(cycle).exists() else "it has not been prepared"
            raise Refusal(f"{directory}: cycle {cycle} is not on disk ({state})")
        sha256 = str(read_json(directory / "READY")["manifest_sha256"])
        manifest = load_manifest(line.manifest_path(cycle), sha256)
        refuse_edited_past(line, manifest)
        streams, files = [], []
        for name in manifest["order"]:
            path, expected = directory / f"{name}.bin", manifest["sources"][name]["files"]["bin"]["bytes"]
            found = path.stat().st_size if path.exists() else None
            if found != expected:
                raise Refusal(
                    f"{path}: expected {expected:,} bytes, found {found if found is not None else 'no file'}; remove "
                    f"{directory} and let the preparer make it again"
                )
            files.append(FileIO(path))
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
        return self.source_ids[self.order.locate(first, last)[0]]

    def read(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Rows first ... last-1 as [last - first, row_tokens + 1]: inputs are [:, :-1], targets [:, 1:]."""
        sources, windows = self.order.locate(first, last)
        length = self.row_tokens
        out = np.empty((last - first, length + 1), dtype=np.int64)
        for place, (source, window) in enumerate(zip(sources, windows, strict=True)):
            start = int(window) * length
            out[place] = self.streams[source][start : start + length + 1]
        return out
