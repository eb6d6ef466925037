"""Checkpoints written in the background: in order, one at a time, and no error lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from nstrain.line.background import BackgroundWriter
from nstrain.line.checkpoint import newest_good
from nstrain.line.paths import LinePaths


def test_background_writes_in_order_one_at_a_time_and_calls_back_before_done(
    paths: LinePaths, make_checkpoint: Any
) -> None:
    seen: list[tuple[str, int, bool, bool]] = []

    def committed(path: Path, state: dict[str, Any]) -> None:
        named = paths.latest.read_text().strip() == path.name
        seen.append((path.name, state["update"], named, threading.current_thread() is threading.main_thread()))

    writer = BackgroundWriter(paths, committed)
    for update in (1, 2, 3):
        writer.submit(make_checkpoint(update))
        assert [update for _, update, _, _ in seen[: update - 1]] == list(range(1, update))
    writer.wait()
    assert not writer.busy
    assert seen == [(f"u0000000{update}", update, True, False) for update in (1, 2, 3)]
    assert newest_good(paths) == paths.checkpoint(3)


def test_submit_waits_for_the_write_before_and_poll_never_waits(paths: LinePaths, make_checkpoint: Any) -> None:
    go_on = threading.Event()
    order: list[str] = []

    def committed(path: Path, state: dict[str, Any]) -> None:
        assert go_on.wait(20)
        order.append(f"committed {state['update']}")

    writer = BackgroundWriter(paths, committed)
    writer.submit(make_checkpoint(1))
    writer.poll()
    assert writer.busy
    threading.Timer(0.1, go_on.set).start()
    writer.submit(make_checkpoint(2))
    order.append("submitted 2")
    writer.wait()
    assert order == ["committed 1", "submitted 2", "committed 2"] or order == [
        "committed 1",
        "committed 2",
        "submitted 2",
    ]


def test_the_writers_error_is_raised_as_it_is_and_once(paths: LinePaths, make_checkpoint: Any) -> None:
    trouble = OSError(5, "the disk is gone")

    def committed(path: Path, state: dict[str, Any]) -> None:
        if state["update"] == 1:
            raise trouble

    for collect in ("poll", "wait", "submit"):
        writer = BackgroundWriter(paths, committed)
        writer.submit(make_checkpoint(1))
        while writer.busy:
            pass
        with pytest.raises(OSError) as caught:
            writer.submit(make_checkpoint(2)) if collect == "submit" else getattr(writer, collect)()
        assert caught.value is trouble
        writer.poll()
        writer.submit(make_checkpoint(3))
        writer.wait()
        assert newest_good(paths) == paths.checkpoint(3)
