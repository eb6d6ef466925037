"""Whole lines that keep a moving average: in checkpoints once it has begun, and the same bits however often resumed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from real_line import (
    change_run,
    journal_summary,
    last_update,
    make_data_line,
    make_run,
    prepare,
    rows_of,
    run_here,
    tensors_of,
)

from nstrain.base.errors import ExitCode, Refusal
from nstrain.data.line import DataLine
from nstrain.line.paths import LinePaths

LAST_UPDATE = 26
BEGINS = 6
"""Updates of 160 tokens: the first that ends at 960 or beyond."""
EMA = {"horizon_tokens": 800, "from_tokens": 900}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    line = make_data_line(tmp_path_factory.mktemp("data"), 2)
    prepare(line.work, 2)
    return line


@pytest.fixture(scope="module")
def through(data: DataLine, tmp_path_factory: pytest.TempPathFactory) -> LinePaths:
    paths = make_run(tmp_path_factory.mktemp("through") / "run", data, ema=EMA)
    assert run_here(paths) == ExitCode.DONE
    return paths


def kinds(paths: LinePaths, update: int) -> set[str]:
    return {kind for kind, _ in tensors_of(paths, update)}


def test_stopped_around_its_beginning_it_has_the_same_bits(data: DataLine, through: LinePaths, tmp_path: Path) -> None:
    line = make_run(tmp_path / "run", data, ema=EMA)
    for stop, has_average in ((BEGINS - 1, False), (BEGINS, True), (15, True)):
        assert run_here(line, stop_after=stop) == ExitCode.STOPPED
        assert ("ema" in kinds(line, stop)) == has_average
    ours = tensors_of(line, BEGINS) if BEGINS in line.checkpoint_updates() else None
    assert run_here(line) == ExitCode.DONE
    assert last_update(line) == LAST_UPDATE
    assert journal_summary(line) == journal_summary(through)
    assert tensors_of(line, LAST_UPDATE) == tensors_of(through, LAST_UPDATE)
    if ours is not None:
        names = {name for kind, name in ours if kind == "ema"}
        assert all(ours["ema", name] == ours["weights", name] for name in names), "it begins as a copy"


def test_a_skip_where_it_begins_puts_it_off(data: DataLine, tmp_path: Path) -> None:
    line = make_run(tmp_path / "run", data, ema=EMA)
    first = 3 * (BEGINS - 1)  # five rows are three micro-batches
    assert run_here(line, BEGINS, lambda n: n == first) == ExitCode.STOPPED
    assert "ema" not in kinds(line, BEGINS)
    assert run_here(line, BEGINS + 1) == ExitCode.STOPPED
    found = tensors_of(line, BEGINS + 1)
    assert all(found["ema", name] == bits for (kind, name), bits in found.items() if kind == "weights")


def test_it_is_validated_once_it_has_begun_and_changes_nothing(
    data: DataLine, through: LinePaths, tmp_path: Path
) -> None:
    plain = make_run(tmp_path / "plain", data)
    assert run_here(plain) == ExitCode.DONE
    without = tensors_of(plain, LAST_UPDATE)
    assert {key: bits for key, bits in tensors_of(through, LAST_UPDATE).items() if key[0] != "ema"} == without
    ours, theirs = rows_of(through), rows_of(plain)
    for row, other in zip(ours, theirs, strict=True):
        added = {name: value for name, value in row.items() if re.match("ema/", name)}
        assert {name: value for name, value in row.items() if name not in added} == other
        validated = "val_32/mix" in row and row["update"] >= BEGINS
        assert ("ema/val_32/mix" in added) == validated
    assert sum("ema/val_32/mix" in row for row in ours) >= 3


def test_one_that_is_to_begin_later_on_purpose_begins_anew(data: DataLine, tmp_path: Path) -> None:
    """Until then it is in no checkpoint and in no row; then it is a copy, and not the old one going on."""
    line = make_run(tmp_path / "run", data, ema=EMA)
    assert run_here(line, stop_after=BEGINS + 2) == ExitCode.STOPPED
    later = BEGINS + 5
    change_run(line, ema={**EMA, "from_tokens": rows_of(line)[1]["tokens"] * later}, allow_changes=["ema"])
    assert run_here(line, stop_after=later - 1) == ExitCode.STOPPED
    assert "ema" not in kinds(line, later - 1)
    assert not [name for row in rows_of(line)[BEGINS + 3 :] for name in row if name.startswith("ema/")]
    assert run_here(line, stop_after=later) == ExitCode.STOPPED
    found = tensors_of(line, later)
    assert all(found["ema", name] == bits for (kind, name), bits in found.items() if kind == "weights")


def test_a_line_that_does_not_keep_it_any_more_says_so(data: DataLine, tmp_path: Path) -> None:
    line = make_run(tmp_path / "run", data, ema=EMA)
    assert run_here(line, stop_after=10) == ExitCode.STOPPED
    change_run(line, ema=None)
    with pytest.raises(Refusal, match="ema"):
        run_here(line)
    change_run(line, allow_changes=["ema"])
    assert run_here(line, stop_after=12) == ExitCode.STOPPED
    assert "ema" not in kinds(line, 12)
