"""The benchmark of a whole line, with a tiny model on a CPU: what it says adds up to the line's time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nstrain import demo_text
from nstrain.data.encode import load_encoder

ROOT = Path(__file__).parents[2]


def test_a_tokenizer_is_filled_up_to_the_vocabulary_of_a_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("line_benchmark", ROOT / "benchmarks" / "line.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
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
