"""`nstrain tune` on a card, from end to end: the command, its trials, the lease, the table, and a second call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nstrain.base.errors import ExitCode
from nstrain.line.paths import LinePaths
from nstrain.settings.run import RunSettings, load_run, save_run
from nstrain.train.model import model_cost

pytestmark = [pytest.mark.gpu, pytest.mark.card_alone]

ROOT = Path(__file__).parents[2]
GIB = 1 << 30

READER = """
import json, subprocess

def ask(what, *fields):
    command = ["nvidia-smi", f"--query-{what}=" + ",".join(fields), "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [[cell.strip() for cell in line.split(",")] for line in said.splitlines() if line.strip()]

there = ask("compute-apps", "gpu_uuid", "pid")
gpus = [
    {"uuid": uuid, "name": name, "used_bytes": int(used) << 20, "reserved_bytes": 0, "total_bytes": int(total) << 20}
    | {"memory_tells": True, "processes": [{"pid": int(pid), "used_bytes": None} for on, pid in there if on == uuid]}
    for uuid, name, used, total in ask("gpu", "uuid", "name", "memory.used", "memory.total")
]
print(json.dumps({"format": 1, "gpus": gpus}))
"""
"""Reads the GPUs where nvidia-ml-py is not installed."""


def environment(tmp_path: Path) -> dict[str, str]:
    host: dict[str, Any] = {}
    try:
        import pynvml  # noqa: F401
    except ImportError:
        host["gpu_reader"] = [sys.executable, "-c", READER]
    (tmp_path / "host.json").write_text(json.dumps(host))
    return {**os.environ, "NSTRAIN_HOST": str(tmp_path / "host.json"), "OMP_NUM_THREADS": "1"}


def tune(paths: LinePaths, tmp_path: Path, *options: str) -> tuple[dict[str, Any], str]:
    """The command's JSON and what it told on the way."""
    command = [
        sys.executable,
        "-m",
        "nstrain.cli.main",
        "tune",
        str(paths.root),
        "--seconds",
        "0.3",
        "--json",
        *options,
    ]
    began = time.monotonic()
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(tmp_path), check=False)
    print(ran.stderr, f"{time.monotonic() - began:.1f} s", sep="\n")
    assert ran.returncode == int(ExitCode.DONE), ran.stderr
    return json.loads(ran.stdout), ran.stderr


def test_a_line_is_tuned_on_a_card(paths: LinePaths, tmp_path: Path) -> None:
    fields = json.loads(paths.run_json.read_text())
    fields |= {"device": "cuda", "tokens_per_update": 128, "ema": {"horizon_tokens": 100_000, "from_tokens": 0}}
    save_run(paths.run_json, RunSettings.model_validate_json(json.dumps(fields)))
    result, told = tune(paths, tmp_path)
    trials = result["trials"]
    parameters = model_cost(load_run(paths.run_json).model.config, 64).parameters
    assert {trial["shape"]["recompute"] for trial in trials} == {"none", "dendritic", "all"}
    for trial in trials:
        measured = trial["measured"]
        assert measured is not None, trial["reason"]
        assert trial["outcome"] == "measured"
        assert measured["updates"] >= 3
        assert measured["room_bytes"] > 16 * GIB, "the arena holds the card's memory"
        assert 0 < measured["transient_bytes"] < 8 * GIB, "and the trial's peak is what it used of it"
        assert 0 < measured["micro_batch_s"] < 1
        assert measured["persistent_bytes"] >= 22 * parameters, (
            "masters, gradients, moments, average and compute copies"
        )
    assert told.count("tokens/s") == len(trials)
    choice = result["chosen"]["64"]
    assert choice["tokens_per_s"] == max(trial["tokens_per_s"] for trial in trials)
    written = load_run(paths.run_json).lengths["64"]
    assert (written.micro_rows, written.recompute) == (choice["micro_rows"], choice["recompute"])
    kernels = json.loads((paths.tune / "kernels.json").read_text())["kernels"]
    assert any(name.startswith("dendritic_scan") for name in kernels)
    assert all("any" in launches for launches in kernels.values())
    again, _ = tune(paths, tmp_path)
    assert again["chosen"] == result["chosen"]
    assert all(trial["reused"] for trial in again["trials"]), "nothing is measured twice"
