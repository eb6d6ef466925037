"""Preparing one cycle, and deleting those that every training line is past.

A cycle is written under a temporary name, its manifest is put in place, then its directory is renamed: a cycle that can
be seen is complete and has its manifest, and a kill at any instant leaves at most something that is made again, to the
same bytes. NAME.bin holds the source's stream: the cycle's targets plus one token. NAME.idx is its table of documents.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nstrain.base.disk import (
    PARTIAL_SUFFIX,
    atomic_write,
    canonical_json,
    directory_by_rename,
    disk_full_is_named,
    sha256_bytes,
)
from nstrain.base.errors import Refusal
from nstrain.base.killpoints import kill_point
from nstrain.data.consumers import read_consumers
from nstrain.data.draw import SourceDraw, document_tokens
from nstrain.data.encode import Encoder
from nstrain.data.line import DataLine
from nstrain.data.manifest import encode_manifest, load_manifest, manifest_head, states_before
from nstrain.data.schedule import CyclePlan
from nstrain.data.state import SourceState

STREAM_DOCUMENT = np.dtype([("end", "<u8"), ("stratum", "<u4"), ("file", "<u4"), ("document", "<u4"), ("row", "<u4")])
"""A document in NAME.idx: where it ends in the stream (cut at the stream's end), its stratum, its file's place in the
stratum's opening order, its place in the file's keyed order, and its row in the file."""

BUFFER_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class _Stream:
    """What drawing and writing one source's stream gave."""

    record: dict[str, Any]
    after: SourceState


def prepare_cycle(
    line: DataLine, cycle: int, encoder: Encoder, progress: Callable[[float], None] = lambda share: None
) -> str:
    """Prepare a cycle and mark it READY; returns its manifest's SHA-256.

    `progress` is called often with the share that is written, and may raise to stop. If the cycle's manifest exists
    already (its tokens were deleted, or the last preparer was killed), the result must equal it. Raises `Exhausted`,
    `Refusal` or `DiskFull`.
    """
    plan = line.cycle_plan(cycle)
    before = states_before(line, cycle)
    kept: dict[str, set[tuple[int, int]]] = {}
    manifest = manifest_head(line, plan)
    done = 0

    def report(written: int) -> None:
        progress((done + written) / plan.tokens)

    with directory_by_rename(line.cycle_directory(cycle)) as directory:
        sources, after = {}, {name: state.to_json() for name, state in before.items()}
        for index, name in enumerate(plan.sources):
            stream = _write_stream(line, plan, index, before[name], encoder, directory, report)
            sources[name] = stream.record
            after[name] = stream.after.to_json()
            kept[name] = _still_needed(stream.after)
            done += plan.source_tokens[index]
            kill_point("cycle:source written")
        data, sha256 = encode_manifest(
            {**manifest, "previous": _previous_sha256(line, cycle), "sources": sources, "after": after}
        )
        _put_manifest(line, cycle, data, sha256)
        kill_point("cycle:manifest written")
        (directory / "READY").write_bytes(canonical_json({"manifest_sha256": sha256}))
    kill_point("cycle:renamed")
    for name, keep in kept.items():
        line.opened_files(name, encoder).forget(keep)
    return sha256


def _write_stream(
    line: DataLine,
    plan: CyclePlan,
    index: int,
    before: SourceState,
    encoder: Encoder,
    directory: Path,
    progress: Callable[[int], None],
) -> _Stream:
    name, targets = plan.sources[index], plan.source_tokens[index]
    files = line.opened_files(name, encoder, on_open=lambda: progress(0))
    draw = SourceDraw(files, before, targets, line.settings.open_files, plan.cycle)
    segment_tokens = plan.segment_tokens[index]
    segments: list[dict[tuple[int, int], list[int]]] = [{} for _ in range(plan.segments)]
    position = documents = reported = 0
    with (
        disk_full_is_named(directory / f"{name}.bin"),
        _HashingFile(directory / f"{name}.bin") as tokens_file,
        _HashingFile(directory / f"{name}.idx") as table_file,
    ):
        for drawn in draw.documents():
            file = files.get(drawn.stratum, drawn.order)
            ids = document_tokens(file, drawn)[: targets + 1 - position]
            tokens_file.write(ids.astype(line.token_dtype).tobytes())
            if not drawn.is_tail:  # a document belongs to the segment in which its first token is a target
                segment = segments[max(0, position - 1) // segment_tokens]
                taken = segment.setdefault((drawn.stratum, drawn.order), [drawn.document, drawn.document])
                assert taken[1] == drawn.document, "a file's documents are taken in their order"
                taken[1] += 1
            position += len(ids)
            documents += 1
            row = int(file.table["row"][drawn.document])
            entry = (position, drawn.stratum, drawn.order, drawn.document, row)
            table_file.write(np.array(entry, dtype=STREAM_DOCUMENT).tobytes())
            if position - reported > targets // 64:
                reported = position
                progress(min(position, targets))
    assert position == targets + 1, f"{name}: the stream has {position} tokens instead of {targets + 1}"
    assert draw.state_after is not None
    listing = line.listing(name)
    record = {
        "identity": line.source(name).identity.hex(),
        "held_out": line.source(name).held_out,
        "listing_sha256": listing.digest,
        "targets": targets,
        "strata": list(listing.strata),
        "shares": list(draw.shares),
        "opened": [dataclasses.asdict(s) for s in draw.opened_state],
        "tail_in": None if before.tail is None else dataclasses.asdict(before.tail),
        "segments": [[[*file, *taken] for file, taken in sorted(segment.items())] for segment in segments],
        "documents": documents,
        "files": {
            "bin": {"bytes": tokens_file.size, "sha256": tokens_file.sha256},
            "idx": {"bytes": table_file.size, "sha256": table_file.sha256},
        },
    }
    return _Stream(record, draw.state_after)


def _still_needed(after: SourceState) -> set[tuple[int, int]]:
    """The opened files that the next cycle reads."""
    needed = {(index, file.order) for index, stratum in enumerate(after.strata) for file in stratum.open}
    return needed | ({(after.tail.stratum, after.tail.order)} if after.tail else set())


def _previous_sha256(line: DataLine, cycle: int) -> str | None:
    return None if cycle == 1 else sha256_bytes(line.manifest_path(cycle - 1).read_bytes())


def _put_manifest(line: DataLine, cycle: int, data: bytes, sha256: str) -> None:
    path = line.manifest_path(cycle)
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        atomic_write(path, data)
        return
    if path.read_bytes() != data:
        load_manifest(path)  # a damaged one is named as such
        raise Refusal(
            f"{path}: preparing cycle {cycle} again gives another manifest (sha256 {sha256}) than the permanent one "
            f"({sha256_bytes(path.read_bytes())}); the pinned inputs or line.json were changed: put them back"
        )


class _HashingFile:
    """A file written once from start to end, hashed on the way."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=BUFFER_BYTES)
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def __enter__(self) -> _HashingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def is_consumed(line: DataLine, cycle: int) -> bool:
    """Whether there is a consumer and every consumer's committed position is past the cycle."""
    consumers = read_consumers(line.work)
    return bool(consumers) and all(consumer.cycle > cycle for consumer in consumers)


def cycles_on_disk(line: DataLine) -> list[int]:
    """The complete cycles that lie on disk, in order."""
    directory = line.work / "cycles"
    names = (path.name for path in directory.iterdir()) if directory.exists() else ()
    return sorted(int(name) for name in names if name.isdecimal() and line.is_ready(int(name)))


def delete_consumed(line: DataLine) -> list[int]:
    """Delete the cycles that every consumer is past, and leftovers of interrupted work; returns their numbers.

    The caller holds the preparer's lock. A cycle vanishes by a rename first, so no half of one is ever seen.
    """
    gone = [cycle for cycle in cycles_on_disk(line) if is_consumed(line, cycle)]
    for cycle in gone:
        directory = line.cycle_directory(cycle)
        os.rename(directory, directory.with_name(f".{directory.name}.deleted{PARTIAL_SUFFIX}"))
        kill_point("cycle:set aside for deletion")
    discard_partial_cycles(line)
    return gone


def discard_partial_cycles(line: DataLine) -> None:
    """Remove what a killed preparer left half-written or half-deleted."""
    directory = line.work / "cycles"
    if directory.exists():
        for path in directory.iterdir():
            if path.name.endswith(PARTIAL_SUFFIX):
                shutil.rmtree(path)
