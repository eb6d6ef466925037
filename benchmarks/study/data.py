"""The study's data on disk: what corpus.py writes and run.py reads.

data.json           digest, counts, and the held-out rows' names, numbers and lengths in the order of their file
train.bin.xz        the training tokens, little-endian 16-bit numbers
held_out.bin.xz     held-out rows one after the other, likewise
tokenizer.json      of the tokenizers library; token 0 ends a document
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nstrain.base.errors import Refusal

EOS_ID = 0
TOKEN = np.dtype("<u2")
Rows = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Held:
    """Held-out rows of one name."""

    name: str
    """A source, or long-<tokens>."""
    rows: npt.NDArray[np.uint16]
    """[rows, L + 1]"""


@dataclasses.dataclass(frozen=True)
class StudyData:
    """Everything that a run reads."""

    digest: str
    """Of all tokens: a row of the table is about one data set."""
    vocabulary: int
    training: npt.NDArray[np.uint16]
    """All training tokens, documents one after the other."""
    sources: dict[str, Rows]
    """Held-out rows [rows, L + 1] by source."""
    long_rows: dict[int, Rows]
    """Held-out rows of single documents by their length in tokens."""

    def updates(self, row_tokens: int, rows: int, seed: int, epochs: int) -> Iterator[Rows]:
        """The rows [rows, L + 1] of every update: each epoch has all of the training rows once, in its own order."""
        count = (len(self.training) - 1) // row_tokens
        for epoch in range(epochs):
            order = np.random.default_rng([seed, epoch]).permutation(count)
            for first in range(0, count - rows + 1, rows):
                starts = order[first : first + rows] * row_tokens
                yield np.stack([self.training[s : s + row_tokens + 1] for s in starts]).astype(np.int64)

    def updates_an_epoch(self, row_tokens: int, rows: int) -> int:
        """Whole updates in an epoch."""
        return (len(self.training) - 1) // row_tokens // rows


def write_data(
    out: Path, tokenizer: str, training: npt.NDArray[np.uint16], held: Sequence[Held], made_of: Mapping[str, Any]
) -> None:
    """Write a data set; `made_of` is kept for the reader."""
    out.mkdir(parents=True, exist_ok=True)
    train_bytes = training.astype(TOKEN).tobytes()
    held_bytes = b"".join(rows.rows.astype(TOKEN).tobytes() for rows in held)
    for name, data in (("train", train_bytes), ("held_out", held_bytes)):
        (out / f"{name}.bin.xz").write_bytes(lzma.compress(data, preset=6))
    (out / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    description = {
        "digest": _digest(train_bytes, held_bytes),
        "vocabulary": len(json.loads(tokenizer)["model"]["vocab"]),
        "training tokens": len(training),
        "held out": [{"name": rows.name, "rows": len(rows.rows), "columns": rows.rows.shape[1]} for rows in held],
        **made_of,
    }
    (out / "data.json").write_text(json.dumps(description, indent=1, sort_keys=True) + "\n")


def _digest(train_bytes: bytes, held_bytes: bytes) -> str:
    return hashlib.sha256(hashlib.sha256(train_bytes).digest() + hashlib.sha256(held_bytes).digest()).hexdigest()[:16]


def read_data(directory: Path) -> StudyData:
    """A data set. Raises `Refusal` if it is not there or its tokens are not the ones that were written."""
    try:
        description = json.loads((directory / "data.json").read_text())
        train_bytes = lzma.decompress((directory / "train.bin.xz").read_bytes())
        held_bytes = lzma.decompress((directory / "held_out.bin.xz").read_bytes())
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise Refusal(f"{directory} holds no data of the study ({error}); make it: benchmarks.study.corpus") from None
    if _digest(train_bytes, held_bytes) != description["digest"]:
        raise Refusal(f"{directory}: its tokens are not those that data.json was written for; make the data again")
    sources: dict[str, Rows] = {}
    long_rows: dict[int, Rows] = {}
    stream, place = np.frombuffer(held_bytes, TOKEN), 0
    for entry in description["held out"]:
        size = entry["rows"] * entry["columns"]
        rows = stream[place : place + size].reshape(entry["rows"], entry["columns"]).astype(np.int64)
        place += size
        if entry["name"].startswith("long-"):
            long_rows[entry["columns"] - 1] = rows
        else:
            sources[entry["name"]] = rows
    return StudyData(
        description["digest"], description["vocabulary"], np.frombuffer(train_bytes, TOKEN), sources, long_rows
    )
