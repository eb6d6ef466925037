"""run.json of a line on disk: loaded, or refused with a way to have it back.

Every checkpoint holds the whole run.json that it was written under, so that a lost one is never a reason to make the
line anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nstrain.base.commands import typed
from nstrain.base.disk import read_json
from nstrain.base.errors import NstrainError, Refusal
from nstrain.line.paths import LinePaths

if TYPE_CHECKING:
    from nstrain.settings.run import RunSettings

_TAKE_SETTINGS = 'import json, sys; print(json.dumps(json.load(open(sys.argv[1]))["settings"], indent=2))'
"""Without a single quote, so that a shell shows it as it is."""


def refuse_no_line(run: Path) -> None:
    """Raise `Refusal` if a directory is no training line, telling one that lost its run.json from one that is none."""
    paths = LinePaths(run.resolve())
    if paths.run_json.exists():
        return
    if paths.checkpoints.is_dir() or paths.journal.exists():
        raise Refusal(f"{paths.run_json}: missing, though this is a training line; {_restore(paths)}")
    raise Refusal(f"{run} is not a training line (no run.json); make one with `{typed('nstrain', 'new', run)} ...`")


def load_settings(paths: LinePaths) -> RunSettings:
    """A line's run.json. Raises `Refusal` with what mends it."""
    from nstrain.settings.model import validate  # pydantic, which `nstrain status` does without
    from nstrain.settings.run import RunSettings

    refuse_no_line(paths.root)
    value = read_run_json(paths)
    try:
        return validate(RunSettings, value, str(paths.run_json))
    except Refusal as error:
        raise Refusal(f"{error}; mend it, or {_restore(paths)}") from None


def read_run_json(paths: LinePaths) -> Any:
    """A line's run.json as JSON values, not validated. Raises `Refusal` with what mends it."""
    try:
        return read_json(paths.run_json)
    except Refusal as error:
        raise Refusal(f"{error}; mend it, or {_restore(paths)}") from None


def _restore(paths: LinePaths) -> str:
    from nstrain.line.checkpoint import newest_state  # it imports numpy, which a line that is in order does without

    try:
        found = newest_state(paths, warn=lambda message: None)
    except (NstrainError, OSError):
        found = None
    if found is None:
        return "put a copy of it back"
    update, state = found[1]["update"], typed(found[0] / "state.json")
    command = f"{typed('python3', '-c', _TAKE_SETTINGS)} {state} > {typed(paths.run_json)}"
    return f"put a copy of it back, or have it as it was at update {update} by `{command}`"
