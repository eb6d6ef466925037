"""`data verify`, `data rebuild` and `plot` as commands: what they print, write and end with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_line import CYCLE_TOKENS, EOS_ID, UNIT_TOKENS, nstrain, write_sources, write_tokenizer

from nstrain.record.journal import Journal
from nstrain.settings.run import METRICS_VERSION


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text and a data line whose one cycle is prepared."""
    root = tmp_path_factory.mktemp("line")
    recipe, tokenizer = write_sources(root), write_tokenizer(root)
    nstrain(
        *("data", "init", "--work", root / "data", "--recipe", recipe, "--tokenizer", tokenizer, "--eos-id", EOS_ID),
        *("--cycle-tokens", CYCLE_TOKENS, "--cycles", 1, "--unit-tokens", UNIT_TOKENS, "--segment-units", 8),
    )
    nstrain("data", "run-preparer", "--work", root / "data", "--until", 1, "--workers", 0, "--foreground")
    return root


def test_a_damaged_cycle_is_found_and_made_again(root: Path) -> None:
    data, cycle = root / "data", root / "data" / "cycles" / "000001"
    files = {path.name: path.read_bytes() for path in cycle.iterdir()}
    sound = nstrain("data", "verify", "--work", data).splitlines()
    assert {line.split()[0] for line in sound} == {"ok"}
    assert any("cycle 1: " in line and "with the manifest's hashes" in line for line in sound)

    (cycle / "code.bin").write_bytes(files["code.bin"][:-1] + b"\x7f")
    damaged = nstrain("data", "verify", "--work", data, "--json", code=1)
    (failed,) = [finding for finding in json.loads(damaged[: damaged.rindex("]") + 1]) if not finding["ok"]]
    assert failed["what"] == "cycle 1"
    assert failed["message"].startswith(f"{cycle / 'code.bin'}: expected sha256")

    assert "exists already" in nstrain("data", "rebuild", "--work", data, "--cycle", 1, code=2)
    shutil.rmtree(cycle)
    assert str(cycle) in nstrain("data", "rebuild", "--work", data, "--cycle", 1)
    assert {path.name: path.read_bytes() for path in cycle.iterdir()} == files


def test_a_cycle_is_made_again_without_its_line(root: Path, tmp_path: Path) -> None:
    data, out = root / "data", tmp_path / "copy"
    places = [f"--source={name}={root / 'text' / name}" for name in ("notes", "code")]
    by_manifest = ("--manifest", data / "manifests" / "000001.json", "--tokenizer", root / "tokenizer.json")
    nstrain("data", "rebuild", *by_manifest, *places, "--out", out)
    for name in ("notes.bin", "notes.idx", "code.bin", "code.idx"):
        assert (out / name).read_bytes() == (data / "cycles" / "000001" / name).read_bytes()
    assert "--work" in nstrain("data", "rebuild", "--cycle", 1, code=2), "it says what it takes"


def test_curves_are_drawn(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with Journal.open(run / "journal.db", METRICS_VERSION) as journal:
        for update in range(3):
            row = {"tokens": 64 * update, "cycle": 1, "row_tokens": 32, "rows": 2, "skipped": 0, "smaller": 0}
            trained = {"train/loss": 6.0 - update, "train/grad_norm": 1.0, "train/learning_rate": 1e-3}
            journal.commit(update, {**row, **(trained if update else {"val_32/mix": 6.0})})
    assert str(run / "curves.png") in nstrain("plot", run)
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "no such journal" in nstrain("plot", tmp_path / "nothing", code=2)
