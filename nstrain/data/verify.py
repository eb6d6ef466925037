"""`nstrain data verify`: whether a data line is still what its hashes say, and its manifests one chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nstrain.base.disk import read_json, sha256_file
from nstrain.base.errors import NstrainError, Refusal
from nstrain.data.consumers import read_consumers
from nstrain.data.cycles import cycles_on_disk
from nstrain.data.line import DataLine
from nstrain.data.manifest import last_manifest, load_manifest, previous_sha256, refuse_edited_past, states_before
from nstrain.data.state import SourceState, StratumState, Tail
from nstrain.data.val import load_index


@dataclasses.dataclass(frozen=True)
class Verified:
    """What one look found."""

    what: str
    ok: bool
    message: str


def verify_line(line: DataLine, progress: Callable[[str], None] = lambda what: None) -> list[Verified]:
    """Check lists, calibration, tokenizer, held-out rows, every manifest and every token file on disk; all findings."""
    found: list[Verified] = []

    def look(what: str, check: Callable[[], str]) -> None:
        progress(what)
        try:
            found.append(Verified(what, True, check()))
        except (NstrainError, OSError, LookupError, TypeError, ValueError) as error:
            message = str(error) if isinstance(error, NstrainError) else f"{type(error).__name__}: {error}"
            found.append(Verified(what, False, message))

    for name in line.source_names:
        look(f"pinned files of {name}", lambda name=name: f"{line.listing(name).count:,} files")  # type: ignore[misc]
    look("calibration", lambda: f"{len(line.calibration().sources)} sources")
    look("tokenizer", lambda: f"{line.encoder().vocabulary.size:,} ids; control tokens in a text stay text")
    if (line.work / "val").exists():
        look("held-out rows", lambda: _held_out(line))
    look("consumers", lambda: ", ".join(consumer.id for consumer in read_consumers(line.work)) or "none")
    taken: dict[tuple[str, int, int], int] = {}
    for cycle in range(1, _last_prepared(line) + 1):
        look(f"manifest {cycle}", lambda cycle=cycle: _manifest(line, cycle, taken))  # type: ignore[misc]
        if line.is_ready(cycle):
            look(f"cycle {cycle}", lambda cycle=cycle: _token_files(line, cycle))  # type: ignore[misc]
    return found


def _last_prepared(line: DataLine) -> int:
    """The last cycle of which there is any trace: a manifest, token files, or what the preparer has recorded."""
    try:
        recorded = int(read_json(line.work / "state.json")["prepared_cycles"])
    except (NstrainError, LookupError, TypeError, ValueError):  # its calibration is looked at above
        recorded = 0
    return max([recorded, last_manifest(line), *cycles_on_disk(line)])


def _held_out(line: DataLine) -> str:
    index = load_index(line)
    for name, entry in index["sources"].items():
        _refuse_other_hash(line, f"val/{name}.bin", entry["sha256"])
    return f"{sum(entry['tokens'] for entry in index['sources'].values()):,} tokens"


def _manifest(line: DataLine, cycle: int, taken: dict[tuple[str, int, int], int]) -> str:
    """A manifest follows the one before it, and takes no document that an earlier one took."""
    path = line.manifest_path(cycle)
    manifest = load_manifest(path)
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
        raise Refusal(f"{path}: is of cycle {manifest['cycle']}, not of cycle {cycle}; restore it")
    refuse_edited_past(line, manifest)
    if manifest["previous"] != previous_sha256(line, cycle):
        raise Refusal(f"{path}: follows manifest {manifest['previous']}, the one before it is another; restore it")
    before = states_before(line, cycle)
    if cycle == 1:  # a branch's first cycle goes on inside files that its trunk has opened
        for name, state in before.items():
            taken.update(_cursors(name, state))
    documents = 0
    for name, source in manifest["sources"].items():
        _refuse_other_start(f"{path}: source {name}", source, before[name])
        for segment in source["segments"]:
            for stratum, order, first, end in segment:
                key = (name, stratum, order)
                if taken.get(key, 0) != first:
                    raise Refusal(
                        f"{path}: source {name} takes documents {first} ... {end - 1} of file {order} of stratum "
                        f"{stratum}, expected to go on at {taken.get(key, 0)}"
                    )
                taken[key] = end
                documents += end - first
    return f"{documents:,} documents, each once"


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
    manifest = load_manifest(line.manifest_path(cycle), str(read_json(directory / "READY")["manifest_sha256"]))
    total = 0
    for name, source in manifest["sources"].items():
        for kind, file in source["files"].items():
            _refuse_other_hash(line, f"cycles/{directory.name}/{name}.{kind}", file["sha256"])
            total += file["bytes"]
    return f"{total:,} bytes with the manifest's hashes"


def _refuse_other_hash(line: DataLine, name: str, expected: str) -> None:
    path = line.work / name
    found = sha256_file(path) if path.exists() else "no file"
    if found != expected:
        raise Refusal(
            f"{path}: expected sha256 {expected}, found {found}; remove what is damaged and let it be made again"
        )
