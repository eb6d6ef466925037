"""64,000 files in one source: a line is made, opened and prepared within the design's bounds."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import hub_lines
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_hub import FakeHub, HubFile

FILES, DUMPS = 64_000, 110

PROGRAM = """
import json, sys, time
from pathlib import Path
import hub_lines
from nstrain.data.hub import client, patience
from nstrain.data.init import Recipe
from nstrain.data.line import DataLine
from nstrain.settings.model import validate
client.library()
from hub_lines import peak_mib
patience.PATIENCE = patience.dataclasses.replace(patience.Patience(), reserve_bytes=0)
source = {"name": "web", "kind": "hub", "repo": "big/corpus", "include": ["data/web/*/*.parquet"], "reader": "parquet",
          "text_column": "content", "stratum": {"by": "directory", "depth": 3}, "share": 1}
recipe = validate(Recipe, {"format": 1, "sources": [source]}, "test")
work, found, base, began = Path(sys.argv[1]), {}, peak_mib(), time.monotonic()
line = hub_lines.init_line(work, recipe, Path(sys.argv[2]), 1, 200_000, cycles=2, unit_tokens=64)
found["init_s"], found["init_mib"] = time.monotonic() - began, peak_mib() - base
hub_lines.prepare(line)
began = time.process_time()
again = DataLine.open(work)
again.listing("web")
found["open_s"] = time.process_time() - began
from nstrain.data.rows import CycleRows
again.cycle_plan(2)
began = time.process_time()
rows = CycleRows.open(again, 2, 64)
rows.read(rows.rows - 1, rows.rows)
found["seek_s"], found["mib"] = time.process_time() - began, peak_mib() - base
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_source_of_64000_files(
    hub: FakeHub, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.BytesIO()
    pq.write_table(pa.table({"content": [f"document {i} " + "of some text " * 20 for i in range(1000)]}), out)
    same = HubFile.of(out.getvalue())
    names = (f"data/web/CC-MAIN-{2013 + i % DUMPS}/part-{i:05d}-of-64000.parquet" for i in range(FILES))
    hub.add("big/corpus", dict.fromkeys(names, same))
    monkeypatch.setattr(hub, "page_entries", 1000)
    paths = f"{Path(__file__).parent}:{Path(hub_lines.nstrain.__file__).parents[1]}"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "line"), str(tokenizer)],
        env=hub_lines.environment(hub, PYTHONPATH=paths), capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    # Of the processor: how busy the machine is decides the clock's.
    assert found["open_s"] < 1.0
    assert found["seek_s"] < 1.0
    assert 20 < found["init_mib"] <= found["mib"] < 400
