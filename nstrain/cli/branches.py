"""`nstrain branch | rollback`: a line that goes on from another's past, or from its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from nstrain.base.commands import typed
from nstrain.base.units import human_count
from nstrain.cli.common import parse_recipe, parse_token_option, progress_bars, resolve, table

if TYPE_CHECKING:
    from nstrain.data.line import DataLine
    from nstrain.ops.branch import Branched
    from nstrain.ops.branch_plan import Stage

Run = Annotated[str, typer.Argument(help="The training line's directory.", metavar="RUN")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for command in (branch, rollback):
        app.command(command.__name__)(command)


def branch(
    run: Run,
    parent: Annotated[str, typer.Option("--from", help="The line to branch from.")],
    at_cycle: Annotated[int, typer.Option(min=1, help="Branch at the end of this data cycle of it.")],
    plan: Annotated[str, typer.Option(help="The stages: decay:10e9,long:2e9, or one of them.")],
    data: Annotated[str, typer.Option(help="The branch's data line: made here, or one made by `data branch`.")],
    share: Annotated[
        list[str] | None,
        typer.Option(help="NAME=SHARE, once a source, none of others: the mixture (default: the trunk's)."),
    ] = None,
    final_lr: Annotated[
        float | None, typer.Option(help="Learning rate at the decay's end (default: a tenth of the trunk's).")
    ] = None,
    decay_shape: Annotated[str | None, typer.Option(help="linear (default), cosine or sqrt.")] = None,
    long_lr: Annotated[
        float | None, typer.Option(help="Learning rate of the long stage (default: where the decay ended).")
    ] = None,
    long_row_tokens: Annotated[
        int | None, typer.Option(min=1, help="Rows of the long stage (default: the longest that model and data allow).")
    ] = None,
    tokens_per_update: Annotated[
        str | None, typer.Option(help="Tokens of an update from the fork on (default: the trunk's).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a line that goes on from a trunk's cycle end by itself: its rate decays, or its rows get long."""
    import dataclasses

    from nstrain.ops.branch import make_branch
    from nstrain.ops.branch_plan import StageOptions, parse_plan

    options = StageOptions(
        long_row_tokens=long_row_tokens,
        decay_shape=decay_shape,
        final_lr=final_lr,
        long_lr=long_lr,
        tokens_per_update=parse_token_option(tokens_per_update, "--tokens-per-update"),
    )
    with progress_bars() as bar:
        made = make_branch(
            resolve(run),
            resolve(parent),
            at_cycle,
            parse_plan(plan),
            plan,
            resolve(data),
            recipe=parse_recipe(share),
            options=options,
            on_held_out=lambda source, done: bar.set(f"reading {source}", done),
        )
    if as_json:
        value = {
            "id": made.settings.id,
            "update": made.update,
            "stages": [dataclasses.asdict(stage) for stage in made.stages],
            "changed_since": made.changed_since,
            "notes": made.notes,
        }
        print(json.dumps(value, indent=2))
        return
    _show_branch(run, parent, made)


def _cycles(data: DataLine, stage: Stage) -> str:
    """A stage's cycles by their sizes: `3 of 9,216, 1 of 6,144`."""
    sizes: dict[int, int] = {}
    first = 1
    for piece in data.settings.schedule:
        end = first + (piece.cycles or 0)
        here = min(end, stage.first_cycle + stage.cycles) - max(first, stage.first_cycle)
        if here > 0:
            sizes[piece.cycle_tokens] = sizes.get(piece.cycle_tokens, 0) + here
        first = end
    return ", ".join(f"{count:,} of {tokens:,}" for tokens, count in sizes.items())


def _show_branch(run: str, parent: str, made: Branched) -> None:
    """The branch's stages, what a person should know of it, and what comes next."""
    rows = [
        (
            stage.kind,
            f"{stage.asked_tokens:,}",
            f"{stage.tokens:,}",
            _cycles(made.data, stage),
            f"{stage.row_tokens:,}",
            f"{stage.rate_start:.3g}" + ("" if stage.rate_end == stage.rate_start else f" to {stage.rate_end:.3g}"),
        )
        for stage in made.stages
    ]
    heads = ("stage", "asked", "tokens", "cycles", "rows of", "rate")
    first = made.stages[0].first_token
    print(table(f"{run}: {parent} up to update {made.update:,} ({human_count(first)} tokens), then", heads, rows))
    print(f"data line {made.data.work}" + ("" if made.made_data else " (was there)"))
    for text in dict.fromkeys(piece.describe_mixture(made.data.source_names) for piece in made.data.settings.schedule):
        print(text)
    for difference in made.changed_since:
        print(f"{parent} was changed since; the branch keeps what it was trained with at the fork: {difference}")
    for note in made.notes:
        print(f"note: {note}")
    tune, check = typed("nstrain", "tune", run), typed("nstrain", "check", run)
    print(f"next: {tune} (rows of a new length go through one at a time until it has); {check}")
    print(f"then: {typed('nstrain', 'run', run)}")


def rollback(
    run: Run,
    to: Annotated[int, typer.Option(min=0, help="The update of the checkpoint to go on from.")],
) -> None:
    """Let a line go on from an earlier checkpoint; later ones are set aside, its record opens a new generation."""
    from nstrain.ops.rollback import roll_back

    done = roll_back(resolve(run), to)
    print(f"{run} stands at update {done.update:,}, {human_count(done.tokens)} tokens")
    print(f"generation {done.generation} begins with its next update")
    if done.set_aside:
        print(f"set aside until the line has come as far again: {', '.join(done.set_aside)}")
    if done.to_prepare:
        cycles, one = ", ".join(map(str, done.to_prepare)), len(done.to_prepare) == 1
        deleted = f"data cycle {cycles} was" if one else f"data cycles {cycles} were"
        again = "it again from its manifest" if one else "them again from their manifests"
        print(f"{deleted} deleted; the preparer makes {again}")
    print(f"next: {typed('nstrain', 'run', run)}")
