"""A cycle's manifest: permanent, hashed, and enough to make the cycle again.

It pins the schedule's piece, the versions, the tokenizer, every file that the cycle drew from with its hash, by segment
and file the range of documents taken, the shares by stratum, the tail carried in and out, the hashes of the token
files, and the complete state of every source before and after. Its bytes are canonical JSON; docs/reference/manifest.md
describes every field.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nstrain.base.commands import typed
from nstrain.base.disk import canonical_json, read_json, sha256_bytes
from nstrain.base.errors import Exhausted, NstrainError, Refusal
from nstrain.data.encode import ENCODING_VERSION
from nstrain.data.line import DataLine, Fork
from nstrain.data.opening import Opening
from nstrain.data.order import ORDER_VERSION
from nstrain.data.schedule import CyclePlan
from nstrain.data.state import Counts, SourceState, StratumState, Tail

MANIFEST_FORMAT = 1


def manifest_head(line: DataLine, plan: CyclePlan) -> dict[str, Any]:
    """The part of a manifest that is known before anything is drawn."""
    excluded = line.excluded(plan.cycle)
    return {
        "format": MANIFEST_FORMAT,
        "line": line.id,
        "cycle": plan.cycle,
        "order_version": ORDER_VERSION,
        "encoding_version": ENCODING_VERSION,
        "seed": line.settings.seed,
        "eos_id": line.eos_id,
        "tokenizer_sha256": line.settings.tokenizer.sha256,
        "token_dtype": line.token_dtype.str,
        "unit_tokens": plan.unit_tokens,
        "open_files": line.settings.open_files,
        "recipe": dict(zip(plan.sources, plan.shares, strict=True)),
        "order": list(plan.sources),
        "piece": plan.piece,
        "first_token": plan.first_token,
        "cycle_tokens": plan.tokens,
        "segment_units": plan.segment_units,
        "segments": plan.segments,
        **({"excluded": excluded} if excluded else {}),
    }


def encode_manifest(manifest: dict[str, Any]) -> tuple[bytes, str]:
    """A manifest's bytes and their SHA-256."""
    data = canonical_json(manifest) + b"\n"
    return data, sha256_bytes(data)


RESTORE = "restore it from a copy"
"""What mends a manifest of which nothing is known but its path."""


def load_manifest(path: Path, expected_sha256: str | None = None, remedy: str = RESTORE) -> dict[str, Any]:
    """A manifest. Raises `Refusal` with the remedy if it is missing, damaged, or not the one that was expected."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise Refusal(f"{path}: no such manifest; {remedy}") from None
    except OSError as error:
        raise Refusal(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    if expected_sha256 is not None and sha256_bytes(data) != expected_sha256:
        raise Refusal(
            f"{path}: expected sha256 {expected_sha256}, found {sha256_bytes(data)}; a manifest never changes: {remedy}"
        )
    try:
        manifest: dict[str, Any] = json.loads(data)
        if canonical_json(manifest) + b"\n" != data or manifest["format"] != MANIFEST_FORMAT:
            raise ValueError("not in the canonical form of this format")
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(f"{path}: not a manifest ({error}); {remedy}") from None
    return manifest


def cycle_manifest(line: DataLine, cycle: int, expected_sha256: str | None = None) -> dict[str, Any]:
    """A line's manifest of a cycle. Raises `Refusal` like `load_manifest`, and if the cycle was not prepared yet.

    One of which somebody knows the hash was prepared: it is lost, whatever the line knows (an older copy of it).
    """
    path = line.manifest_path(cycle)
    if expected_sha256 is None and not path.exists() and cycle > last_prepared(line):
        raise Refusal(f"{path}: no manifest of that cycle; it has not been prepared yet")
    return load_manifest(path, expected_sha256, make_again(line, cycle))


def make_again(line: DataLine, cycle: int) -> str:
    """How to have a cycle's lost or damaged manifest back: it follows from the pinned inputs and the one before it."""
    lost = [path for path in (line.manifest_path(cycle), line.cycle_directory(cycle)) if path.exists()]
    remove = f"{typed('rm', '-r', *lost)} && " if lost else ""
    make = typed("nstrain", "data", "run-preparer", "--work", line.work, "--until", cycle, "--foreground")
    return f"{RESTORE}, or have it made again, to the same bytes, by `{remove}{make}`"


@contextlib.contextmanager
def drawing_from(path: Path, remedy: str = RESTORE) -> Iterator[None]:
    """Name a manifest if its fields do not fit each other, so that nothing can be drawn from it."""
    try:
        yield
    except (Exhausted, LookupError, TypeError, ValueError, AssertionError) as error:
        raise Refusal(
            f"{path}: no cycle can be drawn from it ({type(error).__name__}: {error}); it is not as the preparer "
            f"wrote it: {remedy}"
        ) from error


def last_prepared(line: DataLine) -> int:
    """The last cycle of which there is any trace: a manifest, token files, or what the preparer has recorded."""
    try:
        recorded = int(read_json(line.work / "state.json")["prepared_cycles"])
    except (NstrainError, LookupError, TypeError, ValueError):
        recorded = 0
    names = (path.name for path in (line.work / "cycles").glob("*"))
    on_disk = (int(name) for name in names if name.isdecimal())
    return max([recorded, last_manifest(line), *on_disk])


def refuse_edited_past(line: DataLine, manifest: dict[str, Any]) -> None:
    """Refuse a line that says something else of a prepared cycle than its manifest, naming the first difference."""
    cycle = manifest["cycle"]
    if manifest.get("excluded", {}) != line.excluded(cycle):  # a file may have been left out since it was opened
        line = DataLine.open(line.work)
    for name, now in {"excluded": None, **manifest_head(line, line.cycle_plan(cycle))}.items():
        if manifest.get(name) != now:
            raise Refusal(
                f"{line.work / 'line.json'}: cycle {cycle} was prepared with {name} {manifest.get(name)!r}, found "
                f"{now!r}; what is prepared never changes and a schedule only grows at its end: put the old value "
                f"back. If nobody edited it, {line.manifest_path(cycle)} is damaged: {make_again(line, cycle)}"
            )


def last_manifest(line: DataLine) -> int:
    """The last cycle that has a manifest; 0 if none has."""
    names = (path.stem for path in (line.work / "manifests").glob("*.json"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def refuse_edited_pasts(line: DataLine) -> None:
    """`refuse_edited_past` for every prepared cycle, from the first.

    One whose manifest and token files are both gone is passed over: the preparer makes it again.
    """
    for cycle in range(1, last_prepared(line) + 1):
        if line.manifest_path(cycle).exists() or line.is_ready(cycle):
            refuse_edited_past(line, cycle_manifest(line, cycle))


def states_before(line: DataLine, cycle: int) -> dict[str, SourceState]:
    """Every source's state as a cycle begins: what the manifest before it holds, for a branch's first its trunk's."""
    fork = line.settings.fork
    if cycle > 1:
        manifest = cycle_manifest(line, cycle - 1)
        refuse_edited_past(line, manifest)
        path, remedy = line.manifest_path(cycle - 1), make_again(line, cycle - 1)
    elif fork is not None:
        manifest = parent_manifest(line, fork)
        path, remedy = line.parent_manifest_path, RESTORE
    else:
        return {name: SourceState.initial(len(line.listing(name).strata)) for name in line.source_names}
    with drawing_from(path, remedy):
        return {name: SourceState.from_json(manifest["after"][name]) for name in line.source_names}


def parent_manifest(line: DataLine, fork: Fork) -> dict[str, Any]:
    """A branch's copy of the manifest that it forked after. Raises `Refusal`."""
    name = line.manifest_path(fork.cycle).name
    remedy = f"it is a copy of manifests/{name} of its trunk, the data line {fork.line}: copy that here again"
    return load_manifest(line.parent_manifest_path, fork.manifest_sha256, remedy)


def previous_sha256(line: DataLine, cycle: int) -> str | None:
    """Hash of the manifest that a cycle follows: the one before it, a branch's first its trunk's; None at the start."""
    if cycle == 1:
        return line.settings.fork.manifest_sha256 if line.settings.fork else None
    return sha256_bytes(line.manifest_path(cycle - 1).read_bytes())


def files_taken(source: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The (stratum, order) of the files that a source's cycle takes tokens of, in the order of the segments."""
    tail = source["tail_in"]
    first = [] if tail is None else [(tail["stratum"], tail["order"])]
    taken = ((stratum, order) for segment in source["segments"] for stratum, order, _, _ in segment)
    return list(dict.fromkeys([*first, *taken]))


def opening_of(source: dict[str, Any]) -> Opening:
    """What a manifest says of a source as the cycle's drawing began: all that drawing it again needs."""
    return Opening(
        strata=tuple(StratumState.from_json(stratum) for stratum in source["opened"]),
        shares=tuple(source["shares"]),
        tail=None if source["tail_in"] is None else Tail(**source["tail_in"]),
        counts=Counts(**source["opened_counts"]),
    )
