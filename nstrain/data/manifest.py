"""A cycle's manifest: permanent, hashed, and enough to make the cycle again.

It pins the schedule's piece, the versions, the tokenizer, every file that the cycle drew from with its hash, by segment
and file the range of documents taken, the shares by stratum, the tail carried in and out, the hashes of the token
files, and the complete state of every source before and after. Its bytes are canonical JSON; docs/reference/manifest.md
describes every field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nstrain.base.disk import canonical_json, sha256_bytes
from nstrain.base.errors import Refusal
from nstrain.data.encode import ENCODING_VERSION
from nstrain.data.line import DataLine
from nstrain.data.opening import Opening
from nstrain.data.order import ORDER_VERSION
from nstrain.data.schedule import CyclePlan
from nstrain.data.state import Counts, SourceState, StratumState, Tail

MANIFEST_FORMAT = 1


def manifest_head(line: DataLine, plan: CyclePlan) -> dict[str, Any]:
    """The part of a manifest that is known before anything is drawn."""
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
    }


def encode_manifest(manifest: dict[str, Any]) -> tuple[bytes, str]:
    """A manifest's bytes and their SHA-256."""
    data = canonical_json(manifest) + b"\n"
    return data, sha256_bytes(data)


def load_manifest(path: Path, expected_sha256: str | None = None) -> dict[str, Any]:
    """A manifest. Raises `Refusal` if it is missing, damaged, or not the one that was expected."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise Refusal(f"{path}: no manifest of that cycle; it has not been prepared yet") from None
    if expected_sha256 is not None and sha256_bytes(data) != expected_sha256:
        raise Refusal(
            f"{path}: expected sha256 {expected_sha256}, found {sha256_bytes(data)}; a manifest never changes: "
            "restore it"
        )
    try:
        manifest: dict[str, Any] = json.loads(data)
        if canonical_json(manifest) + b"\n" != data or manifest["format"] != MANIFEST_FORMAT:
            raise ValueError("not in the canonical form of this format")
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(f"{path}: not a manifest ({error}); restore it") from None
    return manifest


def refuse_edited_past(line: DataLine, manifest: dict[str, Any]) -> None:
    """Refuse a line that says something else of a prepared cycle than its manifest, naming the first difference."""
    cycle = manifest["cycle"]
    for name, now in manifest_head(line, line.cycle_plan(cycle)).items():
        if manifest[name] != now:
            raise Refusal(
                f"{line.work / 'line.json'}: cycle {cycle} was prepared with {name} {manifest[name]!r}, found {now!r}; "
                "what is prepared never changes and a schedule only grows at its end: put the old value back"
            )


def last_manifest(line: DataLine) -> int:
    """The last cycle that has a manifest; 0 if none has."""
    names = (path.stem for path in (line.work / "manifests").glob("*.json"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def refuse_edited_pasts(line: DataLine) -> None:
    """`refuse_edited_past` for every prepared cycle, from the first."""
    for cycle in range(1, last_manifest(line) + 1):
        refuse_edited_past(line, load_manifest(line.manifest_path(cycle)))


def states_before(line: DataLine, cycle: int) -> dict[str, SourceState]:
    """Every source's state as a cycle begins: what the manifest before it holds, for a branch's first its trunk's."""
    fork = line.settings.fork
    if cycle > 1:
        manifest = load_manifest(line.manifest_path(cycle - 1))
        refuse_edited_past(line, manifest)
    elif fork is not None:
        manifest = load_manifest(line.parent_manifest_path, fork.manifest_sha256)
    else:
        return {name: SourceState.initial(len(line.listing(name).strata)) for name in line.source_names}
    return {name: SourceState.from_json(state) for name, state in manifest["after"].items()}


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
