"""The benchmark of a whole line, with a tiny model on a CPU: what it says adds up to the line's time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_lines_time_is_told_in_parts(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    options = (
        "--model tiny-32k --device cpu --row-tokens 32 --unit-tokens 64 --rows 2 --batch 128 --updates 6 --every 3"
    )
    ran = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "line.py"), *options.split()),
            *("--directory", str(tmp_path), "--json", str(told)),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert list(tmp_path.iterdir()) == [told], "its files are gone"
    found = json.loads(told.read_text())
    assert found["updates"] == 6
    assert len(found["validations"]) == 3, "before the first update, in the middle and at the end"
    last = found["validations"][-1]
    assert 0 < last["validation_probe_s"] + last["validation_long_s"] < last["validation_s"]
    assert found["share"] == pytest.approx(last["validation_s"] / (last["validation_s"] + 1000 * found["update_s"]))
    spent = found["first_update_s"] + 5 * found["update_s"] + sum(v["validation_s"] for v in found["validations"])
    assert found["start_s"] + found["end_s"] + found["between_s"] < found["whole_s"]
    assert 0 <= found["between_s"] < found["whole_s"] - spent / 2
    assert "before the first row" in ran.stdout
