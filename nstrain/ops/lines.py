"""`nstrain lines`: every training line below a directory, each with where it stands."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from nstrain.base.disk import resolved
from nstrain.base.errors import NstrainError, Refusal
from nstrain.base.units import human_count, human_seconds
from nstrain.ops.status import Status, status
from nstrain.ops.status_life import silence

DEEPEST = 4
"""Directories below the one that is looked into."""


@dataclasses.dataclass(frozen=True)
class FoundLine:
    """A line, and where it stands or why that cannot be told."""

    run: Path
    shown: str
    """Its path below the directory that was looked into."""
    status: Status | None
    error: str | None

    def to_json(self) -> dict[str, Any]:
        """As `nstrain status --json` has it; of a damaged line its directory and the error."""
        return {"run": str(self.run), "error": self.error} if self.status is None else self.status.to_json()

    def row(self) -> tuple[str, ...]:
        """The line in a table."""
        now = self.status
        if now is None:
            return (self.shown, "", "damaged", "", "", "", "", "", self.error or "")
        total = "" if now.tokens_total is None else f" of {human_count(now.tokens_total)}"
        waits = ""
        if now.waiting_for is not None:
            waits = now.waiting_for + ("" if now.preparer_failure is None else f": {now.preparer_failure}")
        elif now.silent_s is not None:
            waits = silence(now.silent_s, now.budget_s)
        elif now.state == "failed":
            waits = now.reason or ""
        elif now.alarms:
            waits = now.alarms[0]
        return (
            self.shown,
            now.preset,
            now.state,
            f"{now.update:,}",
            human_count(now.tokens) + total,
            "" if now.loss is None else f"{now.loss:.4f}",
            "" if now.tokens_per_s is None else human_count(now.tokens_per_s),
            "" if now.eta_s is None else human_seconds(now.eta_s),
            waits,
        )


def lines_root(given: str | None) -> Path:
    """The directory to look into: the one given, or host.json's work_root. Raises `Refusal` if there is neither, or no
    path in what was given."""
    if given is not None:
        return resolved(given)
    from nstrain.settings.host_file import host_file, host_is_set

    if host_is_set():
        from nstrain.settings.host import load_host

        root = load_host().work_root
        if root is not None:
            return Path(root).resolve()
    raise Refusal(f"name a directory to look into, or set work_root in {host_file()}")


def find_lines(root: Path) -> list[FoundLine]:
    """The lines below a directory in the order of their paths; other lines' directories are not looked into."""
    if not root.is_dir():
        raise Refusal(f"{root}: no such directory")
    found = []
    for directory, below, files in os.walk(root):
        below.sort()
        place = Path(directory)
        inside = place.relative_to(root)
        if "run.json" in files:
            found.append(_look(place, str(inside)))
        if "run.json" in files or "line.json" in files or len(inside.parts) >= DEEPEST:
            below.clear()
        below[:] = [name for name in below if not name.startswith(".")]
    return sorted(found, key=lambda line: line.run)


def _look(run: Path, shown: str) -> FoundLine:
    try:
        return FoundLine(run, shown, status(run), None)
    except (NstrainError, OSError) as error:
        return FoundLine(run, shown, None, str(error))
