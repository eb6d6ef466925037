"""`nstrain data verify`: whether a data line is still what its hashes say, and its manifests one chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nstrain.base.errors import NstrainError, Refusal
from nstrain.data.consumers import read_consumers
from nstrain.data.line import DataLine
from nstrain.data.manifest import (
    cycle_manifest,
    last_prepared,
    make_again,
    previous_sha256,
    refuse_edited_past,
    states_before,
)
from nstrain.data.rows import prepared_again, read_cycle, refuse_other_hash
from nstrain.data.state import SourceState, StratumState, Tail
from nstrain.data.val import gather_again, load_index


@dataclasses.dataclass(frozen=True)
class Verified:
    """What one look found."""

    what: str
    ok: bool
    message: str


def verify_line(line: DataLine, progress: Callable[[str], None] = lambda what: None) -> list[Verified]:
    """Check lists, calibration, tokenizer, held-out rows, every manifest and every token file on disk; all findings.

    The sources' own files are not read.
    """
    found: list[Verified] = []

    def look(what: str, check: Callable[[], str]) -> None:
        progress(what)
        try:
            found.append(Verified(what, True, check()))
        except (NstrainError, OSError, LookupError, TypeError, ValueError) as error:
            message = str(error) if isinstance(error, NstrainError) else f"{type(error).__name__}: {error}"
            found.append(Verified(what, False, message))

    for name in line.source_names:
        look(f"pinned files of {name}", lambda name=name: _pinned(line, name))  # type: ignore[misc]
    look("calibration", lambda: f"{len(line.calibration().sources)} sources")
    look("tokenizer", lambda: f"{line.encoder().vocabulary.size:,} ids; control tokens in a text stay text")
    for name in sorted({file.source for file in line.settings.excluded}):
        look(f"files of {name} that are left out", lambda name=name: _left_out(line, name))  # type: ignore[misc]
    if (line.work / "val").exists():
        look("held-out rows", lambda: _held_out(line))
    look("consumers", lambda: ", ".join(consumer.id for consumer in read_consumers(line.work)) or "none")
    taken: dict[tuple[str, int, int], int] = {}
    for cycle in range(1, last_prepared(line) + 1):
        look(f"manifest {cycle}", lambda cycle=cycle: _manifest(line, cycle, taken))  # type: ignore[misc]
        if line.cycle_directory(cycle).exists():
            look(f"cycle {cycle}", lambda cycle=cycle: _token_files(line, cycle))  # type: ignore[misc]
    return found


def _pinned(line: DataLine, name: str) -> str:
    return (
        f"the list of {line.listing(name).count:,} files; the files are not read here, but hashed when they are opened "
        "(`nstrain check RUN --deep` hashes those on this machine)"
    )


def _left_out(line: DataLine, name: str) -> str:
    files = [file for file in line.settings.excluded if file.source == name]
    for cycle in {file.from_cycle for file in files}:
        line.listing_for(name, cycle)
    return ", ".join(f"{file.path} (from cycle {file.from_cycle})" for file in files)


def _held_out(line: DataLine) -> str:
    index = load_index(line)
    for name, entry in index["sources"].items():
        refuse_other_hash(line.work / "val" / f"{name}.bin", entry["sha256"], gather_again(line))
    return f"{sum(entry['tokens'] for entry in index['sources'].values()):,} tokens"


def _manifest(line: DataLine, cycle: int, taken: dict[tuple[str, int, int], int]) -> str:
    """A manifest follows the one before it, and takes no document that an earlier one took."""
    path = line.manifest_path(cycle)
    manifest = cycle_manifest(line, cycle)
    try:
        return _following(line, cycle, path, manifest, taken)
    except Exception:  # the manifests after it go on from what it says, and are not blamed for it
        for name, state in manifest["after"].items():
            taken.update(_cursors(name, SourceState.from_json(state)))
        raise


def _cursors(name: str, state: SourceState) -> dict[tuple[str, int, int], int]:
    """How many documents of each open file of a source are taken."""
    return {(name, i, file.order): file.cursor for i, stratum in enumerate(state.strata) for file in stratum.open}


def _following(
    line: DataLine, cycle: int, path: Path, manifest: dict[str, Any], taken: dict[tuple[str, int, int], int]
) -> str:
    if manifest["cycle"] != cycle:
        raise Refusal(f"{path}: is of cycle {manifest['cycle']}, not of cycle {cycle}; {make_again(line, cycle)}")
    refuse_edited_past(line, manifest)
    if manifest["previous"] != previous_sha256(line, cycle):
        raise Refusal(
            f"{path}: follows manifest {manifest['previous']}, the one before it is another: one of the two is not as "
            "the preparer wrote it; restore that from a copy"
        )
    before = states_before(line, cycle)
    if cycle == 1:  # a branch's first cycle goes on inside files that its trunk has opened
        for name, state in before.items():
            taken.update(_cursors(name, state))
    documents = 0
    for name, source in manifest["sources"].items():
        _refuse_other_start(f"{path}: source {name}", source, before[name])
        left_out = line.listing_for(name, cycle).left_out if name in line.excluded(cycle) else frozenset()
        for segment in source["segments"]:
            for stratum, order, first, end in segment:
                key = (name, stratum, order)
                if (stratum, order) in left_out:
                    raise Refusal(
                        f"{path}: source {name} takes documents of file {order} of stratum {stratum}, which "
                        f"{line.work / 'line.json'} leaves out of this cycle"
                    )
                if taken.get(key, 0) != first:
                    raise Refusal(
                        f"{path}: source {name} takes documents {first} ... {end - 1} of file {order} of stratum "
                        f"{stratum}, expected to go on at {taken.get(key, 0)}"
                    )
                taken[key] = end
                documents += end - first
    return f"{documents:,} document{'' if documents == 1 else 's'}, each once"


def _refuse_other_start(where: str, source: dict[str, Any], before: SourceState) -> None:
    """A cycle begins with the tail and the open files that the cycle before left."""
    if (None if source["tail_in"] is None else Tail(**source["tail_in"])) != before.tail:
        raise Refusal(f"{where}: begins with another tail than the cycle before left")
    for index, (opened, left) in enumerate(zip(source["opened"], before.strata, strict=True)):
        state = StratumState.from_json(opened)
        if state.next_file < left.next_file or state.open[: len(left.open)] != left.open:
            raise Refusal(f"{where}, stratum {index}: begins with other open files than the cycle before left")


def _token_files(line: DataLine, cycle: int) -> str:
    directory = line.cycle_directory(cycle)
    manifest, _ = read_cycle(line, cycle)
    total = 0
    for name, source in manifest["sources"].items():
        for kind, file in source["files"].items():
            refuse_other_hash(directory / f"{name}.{kind}", file["sha256"], prepared_again(directory))
            total += file["bytes"]
    return f"{total:,} bytes with the manifest's hashes"
