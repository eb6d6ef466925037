"""`nstrain checkpoints | verify`: what a line has saved, what may go, and whether every byte of it is intact."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from nstrain.base.errors import ExitCode, Refusal
from nstrain.base.units import human_bytes, human_count
from nstrain.cli.common import progress_bars, resolve, table

if TYPE_CHECKING:
    from nstrain.line.listing import DiskForecast, ListedCheckpoint

Run = Annotated[str, typer.Argument(help="The training line's directory.", metavar="RUN")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for command in (checkpoints, verify):
        app.command(command.__name__)(command)


def checkpoints(
    run: Run,
    remove: Annotated[
        list[int] | None, typer.Option(min=0, help="Remove the checkpoint after this update; may be given again.")
    ] = None,
    thin: Annotated[
        int | None, typer.Option(min=1, help="Of the kept ends of data cycles leave every n-th, remove the others.")
    ] = None,
    forks: Annotated[bool, typer.Option("--forks", help="Remove also those that branches began with.")] = False,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Remove what rollbacks have set aside, before the line is as far again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """The line's checkpoints with their sizes, and what they will take; with an option that removes, fewer of them."""
    from nstrain.ops.checkpoints import checkpoints_of, forecast, remove_aside
    from nstrain.ops.checkpoints import remove as remove_some
    from nstrain.ops.checkpoints import thin as thin_all

    place = resolve(run)
    if bool(remove) + (thin is not None) + set_aside > 1:
        raise Refusal("--remove, --thin and --set-aside: give one of them")
    if forks and not remove and thin is None:
        raise Refusal("--forks says what else --remove or --thin takes: give one of them with it")
    removed = None
    if remove:
        removed = remove_some(place, remove, forks)
    elif thin is not None:
        removed = thin_all(place, thin, forks)
    elif set_aside:
        removed = remove_aside(place)
    listed, outlook = checkpoints_of(place), forecast(place)
    if as_json:
        value = {"checkpoints": [dataclasses.asdict(item) for item in listed], "forecast": dataclasses.asdict(outlook)}
        if removed is not None:
            value["removed"] = [dataclasses.asdict(item) for item in removed.checkpoints]
        print(json.dumps(value, indent=2))
        return
    if removed is not None:
        names = ", ".join(item.name for item in removed.checkpoints) or "nothing"
        print(f"removed: {names}; {human_bytes(removed.bytes)} freed")
    print(table(f"checkpoints of {place.name}", HEADS, [_row(item) for item in listed]))
    print(_outlook(outlook))


HEADS = ("", "tokens", "why", "stays", "size", "written")


def _row(item: ListedCheckpoint) -> tuple[str, ...]:
    name = f"set-aside/{item.name}" if item.set_aside else item.name
    stays = "until the line is as far again" if item.set_aside else {True: "yes", False: "rolling"}.get(item.kept, "?")  # type: ignore[arg-type]
    return (
        name,
        "?" if item.tokens is None else human_count(item.tokens),
        (item.reason or "unreadable") + (f" {item.after_cycle}" if item.reason == "cycle_end" else ""),
        "latest" if item.latest and not item.kept else stays + (", latest" if item.latest else ""),
        human_bytes(item.bytes),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(item.written_at)),
    )


def _outlook(outlook: DiskForecast) -> str:
    free = f"{human_bytes(outlook.free_bytes)} free"
    if not outlook.checkpoint_bytes:
        return f"none yet; {free}"
    if outlook.end_bytes is None:
        more = f"an open-ended schedule: {human_bytes(outlook.next_bytes)} more up to the next cycle's end"
    else:
        more = (
            f"{human_bytes(outlook.end_bytes)} more at most up to the schedule's end ({outlook.kept_to_come} to keep)"
        )
    fit = f"room for the ends of {outlook.cycles_that_fit} more cycles"
    warning = "" if outlook.fits_end and outlook.fits_next else "\nnot enough: thin the kept ones in time, or add room"
    return f"{more}; {free}: {fit}{warning}"


def verify(run: Run, as_json: AsJson = False) -> None:
    """Check every hash of every checkpoint, and that the line can go on; all failures at once."""
    from nstrain.ops.verify import verify_line

    with progress_bars() as bar:
        report = verify_line(resolve(run), lambda what: bar.set(f"verifying {what}", 0.0))
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        for item in report.verified:
            print(f"{'ok' if item.ok else 'FAILED':>6}  {item.what}: {item.message}")
    if not report.ok:
        raise typer.Exit(int(ExitCode.FAILED))
