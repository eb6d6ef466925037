"""`nstrain tune`: the fastest shape of each row length that fits the device."""

from __future__ import annotations

import dataclasses
import json
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer

from nstrain.base.units import human_bytes
from nstrain.cli.common import resolve, table

if TYPE_CHECKING:
    from rich.table import Table

    from nstrain.tune.records import Shape, Trial
    from nstrain.tune.tuner import Tuned

HEADS = ("rows of", "micro", "recompute", "tokens/s", "padding", "batch ms", "end ms", "memory", "estimate")


def register(root: typer.Typer) -> None:
    """Add the command to the program."""
    root.command("tune")(tune)


def tune(
    run: Annotated[str, typer.Argument(help="The training line's directory.", metavar="RUN")],
    measure_only: Annotated[
        bool, typer.Option("--measure-only", help="Leave run.json as it is; also for a line that has trained.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure again what an earlier call measured.")] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long a shape is timed at least.")] = 5.0,
    limit: Annotated[float, typer.Option(min=1, help="Seconds after which a trial has failed.")] = 900.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Find the fastest micro_rows and recompute of every row length that fit the device, and write them into run.json.

    Works before a line's first update. Trials are kept in RUN/tune; a call that was interrupted goes on from there.
    """
    from nstrain.tune.tuner import TuneOptions
    from nstrain.tune.tuner import tune as run_tuner

    place = resolve(run)
    with _Progress() as progress:
        tuned = run_tuner(place, TuneOptions(measure_only, again, seconds, limit), progress.show)
    if as_json:
        print(json.dumps(_as_json(tuned), indent=2))
        return
    print(table(f"{place.name} on {tuned.device}", (*HEADS, ""), [_cells(trial, tuned) for trial in tuned.trials]))
    for notice in tuned.notices:
        print(f"note: {notice}")
    for row_tokens, choice in tuned.chosen.items():
        padding = f", {choice.padding:.1%} of it padding" if choice.padding else ""
        print(
            f"rows of {row_tokens:,} tokens: micro_rows {choice.micro_rows}, recompute {choice.recompute}: "
            f"{choice.tokens_per_s:,.0f} tokens a second{padding}"
        )
    print(f"{place / 'run.json'}: " + ("lengths written" if tuned.written else "left as it is (--measure-only)"))


def _as_json(tuned: Tuned) -> dict[str, object]:
    return dataclasses.asdict(tuned)


def _cells(trial: Trial, tuned: Tuned | None = None) -> tuple[str, ...]:
    """A trial's row; `tuned` marks the chosen."""
    from rich.markup import escape

    shape, measured = trial.shape, trial.measured
    word = trial.reason or ("reused" if trial.reused else "")
    if tuned is not None and (choice := tuned.chosen.get(shape.row_tokens)) is not None:
        chosen = (choice.micro_rows, choice.recompute) == (shape.micro_rows, shape.recompute)
        word = "chosen" if chosen else word
    if trial.outcome in ("failed", "pruned"):
        word = f"{trial.outcome}: {(trial.reason or '').splitlines()[0]}"
    return (
        f"{shape.row_tokens:,}",
        f"{shape.micro_rows:,}",
        shape.recompute,
        "" if trial.tokens_per_s is None else f"{trial.tokens_per_s:,.0f}",
        "" if not trial.padding else f"{trial.padding:.1%}",
        "" if measured is None else f"{measured.micro_batch_s * 1e3:,.1f}",
        "" if measured is None else f"{measured.finish_s * 1e3:,.1f}",
        "" if measured is None else human_bytes(measured.transient_bytes),
        "" if trial.estimated_bytes is None else human_bytes(trial.estimated_bytes),
        escape(word),  # an allocator's message begins with brackets
    )


class _Progress:
    """The trials as they come, on standard error: a live table on a terminal, a line for each that ended elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._trials: dict[Shape, Trial] = {}
        console = Console(stderr=True)
        self._live = Live(get_renderable=self._drawn, console=console, transient=True) if console.is_terminal else None

    def show(self, trial: Trial) -> None:
        """A trial began, went on or ended."""
        self._trials[trial.shape] = trial
        if self._live is None and trial.outcome != "running":
            rate = "" if trial.tokens_per_s is None else f"{trial.tokens_per_s:,.0f} tokens/s"
            again = " (measured earlier)" if trial.reused else ""
            reason = f"{trial.outcome}: {trial.reason}" if trial.outcome in ("failed", "pruned") else trial.reason or ""
            print(f"{trial.shape}: {rate}{again} {reason}".rstrip(), file=sys.stderr, flush=True)

    def _drawn(self) -> Table:
        from rich.table import Table

        drawn = Table(header_style="bold")
        for head in (*HEADS, ""):
            drawn.add_column(head, justify="right" if head else "left", overflow="fold")
        for trial in self._trials.values():
            drawn.add_row(*_cells(trial))
        return drawn

    def __enter__(self) -> _Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
