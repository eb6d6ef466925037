"""wandb_run.json: read back as written; what is unknown or damaged is refused with a remedy."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from nstrain.base.errors import Refusal
from nstrain.line.paths import LinePaths
from nstrain.mirror.state import ClientDirectory, MirrorState, StateFile, SupersededRun, read_state, write_state

STATE = MirrorState(
    service="wandb",
    base_url=None,
    entity="me",
    project="neurons",
    run_id="ab12",
    generation=2,
    url="https://tracker/ab12",
    known=True,
    pushed_through=7,
    verified_through=None,
    failing_since=1.8e9,
    error="away",
    directories=(ClientDirectory("wandb/run-1", 12, False),),
    superseded=(SupersededRun("cd34", 1, "a hole at update 3", 1.7e9, True),),
)


def test_it_is_read_back_as_written(tmp_path: Path) -> None:
    paths = LinePaths(tmp_path)
    assert read_state(paths) is None
    write_state(paths, STATE)
    assert read_state(paths) == STATE


def test_every_field_has_a_type_that_is_checked() -> None:
    from nstrain.mirror import state

    for kind in (MirrorState, ClientDirectory, SupersededRun):
        assert [field.name for field in dataclasses.fields(kind)] == list(state._KINDS[kind])


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"format": 2}, "expected format 1, found 2"),
        ({"run_id": None}, "field 'run_id': expected str, found None"),
        ({"generation": True}, "field 'generation': expected int, found True"),
        ({"known": 1}, "field 'known': expected bool, found 1"),
        ({"pushed_through": 1.5}, "field 'pushed_through': expected int or null, found 1.5"),
        ({"updated_at": math.inf}, "Infinity is no JSON number"),
        ({"more": 1}, "expected the fields service, base_url"),
        ({"directories": [{"path": "wandb/x", "pid": 1}]}, "expected the fields path, pid, clean"),
        ({"superseded": {}}, "field 'superseded': expected list"),
    ],
)
def test_what_it_does_not_know_is_refused(tmp_path: Path, change: dict[str, Any], found: str) -> None:
    paths = LinePaths(tmp_path)
    write_state(paths, STATE)
    paths.wandb_run.write_text(json.dumps({**json.loads(paths.wandb_run.read_text()), **change}))
    with pytest.raises(Refusal) as refused:
        read_state(paths)
    assert found in str(refused.value)
    assert f"rm {paths.wandb_run}` begins a new run on the service" in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}'])
def test_what_is_no_such_file_is_refused(tmp_path: Path, text: str) -> None:
    paths = LinePaths(tmp_path)
    paths.wandb_run.write_text(text)
    with pytest.raises(Refusal, match="begins a new run"):
        StateFile(paths)


def test_notes_are_written_at_a_beat_and_what_is_kept_at_once(tmp_path: Path) -> None:
    paths, now = LinePaths(tmp_path), [100.0]
    file = StateFile(paths, lambda: now[0])
    file.begin(STATE)

    def on_disk() -> MirrorState:
        found = read_state(paths)
        assert found is not None
        return found

    file.note(pushed_through=8)
    file.beat()
    assert on_disk().pushed_through == 7
    file.keep(pid=5)
    assert (on_disk().pushed_through, on_disk().pid) == (8, 5)
    now[0] += file.BEAT_S
    file.note(pushed_through=9)
    file.beat()
    assert (on_disk().pushed_through, on_disk().updated_at) == (9, now[0])
    now[0] -= 3600  # a clock that was set back
    file.note(pushed_through=10)
    file.beat()
    assert (on_disk().pushed_through, on_disk().updated_at) == (10, now[0])
