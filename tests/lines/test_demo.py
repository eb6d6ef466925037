"""The demo with a schedule of minutes cut down to seconds: every stage, its table, and what it says when run again."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import nstrain.demo
from nstrain.base.errors import ExitCode
from nstrain.cli.main import app
from nstrain.data.val import ValidationRow
from nstrain.demo import DemoPlaces, prepare_demo, run_demo, unigram_entropy


def test_the_demo_makes_trains_and_shows_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CYCLES", 2), ("CYCLE_TOKENS", 8192), ("SEGMENT_UNITS", 1), ("VALIDATION_ROWS", 4)):
        monkeypatch.setattr(nstrain.demo, name, value)
    said: list[str] = []
    places = DemoPlaces(tmp_path / "demo")
    prepare_demo(places, said.append)
    made = {path: path.read_bytes() for path in (places.tokenizer, places.data / "line.json", places.line / "run.json")}
    assert run_demo(places.root, said.append) == ExitCode.DONE
    assert {path: path.read_bytes() for path in made} == made, "a stage that is done is not done again"
    shown = "\n".join(said)
    for source in ("stdlib", "packages", "headers", "stubs", "mix"):
        assert f"\n  {source} " in shown, f"the table has a row of {source}"
    assert (places.line / "curves.png").stat().st_size > 10_000
    assert "nstrain data extend" in shown
    looks = [line.strip() for line in shown.partition("look further:")[2].splitlines() if line.startswith("  nstrain ")]
    assert len(looks) == 5
    for look in looks[:-2]:  # as typed; the last two go on with the line
        done = CliRunner().invoke(app, shlex.split(look)[1:])
        assert (done.exit_code, bool(done.stdout)) == (ExitCode.DONE, True), look
        assert "deleted" not in done.stdout
    before = (places.line / "journal.db").read_bytes()
    said.clear()
    assert run_demo(places.root, said.append) == ExitCode.DONE
    assert "is done" in said[0]
    assert (places.line / "journal.db").read_bytes() == before


def test_unigram_entropy_weights_rows_as_the_loss_does() -> None:
    import numpy as np

    first = ValidationRow("s", "a", 0.75, np.array([9, 1, 1, 1, 1]))
    second = ValidationRow("s", "b", 0.25, np.array([9, 2, 2, 3, 3]))
    p = np.array([0.75, 0.125, 0.125])
    assert unigram_entropy([first, second]) == pytest.approx(float(-(p * np.log(p)).sum()))
