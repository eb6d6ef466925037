"""Preparing one cycle, and deleting those that every training line is past.

A cycle is written under a temporary name, its manifest is put in place, then its directory is renamed: a cycle that can
be seen is complete and has its manifest, and a kill at any instant leaves at most something that is made again, to the
same bytes. NAME.bin holds the source's stream: the cycle's targets plus one token. NAME.idx is its table of documents.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
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
    remove_entry,
    sha256_bytes,
)
from nstrain.base.errors import Refusal
from nstrain.base.killpoints import kill_point
from nstrain.data.consumers import read_consumers
from nstrain.data.draw import SourceDraw, document_tokens
from nstrain.data.encode import Encoder
from nstrain.data.exclude import leaving_out_is_offered
from nstrain.data.line import DataLine
from nstrain.data.manifest import (
    cycle_manifest,
    drawing_from,
    encode_manifest,
    files_taken,
    last_manifest,
    make_again,
    manifest_head,
    opening_of,
    previous_sha256,
    refuse_edited_past,
    states_before,
)
from nstrain.data.opened import OpenedFiles, OpenerPool
from nstrain.data.opening import Opening, open_for_cycle
from nstrain.data.sources import SourceSettings
from nstrain.data.state import SourceState
from nstrain.data.supply import OnDownload, fetched_nothing

STREAM_DOCUMENT = np.dtype([("end", "<u8"), ("stratum", "<u4"), ("file", "<u4"), ("document", "<u4"), ("row", "<u4")])
"""A document in NAME.idx: where it ends in the stream (cut at the stream's end), its stratum, its file's place in the
stratum's opening order, its place in the file's keyed order, and its row in the file."""

BUFFER_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class SourceJob:
    """What one source's stream of a cycle is drawn from."""

    settings: SourceSettings
    listing_sha256: str
    strata: tuple[str, ...]
    files: OpenedFiles
    opening: Opening


def prepare_cycle(
    line: DataLine,
    cycle: int,
    encoder: Encoder,
    progress: Callable[[float], None] = lambda share: None,
    pool: OpenerPool | None = None,
    on_download: OnDownload = fetched_nothing,
) -> str:
    """Prepare a cycle and mark it READY; returns its manifest's SHA-256.

    `progress` is called often with the share that is written, and may raise to stop. If the cycle's manifest exists
    already - its tokens were deleted, or the last preparer was killed - the cycle is drawn from it alone, and must come
    out equal. With a pool, files are opened by its processes. `on_download` is told of what
    is fetched, and may raise like `progress`. Raises `Exhausted`, `Refusal` or `DiskFull`.
    """
    plan = line.cycle_plan(cycle)
    path = line.manifest_path(cycle)
    known = cycle_manifest(line, cycle) if path.exists() else None
    if known is not None:
        refuse_edited_past(line, known)
    before = {} if known is not None else states_before(line, cycle)
    calibration = line.calibration()
    written = 0

    def job(index: int) -> SourceJob:
        name, listing = plan.sources[index], line.listing_for(plan.sources[index], cycle)
        files = line.opened_files(name, encoder, pool, lambda: progress(written / plan.tokens), on_download)
        # Of a branch, a rebuilt cycle or a lost cache none of the files that it begins with may be there.
        if known is not None:
            files.prefetch(files_taken(known["sources"][name]))
            opening = opening_of(known["sources"][name])
        else:
            files.prefetch(sorted(_still_needed(before[name])))
            rates = calibration.rates(line.source(name), listing)
            targets, open_files = plan.source_tokens[index], line.settings.open_files
            with leaving_out_is_offered(line):
                opening = open_for_cycle(files, listing, before[name], rates, targets, open_files, cycle)
        return SourceJob(line.source(name), line.listing(name).digest, listing.strata, files, opening)

    with contextlib.ExitStack() as held:
        directory = held.enter_context(directory_by_rename(line.cycle_directory(cycle)))
        if known is not None:
            held.enter_context(drawing_from(path, make_again(line, cycle)))
        head = manifest_head(line, plan)
        sources: dict[str, Any] = {}
        after = {name: state.to_json() for name, state in before.items()} if known is None else dict(known["after"])
        jobs = []
        for index, name in enumerate(plan.sources):
            jobs.append(job(index))
            base = written
            stream = write_stream(jobs[-1], head, directory, lambda n, base=base: progress((base + n) / plan.tokens))  # type: ignore[misc]
            sources[name], after[name] = stream.record, stream.after.to_json()
            written += plan.source_tokens[index]
            kill_point("cycle:source written")
        data, sha256 = encode_manifest(
            {**head, "previous": previous_sha256(line, cycle), "sources": sources, "after": after}
        )
        _put_manifest(line, cycle, data, sha256)
        kill_point("cycle:manifest written")
        (directory / "READY").write_bytes(canonical_json({"manifest_sha256": sha256}))
    kill_point("cycle:renamed")
    afterwards = {name: SourceState.from_json(state) for name, state in after.items()}
    # A cycle that was made again says nothing of what the next new one needs.
    newest = afterwards if known is None else states_before(line, last_manifest(line) + 1)
    for done in jobs:
        name = done.settings.name
        needed = _still_needed(afterwards[name]) | _still_needed(newest[name])
        done.files.forget(needed, [stratum.next_file for stratum in newest[name].strata])
    return sha256


@dataclasses.dataclass(frozen=True)
class Stream:
    """What drawing and writing one source's stream gave."""

    record: dict[str, Any]
    """The source's part of the manifest."""
    after: SourceState


def write_stream(job: SourceJob, head: dict[str, Any], directory: Path, progress: Callable[[int], None]) -> Stream:
    """Draw a source's stream of the cycle that a manifest's head describes, into NAME.bin and NAME.idx."""
    name = job.settings.name
    segment_tokens = head["recipe"][name] * head["segment_units"] * head["unit_tokens"]
    targets = segment_tokens * head["segments"]
    dtype = np.dtype(head["token_dtype"])
    draw = SourceDraw(job.files, job.opening, targets, head["open_files"], head["cycle"])
    segments: list[dict[tuple[int, int], list[int]]] = [{} for _ in range(head["segments"])]
    position = documents = reported = 0
    with (
        disk_full_is_named(directory / f"{name}.bin"),
        _HashingFile(directory / f"{name}.bin") as tokens_file,
        _HashingFile(directory / f"{name}.idx") as table_file,
    ):
        for drawn in draw.documents():
            file = job.files.get(drawn.stratum, drawn.order)
            ids = document_tokens(file, drawn)[: targets + 1 - position]
            tokens_file.write(ids.astype(dtype).tobytes())
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
            if position - reported > targets // 1024:
                reported = position
                progress(min(position, targets))
    assert position == targets + 1, f"{name}: the stream has {position} tokens instead of {targets + 1}"
    assert draw.state_after is not None
    opening = job.opening
    record = {
        "identity": job.settings.identity.hex(),
        "settings": job.settings.pinned(),
        "listing_sha256": job.listing_sha256,
        "targets": targets,
        "strata": list(job.strata),
        "shares": list(opening.shares),
        "opened": [dataclasses.asdict(stratum) for stratum in opening.strata],
        "opened_counts": dataclasses.asdict(opening.counts),
        "tail_in": None if opening.tail is None else dataclasses.asdict(opening.tail),
        "segments": [[[*file, *taken] for file, taken in sorted(segment.items())] for segment in segments],
        "documents": documents,
        "files": {
            "bin": {"bytes": tokens_file.size, "sha256": tokens_file.sha256},
            "idx": {"bytes": table_file.size, "sha256": table_file.sha256},
        },
    }
    return Stream(record, draw.state_after)


def _still_needed(after: SourceState) -> set[tuple[int, int]]:
    """The opened files that the next cycle reads."""
    needed = {(index, file.order) for index, stratum in enumerate(after.strata) for file in stratum.open}
    return needed | ({(after.tail.stratum, after.tail.order)} if after.tail else set())


def _put_manifest(line: DataLine, cycle: int, data: bytes, sha256: str) -> None:
    path = line.manifest_path(cycle)
    if not path.exists():
        if line.manifest_path(cycle + 1).exists():  # it was lost, and is made again
            _refuse_other_manifest(line, cycle, sha256)
        path.parent.mkdir(exist_ok=True)
        atomic_write(path, data)
        return
    if path.read_bytes() != data:
        cycle_manifest(line, cycle)  # a damaged one is named as such
        raise Refusal(
            f"{path}: preparing cycle {cycle} again gives another manifest (sha256 {sha256}) than the permanent one "
            f"({sha256_bytes(path.read_bytes())}): the pinned inputs or line.json were changed, put them back; or the "
            f"manifest was: {make_again(line, cycle)}"
        )


def _refuse_other_manifest(line: DataLine, cycle: int, sha256: str) -> None:
    """Refuse a manifest that the next one, which is there, does not follow."""
    expected = cycle_manifest(line, cycle + 1)["previous"]
    if expected != sha256:
        raise Refusal(
            f"{line.manifest_path(cycle)}: made again it has sha256 {sha256}, the manifest after it follows "
            f"{expected}; the pinned inputs or line.json were changed: put them back, or a copy of this manifest"
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
    """Remove what a killed preparer left half-written or half-deleted, and a directory that lost its READY.

    Such a one is no cycle, and would be in the way of the one that is made again.
    """
    directory = line.work / "cycles"
    if directory.exists():
        for path in directory.iterdir():
            unready = path.name.isdecimal() and not line.is_ready(int(path.name))
            if unready or path.name.endswith(PARTIAL_SUFFIX):
                remove_entry(path)
