"""`status`: how far a line's copy on its tracker is, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from typing import Any

import pytest
from looked_at_lines import beat, page, record, supervise

from nstrain.line.paths import LinePaths
from nstrain.mirror.state import MirrorState, write_state
from nstrain.ops.status import status
from nstrain.ops.status_mirror import TrackerNow
from nstrain.record.journal import Journal
from nstrain.settings.run import METRICS_VERSION

URL = "https://wandb.example.org/lab/spikes/runs/r1"
STATE = MirrorState("wandb", None, "lab", "spikes", "r1", 1, url=URL, known=True)


@pytest.fixture
def shown(paths: LinePaths) -> LinePaths:
    """A line with a tracker, whose journal goes to update 12."""
    value = json.loads(paths.run_json.read_text())
    value["tracker"] = {"service": "wandb", "project": "spikes", "entity": "lab", "base_url": None}
    paths.run_json.write_text(json.dumps(value))
    record(paths, 12)
    return paths


def say(paths: LinePaths, **fields: Any) -> None:
    """wandb_run.json of now."""
    write_state(paths, dataclasses.replace(STATE, updated_at=time.time(), **fields))


def tracker(paths: LinePaths) -> TrackerNow:
    """What status says of it."""
    found = status(paths.root).tracker
    assert found is not None
    return found


def line_of(paths: LinePaths) -> str:
    """The page's text on it, on one line."""
    text = " ".join(page(status(paths.root)).split())
    return text.partition(" wandb ")[2]


def test_a_line_without_one(paths: LinePaths) -> None:
    say(paths)
    assert status(paths.root).tracker is None
    assert "wandb" not in page(status(paths.root))


def test_how_far_it_is(shown: LinePaths) -> None:
    assert tracker(shown) == TrackerNow("wandb", None, None, None, 13, 0, None, None, None)
    assert line_of(shown).startswith(f"nothing sent yet, 13 behind `nstrain mirror {shown.root}` sends the rest")
    supervise(shown, mirror_pid=os.getpid())
    say(shown, pushed_through=9, pid=os.getpid())
    beat(shown, os.getpid(), update=12)
    assert tracker(shown) == TrackerNow("wandb", URL, "r1", 9, 3, 0, None, None, os.getpid())
    assert line_of(shown).startswith(f"through update 9, 3 behind {URL}")
    assert "sends the rest" not in line_of(shown), "its mirror does"
    say(shown, pushed_through=12, pid=os.getpid())
    assert line_of(shown).startswith(f"through update 12 {URL}")
    say(shown, pushed_through=15, pid=os.getpid())
    assert tracker(shown).behind_updates == 0, "the journal is to catch up with what was replayed"
    say(shown, pushed_through=12, pid=os.getpid(), differences=2)
    assert "it has another row than the journal of 2 updates" in line_of(shown)


def test_what_is_wrong_and_since_when(shown: LinePaths) -> None:
    supervise(shown, mirror_pid=os.getpid())
    since = time.time() - 7300
    say(shown, pushed_through=9, pid=os.getpid(), failing_since=since, error="the service is away")
    assert (tracker(shown).failing_since, tracker(shown).error) == (since, "the service is away")
    assert f"through update 9, 3 behind {URL} failing for 2h01m: the service is away" in line_of(shown)
    supervise(shown, mirror_failures=4, mirror_failure="it was killed by SIGKILL")
    assert "its process failed 4 times in a row, the last: it was killed by SIGKILL" in line_of(shown)
    shown.wandb_run.write_text("{")
    assert "wandb_run.json" in (tracker(shown).error or "")
    assert f"`rm {shown.wandb_run}` begins a new run" in line_of(shown)


def test_another_run_than_the_one_that_is_to_be_says_nothing_of_how_far_that_is(shown: LinePaths) -> None:
    say(shown, pushed_through=12, differences=1, project="of before")
    assert (tracker(shown).pushed_through, tracker(shown).url, tracker(shown).differences) == (None, None, 0)
    say(shown, pushed_through=12, generation=1)
    with Journal.open(shown.journal, METRICS_VERSION) as journal:
        journal.begin_generation(8)
        assert tracker(shown).behind_updates == 0, "nothing of it is recorded yet"
        journal.commit(8, {"tokens": 1})
    assert (tracker(shown).pushed_through, tracker(shown).behind_updates) == (None, 9)
    say(shown, pushed_through=7, generation=2)
    assert (tracker(shown).pushed_through, tracker(shown).behind_updates) == (7, 1)


def test_the_journal_cannot_be_read(shown: LinePaths) -> None:
    say(shown, pushed_through=9)
    shown.journal.write_bytes(b"no database")
    assert tracker(shown).behind_updates is None
    assert line_of(shown).startswith(f"through update 9 {URL}")


def test_a_mirror_that_was_stopped_by_a_signal_is_named(shown: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nstrain.ops.status_life.is_stopped", lambda pid: pid == 4711)
    supervise(shown, mirror_pid=4711)
    assert status(shown.root).stopped_pids == (4711,)


def test_one_that_runs_without_a_supervisor_is_seen(shown: LinePaths) -> None:
    """`nstrain mirror RUN`."""
    say(shown, pid=os.getpid())
    assert tracker(shown).pid == os.getpid()
    assert "sends the rest" not in line_of(shown)
    say(shown, pid=2**22 + 1)
    assert tracker(shown).pid is None
