"""A data line that lies somewhere else now is the same data line; another one is refused, wherever it lies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from real_line import change_run, journal_summary, make_data_line, make_run, prepare, run_here, tensors_of

from nstrain.base.errors import ExitCode, Refusal
from nstrain.data.consumers import read_consumers
from nstrain.data.line import DataLine
from nstrain.line.paths import LinePaths
from nstrain.ops.check import check_line
from nstrain.settings.changes import Changes
from nstrain.settings.run import load_run

LAST_UPDATE = 26


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    line = make_data_line(tmp_path_factory.mktemp("data"), 2)
    prepare(line.work, 2)
    return line


@pytest.fixture(scope="module")
def through(prepared: DataLine, tmp_path_factory: pytest.TempPathFactory) -> LinePaths:
    paths = make_run(tmp_path_factory.mktemp("through") / "run", prepared)
    assert run_here(paths) == ExitCode.DONE
    return paths


def moved_to(paths: LinePaths, work: Path, **more: int) -> None:
    change_run(paths, data={"work": str(work), **more})


@pytest.mark.parametrize("stop_after", [1, 6, 13])
def test_a_line_goes_on_with_the_data_line_that_was_moved(
    prepared: DataLine, through: LinePaths, tmp_path: Path, stop_after: int
) -> None:
    before, now = tmp_path / "before", tmp_path / "another place" / "now"
    shutil.copytree(prepared.work, before)
    paths = make_run(tmp_path / "run", DataLine.open(before))
    assert run_here(paths, stop_after) == ExitCode.STOPPED
    now.parent.mkdir()
    before.rename(now)
    with pytest.raises(Refusal, match="is not a data line"):
        run_here(paths)
    moved_to(paths, now, ahead_cycles=3)
    settings = next(finding for finding in check_line(paths.root, quick=True) if finding.name == "settings")
    assert (settings.ok, settings.message) == (True, f"as trained up to update {stop_after}")
    if stop_after == 13:  # a cycle's end, and the data line is a copy of before that cycle was made
        for name in ("manifests", "cycles"):
            shutil.rmtree(now / name)
            (now / name).mkdir()
        state_json = now / "state.json"
        state_json.write_text(json.dumps(json.loads(state_json.read_text()) | {"prepared_cycles": 0}))
        lost = {finding.name: finding.message for finding in check_line(paths.root)}
        with pytest.raises(Refusal) as refused:
            run_here(paths)
        for text in (lost["data cycles"], lost["resume"], str(refused.value)):
            assert f"`nstrain data run-preparer --work '{now}' --until 1 --foreground`" in text
        prepare(now, 1)
        assert all(finding.ok for finding in check_line(paths.root, quick=True))
        prepare(now, 2)
    assert run_here(paths) == ExitCode.DONE
    assert journal_summary(paths) == journal_summary(through)
    assert tensors_of(paths, LAST_UPDATE) == tensors_of(through, LAST_UPDATE)
    assert next(c for c in read_consumers(now) if c.run == str(paths.root)).cycle == 3
    assert not before.exists(), "nothing is written where it was"
    state = json.loads((paths.checkpoint(LAST_UPDATE) / "state.json").read_text())
    assert Changes.from_state(state).applied == (), "no change of what is trained"
    assert load_run(paths.run_json).allow_changes == ()


def test_another_data_line_is_refused_before_a_row_is_trained(prepared: DataLine, tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", prepared)
    assert run_here(paths, 0) == ExitCode.STOPPED
    other = make_data_line(tmp_path / "other", 2, short_documents=True)
    prepare(other.work, 1)
    moved_to(paths, other.work)
    with pytest.raises(Refusal, match=r"data.work was .* and is now") as caught:
        run_here(paths)
    assert "held_out was" in str(caught.value)
