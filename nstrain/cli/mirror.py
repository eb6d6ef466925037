"""`nstrain mirror`: a line's journal on its tracker, complete and compared."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from nstrain.base.errors import ExitCode, Interrupted, NstrainError, Refusal
from nstrain.cli.common import progress_bars, resolve, table

if TYPE_CHECKING:
    from nstrain.mirror.whole import Whole

Run = Annotated[str, typer.Argument(help="The training line's directory.", metavar="RUN")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("mirror")(mirror)


def mirror(run: Run, as_json: AsJson = False) -> None:
    """Send what the line's tracker lacks of its journal, then compare every row with the service's copy."""
    from nstrain.line.paths import LinePaths
    from nstrain.mirror.clock import MirrorClock
    from nstrain.mirror.opening import make_copier, mirror_lock, tracked_settings
    from nstrain.mirror.whole import send_and_compare

    paths = LinePaths(resolve(run))
    tracked_settings(paths)  # what has no tracker gets no lock
    lock = mirror_lock(paths)
    try:
        lock.acquire("the mirror of the line")
    except NstrainError:
        raise Refusal(
            f"{paths.root}: process {lock.holder()} copies its journal now ({lock.path}) and sends all that is there; "
            "`nstrain status` shows how far it is. To have every row compared, stop the line first"
        ) from None
    with lock, progress_bars() as bars:
        copier = make_copier(paths, lambda text: print(text, file=sys.stderr), MirrorClock())

        def show(what: str, done: int, of: int) -> None:
            bars.show(what, done / max(1, of), f"{done:,} of {of:,} updates")

        ended_by: NstrainError | None = None
        try:
            found = send_and_compare(copier, paths, show)
        except NstrainError as error:
            ended_by = None if isinstance(error, Interrupted) else error
            raise
        finally:
            copier.end(ended_by)
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "same": found.same}, indent=2))
    else:
        _print(found, paths.root.name)
    if not found.same:
        raise typer.Exit(int(ExitCode.FAILED))


def _print(found: Whole, line: str) -> None:
    rows = [
        ("in the journal", f"{found.updates:,}"),
        ("sent now", f"{found.sent:,}"),
        ("equal", f"{found.updates - found.different:,}"),
        ("different", f"{found.different:,}"),
        ("after the journal's last", f"{found.beyond:,}"),
    ]
    place = found.url or f"run {found.run_id}"
    print(table(f"{line}, generation {found.generation}: {place}", ("", "updates"), rows))
    for update, names in found.differences:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        print(f"update {update} differs in {', '.join(names[:5])}{more}")
    if found.beyond:
        print(
            "the service has updates that the journal does not have: once the line has trained them, they are compared"
        )
