"""What a line's checkpoints are and will take, from state.json alone."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from nstrain.line.checkpoint import write_checkpoint
from nstrain.line.listing import DiskForecast, Keeping, ListedCheckpoint, disk_forecast, forecast_of, list_checkpoints
from nstrain.line.paths import LinePaths
from nstrain.line.retention import set_aside_later


def end_of(cycle: int) -> dict[str, Any]:
    """The position after a data cycle."""
    previous = {"cycle": cycle, "row_tokens": 256, "manifest_sha256": "a", "order_digest": "b"}
    return {"cycle": cycle + 1, "row": 0, "row_tokens": 256, "manifest_sha256": None, "order_digest": None} | {
        "previous": previous
    }


def start() -> dict[str, Any]:
    return {**end_of(0), "previous": None}


def test_a_list_in_order_of_the_updates(paths: LinePaths, make_checkpoint: Any) -> None:
    assert list_checkpoints(paths) == []
    write_checkpoint(paths, make_checkpoint(0, kept=True, position=start(), reason="start"))
    for update in (9, 10, 100):
        write_checkpoint(paths, make_checkpoint(update, kept=update == 10, position=end_of(1) if update == 10 else {}))
    (paths.checkpoints / "u00000200.partial").mkdir()
    (paths.checkpoints / "notes.txt").write_text("")
    listed = list_checkpoints(paths)
    assert [item.update for item in listed] == [0, 9, 10, 100]
    assert [item.latest for item in listed] == [False, False, False, True]
    assert [item.kept for item in listed] == [True, False, True, False]
    assert [item.reason for item in listed] == ["start", "rolling", "cycle_end", "rolling"]
    assert [item.after_cycle for item in listed] == [None, None, 1, None]
    assert [item.cycle for item in listed] == [1, None, 2, None]
    assert [item.tokens for item in listed] == [0, 9 * 512, 10 * 512, 100 * 512]
    files = os.listdir(paths.checkpoint(10))
    assert listed[2].bytes == sum((paths.checkpoint(10) / name).stat().st_size for name in files)
    weights = (paths.checkpoint(10) / "weights.safetensors").stat().st_size
    assert listed[2].bytes_with_average == listed[2].bytes + weights
    (paths.checkpoint(10) / "ema.safetensors").write_bytes(bytes(weights))
    (again,) = (item for item in list_checkpoints(paths) if item.update == 10)
    assert again.bytes == again.bytes_with_average == listed[2].bytes_with_average
    (paths.checkpoint(10) / "ema.safetensors").unlink()
    set_aside_later(paths, 10)
    later = list_checkpoints(paths)
    assert [(item.name, item.set_aside, item.latest) for item in later[-2:]] == [
        ("u00000010", False, True),
        ("u00000100", True, False),
    ]
    write_checkpoint(paths, make_checkpoint(100))
    assert [(item.set_aside, item.latest) for item in list_checkpoints(paths)[-2:]] == [(False, True), (True, False)]


def test_what_cannot_be_read_is_listed_as_such(paths: LinePaths, make_checkpoint: Any) -> None:
    for update, text in ((10, "{"), (20, "[]"), (30, '{"position": 3}'), (40, None)):
        state = write_checkpoint(paths, make_checkpoint(update)) / "state.json"
        state.unlink() if text is None else state.write_text(text)
    (paths.checkpoint(20) / "weights.safetensors").unlink()
    assert [(item.update, item.kept, item.cycle, item.after_cycle) for item in list_checkpoints(paths)] == [
        (update, None, None, None) for update in (10, 20, 30, 40)
    ]


def test_numpy_is_not_needed(paths: LinePaths) -> None:
    """`nstrain status` answers at once."""
    code = "import sys, nstrain.line.listing; assert not {'numpy', 'pydantic', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("kept", "rolling", "keep_last", "cycles", "soon", "end"),
    [
        # A new line: its start, the rolling ones, one kept a cycle. While the last one is written nothing else is.
        (0, 0, 2, 3, 1 + 2 + 1, 1 + 2 + 3),
        (0, 0, 1, 1, 3, 3),
        # Begun: the start is there; so are rolling ones, whose places are taken again.
        (1, 0, 2, 3, 2 + 1, 2 + 3),
        (1, 1, 2, 3, 1 + 1, 1 + 3),
        (1, 2, 2, 3, 1, 3),
        (3, 2, 2, 1, 1, 1),
        # More rolling ones than may be (keep_last was lowered): they go with the next commit, not before it.
        (1, 5, 2, 3, 1, 3),
        # The schedule is done: nothing more is written.
        (4, 2, 2, 0, 0, 0),
        # Open-ended.
        (7, 2, 2, None, 1, None),
        (0, 0, 2, None, 4, None),
    ],
)
def test_forecast_in_checkpoints(
    kept: int, rolling: int, keep_last: int, cycles: int | None, soon: int, end: int | None
) -> None:
    found = disk_forecast(100, kept, rolling, keep_last, cycles, free_bytes=100 * soon)
    assert found.next_bytes == 100 * soon
    assert found.end_bytes == (None if end is None else 100 * end)
    assert found.fits_next
    assert not disk_forecast(100, kept, rolling, keep_last, cycles, 100 * soon - 1).fits_next or soon == 0
    assert found.fits_end == (end is None or end <= soon)
    assert found.kept_to_come == (None if cycles is None else cycles + (kept == rolling == 0))


def simulated_peak(keep_last: int, cycles: int, rolling_a_cycle: int) -> int:
    """The most checkpoints that lie on disk at once, by writing them all: each is there before an old one goes."""
    kept, rolling, peak = 1, 0, 1
    for _ in range(cycles):
        for _ in range(rolling_a_cycle):
            peak = max(peak, kept + rolling + 1)
            rolling = min(rolling + 1, keep_last)
        peak = max(peak, kept + rolling + 1)
        kept += 1
    return peak


@pytest.mark.parametrize("keep_last", [1, 2, 5])
@pytest.mark.parametrize("cycles", [1, 2, 7])
def test_forecast_is_the_peak_of_a_line_that_saves_often(keep_last: int, cycles: int) -> None:
    found = disk_forecast(1, 0, 0, keep_last, cycles, 0)
    assert found.end_bytes == simulated_peak(keep_last, cycles, rolling_a_cycle=20)
    assert found.end_bytes >= simulated_peak(keep_last, cycles, rolling_a_cycle=1)


def test_cycles_that_fit() -> None:
    assert [disk_forecast(10, 1, 2, 2, None, free).cycles_that_fit for free in (9, 10, 35)] == [0, 1, 3]
    assert disk_forecast(10, 1, 0, 2, None, 35).cycles_that_fit == 1
    assert disk_forecast(10, 0, 0, 2, None, 35).cycles_that_fit == 0
    assert disk_forecast(0, 0, 0, 2, 3, 35).fits_end, "nothing is known yet"


def listed(update: int, **fields: Any) -> ListedCheckpoint:
    values: dict[str, Any] = {
        "name": f"u{update:08d}", "update": update, "bytes": 100, "bytes_with_average": 140,
        "latest": False, "set_aside": False, "kept": False,
        "reason": "rolling", "tokens": 0, "cycle": 1, "after_cycle": None, "written_at": 0.0,
    }  # fmt: skip
    return ListedCheckpoint(**{**values, **fields})


def test_forecast_of_a_line() -> None:
    checkpoints = [
        listed(0, kept=True, reason="start"),
        listed(10, kept=True, cycle=2, after_cycle=1, reason="cycle_end"),
        listed(15, kept=None, cycle=None, reason=None),
        listed(25, cycle=3),
        listed(30, cycle=3, latest=True, bytes=110, bytes_with_average=150),
        listed(40, cycle=4, set_aside=True, bytes=999),
    ]
    # The end of cycle 2 was thinned: where the line stands is what `latest` says.
    found = forecast_of(checkpoints, Keeping(2, with_average=False), cycle_count=5, checkpoint_bytes=7, free_bytes=1000)
    assert found == DiskForecast(
        checkpoint_bytes=110, kept=3, rolling=2, kept_to_come=3, next_bytes=110, end_bytes=330, free_bytes=1000,
        cycles_that_fit=9,
    )  # fmt: skip
    later = forecast_of(checkpoints, Keeping(2, with_average=True), cycle_count=5, checkpoint_bytes=7, free_bytes=1000)
    assert (later.checkpoint_bytes, later.next_bytes, later.end_bytes) == (150, 150, 450), "an average to come"
    new = forecast_of([], Keeping(2, with_average=True), cycle_count=5, checkpoint_bytes=7, free_bytes=1000)
    assert (new.checkpoint_bytes, new.kept_to_come, new.end_bytes) == (7, 6, 7 * 8)
