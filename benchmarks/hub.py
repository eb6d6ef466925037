"""How fast hub sources are: a download against curl, and a cycle from the hub to READY. Prints one table.

    python benchmarks/hub.py [--megabytes 512] [--text-megabytes 32] [--repeats 3] [--workers 2]

The hub is a process of its own on this machine, so that what is measured is the client: on a real network the network
decides. Ours verifies the sha256 and fsyncs; curl is timed alone, and with sha256sum after it. By the clock, and by
processor time (the client's alone), which other work on the machine disturbs less; the best of the repeats, in turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import os
import random
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "hub"), str(REPOSITORY / "tests" / "data")]

MEGABYTE = 1_000_000
REPO = "bench/corpus"


def serve(pipe: Connection, megabytes: int, text_megabytes: int) -> None:
    """The hub's process: one large file of noise, and files of rows; tells where it listens."""
    from fake_hub import FakeHub

    with FakeHub() as hub:
        noise = random.Random(0).randbytes(MEGABYTE) * megabytes
        files, text_bytes = text_files(text_megabytes * MEGABYTE)
        commit = hub.add(REPO, {"noise.bin": noise, **files})
        pipe.send((hub.endpoint, commit, hashlib.sha256(noise).hexdigest(), text_bytes, sum(map(len, files.values()))))
        pipe.recv()


def text_files(limit: int) -> tuple[dict[str, bytes], int]:
    """Parquet files of the standard library's sources, 8 MB of text each, and the bytes of all text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files: dict[str, bytes] = {}
    rows: list[str] = []
    done = waiting = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if done >= limit:
            break
        text = path.read_text(errors="ignore")
        rows.append(text)
        waiting += len(text.encode())
        if waiting > 4 * MEGABYTE or done + waiting >= limit:
            out = io.BytesIO()
            pq.write_table(pa.table({"content": rows}), out, compression="zstd")
            files[f"data/s{len(files) % 4}/{len(files):04d}.parquet"] = out.getvalue()
            done, waiting, rows = done + waiting, 0, []
    return files, done


def seconds(call: Callable[[], object]) -> tuple[float, float]:
    """What a call takes by the clock, and of the processors by this process and those that ended in it."""

    def processors() -> float:
        both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in both)

    began, used = time.perf_counter(), processors()
    call()
    return time.perf_counter() - began, processors() - used


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--text-megabytes", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    ours, theirs = get_context("spawn").Pipe()
    server = get_context("spawn").Process(
        target=serve, args=(theirs, arguments.megabytes, arguments.text_megabytes), daemon=True
    )
    server.start()
    endpoint, commit, sha256, text_bytes, stored_bytes = ours.recv()
    with tempfile.TemporaryDirectory() as directory:
        os.environ.update(HF_ENDPOINT=endpoint, HF_HOME=f"{directory}/hf", NO_PROXY="*")
        downloads(Path(directory), endpoint, commit, sha256, arguments.megabytes, arguments.repeats)
        cycle(Path(directory), text_bytes, stored_bytes, arguments.workers)
    ours.send(None)
    server.join()


def downloads(root: Path, endpoint: str, commit: str, sha256: str, megabytes: int, repeats: int) -> None:
    """One large file: ours, curl, and curl with sha256sum."""
    from nstrain.data.hub import patience
    from nstrain.data.hub.downloads import Downloads
    from nstrain.data.sources import PinnedFile, SourceSettings

    patience.PATIENCE = dataclasses.replace(patience.PATIENCE, reserve_bytes=0)
    source = SourceSettings(name="noise", kind="hub", repo=REPO, revision=commit, include=("*",))
    file = PinnedFile("noise.bin", megabytes * MEGABYTE, sha256, 0, 0, 0)
    target = root / "curl.bin"
    command = ["curl", "-sL", "-o", str(target), f"{endpoint}/datasets/{REPO}/resolve/{commit}/noise.bin"]

    def fetch() -> None:
        shutil.rmtree(root / "downloads", ignore_errors=True)
        Downloads(root / "downloads", source).fetch([file])

    def curl() -> None:
        target.unlink(missing_ok=True)
        subprocess.run(command, check=True)

    def curl_and_hash() -> None:
        curl()
        subprocess.run(["sha256sum", str(target)], check=True, stdout=subprocess.DEVNULL)

    fetch()
    calls = {"ours": fetch, "curl": curl, "curl, sha256sum": curl_and_hash}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            took[name].append(seconds(call))
    for name, readings in took.items():
        clock, processors = (megabytes / min(reading) for reading in zip(*readings, strict=True))
        print(f"download of {megabytes} MB, {name:<16} {clock:8.0f} MB/s, {processors:8.0f} MB/s a core")


def cycle(root: Path, text_bytes: int, stored_bytes: int, workers: int) -> None:
    """From the hub to a cycle that is READY: fetch, verify, read, encode, write."""
    from data_helpers import train_tokenizer

    from nstrain.data.init import Recipe, init_line
    from nstrain.data.line import DataLine
    from nstrain.data.preparer import run_preparer
    from nstrain.settings.model import validate

    (root / "tokenizer.json").write_text(train_tokenizer())
    source = {
        "name": "code", "kind": "hub", "repo": REPO, "include": ["data/*/*.parquet"], "reader": "parquet",
        "text_column": "content", "stratum": {"by": "directory", "depth": 2}, "share": 1,
    }  # fmt: skip
    recipe = validate(Recipe, {"format": 1, "sources": [source]}, "benchmark")
    tokenizer, work = root / "tokenizer.json", root / "line"
    made, _ = seconds(lambda: init_line(work, recipe, tokenizer, 1, int(text_bytes * 0.25), 1, 4096))
    line = DataLine.open(work)
    shutil.rmtree(work / "downloads")
    clock, processors = seconds(lambda: run_preparer(work, until_cycle=1, workers=workers))
    opened = sum(path.stat().st_size for path in (line.work / "open").rglob("*.tokens"))
    tokens = opened / line.token_dtype.itemsize
    print(f"data init: list, pin, sample {stored_bytes / MEGABYTE:.1f} MB of files: {made:.1f} s")
    text, stored = text_bytes / MEGABYTE, stored_bytes / MEGABYTE
    print(
        f"hub to READY, {workers} workers: about {text:.0f} MB of text ({stored:.1f} MB of parquet) in {clock:.1f} s:"
    )
    speeds = f"{text / clock:.1f} MB of text/s, {tokens / clock / 1e6:.2f}M tokens/s"
    print(f"    {speeds}; {text / processors:.1f} MB of text/s a core")


if __name__ == "__main__":
    main()
