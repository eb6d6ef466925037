"""The baselines through the real commands: host.json names their package, and nothing else is told of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from real_line import ROOT, make_data_line, prepare, rows_of, tensors_of

from nstrain.line.paths import LinePaths

PACKAGE = ROOT / "benchmarks" / "models" / "baselines"
COMMAND = "import sys; from nstrain.cli.main import main; main()"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    host = tmp_path_factory.mktemp("host") / "host.json"
    host.write_text(json.dumps({"neuronspark": str(PACKAGE)}))
    return os.environ | {"NSTRAIN_HOST": str(host), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def nstrain(environment: dict[str, str], *arguments: str, program: tuple[str, ...] = ("-c", COMMAND)) -> str:
    command = [sys.executable, *program, *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def flags(options: Mapping[str, Any]) -> list[str]:
    return [str(part) for option in options.items() for part in option]


def test_the_presets_are_as_large_as_neuronsparks(environment: dict[str, str]) -> None:
    shown: dict[str, Any] = json.loads(nstrain(environment, "model", "list", "--json"))
    assert list(shown) == ["llama-1p3b", "llama-1p7b", "llama-2b", "llama-tiny", "mamba2-2b", "mamba2-tiny"]
    from neuronspark import load_preset

    for ours, theirs, most in (("2b", "ns-2b", 0.02), ("tiny", "tiny-32k", 0.06)):
        wanted = load_preset(theirs)
        for family in ("llama", "mamba2"):
            cost = shown[f"{family}-{ours}"]
            assert abs(cost["parameters"] / wanted.parameter_count() - 1) < most
            assert cost["config"]["vocab_size"] == wanted.vocab_size
            assert cost["config"]["rope_max_seq_len"] == wanted.rope_max_seq_len
    # 6 N and, of a Llama in rows of 4096, what its attention costs: less than a fifth more.
    for cost in shown.values():
        assert 1 <= cost["flops_per_token"] / (6 * cost["parameters"]) < 1.6
        kinds = {part["kind"] for part in cost["parts"].values()}
        assert kinds in ({"embedding", "norm", "attention"}, {"embedding", "norm", "state space"})


def test_bench_times_a_baseline(environment: dict[str, str]) -> None:
    options = {"--model": "mamba2-tiny", "--seq-len": 32, "--rows": 1, "--accum": 2, "--updates": 1, "--device": "cpu"}
    result = json.loads(nstrain(environment, "bench", *flags(options), "--json"))
    assert result["parameters"] == 3_825_504
    assert result["tokens_per_s"] > 0
    assert len(result["losses"]) == 3


@pytest.mark.slow  # the baselines' other tests are in every run
def test_a_line_learns(environment: dict[str, str], tmp_path: Path) -> None:
    data = make_data_line(tmp_path / "data", 1)
    prepare(data.work, 1)
    run = LinePaths(tmp_path / "run")
    options = {
        "--model": "llama-tiny",
        "--data": data.work,
        "--peak-lr": 2e-3,
        "--tokens-per-update": 128,
        "--row-tokens": 32,
        "--micro-rows": 2,
        "--recompute": "all",
        "--validate-every": 8,
        "--validation-rows": 3,
        "--checkpoint-every": 16,
        "--threads": 1,
        "--device": "cpu",
    }
    nstrain(environment, "new", str(run.root), *flags(options))
    nstrain(environment, str(run.root), program=("-m", "nstrain.train"))
    rows = rows_of(run)
    assert rows[-1]["update"] == 16
    assert rows[-1]["val_32/mix"] < rows[0]["val_32/mix"] - 0.5
    names = {name for _, name in tensors_of(run, 16)}
    assert {"embedding", "norm", "layer00.norm"} <= names
