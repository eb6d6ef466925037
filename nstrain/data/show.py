"""`nstrain data show`: what stands in given rows of a cycle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from nstrain.data.cycles import STREAM_DOCUMENT
from nstrain.data.line import DataLine
from nstrain.data.manifest import cycle_manifest
from nstrain.data.rows import CycleRows, prepared_again, refuse_other_hash, row_order

FIRST_TOKENS = 16


def _table(rows: CycleRows, name: str) -> npt.NDArray[Any]:
    """A source's table of documents. Raises `Refusal` if it is not the one that the manifest pins."""
    path = rows.line.cycle_directory(rows.cycle) / f"{name}.idx"
    refuse_other_hash(path, rows.manifest["sources"][name]["files"]["idx"]["sha256"], prepared_again(path.parent))
    return np.fromfile(path, dtype=STREAM_DOCUMENT)


def show_rows(
    line: DataLine, cycle: int, first: int, last: int, row_tokens: int, with_text: bool
) -> Iterator[dict[str, Any]]:
    """Rows first ... last-1 of a cycle, one object each.

    row; source; window (in the source's stream of the cycle); stratum (of the row's first target) and strata (target
    tokens by stratum); documents (path, row in the file, its target tokens here); tokens (the first 16 of the row);
    text on request. Of a cycle whose tokens are deleted only row, source and window are known: the manifest gives
    them. Raises `Refusal` for rows or a cycle that do not exist.
    """
    if not line.cycle_directory(cycle).exists():
        order = row_order(cycle_manifest(line, cycle), row_tokens)
        sources, windows = order.locate(first, last)
        for place, (source, window) in enumerate(zip(sources, windows, strict=True)):
            yield {
                "row": first + place,
                "source": order.sources[source],
                "window": int(window),
                "tokens": None,
            }
        return
    rows = CycleRows.open(line, cycle, row_tokens)
    decode = line.encoder().decode if with_text else None
    tables = [_table(rows, name) for name in rows.order.sources]
    sources, windows = rows.order.locate(first, last)
    for place, tokens in enumerate(rows.read(first, last)):
        source, window = int(sources[place]), int(windows[place])
        name = rows.order.sources[source]
        listing = line.listing(name)
        documents: list[dict[str, Any]] = []
        strata: dict[str, int] = {}
        start, end = window * row_tokens + 1, (window + 1) * row_tokens + 1  # target positions in the stream
        table = tables[source]
        index = int(np.searchsorted(table["end"], start, side="right"))
        position = start
        while position < end:
            document = table[index]
            count = min(int(document["end"]), end) - position
            stratum = listing.strata[document["stratum"]]
            file = listing.files[document["stratum"]][document["file"]]
            documents.append({"path": file.path, "row": int(document["row"]), "stratum": stratum, "tokens": count})
            strata[stratum] = strata.get(stratum, 0) + count
            position += count
            index += 1
        shown = {
            "row": first + place,
            "source": name,
            "window": window,
            "stratum": documents[0]["stratum"],
            "strata": strata,
            "documents": documents,
            "tokens": tokens[:FIRST_TOKENS].tolist(),
        }
        if decode is not None:
            shown["text"] = decode(tokens)
        yield shown
