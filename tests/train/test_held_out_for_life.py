"""A line's readings are of the same held-out rows for life: neither their number nor their text changes unnoticed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from real_line import UNIT_TOKENS, change_run, make_data_line, make_run, prepare, run_here, state_of

from nstrain.base.errors import ExitCode, Refusal
from nstrain.data.line import DataLine
from nstrain.data.val import collect_held_out, held_out_digest
from nstrain.line.checkpoint import Checkpoint, load_checkpoint, write_checkpoint
from nstrain.line.paths import LinePaths
from nstrain.ops.check import check_line
from nstrain.ops.verify import verify_line

STOPPED = 4
"""The update after which the line was stopped."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a line that was stopped in its first cycle, with its data line."""
    root = tmp_path_factory.mktemp("stopped")
    data = make_data_line(root, 1)
    prepare(data.work, 1)
    assert run_here(make_run(root / "run", data), stop_after=STOPPED) == ExitCode.STOPPED
    return root


@pytest.fixture
def line(stopped: Path) -> LinePaths:
    """That line and its data line, which the test may change: put back after it."""
    kept = stopped.with_name(stopped.name + " kept")
    if not kept.exists():
        shutil.copytree(stopped, kept)
    shutil.rmtree(stopped)
    shutil.copytree(kept, stopped)
    return LinePaths(stopped / "run")


def data_of(line: LinePaths) -> DataLine:
    return DataLine.open(line.root.parent / "data")


def gather_anew(line: LinePaths, units: int | None) -> str:
    """The held-out text gathered again; its index's hash."""
    shutil.rmtree(data_of(line).work / "val")
    collect_held_out(data_of(line), None if units is None else units * UNIT_TOKENS)
    return held_out_digest(data_of(line))


def failed(line: LinePaths) -> tuple[dict[str, str], dict[str, str]]:
    """What `check` (its quick part) and `verify` find wrong, by name."""
    checked = {found.name: found.message for found in check_line(line.root, quick=True) if found.ok is False}
    return checked, {found.what: found.message for found in verify_line(line.root).verified if not found.ok}


def test_text_that_was_gathered_anew_is_refused_unless_it_is_the_same(line: LinePaths) -> None:
    before = held_out_digest(data_of(line))
    assert state_of(line, STOPPED)["held_out"] == before
    other = gather_anew(line, 40)
    assert other != before
    with pytest.raises(Refusal, match=f"held_out was '{before}' and is now '{other}'"):
        run_here(line)
    for found in failed(line):
        assert list(found) == ["settings"]
        assert "was gathered anew and is another" in found["settings"]
    assert gather_anew(line, None) == before
    assert failed(line) == ({}, {})
    assert run_here(line) == ExitCode.DONE


def test_another_text_can_be_meant(line: LinePaths) -> None:
    before, other = held_out_digest(data_of(line)), gather_anew(line, 40)
    change_run(line, allow_changes=["held_out"])
    assert failed(line) == ({}, {})
    assert run_here(line, stop_after=STOPPED + 1) == ExitCode.STOPPED
    state = state_of(line, STOPPED + 1)
    assert state["held_out"] == other
    (change,) = state["changes"]["applied"]
    assert (change["field"], change["update"]) == ("held_out", STOPPED)
    assert (change["before"], change["after"]) == (before, other)
    gather_anew(line, 50)
    with pytest.raises(Refusal, match="was used at update 4 and allows no second change"):
        run_here(line)


def test_the_number_of_rows_is_fixed_and_when_they_are_read_is_free(line: LinePaths) -> None:
    change_run(line, validation={"every_updates": 2, "rows_per_source": 3})
    assert run_here(line, stop_after=STOPPED + 1) == ExitCode.STOPPED
    change_run(line, validation={"every_updates": 2, "rows_per_source": 3, "long_rows_per_source": 0})
    with pytest.raises(Refusal, match=r"validation.long_rows_per_source was 4 and is now 0"):
        run_here(line)
    assert list(failed(line)[0]) == ["settings"]
    change_run(line, allow_changes=["validation"])
    assert run_here(line, stop_after=STOPPED + 2) == ExitCode.STOPPED


def test_a_checkpoint_of_before_the_text_was_recorded_goes_on_and_records_it(
    line: LinePaths, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = load_checkpoint(line.checkpoint(STOPPED))
    state = {name: value for name, value in checkpoint.state.items() if name != "held_out"}
    write_checkpoint(line, Checkpoint(state, checkpoint.tensors))
    assert failed(line) == ({}, {})
    assert run_here(line, stop_after=STOPPED + 1) == ExitCode.STOPPED
    assert state_of(line, STOPPED + 1)["held_out"] == held_out_digest(data_of(line))
    assert "changed on purpose" not in capsys.readouterr().out
