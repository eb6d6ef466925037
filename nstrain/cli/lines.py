"""`nstrain new | check | run | status | lines | stop | journal | plot | demo`: what a person does with a line."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nstrain.base.commands import typed
from nstrain.base.errors import ExitCode, Refusal
from nstrain.base.units import human_count, human_seconds, parse_tokens
from nstrain.cli.common import parse_token_option, resolve

Run = Annotated[str, typer.Argument(help="The training line's directory.", metavar="RUN")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for command in (new, check, run, status, lines, stop, journal, plot, demo):
        app.command(command.__name__)(command)


def new(
    run: Run,
    model: Annotated[str, typer.Option(help="Model preset: tiny-32k, ns-1p3b or ns-2b.")],
    data: Annotated[str, typer.Option(help="The data line's directory.")],
    peak_lr: Annotated[float, typer.Option(help="Learning rate after warm-up.")],
    tokens_per_update: Annotated[
        str | None,
        typer.Option(
            help='A number, or a ramp: \'[{"from":0,"to":4.7e9,"tokens":262144}, ...]\'; the last to is null '
            "(default: a thousandth of the schedule at most, of 8 rows to 1,048,576 tokens)."
        ),
    ] = None,
    row_tokens: Annotated[int | None, typer.Option(help="Row length (default: up to 4096).")] = None,
    micro_rows: Annotated[
        int | None, typer.Option(help="Rows of one forward and backward pass (default: up to 4096 tokens).")
    ] = None,
    recompute: Annotated[str, typer.Option(help="Activations recomputed: none, dendritic or all.")] = "none",
    warmup_tokens: Annotated[
        str | None,
        typer.Option(help="Tokens of warm-up, 0 for none (default: 2 % of the schedule, 2000 updates at most)."),
    ] = None,
    decay_tokens: Annotated[
        str | None, typer.Option(help="Tokens of decay at the schedule's end (default: the rate stays).")
    ] = None,
    decay_shape: Annotated[str | None, typer.Option(help="linear (default), cosine or sqrt.")] = None,
    final_lr: Annotated[float | None, typer.Option(help="Learning rate at the decay's end (default: 0).")] = None,
    ema_horizon_tokens: Annotated[
        str | None, typer.Option(help="Average the weights over so many tokens, beginning as far in (default: do not).")
    ] = None,
    ema_from_tokens: Annotated[
        str | None, typer.Option(help="Begin the average here (default: --ema-horizon-tokens).")
    ] = None,
    weight_decay: Annotated[float, typer.Option(help="AdamW's decoupled weight decay.")] = 0.1,
    weight_decay_batch: Annotated[
        str | None, typer.Option(help="Tokens an update at which --weight-decay holds (default: at every batch).")
    ] = None,
    clip_norm: Annotated[float, typer.Option(help="The gradient is clipped to this norm.")] = 1.0,
    validate_every: Annotated[
        int | None, typer.Option(help="Updates between validations (default: 25 in the schedule, 1000 at most).")
    ] = None,
    validation_rows: Annotated[int | None, typer.Option(help="Held-out rows of a source (default: 16).")] = None,
    long_rows: Annotated[
        int | None,
        typer.Option(
            help="Held-out rows of a source at the longest context of model and data (default: 4, on a CPU 1)."
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Updates between rolling checkpoints (default: by time alone).")
    ] = None,
    checkpoint_minutes: Annotated[
        float | None, typer.Option(help="Minutes between rolling checkpoints (default: 30).")
    ] = None,
    keep_last: Annotated[int | None, typer.Option(help="Rolling checkpoints that stay (default: 2).")] = None,
    print_every: Annotated[int, typer.Option(help="Updates between rows in run.log.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads (default: this machine's cores).")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda where there is one).")] = None,
    wandb_project: Annotated[
        str | None, typer.Option(help="Copy the journal to this project on Weights & Biases (default: nowhere).")
    ] = None,
    wandb_entity: Annotated[
        str | None, typer.Option(help="The user or team whose project it is (default: the key's own).")
    ] = None,
) -> None:
    """Make a training line on a data line; its run.json shows every setting, and appears whole or not at all."""
    from nstrain.data.line import DataLine
    from nstrain.data.plan import shortages
    from nstrain.ops.new import new_line
    from nstrain.ops.schedule_notes import schedule_notes

    settings = new_line(
        resolve(run),
        model,
        resolve(data),
        peak_lr,
        _batch(tokens_per_update),
        row_tokens=row_tokens,
        micro_rows=micro_rows,
        recompute=recompute,
        warmup_tokens=parse_token_option(warmup_tokens, "--warmup-tokens", may_be_zero=True),
        decay_tokens=parse_token_option(decay_tokens, "--decay-tokens"),
        decay_shape=decay_shape,
        final_lr=final_lr,
        ema_horizon_tokens=parse_token_option(ema_horizon_tokens, "--ema-horizon-tokens"),
        ema_from_tokens=parse_token_option(ema_from_tokens, "--ema-from-tokens", may_be_zero=True),
        optimizer={
            "clip_norm": clip_norm,
            "weight_decay": weight_decay,
            "weight_decay_batch": parse_token_option(weight_decay_batch, "--weight-decay-batch"),
        },
        validation=_given(
            every_updates=validate_every, rows_per_source=validation_rows, long_rows_per_source=long_rows
        ),
        checkpoints=_given(every_updates=checkpoint_every, every_minutes=checkpoint_minutes, keep_last=keep_last),
        seed=seed,
        threads=threads,
        device=device,  # type: ignore[arg-type]  # validated with the rest
        print_every=print_every,
        tracker=_tracker(wandb_project, wandb_entity),
    )
    print(f"{resolve(run)}: {settings.model.preset} on {settings.data.work}")
    data_line = DataLine.open(Path(settings.data.work))
    for note in (*schedule_notes(settings, data_line.schedule), *shortages(data_line)):
        print(f"note: {note}")
    print(f"next: {typed('nstrain', 'check', run)}; {typed('nstrain', 'run', run, '--foreground')}")


def _given(**options: float | None) -> dict[str, float]:
    """Fields of run.json by their names, without those that were left out."""
    return {name: value for name, value in options.items() if value is not None}


def _tracker(project: str | None, entity: str | None) -> dict[str, str | None] | None:
    """run.json's tracker, if one is asked for."""
    if project is None:
        if entity is not None:
            raise Refusal(f"--wandb-entity {entity}: goes with --wandb-project; name the project too")
        return None
    return {"service": "wandb", "project": project, "entity": entity}


def _batch(text: str | None) -> int | list[dict[str, int | None]] | None:
    """--tokens-per-update: a number, or a JSON list of pieces whose numbers may be written like 4.7e9."""
    name = "--tokens-per-update"
    if text is None or not text.lstrip().startswith("["):
        return parse_token_option(text, name)
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
    """Train the line in the background, trainer and preparer under one supervisor; `nstrain stop` stops it."""
    place = resolve(run)
    if foreground:
        from nstrain.supervise.refused_start import refused_start_told
        from nstrain.supervise.supervisor import run_foreground

        with refused_start_told(place):
            code = run_foreground(place)
        raise typer.Exit(int(code))
    from nstrain.cli.background import begin
    from nstrain.line.paths import LinePaths
    from nstrain.line.run_json import refuse_no_line

    paths = LinePaths(place)
    refuse_no_line(place)
    service = [sys.executable, "-m", "nstrain", "run", str(place), "--foreground"]
    command = [sys.executable, "-m", "nstrain.supervise", str(place)]
    pid = begin(f"nstrain-{place.name}", service, command, paths.supervisor_out)
    print(f"{place}: runs in the background as process {pid}")
    print(f"look: {typed('nstrain', 'status', run)}; end: {typed('nstrain', 'stop', run)}")


def status(
    run: Run,
    watch: Annotated[bool, typer.Option("--watch", help="Keep the page up to date until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Where the line stands: progress, loss and its trend, rate, data, disk, alarms, and what it waits for."""
    from nstrain.ops.status import status as read_status

    place = resolve(run)
    found = read_status(place)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    from rich.console import Console

    from nstrain.cli.common import console
    from nstrain.ops.status_page import render, watch_page

    if watch:
        watch_page(place, Console())
    else:
        console().print(render(found))


def lines(
    root: Annotated[
        str | None, typer.Argument(help="Look below this directory (default: host.json's work_root).", metavar="DIR")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Every training line below a directory: its state, progress and speed, and what it waits for."""
    from nstrain.cli.common import table
    from nstrain.ops.lines import find_lines, lines_root

    found = find_lines(lines_root(root))
    if as_json:
        print(json.dumps([line.to_json() for line in found], indent=2))
        return
    heads = ("line", "model", "state", "update", "tokens", "loss", "tokens/s", "left", "what it waits for")
    print(
        table(
            f"{len(found)} line{'' if len(found) == 1 else 's'} below {lines_root(root)}",
            heads,
            [line.row() for line in found],
        )
    )


def stop(
    run: Run,
    at_cycle_end: Annotated[
        int | None, typer.Option(min=1, help="Stop exactly at the end of this data cycle, not at the next update.")
    ] = None,
    wait: Annotated[
        float | None, typer.Option(min=0, help="Seconds to wait for the line's end (default: 300; for a cycle's, 0).")
    ] = None,
) -> None:
    """Save a checkpoint at the next update and stop; `nstrain run` goes on from there."""
    from nstrain.ops.status_life import how_to_go_on
    from nstrain.ops.stop import stop_line

    began = time.monotonic()
    wait_s = (300.0 if at_cycle_end is None else 0.0) if wait is None else wait
    stopped = stop_line(
        resolve(run),
        wait_s,
        lambda now: print(f"waiting: update {now.update}, {human_seconds(time.monotonic() - began)}", file=sys.stderr),
        at_cycle_end,
    )
    now = stopped.status
    if stopped.ended:
        print(f"{now.state} at update {now.update}, {human_count(now.tokens)} tokens, checkpoint {now.checkpoint}")
    elif at_cycle_end is None:
        when = how_to_go_on(now.stopped_pids) if now.stopped_pids else "it stops after its present update"
        print(f"asked; the line still runs after {human_seconds(wait_s)}: {when}")
        raise typer.Exit(int(ExitCode.FAILED))
    else:
        done = "" if now.cycle_progress is None else f", {100 * now.cycle_progress:.0f} % trained"
        print(f"asked: it stops at the end of cycle {at_cycle_end}; it is in cycle {now.cycle or 1}{done}")


def journal(
    run: Run,
    form: Annotated[Literal["jsonl", "csv"], typer.Option("--format", help="jsonl or csv.")] = "jsonl",
    output: Annotated[Path | None, typer.Option(help="Write here instead of to standard output.")] = None,
) -> None:
    """The line's record: one flat object an update, readings under their names (docs/reference/journal.md)."""
    from nstrain.line.paths import LinePaths
    from nstrain.record.export import export
    from nstrain.record.journal import Journal

    place = resolve(run)
    with Journal.open_for_reading(LinePaths(place).journal) as opened:
        _refuse_own_file(place, output)
        if output is None:
            export(opened, form, sys.stdout)
            return
        with output.open("w", newline="", encoding="utf-8") as file:
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
        _refuse_own_file(place, output)
        print(plot_line(opened, output or place / "curves.png", place.name))


def _refuse_own_file(run: Path, output: Path | None) -> None:
    """Raise `Refusal` for an output that would replace a file of the line itself: its journal, say."""
    if output is None or not output.exists() or output.suffix in (".csv", ".jsonl", ".png"):
        return
    if output.resolve().is_relative_to(run):
        raise Refusal(f"--output {output}: is a file of the line itself; name another")


def demo(
    directory: Annotated[Path, typer.Argument(help="Where the demo is made.", metavar="DIR")] = Path(".demo"),
) -> None:
    """From this machine's own text to a trained line; run again, it goes on or shows the result."""
    from nstrain.demo import run_demo

    raise typer.Exit(int(run_demo(directory.resolve(), lambda text: print(text, flush=True))))
