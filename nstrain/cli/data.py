"""`nstrain data ...`: make a data line, prepare it, look into it."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nstrain.base.commands import typed
from nstrain.base.errors import ExitCode, NeedsOperator, NstrainError, Refusal
from nstrain.base.units import human_bytes, human_count, human_seconds, parse_tokens
from nstrain.cli.common import Bars, parse_recipe, progress_bars, resolve, table
from nstrain.data.recipes import DEFAULT as DEFAULT_RECIPE

if TYPE_CHECKING:
    from nstrain.data.hub.downloads import DownloadProgress
    from nstrain.data.plan import LinePlan

app = typer.Typer(help="Data lines: pinned text, tokenized in cycles.", no_args_is_help=True, rich_markup_mode=None)

Work = Annotated[str, typer.Option("--work", help="The data line's directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


@app.command("init")
def init(
    work: Work,
    eos_id: Annotated[int, typer.Option(help="Id of the token put after every document.")],
    cycle_tokens: Annotated[str, typer.Option(help="Tokens of a cycle, e.g. 2e10; rounded to whole segments.")],
    recipe: Annotated[
        str, typer.Option(help="Recipe: a file (docs/guide/data.md), or the name of one that comes with nstrain.")
    ] = DEFAULT_RECIPE,
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
    from nstrain.data.init import find_recipe, init_line
    from nstrain.settings.host import load_host

    host = load_host()
    named = tokenizer or (Path(host.tokenizer) if host.tokenizer else None)
    if named is None:
        raise Refusal("no tokenizer: name one with --tokenizer, or set 'tokenizer' in host.json")
    with progress_bars() as bar:
        line = init_line(
            resolve(work),
            find_recipe(recipe),
            named,
            eos_id,
            parse_tokens(cycle_tokens, "--cycle-tokens"),
            cycles,
            unit_tokens,
            segment_units,
            seed,
            open_files,
            Path(host.calibration_from) if host.calibration_from else None,
            on_file=lambda source, size: bar.add(f"pinning {source}", size),
            on_sample=lambda source, share: bar.set(f"sampling {source}", share),
            on_download=_shows_downloads(bar),
            on_notice=bar.say,
        )
    rows = [(s.settings.name, f"{s.files:,}", human_bytes(s.bytes)) for s in line.settings.sources]
    print(table(f"data line {line.work}", ("source", "files", "size"), rows))
    piece = line.settings.schedule[0]
    count = "open-ended" if piece.cycles is None else f"{piece.cycles} cycles"
    plan = line.cycle_plan(1)
    print(f"schedule: {count} of {piece.cycle_tokens:,} tokens in {plan.segments} segments; unit {unit_tokens:,}")
    print(f"next: {typed('nstrain', 'data', 'val', '--work', work)}")


def _shows_downloads(bar: Bars) -> Callable[[DownloadProgress], None]:
    """Shows downloads on a bar, and says once what is being waited for."""
    said: list[str] = []

    def show(progress: DownloadProgress) -> None:
        bar.show(f"fetching {progress.source}", progress.bytes_done / max(1, progress.bytes), progress.describe())
        if progress.trouble is not None and said != [progress.trouble]:
            said[:] = [progress.trouble]
            bar.say(progress.trouble)

    return show


@app.command("val")
def val(
    work: Work,
    tokens_per_source: Annotated[
        str | None, typer.Option(help="Held-out tokens to gather of each source (default 16 units).")
    ] = None,
) -> None:
    """Gather the held-out text that validation reads; fixed for the line's life."""
    from nstrain.data.line import DataLine
    from nstrain.data.preparer import preparer_lock
    from nstrain.data.val import collect_held_out

    line = DataLine.open(resolve(work))
    tokens = None if tokens_per_source is None else parse_tokens(tokens_per_source, "--tokens-per-source")
    with contextlib.ExitStack() as held, progress_bars() as bar:
        if any(line.source(name).kind == "hub" for name in line.source_names):  # a preparer deletes what is fetched
            held.enter_context(preparer_lock(line.work).acquire(f"the preparer of {line.work}"))
        index = collect_held_out(
            line, tokens, lambda source, share: bar.set(f"reading {source}", share), _shows_downloads(bar)
        )
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
    cycles: Annotated[
        int | None, typer.Option(min=0, help="More cycles (default: until a source is used up); with --after also 0.")
    ] = None,
    cycle_tokens: Annotated[str | None, typer.Option(help="Tokens of a cycle (default: as in the last piece).")] = None,
    share: Annotated[
        list[str] | None,
        typer.Option(help="NAME=SHARE, once a source, none of others: a new mixture (default: the last piece's)."),
    ] = None,
    after: Annotated[
        int | None,
        typer.Option(min=0, help="Put them after this cycle, in the place of later ones, none of which is prepared."),
    ] = None,
) -> None:
    """Add cycles at the end of the schedule, or replace what is not prepared of it; what is never changes."""
    from nstrain.data.extend import extend_line
    from nstrain.ops.data_at_rest import data_at_rest

    place, tokens = resolve(work), None if cycle_tokens is None else parse_tokens(cycle_tokens, "--cycle-tokens")
    with contextlib.nullcontext() if after is None else data_at_rest(place, "given another schedule"):
        line = extend_line(place, cycles, tokens, parse_recipe(share), after)
    piece = line.settings.schedule[-1]
    if cycles == 0:
        print(f"schedule: ends after cycle {after}")
        return
    count = "open-ended," if piece.cycles is None else f"{piece.cycles} more"
    total = "" if line.cycle_count is None else f"; {line.cycle_count} cycles in all"
    begins = "" if after is None else f", from cycle {after + 1} on"
    print(f"schedule: {count} cycles of {piece.cycle_tokens:,} tokens{begins}{total}")
    print(piece.describe_mixture(line.source_names))


@app.command("exclude")
def exclude(
    work: Work,
    source: Annotated[str, typer.Option(help="The file's source.")],
    path: Annotated[str, typer.Argument(help="The file, as the source's list of pinned files has it.")],
) -> None:
    """Leave a file that cannot be used out of the cycles that are not prepared yet; those that are stay as they are."""
    from nstrain.data.consumers import read_consumers
    from nstrain.data.exclude import exclude_file
    from nstrain.data.line import DataLine
    from nstrain.data.preparer import preparer_lock

    place = resolve(work)
    DataLine.open(place)  # what is none gets no lock
    try:
        lock = preparer_lock(place).acquire(f"the preparer of {place}")
    except NstrainError as error:
        raise Refusal(str(error)) from None
    with lock:
        line = DataLine.open(place)
        done = exclude_file(line, source, path)
    since = "was left out before" if done.before else "is left out"
    print(f"{place}: source {source}: {path} ({human_bytes(done.size)}) {since}, from cycle {done.file.from_cycle} on")
    for stratum in done.ended_strata:
        print(f"it was the last file of stratum {stratum!r} to be opened: that ends with what of it is open")
    lines = [typed("nstrain", "run", consumer.run) for consumer in read_consumers(place)]
    print(f"next: {' or '.join(lines or [typed('nstrain', 'data', 'run-preparer', '--work', place)])}")


@app.command("branch")
def branch(
    work: Work,
    trunk: Annotated[str, typer.Option("--from", help="The data line to fork from.")],
    at_cycle: Annotated[int, typer.Option(min=1, help="Fork from the state after this cycle.")],
    cycle_tokens: Annotated[str, typer.Option(help="Tokens of a cycle; rounded to whole segments.")],
    cycles: Annotated[int | None, typer.Option(min=1, help="Cycles (default: until the sources are used up).")] = None,
    share: Annotated[
        list[str] | None,
        typer.Option(help="NAME=SHARE, once a source, none of others: the mixture (default: the trunk's)."),
    ] = None,
    unit_tokens: Annotated[int | None, typer.Option(min=1, help="The longest row (default: the trunk's).")] = None,
    segment_units: Annotated[int | None, typer.Option(min=1, help="Units of a share in a segment.")] = None,
) -> None:
    """Fork a data line: the same pinned inputs and held-out rows, its own schedule; neither disturbs the other."""
    from nstrain.data.branch import branch_line

    tokens = parse_tokens(cycle_tokens, "--cycle-tokens")
    line = branch_line(
        resolve(work), resolve(trunk), at_cycle, tokens, cycles, parse_recipe(share), unit_tokens, segment_units
    )
    piece = line.settings.schedule[0]
    count = cycles or "open-ended,"
    print(f"{line.work}: forked after cycle {at_cycle}; {count} cycles of {piece.cycle_tokens:,} tokens")
    print(piece.describe_mixture(line.source_names))
    if not (line.work / "val").exists():
        print(f"its rows are longer than the trunk's; next: {typed('nstrain', 'data', 'val', '--work', work)}")


@app.command("plan")
def plan(work: Work, as_json: AsJson = False) -> None:
    """What the schedule takes of each source, when one runs out, what it costs in time and disk; nothing is read."""
    from nstrain.data.line import DataLine
    from nstrain.data.plan import checkpoint_plans, plan_line

    line = DataLine.open(resolve(work))
    planned = plan_line(line)
    if planned is None:
        print("null" if as_json else f"{line.work}: every cycle of the schedule is prepared")
        for checkpoints in () if as_json else checkpoint_plans(line):
            print(checkpoints.describe())
        return
    if as_json:
        print(json.dumps(planned.to_json(), indent=2))
    else:
        _show_plan(line.work, planned)
    short = [source for source in planned.sources if source.short]
    if short:
        print(f"the schedule cannot be met from cycle {min(s.runs_out_in_cycle or 0 for s in short)}", file=sys.stderr)
        raise typer.Exit(int(ExitCode.FAILED))


def _show_plan(work: Path, planned: LinePlan) -> None:
    rows = [
        (
            source.source,
            human_count(source.left_tokens),
            human_count(source.cycle_tokens),
            "open-ended" if source.takes_tokens is None else human_count(source.takes_tokens),
            "lasts" if source.runs_out_in_cycle is None else f"in cycle {source.runs_out_in_cycle}",
        )
        for source in planned.sources
    ]
    heads = ("source", "left (about)", "next cycle", "schedule takes", "runs out")
    print(table(f"{work} from cycle {planned.next_cycle}", heads, rows))
    tables = f" and {human_bytes(planned.tables_bytes)} of tables of documents" if planned.tables_bytes else ""
    print(
        f"a cycle: {human_bytes(planned.cycle_bytes)} of token files{tables}, about {human_seconds(planned.prepare_s)} "
        "to encode with one worker"
    )
    fetched = f", and {human_bytes(planned.downloads_bytes)} fetched" if planned.downloads_bytes else ""
    print(
        f"opened files: about {human_bytes(planned.opens_bytes)} for it, until it is done, beside "
        f"{human_bytes(planned.open_bytes)} now{fetched}"
    )
    for checkpoints in planned.checkpoints:
        print(checkpoints.describe())
    print(f"disk: {planned.disk.describe()}")
    if planned.no_room is not None:
        print(f"the preparer would wait: {planned.no_room}")


@app.command("status")
def status(work: Work, as_json: AsJson = False) -> None:
    """Where the data line stands: what is prepared, on disk and in use, and what the preparer does."""
    from nstrain.data.line import DataLine
    from nstrain.data.look import data_status

    found = data_status(DataLine.open(resolve(work)))
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    on_disk = ", ".join(map(str, found.cycles_on_disk)) or "none"
    rows = [
        ("cycles prepared", f"{found.prepared_cycles} of {found.cycle_count or 'an open-ended schedule'}"),
        ("cycles on disk", f"{on_disk} ({human_bytes(found.cycles_bytes)})"),
        ("opened files", human_bytes(found.open_bytes)),
        ("fetched, not opened", human_bytes(found.downloads_bytes)),
        ("disk", found.disk.describe()),
        ("held-out rows", "gathered" if found.held_out else "missing: run nstrain data val"),
    ]
    if found.preparer is not None:
        stage = found.preparer.stage.replace("_", " ")
        running = "" if found.preparing else " (not running)"
        encoded = found.preparer.encoded_tokens
        so_far = f", {human_count(encoded)} tokens opened, {found.preparer.progress:.0%} written" if encoded else ""
        rows.append(("preparer", f"{stage}, cycle {found.preparer.cycle}{so_far}{running}"))
        if (download := found.preparer.download_progress) is not None:
            rows.append(("", f"{download.source}: {download.describe()}"))
        if found.preparer.error:
            rows.append(("", found.preparer.error))
    rows += [("consumer", f"cycle {c.cycle}, row {c.row:,}: {c.run}") for c in found.consumers]
    print(table(str(found.work), ("", ""), rows))


@app.command("verify")
def verify(work: Work, as_json: AsJson = False) -> None:
    """Check every hash of a data line but its sources' files, and the chain of its manifests; all failures at once."""
    import dataclasses

    from nstrain.data.line import DataLine
    from nstrain.data.verify import verify_line

    with progress_bars() as bar:
        found = verify_line(DataLine.open(resolve(work)), lambda what: bar.set(f"verifying {what}", 0.0))
    if as_json:
        print(json.dumps([dataclasses.asdict(item) for item in found], indent=2))
    else:
        for item in found:
            print(f"{'ok' if item.ok else 'FAILED':>6}  {item.what}: {item.message}")
    if not all(item.ok for item in found):
        raise typer.Exit(int(ExitCode.FAILED))


@app.command("rebuild")
def rebuild(
    cycle: Annotated[int | None, typer.Option(min=1, help="The cycle, of the line in --work.")] = None,
    work: Annotated[str | None, typer.Option("--work", help="The data line's directory.")] = None,
    manifest: Annotated[Path | None, typer.Option(help="Without a line: the cycle's manifest.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Without a line: its tokenizer.json.")] = None,
    source: Annotated[
        list[str] | None, typer.Option(help="Without a line: NAME=DIRECTORY, once a source of kind local.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The directory to make (default: the cycle's place in the line).")
    ] = None,
) -> None:
    """Make a cycle's token files again from its manifest alone, in its line or on an empty machine."""
    from nstrain.data.line import DataLine
    from nstrain.data.preparer import preparer_lock
    from nstrain.data.rebuild import rebuild_cycle, rebuild_in_line

    with progress_bars() as bar:

        def show(share: float) -> None:
            bar.set("rebuilding", share)

        if work is not None and cycle is not None and not (manifest or tokenizer or source):
            line = DataLine.open(resolve(work))
            with preparer_lock(line.work).acquire(f"the preparer of {line.work}"):
                directory = rebuild_in_line(line, cycle, out, show, _shows_downloads(bar))
        elif manifest and tokenizer and out and work is None and cycle is None:
            places = _places(source or ())
            rebuild_cycle(manifest, tokenizer, places, out, show, on_download=_shows_downloads(bar))
            directory = out
        else:
            raise Refusal(
                "rebuild takes --work and --cycle (and --out), or --manifest, --tokenizer, --source and --out, and "
                "nothing of the other"
            )
    print(f"{directory}: rebuilt, with the manifest's hashes")


def _places(pairs: Sequence[str]) -> dict[str, Path]:
    """--source NAME=DIRECTORY ... as the directories by source."""
    places: dict[str, Path] = {}
    for pair in pairs:
        name, separator, place = pair.partition("=")
        if not name or not separator or not place or name in places:
            raise Refusal(f"--source: expected NAME=DIRECTORY, each name once, found {pair!r}")
        places[name] = Path(place)
    return places


@app.command("run-preparer")
def run_preparer_command(
    work: Work,
    ahead: Annotated[int, typer.Option(min=1, help="Cycles kept ready beyond each consumer's.")] = 1,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that open files (default: the cores, 8 at most; 0: none).")
    ] = None,
    until: Annotated[
        int | None, typer.Option(min=1, help="Prepare through this cycle, whatever the consumers do, and exit.")
    ] = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Keep it in this terminal.")] = False,
) -> None:
    """Prepare cycles, in the background, until the schedule is done; stopped, it continues the next time."""
    from nstrain.data.preparer import PreparerStatus, cannot_pass, run_preparer

    if not foreground:
        _prepare_in_background(resolve(work), ahead, workers, until)
        return

    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: told.append(n))
    last: list[str] = []
    with progress_bars() as bar:
        show_download = _shows_downloads(bar)

        def show(status: PreparerStatus) -> None:
            if status.stage == "preparing":
                bar.set(f"preparing cycle {status.cycle}", status.progress)
            elif status.download_progress is not None:
                show_download(status.download_progress)
            elif last != [status.stage]:
                bar.say(f"{status.stage.replace('_', ' ')} (cycle {status.cycle}) {status.error or ''}".rstrip())
            last[:] = [status.stage]

        try:
            code = run_preparer(resolve(work), ahead, until, lambda: bool(told), show, workers=workers)
        except NstrainError as error:
            raise (NeedsOperator(str(error)) if cannot_pass(error) else error) from None
    raise typer.Exit(int(code))


def _prepare_in_background(work: Path, ahead: int, workers: int | None, until: int | None) -> None:
    from nstrain.cli.background import begin
    from nstrain.data.line import DataLine

    DataLine.open(work)
    options = ["--ahead", str(ahead)]
    options += [] if workers is None else ["--workers", str(workers)]
    options += [] if until is None else ["--until", str(until)]
    service = [sys.executable, "-m", "nstrain", "data", "run-preparer", "--work", str(work), *options]
    command = [sys.executable, "-m", "nstrain.data.preparer", str(work), *options]
    output = work / "preparer.out"
    pid = begin(f"nstrain-data-{work.name}", [*service, "--foreground"], command, output)
    print(f"{work}: prepared in the background by process {pid}; what it does: {output}")
    print(f"look: {typed('nstrain', 'data', 'status', '--work', work)}; end: kill {pid}")


@app.command("show")
def show(
    work: Work,
    cycle: Annotated[int, typer.Option(min=1, help="The cycle.")],
    rows: Annotated[str, typer.Option(help="A:B, rows A up to but not including B of the cycle's order.")],
    row_tokens: Annotated[int | None, typer.Option(min=1, help="Row length (default: the line's unit).")] = None,
    text: Annotated[bool, typer.Option("--text", help="With the rows' text.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines, an object a row.")] = False,
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
            print(json.dumps(row))
            continue
        if row["tokens"] is None:
            print(f"row {row['row']}: {row['source']}, window {row['window']} (the cycle's tokens were deleted)")
            continue
        documents = ", ".join(f"{d['path']} ({d['tokens']})" for d in row["documents"])
        print(f"row {row['row']}: {row['source']}, window {row['window']}, {documents}")
        print(f"    {row['text'] if text else row['tokens']}")
    sys.stdout.flush()
