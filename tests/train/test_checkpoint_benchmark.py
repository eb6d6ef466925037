"""The benchmark of checkpoints: its parts on a CPU with a tiny model, as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TINY = ("--model", "tiny-32k", "--row-tokens", "32", "--rows", "2", "--accum", "2", "--updates", "2")

pytestmark = pytest.mark.slow


def benchmark(tmp_path: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Its JSON and its table."""
    told = tmp_path / "told.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "checkpoint.py"), "--device", "cpu", "--directory", tmp_path]
    python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [*map(str, command), "--disk-file-bytes", str(64 << 20), "--json", str(told), *options],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert list(tmp_path.iterdir()) == [told], "its files are gone"
    return json.loads(told.read_text()), ran.stdout


def test_files_alone(tmp_path: Path) -> None:
    report, table = benchmark(tmp_path, "--parameters", "4.2e6")
    assert report["checkpoint_bytes"] > 3 * 4 * 4_194_304
    assert "load, every byte verified" in table


def test_stalls(tmp_path: Path) -> None:
    report, table = benchmark(tmp_path, "--only", "stalls", *TINY)
    assert [save["stall_s"] > 0 for save in report["saves"]] == [True, True]
    assert "stall of each checkpoint" in table
    assert "resume" not in report


def test_a_resume_in_a_new_process(tmp_path: Path) -> None:
    report, table = benchmark(tmp_path, "--only", "resume", *TINY)
    assert report["checkpoint_bytes"] > 3 * 4 * report["parameters"]
    laps, reading = report["resume"]["laps"], report["resume"]["reading"]
    assert reading["hash_s"] > 0
    assert 0 < reading["read_s"] < laps["read and hash"]
    assert laps["first update"] >= report["resume"]["first_update_s"] > 0
    assert "resume, to its first update" in table
    assert "kernels, capture" not in table, "a CPU captures nothing"
