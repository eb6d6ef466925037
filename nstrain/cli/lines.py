"""`nstrain new | check | run | status | stop | journal | plot | demo`: what a person does with a training line."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nstrain.base.errors import ExitCode, Refusal
from nstrain.base.units import human_count, human_seconds, parse_tokens
from nstrain.cli.common import resolve

Run = Annotated[str, typer.Argument(help="The training line's directory.", metavar="RUN")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for command in (new, check, run, status, stop, journal, plot, demo):
        app.command(command.__name__)(command)


def new(
    run: Run,
    model: Annotated[str, typer.Option(help="Model preset: tiny-32k, ns-1p3b or ns-2b.")],
    data: Annotated[str, typer.Option(help="The data line's directory.")],
    peak_lr: Annotated[float, typer.Option(help="Learning rate after warm-up.")],
    tokens_per_update: Annotated[
        str | None,
        typer.Option(
            help='A number, or a ramp: \'[{"from":0,"to":4.7e9,"tokens":262144}, ...]\'; the last to is null.'
        ),
    ] = None,
    row_tokens: Annotated[int | None, typer.Option(help="Row length (default: up to 4096).")] = None,
    micro_rows: Annotated[int | None, typer.Option(help="Rows of one forward and backward pass.")] = None,
    recompute: Annotated[str, typer.Option(help="Activations recomputed: none, dendritic or all.")] = "none",
    warmup_tokens: Annotated[str | None, typer.Option(help="Tokens of warm-up (default: 2 % of the schedule).")] = None,
    decay_tokens: Annotated[
        str | None, typer.Option(help="Tokens of decay at the schedule's end (default: the rate stays).")
    ] = None,
    decay_shape: Annotated[str, typer.Option(help="linear, cosine or sqrt.")] = "linear",
    final_lr: Annotated[float, typer.Option(help="Learning rate at the decay's end.")] = 0.0,
    weight_decay: Annotated[float, typer.Option(help="AdamW's decoupled weight decay.")] = 0.1,
    weight_decay_batch: Annotated[
        str | None, typer.Option(help="Tokens an update at which --weight-decay holds (default: at every batch).")
    ] = None,
    clip_norm: Annotated[float, typer.Option(help="The gradient is clipped to this norm.")] = 1.0,
    validate_every: Annotated[int | None, typer.Option(help="Updates between validations.")] = None,
    validation_rows: Annotated[int | None, typer.Option(help="Held-out rows of a source.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Updates between rolling checkpoints.")] = None,
    checkpoint_minutes: Annotated[float | None, typer.Option(help="Minutes between rolling checkpoints.")] = None,
    keep_last: Annotated[int | None, typer.Option(help="Rolling checkpoints that stay.")] = None,
    print_every: Annotated[int, typer.Option(help="Updates between rows in run.log.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads (default: this machine's cores).")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Make a training line on a data line; its run.json shows every setting, and appears whole or not at all."""
    from nstrain.ops.new import new_line

    checkpoints = {"every_updates": checkpoint_every, "every_minutes": checkpoint_minutes, "keep_last": keep_last}
    validation = {"every_updates": validate_every, "rows_per_source": validation_rows}
    settings = new_line(
        resolve(run),
        model,
        resolve(data),
        peak_lr,
        _batch(tokens_per_update),
        row_tokens=row_tokens,
        micro_rows=micro_rows,
        recompute=recompute,
        warmup_tokens=_tokens(warmup_tokens, "--warmup-tokens"),
        decay_tokens=_tokens(decay_tokens, "--decay-tokens"),
        decay_shape=decay_shape,
        final_lr=final_lr,
        optimizer={
            "clip_norm": clip_norm,
            "weight_decay": weight_decay,
            "weight_decay_batch": _tokens(weight_decay_batch, "--weight-decay-batch"),
        },
        validation={name: value for name, value in validation.items() if value is not None},
        checkpoints={name: value for name, value in checkpoints.items() if value is not None},
        seed=seed,
        threads=threads,
        device=device,  # type: ignore[arg-type]  # validated with the rest
        print_every=print_every,
    )
    print(f"{resolve(run)}: {settings.model.preset} on {settings.data.work}")
    print(f"next: nstrain check {run}; nstrain run {run} --foreground")


def _tokens(text: str | None, name: str) -> int | None:
    return None if text is None or text == "0" else int(parse_tokens(text, name))


def _batch(text: str | None) -> int | list[dict[str, int | None]] | None:
    """--tokens-per-update: a number, or a JSON list of pieces whose numbers may be written like 4.7e9."""
    name = "--tokens-per-update"
    if text is None or not text.lstrip().startswith("["):
        return _tokens(text, name)
    try:
        pieces: list[Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise Refusal(f"{name}: expected a number or a JSON list of pieces, found {text!r} ({error})") from None
    ramp: list[dict[str, int | None]] = []
    for piece in pieces:
        if not isinstance(piece, dict) or set(piece) != {"from", "to", "tokens"}:
            raise Refusal(f'{name}: a piece is {{"from": ..., "to": ..., "tokens": ...}}, found {piece!r}')
        ramp.append(
            {key: value if value in (0, None) else int(parse_tokens(value, name)) for key, value in piece.items()}
        )
    return ramp


def check(
    run: Run,
    deep: Annotated[bool, typer.Option("--deep", help="Hash every file of the sources, not only its size.")] = False,
    as_json: AsJson = False,
) -> None:
    """Every start check, without a GPU; all failures at once."""
    import dataclasses

    from nstrain.cli.common import progress_bars
    from nstrain.ops.check import check_line

    with progress_bars() as bar:
        findings = check_line(resolve(run), deep=deep, on_file=lambda source, size: bar.add(f"checking {source}", size))
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            mark = {True: "ok", False: "FAILED", None: "-"}[finding.ok]
            print(f"{mark:>6}  {finding.name}: {finding.message}")
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(int(ExitCode.BAD_CONFIGURATION))


def run(
    run: Run,
    foreground: Annotated[bool, typer.Option("--foreground", help="Keep the supervisor in this terminal.")] = False,
) -> None:
    """Train the line: trainer and preparer under one supervisor. Ctrl-C or `nstrain stop` saves and stops it."""
    from nstrain.supervise.supervisor import run_foreground

    if not foreground:
        raise Refusal("only `nstrain run RUN --foreground` exists in this version; the background form comes later")
    raise typer.Exit(int(run_foreground(resolve(run))))


def status(run: Run, as_json: AsJson = False) -> None:
    """Where the line stands: progress, loss, rate, data, checkpoints, and what it waits for."""
    from nstrain.ops.status import status as read_status

    found = read_status(resolve(run))
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    from rich.console import Console

    from nstrain.ops.status_page import render

    Console().print(render(found))


def stop(
    run: Run,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for the line's end.")] = 300.0,
) -> None:
    """Save a checkpoint at the next update and stop; `nstrain run` goes on from there."""
    from nstrain.ops.stop import stop_line

    began = time.monotonic()
    stopped = stop_line(
        resolve(run),
        wait,
        lambda now: print(f"waiting: update {now.update}, {human_seconds(time.monotonic() - began)}", file=sys.stderr),
    )
    if not stopped.ended:
        print(f"asked; the line still runs after {human_seconds(wait)}: it stops after its present update")
        raise typer.Exit(int(ExitCode.FAILED))
    now = stopped.status
    print(f"{now.state} at update {now.update}, {human_count(now.tokens)} tokens, checkpoint {now.checkpoint}")


def journal(
    run: Run,
    form: Annotated[Literal["jsonl", "csv"], typer.Option("--format", help="jsonl or csv.")] = "jsonl",
    output: Annotated[Path | None, typer.Option(help="Write here instead of to standard output.")] = None,
) -> None:
    """The line's record: one flat object an update, readings under their names (docs/reference/journal.md)."""
    from nstrain.line.paths import LinePaths
    from nstrain.record.export import export
    from nstrain.record.journal import Journal

    with Journal.open_for_reading(LinePaths(resolve(run)).journal) as opened:
        if output is None:
            export(opened, form, sys.stdout)
            return
        with output.open("w", newline="") as file:
            rows = export(opened, form, file)
    print(f"{output}: {rows} updates")


def plot(
    run: Run,
    output: Annotated[Path | None, typer.Option(help="The PNG to write (default: RUN/curves.png).")] = None,
) -> None:
    """Draw the line's curves as a PNG: loss, validation, learning rate, gradient norm."""
    from nstrain.line.paths import LinePaths
    from nstrain.record.journal import Journal
    from nstrain.record.plot import plot_line

    place = resolve(run)
    with Journal.open_for_reading(LinePaths(place).journal) as opened:
        print(plot_line(opened, output or place / "curves.png", place.name))


def demo(
    directory: Annotated[Path, typer.Argument(help="Where the demo is made.", metavar="DIR")] = Path(".demo"),
) -> None:
    """From this machine's own text to a trained line; run again, it goes on or shows the result."""
    from nstrain.demo import run_demo

    raise typer.Exit(int(run_demo(directory.resolve(), lambda text: print(text, flush=True))))
