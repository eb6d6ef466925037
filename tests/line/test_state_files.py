"""Heartbeat, STOP and supervisor.json."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from nstrain.base.errors import Refusal
from nstrain.base.process import identify, this_process
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import (
    Heartbeat,
    SupervisorState,
    clear_stop,
    read_heartbeat,
    read_stop,
    read_supervisor,
    request_stop,
    stop_requested,
    write_heartbeat,
    write_supervisor,
)

BEAT = Heartbeat(
    time=1.5, pid=7, stage="waiting_data", update=3, tokens=1536, tokens_total=10**12, loss=2.25, tokens_per_s=100.0,
    learning_rate=1e-3, cycle=2, cycle_progress=0.5, eta_s=60.0, checkpoint="u00000003", waiting_for="cycle 3",
    waiting_since=1.0,
)  # fmt: skip


def test_heartbeat_comes_back_as_written(paths: LinePaths) -> None:
    write_heartbeat(paths, BEAT)
    assert read_heartbeat(paths) == BEAT
    bare = Heartbeat(time=2.0, pid=7, stage="starting", update=0, tokens=0)
    write_heartbeat(paths, bare)
    assert read_heartbeat(paths) == bare
    assert sorted(os.listdir(paths.root)) == ["heartbeat"]


def test_heartbeat_has_exactly_the_agreed_fields(paths: LinePaths) -> None:
    write_heartbeat(paths, BEAT)
    agreed = (
        "time pid stage update tokens tokens_total loss tokens_per_s learning_rate cycle cycle_progress eta_s "
        "checkpoint waiting_for waiting_since budget_s gpu_others slow_saving"
    )
    assert list(json.loads(paths.heartbeat.read_text())) == agreed.split()


def test_a_loss_that_is_not_finite_does_not_stop_the_heartbeat(paths: LinePaths) -> None:
    for loss in (float("nan"), float("inf"), float("-inf")):
        write_heartbeat(paths, dataclasses.replace(BEAT, loss=loss))
        assert read_heartbeat(paths) == dataclasses.replace(BEAT, loss=None)


def damaged_heartbeats() -> list[bytes]:
    whole = json.dumps(dataclasses.asdict(BEAT)).encode()
    fields = dataclasses.asdict(BEAT)

    def other(**changed: object) -> bytes:
        return json.dumps({**fields, **changed}).encode()

    without = {name: value for name, value in fields.items() if name != "tokens"}
    return [
        b"", whole[:20], b"\xff\xfe", b"[]", b"null", json.dumps(without).encode(), other(stage="dreaming"),
        other(stage=[]), other(update="3"), other(update=True), other(loss="2.25"), other(surprise=1), other(pid=None),
    ]  # fmt: skip


@pytest.mark.parametrize("text", damaged_heartbeats())
def test_a_heartbeat_that_is_not_understood_is_none(paths: LinePaths, text: bytes) -> None:
    paths.heartbeat.write_bytes(text)
    assert read_heartbeat(paths) is None


def test_no_heartbeat_is_none(paths: LinePaths) -> None:
    assert read_heartbeat(paths) is None


def test_stop_is_asked_once_and_taken_away(paths: LinePaths) -> None:
    assert not stop_requested(paths)
    assert read_stop(paths) is None
    clear_stop(paths)
    request_stop(paths)
    assert stop_requested(paths)
    first = read_stop(paths)
    assert first is not None
    assert first.by_pid == os.getpid()
    request_stop(paths)
    assert read_stop(paths) == first
    assert sorted(os.listdir(paths.root)) == ["STOP"]
    request_stop(paths, at_cycle_end=3)
    assert read_stop(paths) == first, "at once stays at once"
    clear_stop(paths)
    assert not stop_requested(paths)
    paths.stop.mkdir()  # not as one asks, but no trainer may die of it, again and again
    assert stop_requested(paths)
    clear_stop(paths)
    assert not stop_requested(paths)


def test_a_stop_at_a_cycles_end_is_none_before_it_and_can_be_replaced(paths: LinePaths) -> None:
    for cycle in (3, 5):
        request_stop(paths, at_cycle_end=cycle)
        request = read_stop(paths)
        assert request is not None
        assert request.at_cycle_end == cycle
        assert not stop_requested(paths)
    request_stop(paths)
    assert stop_requested(paths)


@pytest.mark.parametrize("text", ["", "please", "{}", "[1]", '{"requested_at": 1}'])
def test_a_stop_file_made_by_hand_counts(paths: LinePaths, text: str) -> None:
    paths.stop.write_text(text)
    assert stop_requested(paths)
    stop = read_stop(paths)
    assert stop is not None
    assert stop.by_pid is None


def test_supervisor_state_comes_back_and_has_the_agreed_keys(paths: LinePaths) -> None:
    assert read_supervisor(paths) is None
    state = SupervisorState(this_process(), started_at=1.0, launches=2, trainer_pid=11, preparer_pid=12)
    write_supervisor(paths, state)
    assert read_supervisor(paths) == state
    value = json.loads(paths.supervisor_json.read_text())
    assert (value["pid"], value["trainer_pid"], value["preparer_pid"]) == (os.getpid(), 11, 12)


def test_only_the_very_process_that_supervises_counts_as_running() -> None:
    ours = SupervisorState(this_process(), started_at=1.0)
    assert ours.running()
    assert not dataclasses.replace(ours, outcome="stopped", reason="asked to").running()
    reused = dataclasses.replace(this_process(), start_ticks=this_process().start_ticks - 1)
    assert not dataclasses.replace(ours, supervisor=reused).running()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify(child.pid)
    assert identity is not None
    theirs = SupervisorState(identity, started_at=1.0)
    assert theirs.running()
    child.kill()
    child.wait()
    assert not theirs.running()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": 3, "supervisor": 3}'])
def test_a_damaged_supervisor_state_is_refused_by_name(paths: LinePaths, text: str) -> None:
    paths.supervisor_json.write_text(text)
    with pytest.raises(Refusal, match=r"supervisor\.json"):
        read_supervisor(paths)
