"""A line over three sources of every kind of reader and strata: JSON lines, nested parquet, a tree of texts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_helpers import make_line, prose, prose_tree, source, write_tree
from reader_files import write_records

from nstrain.data.line import DataLine

KINDS = ("prose", "code", "mail")
HELD_OUT = 0.05
SHARES = {"rows": 2, "nested": 1, "tree": 1}
"""Sources and their shares; one period is four units."""


def write_sources(root: Path, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Sources of a recipe by name: `rows` has its strata in a column, `nested` in a list's elements, `tree` by file."""
    draw = random.Random(seed)

    def text() -> str:
        return prose(draw.randrange(1 << 30), 1 + int(40 * draw.expovariate(1.0)))

    for number in range(4):
        kinds: list[Any] = [draw.choice(KINDS) for _ in range(40)] + [None, 7, ""]
        records = [{"text": text() if draw.random() < 0.95 else None, "meta": {"kind": kind}} for kind in kinds]
        write_records(root / "rows" / f"{number}.jsonl.gz", records)
    for number in range(4):
        repositories = [
            {"files": [{"content": text(), "language": draw.choice("xyz")} for _ in range(draw.randrange(5))]}
            for _ in range(20)
        ]
        write_records(root / "nested" / f"{number}.parquet", repositories, row_group_size=7)
    write_tree(root / "tree", prose_tree(seed, {"a": 50, "b": 30}, words=25))
    return {
        "rows": _source(root, "rows", "jsonl", "**/*.jsonl.gz", "text", {"by": "column", "column": "meta.kind"}),
        "nested": _source(
            root, "nested", "parquet", "*.parquet", "files[].content", {"by": "column", "column": "files[].language"}
        ),
        "tree": source("tree", root / "tree", SHARES["tree"], held_out=2 * HELD_OUT, stratum={"by": "file"}),
    }


def _source(
    root: Path, name: str, reader: str, include: str, column: str, stratum: Mapping[str, Any]
) -> dict[str, Any]:
    fields = {"include": [include], "reader": reader, "text_column": column, "stratum": stratum, "held_out": HELD_OUT}
    return source(name, root / name, SHARES[name], **fields)


def mixed_line(
    root: Path, tokenizer: Path, cycle_tokens: int = 1280, cycles: int | None = None, **options: Any
) -> DataLine:
    """The line `root/line` over the sources in `root/sources`."""
    sources = list(write_sources(root / "sources").values())
    return make_line(root / "line", tokenizer, sources, cycle_tokens, cycles, **options)
