"""The benchmark of a whole line, with a tiny model on a CPU: what it says adds up to the line's time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nstrain import demo_text
from nstrain.base.errors import Refusal
from nstrain.data.encode import load_encoder

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("line_benchmark", ROOT / "benchmarks" / "line.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_line_that_was_stopped_tells_what_it_had_measured(benchmark: Any) -> None:
    validation = {"time/validation_s": 5.0, "time/validation_probe_s": 2.0, "time/validation_long_s": 1.0}
    update = {"time/update_s": 2.0, "perf/tokens_per_s": 64.0}
    rows = [{"time/wall": 110.0, **validation}] + [{"time/wall": 112.5 + 2.5 * n, **update} for n in range(3)]
    found = benchmark.readings(rows, 100.0, 120.0)
    assert (found["updates"], found["update_s"], found["start_s"], found["end_s"]) == (3, 2.0, 10.0, 2.5)
    assert (found["between_s"], found["share"]) == (1.5, 5 / 2005)
    assert "5.00 s" in benchmark.table(found)
    for few in (rows[:2], rows[1:], []):
        with pytest.raises(Refusal, match="nothing is known"):
            benchmark.readings(few, 100.0, 120.0)


def test_a_tokenizer_is_filled_up_to_the_vocabulary_of_a_preset(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_text, "VOCABULARY", 300)
    monkeypatch.setattr(demo_text, "sample_text", lambda: iter([demo_text.__doc__]))
    path = tmp_path / "tokenizer.json"
    path.write_bytes(benchmark.filled_tokenizer(1000))
    assert load_encoder(path, demo_text.EOS_ID).vocabulary.size == 1000


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
