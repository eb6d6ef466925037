"""Memory follows a batch, not the file: peak growth of a fresh process that reads or opens a large one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_helpers import environment, prose
from reader_files import compressed, json_lines, pin

from nstrain.base.disk import canonical_json

MIB = 1 << 20

MEASURE = """
import pathlib, sys, json
from nstrain.data.encode import load_encoder
from nstrain.data.entries import FileRequest, open_file
from nstrain.data.readers import read_pinned
from nstrain.data.sources import PinnedFile, SourceSettings

def peak():
    line = next(l for l in open("/proc/self/status") if l.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

what, root, tokenizer, reader, column, large, small = sys.argv[1:]
fields = {} if reader == "text" else {"text_column": column}
source = SourceSettings(name="s", kind="local", path=root, include=("**/*",), reader=reader, **fields)
encoder = load_encoder(pathlib.Path(tokenizer), 1)
for pinned in (small, large):
    file = PinnedFile(**json.loads(pinned))
    before = peak()
    if what == "read":
        size = sum(len(row.text or "") for row in read_pinned(source, file, "."))
    else:
        entry = pathlib.Path(root) / "open" / (file.path + ".entry")
        open_file(FileRequest(source, file, ".", entry), encoder)
        size = entry.stat().st_size
print(peak() - before, size)
"""


def write(path: Path, texts: Callable[[], list[str]], rows: int) -> None:
    """A file of so many rows, each one of some texts; parquet as one row group."""
    some = texts()
    if path.suffix == ".parquet":
        array = pa.array([some[n % len(some)] for n in range(rows)])
        if path.name.startswith("nested"):
            struct = pa.StructArray.from_arrays([array], ["content"])
            array = pa.ListArray.from_arrays(range(0, rows + 1, 50), struct)
            pq.write_table(
                pa.table({"files": array}), path, row_group_size=rows, compression="zstd", use_dictionary=False
            )
        else:
            pq.write_table(pa.table({"c": array}), path, row_group_size=rows, compression="zstd", use_dictionary=False)
    elif path.suffix == ".txt":
        path.write_text("".join(some[n % len(some)] + "\n" for n in range(rows)))
    else:
        one = json_lines([{"c": text} for text in some])
        path.write_bytes(compressed(path.name, one * (rows // len(some)), frame_bytes=MIB))


def growth(root: Path, tokenizer: Path, what: str, name: str, rows: int, words: int) -> tuple[int, int]:
    """Peak growth in bytes when a file is read or opened (after a small one), and the size of what came of it."""
    for stem, count in (("", rows), ("small.", 50)):
        write(root / name.replace(".", f".{stem}", 1), lambda: [prose(seed, words) for seed in range(50)], count)
    pins = [
        canonical_json(vars(pin(root, root / name.replace(".", f".{stem}", 1)))).decode() for stem in ("", "small.")
    ]
    reader = {".parquet": "parquet", ".txt": "text"}.get(Path(name).suffix, "jsonl")
    column = "files[].content" if name.startswith("nested") else "c"
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, what, str(root), str(tokenizer), reader, column, *pins],
        env=environment(RAYON_NUM_THREADS="1"), capture_output=True, text=True, check=True,
    )  # fmt: skip
    peak, size = map(int, done.stdout.split())
    return peak, size


FILES = ["flat.parquet", "nested.parquet", "rows.jsonl", "rows.jsonl.zst", "rows.jsonl.gz"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name.startswith("rows") else ()) for name in FILES]
)
def test_reading_takes_a_few_megabytes(tmp_path: Path, tokenizer: Path, name: str) -> None:
    peak, size = growth(tmp_path, tokenizer, "read", name, rows=50_000, words=500)
    assert size > 75 * MIB
    assert peak < 60 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_reading_a_row_group_of_300_mb_takes_as_little(tmp_path: Path, tokenizer: Path, name: str) -> None:
    peak, size = growth(tmp_path, tokenizer, "read", name, rows=150_000, words=500)
    assert size > 250 * MIB
    assert peak < 100 * MIB


@pytest.mark.parametrize("name", [pytest.param("flat.parquet", marks=pytest.mark.slow), "one.txt"])
def test_opening_takes_what_a_batch_takes(tmp_path: Path, tokenizer: Path, name: str) -> None:
    peak, size = growth(tmp_path, tokenizer, "open", name, rows=4_000, words=500)
    assert size > 4 * MIB
    assert peak < 220 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flat.parquet", "one.txt"])
def test_opening_100_mb_takes_no_more(tmp_path: Path, tokenizer: Path, name: str) -> None:
    peak, size = growth(tmp_path, tokenizer, "open", name, rows=50_000, words=500)
    assert size > 50 * MIB
    assert peak < (220 if name == "flat.parquet" else 600) * MIB  # one document of 100 MB is held whole, as a text
