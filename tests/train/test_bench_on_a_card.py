"""`nstrain bench` on a card, as a user types it: the lease, the rates, and a profile of the whole update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nstrain.base.errors import ExitCode
from nstrain.gpu.lease import gpu_lease
from nstrain.gpu.readings import READER_COMMAND, read_gpus, visible_gpu
from nstrain.train.profile import IDLE, UNKNOWN

pytestmark = [pytest.mark.gpu, pytest.mark.card_alone]

ROOT = Path(__file__).parents[2]
OPERATORS = {
    "matrix products", "pool read", "dendritic scan", "trace scan", "norms", "neurons", "addresses", "arbitration",
    "head", "embedding", "AdamW", "norms of gradients", "copies and additions", IDLE,
}  # fmt: skip
"""What an update of every NeuronSpark is made of."""

BENCH = ("bench", "--model", "tiny-32k", "--seq-len", "512", "--rows", "2", "--accum", "2", "--updates", "3")

READER = f"""
import json, subprocess, sys
said = json.loads(subprocess.run({list(READER_COMMAND)}, check=True, capture_output=True).stdout)
for gpu in said["gpus"]:
    gpu["processes"] = [process for process in gpu["processes"] if process["pid"] != {os.getpid()}]
print(json.dumps(said))
"""
"""The card's other processes without this one, which other tests may have left on it."""


def typed(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The command's process."""
    (tmp_path / "host.json").write_text(json.dumps({"gpu_reader": [sys.executable, "-c", READER]}))
    environment = {**os.environ, "NSTRAIN_HOST": str(tmp_path / "host.json")}
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", "nstrain.cli.main", *BENCH, *options],
        capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=200,
    )  # fmt: skip
    print(ran.stdout, ran.stderr, f"{time.monotonic() - began:.1f} s", sep="\n")
    return ran


def test_a_preset_is_timed_and_profiled(tmp_path: Path) -> None:
    ran = typed(tmp_path, "--profile", "--json")
    assert ran.returncode == int(ExitCode.DONE), ran.stderr
    found = json.loads(ran.stdout)
    assert found["tokens_per_s"] > 0
    assert 0 < found["share"] < 1
    assert found["copy_tb_s"] > 0
    assert found["peak_gib"] > 0
    profile = found["profile"]
    operators = {of["operator"]: of for of in profile["operators"]}
    assert [k["name"] for k in profile["kernels"] if k["operator"] == UNKNOWN] == [], "say what they belong to"
    assert set(operators) >= OPERATORS
    assert sum(of["share"] for of in profile["operators"]) == pytest.approx(1, abs=0.02)
    assert operators["AdamW"]["calls"] == sum(k["calls"] for k in profile["kernels"] if k["name"] == "_adamw_kernel")


def test_the_tables_are_shown(tmp_path: Path) -> None:
    ran = typed(tmp_path, "--profile")
    assert ran.returncode == int(ExitCode.DONE), ran.stderr
    assert ran.stdout.index("TB/s") < ran.stdout.index("by operator") < ran.stdout.index("by kernel")


def test_a_card_that_is_leased_is_left_alone(tmp_path: Path) -> None:
    uuid = visible_gpu(read_gpus(READER_COMMAND)).uuid
    with gpu_lease(uuid).acquire("the test"):
        ran = typed(tmp_path)
    assert ran.returncode == int(ExitCode.GPU_TAKEN), ran.stderr
    assert f"is held by process {os.getpid()}" in ran.stderr
