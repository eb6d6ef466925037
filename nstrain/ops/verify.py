"""`nstrain verify`: whether every byte of a line's checkpoints is as it was written, and the line can go on.

Nothing is written and no lock is taken. Of a line that runs, what its trainer commits and its retention removes
meanwhile is no finding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nstrain.base.commands import typed
from nstrain.base.disk import PARTIAL_SUFFIX
from nstrain.base.errors import NstrainError, Refusal
from nstrain.base.units import human_bytes, human_count
from nstrain.data.line import DataLine
from nstrain.data.manifest import cycle_manifest, refuse_edited_past
from nstrain.data.rows import row_order
from nstrain.data.val import held_out_digest, load_index
from nstrain.data.verify import Verified
from nstrain.line.abandoned import refuse_abandoned
from nstrain.line.checkpoint import read_latest, read_state, verify_checkpoint
from nstrain.line.listing import ListedCheckpoint, list_checkpoints
from nstrain.line.paths import REPLACED_SUFFIX, LinePaths, checkpoint_name
from nstrain.line.run_json import load_settings, refuse_no_line
from nstrain.record.damage import FROM_A_COPY, sqlite_errors_named
from nstrain.record.journal import Journal
from nstrain.settings.run import RunSettings


@dataclasses.dataclass(frozen=True)
class Report:
    """What the looks found, in order."""

    run: str
    """The line's directory."""
    ok: bool
    """Whether all is in order."""
    goes_on_from: str | None
    """The checkpoint that the line would go on from: the newest sound one up to `latest`."""
    verified: tuple[Verified, ...]


def verify_line(run: Path, progress: Callable[[str], None] = lambda what: None) -> Report:
    """Check every checkpoint's hashes, and that the line can be resumed: settings, data line, order, journal.

    `progress` is told what is looked at. Raises `Refusal` only if `run` is not a line at all.
    """
    paths = LinePaths(run.resolve())
    refuse_no_line(run)
    looks = _Looks(paths, progress)
    looks.checkpoints()
    looks.look("latest", looks.latest)
    looks.look("leftovers", looks.leftovers)
    looks.look("settings", looks.settings_as_trained)
    looks.look("data line", looks.data_line)
    looks.look("order", looks.order)
    looks.look("journal", looks.journal)
    found = tuple(looks.found)
    return Report(str(paths.root), all(item.ok for item in found), looks.goes_on_from, found)


class _Looks:
    """The looks at one line; those at how it goes on stand on the newest sound checkpoint."""

    def __init__(self, paths: LinePaths, progress: Callable[[str], None]) -> None:
        self.paths, self.progress = paths, progress
        self.found: list[Verified] = []
        self._named: int | None = None
        """The update that `latest` names."""
        self._goes_on_from: int | None = None
        """The newest sound one up to it."""
        self._states: dict[int, dict[str, Any]] = {}
        """state.json of the sound checkpoints by their update: what is looked at may be removed meanwhile."""

    def look(self, what: str, check: Callable[[], str]) -> bool:
        self.progress(what)
        try:
            self.found.append(Verified(what, True, check()))
        except (NstrainError, OSError, LookupError, TypeError, ValueError, sqlite3.Error) as error:
            message = str(error) if isinstance(error, NstrainError) else f"{type(error).__name__}: {error}"
            self.found.append(Verified(what, False, message))
        return self.found[-1].ok

    def checkpoints(self) -> None:
        """Look at all there are, and at the one that the line has committed since, if it has."""
        listed = list_checkpoints(self.paths)
        for item in listed:
            self._checkpoint(item)
        looked_at = {item.update for item in listed if not item.set_aside}
        while (named := read_latest(self.paths)) is not None and named not in looked_at:
            looked_at.add(named)
            for item in list_checkpoints(self.paths):
                if item.update == named and not item.set_aside:
                    self._checkpoint(item)
            if named in self._states:
                break
        self._named = named
        self._goes_on_from = max((u for u in self._states if named is None or u <= named), default=None)

    @property
    def goes_on_from(self) -> str | None:
        return None if self._goes_on_from is None else checkpoint_name(self._goes_on_from)

    def _checkpoint(self, item: ListedCheckpoint) -> None:
        place = (self.paths.set_aside if item.set_aside else self.paths.checkpoints) / item.name

        def intact() -> str:
            verify_checkpoint(place)
            if not item.set_aside:
                self._states[item.update] = read_state(place)
            return _described(item)

        what = f"{place.parent.name}/{item.name}"
        if not self.look(what, intact) and not place.exists():
            self.found[-1] = Verified(what, True, "removed by the line meanwhile")

    def latest(self) -> str:
        if self._named is None:
            if self.paths.checkpoint_updates():
                run = typed("nstrain", "run", self.paths.root)
                remedy = "" if self.goes_on_from is None else f"; `{run}` goes on from {self.goes_on_from} and names it"
                raise Refusal(f"{self.paths.latest}: names no checkpoint{remedy}")
            return "no checkpoint yet: the line begins"
        name = checkpoint_name(self._named)
        if self.goes_on_from != name:
            instead = self.goes_on_from or "nothing: the line cannot go on"
            raise Refusal(f"{name} is not sound; a start would go on from {instead}")
        there = self.paths.checkpoint_updates()
        committed = max(self._named, read_latest(self.paths) or 0)
        beyond = sum(1 for update in there if update > committed)
        more = f"; {beyond} beyond it go with the next commit" if beyond else ""
        return f"{name}{more}"

    def leftovers(self) -> str:
        names = [path.name for path in self.paths.checkpoints.glob("*")] if self.paths.checkpoints.is_dir() else []
        left = sorted(name for name in names if name.endswith((PARTIAL_SUFFIX, REPLACED_SUFFIX)))
        return f"{', '.join(left)}: being written, or cleared away at the next start" if left else "none"

    def settings_as_trained(self) -> str:
        from nstrain.train.checkpointing import changed_libraries, refuse_other_line

        settings = load_settings(self.paths)
        if self.goes_on_from is None:
            return "no checkpoint to compare with"
        state = self._state()
        held_out = None
        with contextlib.suppress(NstrainError):  # told of the data line, next
            held_out = held_out_digest(self._data())
        refuse_other_line(state, settings, str(self.paths.run_json), held_out)
        changes = changed_libraries(state)
        more = f"; its libraries changed, its bits may: {', '.join(changes)}" if changes else ""
        return f"as trained up to u{state['update']}{more}"

    def data_line(self) -> str:
        data = self._data()
        load_index(data)
        return f"{data.work}: {', '.join(data.source_names)}"

    def order(self) -> str:
        if self.goes_on_from is None:
            return "nothing trained yet"
        state = self._state()
        position = state["position"]
        pinned = position if position["row"] > 0 else position["previous"]
        if pinned is None:
            return "nothing trained on this data line yet"
        return _refuse_other_order(self._data(), pinned)

    def journal(self) -> str:
        settings = load_settings(self.paths)
        if not self.paths.journal.exists():
            if self.goes_on_from is not None:
                raise Refusal(f"{self.paths.journal}: missing; put the line's own journal back")
            return "none yet"
        with Journal.open_for_reading(self.paths.journal) as journal:
            if journal.metrics_version != settings.metrics:
                raise Refusal(
                    f"{self.paths.journal}: holds readings of metrics version {journal.metrics_version}, run.json "
                    f"says {settings.metrics}"
                )
            with journal.snapshot():
                updates = [int(row["update"]) for row in journal.rows()]  # none is missing
                list(journal.replays())
                if self.goes_on_from is not None and updates and updates[-1] >= self._state()["update"]:
                    refuse_abandoned(self.paths, self._state(), journal.generation_at)
        _refuse_broken_database(self.paths.journal)
        if self.goes_on_from is not None and (not updates or updates[-1] < self._state()["update"]):
            raise Refusal(
                f"{self.paths.journal}: ends at update {updates[-1] if updates else 'none'}, before the checkpoint "
                f"{self.goes_on_from}: rows were lost, or the journal is another line's"
            )
        return f"{human_count(len(updates))} rows" + (f", up to update {updates[-1]}" if updates else "")

    def _state(self) -> dict[str, Any]:
        """state.json of the checkpoint that the line goes on from."""
        assert self._goes_on_from is not None
        return self._states[self._goes_on_from]

    def _data(self) -> DataLine:
        settings: RunSettings = load_settings(self.paths)
        return DataLine.open(Path(settings.data.work))


def _described(item: ListedCheckpoint) -> str:
    kind = dict.fromkeys((str(item.reason), "kept" if item.kept else "rolling"))  # "rolling" is a reason, too
    return f"{human_bytes(item.bytes)}, {', '.join(kind)}"


def _refuse_other_order(data: DataLine, pinned: Mapping[str, Any]) -> str:
    """Compare the order that a checkpoint was trained in with what the data line's manifest gives."""
    cycle = int(pinned["cycle"])
    manifest = cycle_manifest(data, cycle, pinned["manifest_sha256"])
    refuse_edited_past(data, manifest)
    found = row_order(manifest, int(pinned["row_tokens"])).digest()
    if found != pinned["order_digest"]:
        raise Refusal(
            f"{data.manifest_path(cycle)}: the rows of cycle {cycle} came in an order with the digest "
            f"{pinned['order_digest']}, this nstrain gives {found}; go on with the nstrain that trained them"
        )
    on_disk = "on disk" if data.is_ready(cycle) else "not on disk; the preparer makes it again if it is needed"
    return f"cycle {cycle} is the one that was trained ({on_disk})"


def _refuse_broken_database(path: Path) -> None:
    """SQLite's own check of all pages and indices."""
    uri = f"{path.resolve().as_uri()}?mode=ro"
    with sqlite_errors_named(path, writing=False), contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
        problems = [str(row[0]) for row in db.execute("PRAGMA integrity_check(20)")]
    if problems != ["ok"]:
        raise Refusal(f"{path}: damaged: {'; '.join(problems)}; {FROM_A_COPY}")
