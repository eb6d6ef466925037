"""`nstrain data ...`: make a data line, prepare it, look into it."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from nstrain.base.errors import Refusal
from nstrain.base.units import human_bytes, human_count, parse_tokens
from nstrain.cli.common import progress_bars, resolve, table

app = typer.Typer(help="Data lines: pinned text, tokenized in cycles.", no_args_is_help=True, rich_markup_mode=None)

Work = Annotated[str, typer.Option("--work", help="The data line's directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


@app.command("init")
def init(
    work: Work,
    recipe: Annotated[Path, typer.Option(help="Recipe file: the sources and their shares (docs/guide/data.md).")],
    eos_id: Annotated[int, typer.Option(help="Id of the token put after every document.")],
    cycle_tokens: Annotated[str, typer.Option(help="Tokens of a cycle, e.g. 2e10; rounded to whole segments.")],
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json (default: host.json's).")] = None,
    cycles: Annotated[int | None, typer.Option(min=1, help="Cycles (default: until the sources are used up).")] = None,
    unit_tokens: Annotated[int, typer.Option(min=1, help="The longest row the line will ever use.")] = 32768,
    segment_units: Annotated[
        int | None, typer.Option(min=1, help="Units of a share in a segment (default: about 16 segments a cycle).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Keys the order of files and rows.")] = 0,
    open_files: Annotated[int, typer.Option(min=1, help="Files of a stratum that are open together.")] = 2,
) -> None:
    """Make a data line: pin every input, check that it can be met. The directory appears whole or not at all."""
    from nstrain.data.init import init_line, load_recipe
    from nstrain.settings.host import load_host

    host = load_host()
    named = tokenizer or (Path(host.tokenizer) if host.tokenizer else None)
    if named is None:
        raise Refusal("no tokenizer: name one with --tokenizer, or set 'tokenizer' in host.json")
    with progress_bars() as bar:
        line = init_line(
            resolve(work),
            load_recipe(recipe),
            named,
            eos_id,
            parse_tokens(cycle_tokens, "--cycle-tokens"),
            cycles,
            unit_tokens,
            segment_units,
            seed,
            open_files,
            on_file=lambda source, size: bar.add(f"hashing {source}", size),
        )
    rows = [(s.settings.name, f"{s.files:,}", human_bytes(s.bytes)) for s in line.settings.sources]
    print(table(f"data line {line.work}", ("source", "files", "size"), rows))
    piece = line.settings.schedule[0]
    count = "open-ended" if piece.cycles is None else f"{piece.cycles} cycles"
    plan = line.cycle_plan(1)
    print(f"schedule: {count} of {piece.cycle_tokens:,} tokens in {plan.segments} segments; unit {unit_tokens:,}")
    print(f"next: nstrain data val --work {work}")


@app.command("val")
def val(
    work: Work,
    tokens_per_source: Annotated[
        str | None, typer.Option(help="Held-out tokens to gather of each source (default 16 units).")
    ] = None,
) -> None:
    """Gather the held-out text that validation reads; fixed for the line's life."""
    from nstrain.data.line import DataLine
    from nstrain.data.val import collect_held_out

    line = DataLine.open(resolve(work))
    tokens = None if tokens_per_source is None else parse_tokens(tokens_per_source, "--tokens-per-source")
    with progress_bars() as bar:
        index = collect_held_out(line, tokens, lambda source, share: bar.set(f"reading {source}", share))
    rows = []
    for name, entry in index["sources"].items():
        pooled = sum(len(group["strata"]) for group in entry["groups"] if group["pooled"])
        leak = entry["control_tokens_per_million"]
        rows.append(
            (
                name,
                f"{entry['documents']:,}",
                human_count(entry["tokens"]),
                str(len(entry["groups"])),
                f"{pooled} pooled" if pooled else "-",
                f"{leak['library_default']:.1f} -> {leak['plain_text']:.1f}",
            )
        )
    heads = ("source", "documents", "tokens", "groups", "small strata", "control tokens/M: library's default -> ours")
    print(table(f"held-out text of {line.work}", heads, rows))


@app.command("extend")
def extend(
    work: Work,
    cycles: Annotated[int | None, typer.Option(min=1, help="More cycles (default: until a source is used up).")] = None,
    cycle_tokens: Annotated[str | None, typer.Option(help="Tokens of a cycle (default: as in the last piece).")] = None,
    share: Annotated[
        list[str] | None, typer.Option(help="NAME=SHARE, once a source: a new recipe (default: the last piece's).")
    ] = None,
) -> None:
    """Add cycles at the end of the schedule; what it already says never changes."""
    from nstrain.data.extend import extend_line

    recipe: dict[str, int] = {}
    for pair in share or ():
        name, separator, number = pair.partition("=")
        if not separator or not number.isdecimal() or int(number) < 1 or name in recipe:
            raise Refusal(f"--share: expected NAME=SHARE with a positive whole number, each name once, found {pair!r}")
        recipe[name] = int(number)
    tokens = None if cycle_tokens is None else parse_tokens(cycle_tokens, "--cycle-tokens")
    line = extend_line(resolve(work), cycles, tokens, recipe or None)
    piece = line.settings.schedule[-1]
    count = "open-ended" if piece.cycles is None else f"{piece.cycles} more cycles"
    print(f"schedule: {count} of {piece.cycle_tokens:,} tokens; {line.cycle_count or 'any number of'} cycles in all")


@app.command("run-preparer")
def run_preparer_command(
    work: Work,
    ahead: Annotated[int, typer.Option(min=1, help="Cycles kept ready beyond the furthest consumer's.")] = 1,
    until: Annotated[
        int | None, typer.Option(min=1, help="Prepare through this cycle, whatever the consumers do, and exit.")
    ] = None,
) -> None:
    """Prepare cycles in the foreground until the schedule is done; Ctrl-C stops it, and it continues next time."""
    from nstrain.data.preparer import PreparerStatus, run_preparer

    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: told.append(n))
    last: list[str] = []
    with progress_bars() as bar:

        def show(status: PreparerStatus) -> None:
            if status.stage == "preparing":
                bar.set(f"preparing cycle {status.cycle}", status.progress)
            elif last != [status.stage]:
                bar.say(f"{status.stage.replace('_', ' ')} (cycle {status.cycle}) {status.error or ''}".rstrip())
            last[:] = [status.stage]

        code = run_preparer(resolve(work), ahead, until, lambda: bool(told), show)
    raise typer.Exit(int(code))


@app.command("show")
def show(
    work: Work,
    cycle: Annotated[int, typer.Option(min=1, help="The cycle.")],
    rows: Annotated[str, typer.Option(help="A:B, rows A up to but not including B of the cycle's order.")],
    row_tokens: Annotated[int | None, typer.Option(min=1, help="Row length (default: the line's unit).")] = None,
    text: Annotated[bool, typer.Option("--text", help="With the rows' text.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what stands in given rows: source, strata, documents, first tokens."""
    from nstrain.data.line import DataLine
    from nstrain.data.show import show_rows

    first, separator, last = rows.partition(":")
    if not (separator and first.isdecimal() and last.isdecimal()):
        raise Refusal(f"--rows: expected A:B with whole numbers, such as 0:8, found {rows!r}")
    line = DataLine.open(resolve(work))
    for row in show_rows(line, cycle, int(first), int(last), row_tokens or line.unit_tokens, text):
        if as_json:
            print(json.dumps(row, ensure_ascii=False))
            continue
        if row["tokens"] is None:
            print(f"row {row['row']}: {row['source']}, window {row['window']} (the cycle's tokens were deleted)")
            continue
        documents = ", ".join(f"{d['path']} ({d['tokens']})" for d in row["documents"])
        print(f"row {row['row']}: {row['source']}, window {row['window']}, {documents}")
        print(f"    {row['text'] if text else row['tokens']}")
    sys.stdout.flush()
