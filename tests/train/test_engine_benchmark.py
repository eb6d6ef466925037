"""The benchmark of whole updates: on a CPU with tiny models, and with lines that fail."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "engine.py"


@pytest.fixture(scope="module")
def engine() -> Any:
    spec = importlib.util.spec_from_file_location("benchmark_of_engine", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow  # a benchmark, and compilers
def test_lines_beside_their_peers_and_one_that_fails(
    engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (
        engine.Line("tiny-32k", 64, ((2, 2, "none"),), 5.0, device="cpu"),
        engine.Line("llama-tiny", 64, ((2, 2, "none"),), None, beside="tiny-32k", device="cpu"),
        engine.Line("tiny-33k", 64, ((2, 2, "none"), (1, 2, "none")), None, device="cpu"),
    )
    assert engine.main(["--out", str(tmp_path), "--updates", "1", "--budget-s", "300"], lines) == 1
    printed = capsys.readouterr().out
    rows = {
        row.split("|")[1].strip(): [c.strip() for c in row.split("|")] for row in printed.splitlines() if "|" in row
    }
    ours, peer, failed = (rows[name] for name in ("tiny-32k", "llama-tiny, compiled", "tiny-33k"))
    assert len(ours) == len(peer) == len(failed) == len(engine.HEADS) + 2
    assert ours[5] == peer[5][:2] + ours[5][2:] == "0.00B"
    assert float(ours[-2]) > 0
    assert ours[7] == "5"
    assert "tiny-33k" in failed[3], "why it failed"
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["tiny-32k@64"]["found"]["tokens_per_update"] == 256
    assert list(results) == ["tiny-32k@64", "llama-tiny@64", "tiny-33k@64"]


def test_a_process_that_fails_hangs_or_says_nothing_is_told(engine: Any, tmp_path: Path) -> None:
    def told(program: str, limit_s: float = 30.0) -> str:
        found, why = engine.run([sys.executable, "-c", program], limit_s, tmp_path / "log")
        assert found is None
        return str(why)

    assert (
        told("raise MemoryError('CUDA out of memory. Tried')") == "exit code 1: MemoryError: CUDA out of memory. Tried"
    )
    assert told("print('working', flush=True); import time; time.sleep(60)", 1.0) == (
        "not done after 1 s; last said: working"
    )
    assert told("print('all is well')") == "it ended without a result"
    assert told("import os; os.kill(os.getpid(), 9)").startswith("exit code -9: ")
    assert engine.run(
        [sys.executable, "-c", "print('{\"a\": 1}'); print('W1130 goodbye')"], 30.0, tmp_path / "log"
    ) == ({"a": 1}, "")


def test_a_shape_that_lacks_memory_is_tried_with_less(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        engine,
        "run",
        lambda command, limit_s, log: (None, "out of memory") if "none" in command[-1] else ({"ok": 1}, ""),
    )
    line = engine.Line("ns-2b", 32_768, engine.LONG, None)
    assert engine.measured(line, engine.time.monotonic() + 100, 1, tmp_path)["shape"] == (1, 2, "dendritic")
    assert engine.measured(line, engine.time.monotonic() + 10, 1, tmp_path)["failed"] == "no time left"


def test_every_line_has_its_peer_of_the_same_size(engine: Any) -> None:
    sys.path.append(str(FILE.parent / "models"))
    import baselines

    import neuronspark

    for line in engine.LINES:
        if line.beside is not None:
            ours = neuronspark.load_preset(line.beside).parameter_count()
            assert baselines.load_preset(line.model).parameter_count() == pytest.approx(ours, rel=1e-3)
    assert {line.name for line in engine.LINES if line.beside is None} == {
        f"{model}@{length}" for model in ("ns-2b", "ns-1p3b") for length in (4096, 32_768)
    }


def test_a_profile_is_shown_by_operator_and_by_kernel(engine: Any) -> None:
    from nstrain.train.profile import summarize

    profile = summarize([("outputs_kernel", 0.0, 6000.0), ("nvjet", 7000.0, 8000.0)], {"outputs_kernel": "scan"})
    found = {"profile": json.loads(json.dumps(dataclasses.asdict(profile)))}
    assert engine.operators({"ns-2b@4096": {"found": found}, "llama-2b@4096": {"found": {}}}).split("\n") == [
        "ns-2b@4096: one update, 8 ms",
        "        6.0 ms  75.00%      1 scan",
        "        1.0 ms  12.50%      1 matrix products",
        "        1.0 ms  12.50%      0 idle",
        "by kernel:",
        "        6.0 ms  75.00%      1 outputs_kernel (scan)",
        "        1.0 ms  12.50%      1 matrix products (cuBLAS) (matrix products)",
    ]
