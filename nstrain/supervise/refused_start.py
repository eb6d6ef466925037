"""A start that is refused where nobody looks: by a service after a restart of the machine, say.

A refusal is for whoever typed the command and is printed. A unit's `nstrain run --foreground` has no terminal: a disk
that is not mounted yet, a GPU that cannot be read or a full disk would keep a line from running without a word, since
nothing starts it again. So it is given as a notice as well.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from nstrain.base.disk import FileLock
from nstrain.base.errors import Interrupted, NstrainError
from nstrain.line.notices import LIMIT_S, Notifier, notice
from nstrain.line.paths import LinePaths
from nstrain.line.run_json import read_run_json
from nstrain.settings.host import load_host


@contextlib.contextmanager
def refused_start_told(run: Path, limit_s: float = LIMIT_S) -> Iterator[None]:
    """Give what a start in this process is refused for as a notice `failed`, unless standard error is a terminal.

    That another supervisor runs the line already is nothing to tell. Waits for the program, at most `limit_s`.
    """
    try:
        yield
    except (NstrainError, OSError) as error:
        watched = sys.stderr.isatty() or isinstance(error, Interrupted)
        if not watched and not FileLock(LinePaths(run).supervisor_lock).held_elsewhere():
            with contextlib.suppress(NstrainError):  # a host.json that cannot be read names nobody
                notifier = Notifier(
                    load_host().notify, lambda text: print(f"nstrain: {text}", file=sys.stderr), limit_s
                )
                notifier.send(notice("failed", _line_id(LinePaths(run)), run.resolve(), f"it was not started: {error}"))
                notifier.finish(limit_s)
        raise


def _line_id(paths: LinePaths) -> str:
    """The line's id; empty where run.json cannot be read."""
    try:
        return str(read_run_json(paths)["id"])
    except (NstrainError, LookupError, TypeError):
        return ""
