"""The preparer: how far it goes ahead, what it deletes, who may run, and what ends it."""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_helpers import (
    contents,
    make_line,
    manifest_of,
    prepare,
    prepared,
    prose_tree,
    source,
    start_preparer,
    write_tree,
)
from typer.testing import CliRunner

from nstrain.base.detach import start_in_background
from nstrain.base.disk import atomic_write_json, read_json
from nstrain.base.errors import DiskFull, Exhausted, ExitCode, NstrainError, Refusal
from nstrain.base.logs import ROTATE_BYTES, old_log
from nstrain.cli.data import app
from nstrain.data import cycles as cycles_module
from nstrain.data import entries as entries_module
from nstrain.data import opener_pool as opener_pool_module
from nstrain.data import preparer as preparer_module
from nstrain.data.consumers import Consumer, read_consumers, write_consumer
from nstrain.data.cycles import _still_needed, cycles_on_disk
from nstrain.data.line import DataLine
from nstrain.data.opened import entry_place
from nstrain.data.preparer import Preparer, PreparerStatus, preparer_lock, read_status, run_preparer
from nstrain.data.readers import ChangedFile
from nstrain.data.state import SourceState

CYCLES = 6
CYCLE_TOKENS = 1280
WAIT_S = 120.0


@pytest.fixture(scope="module")
def original(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> DataLine:
    base = tmp_path_factory.mktemp("original")
    tree = write_tree(base / "web", prose_tree(1, {"a": 150, "b": 70}, words=40))
    return make_line(base / "line", tokenizer, [source("web", tree, held_out=0.05)], CYCLE_TOKENS, CYCLES)


@pytest.fixture
def line(original: DataLine, tmp_path: Path) -> DataLine:
    shutil.copytree(original.work, tmp_path / "line")
    return DataLine.open(tmp_path / "line")


def until_waiting(line: DataLine, ahead: int = 1) -> list[PreparerStatus]:
    """Run a preparer here until it waits for a consumer or is done; its states."""
    seen: list[PreparerStatus] = []

    def stop() -> bool:
        assert len(seen) < 50 * CYCLES, "it prepares and deletes in circles"
        return bool(seen) and seen[-1].stage == "waiting_consumer"

    run_preparer(line.work, ahead, stop=stop, on_status=seen.append, workers=0)
    return seen


def at(line: DataLine, id: str, cycle: int, row: int = 0) -> None:
    write_consumer(line.work, id, cycle, row, (cycle - 1) * CYCLE_TOKENS + row * 32, Path("/run") / id)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def stage_of(line: DataLine, pid: int) -> str | None:
    status = read_status(line.work)
    return status.stage if status is not None and status.pid == pid else None


# ------------------------------------------------------------------ how far ahead, and what is deleted


def test_without_a_consumer_it_prepares_ahead_of_the_first_cycle_and_deletes_nothing(line: DataLine) -> None:
    states = until_waiting(line, ahead=2)
    assert cycles_on_disk(line) == [1, 2, 3]
    assert [(s.stage, s.cycle) for s in states if s.progress == 0] == [
        ("preparing", 1), ("preparing", 2), ("preparing", 3), ("waiting_consumer", 4), ("stopped", 4)
    ]  # fmt: skip


def test_it_keeps_the_cycle_in_use_and_so_many_ahead_and_deletes_those_behind(line: DataLine) -> None:
    at(line, "run", 1)
    until_waiting(line)
    assert cycles_on_disk(line) == [1, 2]
    at(line, "run", 1, row=9)
    until_waiting(line)
    assert cycles_on_disk(line) == [1, 2]
    at(line, "run", 2)
    until_waiting(line)
    assert cycles_on_disk(line) == [2, 3]
    at(line, "run", 5, row=3)
    until_waiting(line)
    assert cycles_on_disk(line) == [5, 6]
    assert sorted(p.name for p in (line.work / "manifests").iterdir()) == [f"{k:06d}.json" for k in range(1, 7)]


def test_a_cycle_is_deleted_only_once_every_consumer_is_past_it(line: DataLine) -> None:
    at(line, "slow", 2)
    at(line, "fast", 4)
    until_waiting(line)
    assert cycles_on_disk(line) == [2, 3, 4, 5]
    at(line, "slow", 4)
    until_waiting(line)
    assert cycles_on_disk(line) == [4, 5]


def test_a_deleted_cycle_comes_back_for_a_consumer_that_went_back(line: DataLine, original: DataLine) -> None:
    prepare(line)
    before = prepared(line)
    at(line, "run", 6)
    until_waiting(line)
    assert cycles_on_disk(line) == [6]
    at(line, "run", 3, row=2)
    states = until_waiting(line)
    assert [s.cycle for s in states if s.stage == "preparing" and s.progress == 0] == [3, 4]
    assert cycles_on_disk(line) == [3, 4, 6]
    gone = tuple(f"cycles/{k:06d}" for k in (1, 2, 5))
    assert prepared(line) == {name: data for name, data in before.items() if not name.startswith(gone)}
    after = [SourceState.from_json(manifest_of(line, cycle)["after"]["web"]) for cycle in (4, CYCLES)]
    opened = {entry_place(path) for path in (line.work / "open" / "web").iterdir()}
    assert opened <= {place for state in after for place in _still_needed(state)}, "files that were used up long ago"
    assert _still_needed(after[1]) <= opened, "the next new cycle has to open them again"


@pytest.mark.parametrize("workers", [0, 1])
def test_it_shows_that_it_opens_files_before_anything_is_written(
    line: DataLine, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Else it is taken for silent: nearly all of a cycle's time goes into its files."""
    monkeypatch.setattr(preparer_module, "SHOW_EVERY_S", 0.0)
    monkeypatch.setattr(entries_module, "TICK_TOKENS", 50)
    monkeypatch.setattr(opener_pool_module, "TASK_BYTES", 500)
    seen: list[PreparerStatus] = []
    run_preparer(line.work, until_cycle=1, on_status=seen.append, workers=workers)
    encoded = [s.encoded_tokens for s in seen if s.stage == "preparing" and s.progress == 0]
    assert len(encoded) > 4
    assert encoded == sorted(set(encoded)), "each status shows that it has got on"
    assert seen[-1].encoded_tokens == 0


def test_of_the_cycles_between_two_consumers_only_those_that_are_due_come_back(line: DataLine) -> None:
    prepare(line, 4)
    at(line, "run", 4)
    until_waiting(line)
    assert cycles_on_disk(line) == [4, 5]
    at(line, "joined", 1)
    for first, on_disk in ((1, [1, 2, 4, 5]), (2, [2, 3, 4, 5]), (4, [4, 5])):
        at(line, "joined", first)
        states = until_waiting(line)
        assert cycles_on_disk(line) == on_disk
        assert states[-1].cycle == (3 if first == 1 else 6)
    at(line, "run", CYCLES)
    at(line, "joined", 1)
    until_waiting(line)
    assert cycles_on_disk(line) == [1, 2, 4, 5, 6], "the schedule is prepared, but more is to be made again"


def test_a_cycle_that_cannot_be_made_again_holds_up_only_who_wants_it(line: DataLine, tmp_path: Path) -> None:
    """A line that joins late wants a cycle of which a file is gone: who is past it gets its own next cycle."""
    tree = shutil.copytree(line.source("web").root, tmp_path / "web")
    pinned = read_json(line.work / "line.json")
    pinned["sources"][0]["settings"]["path"] = str(tree)
    atomic_write_json(line.work / "line.json", pinned)
    prepare(line, 4)
    at(line, "leader", 4)
    until_waiting(line)
    (tree / manifest_of(line, 1)["sources"]["web"]["opened"][0]["open"][0]["path"]).unlink()
    at(line, "leader", 5)
    at(line, "late", 1)
    with pytest.raises(Refusal, match=r"cycle 1, .* by /run/late, .* cannot be made again: .*consumers/late\.json"):
        until_waiting(line)
    assert {4, 5, 6} <= set(cycles_on_disk(line))
    with pytest.raises(ChangedFile):
        run_preparer(line.work, until_cycle=6, workers=0)
    (line.work / "consumers" / "late.json").unlink()
    until_waiting(line)
    assert cycles_on_disk(line) == [5, 6]


def test_it_is_done_when_every_cycle_of_the_schedule_is_prepared(line: DataLine) -> None:
    at(line, "run", 5)
    seen: list[PreparerStatus] = []
    assert run_preparer(line.work, 1, on_status=seen.append, workers=0) == ExitCode.DONE
    assert (seen[-1].stage, seen[-1].cycle, seen[-1].progress) == ("done", CYCLES, 1.0)
    assert read_status(line.work) == seen[-1]
    assert cycles_on_disk(line) == [5, 6]
    assert run_preparer(line.work, 1, workers=0) == ExitCode.DONE


def test_until_a_cycle_it_prepares_whatever_the_consumers_do(line: DataLine) -> None:
    at(line, "run", 1)
    assert run_preparer(line.work, 1, until_cycle=4, workers=0) == ExitCode.DONE
    assert cycles_on_disk(line) == [1, 2, 3, 4]
    assert b'"prepared_cycles": 4' in (line.work / "state.json").read_bytes()


def test_it_follows_consumers_that_move_while_it_waits(line: DataLine) -> None:
    child = start_preparer(line.work)
    wait_for(lambda: stage_of(line, child.pid) == "waiting_consumer")
    for cycle in (1, 2, 4, CYCLES + 1):
        at(line, "run", cycle)
        wanted = list(range(cycle, min(cycle + 1, CYCLES) + 1))
        wait_for(lambda wanted=wanted: cycles_on_disk(line) == wanted)
    out, _ = child.communicate(timeout=WAIT_S)
    assert child.returncode == 0
    assert out.splitlines()[-1].startswith("preparer: done")
    assert sorted(p.name for p in (line.work / "cycles").iterdir()) == []


def test_consumers_are_read_back_and_damaged_ones_refused(line: DataLine) -> None:
    at(line, "b", 2, row=3)
    at(line, "a", 1)
    at(line, "a", 4)
    assert read_consumers(line.work) == [
        Consumer(id="a", run="/run/a", cycle=4, row=0, tokens=3 * CYCLE_TOKENS),
        Consumer(id="b", run="/run/b", cycle=2, row=3, tokens=CYCLE_TOKENS + 96),
    ]
    (line.work / "consumers" / "a.json").write_text("{}")
    with pytest.raises(Refusal, match=r"consumers/a.json: field 'id' is missing"):
        run_preparer(line.work, 1, workers=0)
    assert not cycles_on_disk(line)  # above all, nothing was deleted on a guess


# ------------------------------------------------------------------ who may run, and what ends it


def test_two_preparers_are_refused(line: DataLine) -> None:
    child = start_preparer(line.work)
    wait_for(lambda: stage_of(line, child.pid) == "waiting_consumer")
    before = contents(line.work)
    with pytest.raises(Refusal, match=f"the preparer of .* is held by process {child.pid}"):
        run_preparer(line.work, until_cycle=CYCLES, workers=0)
    assert contents(line.work) == before
    child.kill()
    child.communicate(timeout=WAIT_S)
    assert run_preparer(line.work, until_cycle=CYCLES, workers=0) == ExitCode.DONE  # a dead one holds nothing


def test_a_second_one_waits_for_an_orphan_that_is_about_to_go(line: DataLine) -> None:
    first = start_preparer(line.work)
    wait_for(lambda: stage_of(line, first.pid) == "waiting_consumer")
    second = start_preparer(line.work, "--ahead", "9")
    assert second.stderr is not None
    told = second.stderr.readline()
    assert told == f"waiting up to 60 s for the preparer of {line.work} (process {first.pid}) to end\n"
    time.sleep(0.3)
    assert second.poll() is None
    first.terminate()
    first.communicate(timeout=WAIT_S)
    second.communicate(timeout=WAIT_S)
    assert second.returncode == 0


LOOKS_OFTEN = """
import nstrain.base.logs
nstrain.base.logs.FOLLOW_S = 0.02
from nstrain.data.preparer import main
raise SystemExit(main())
"""


def test_in_the_background_it_bounds_its_log(line: DataLine, tmp_path: Path) -> None:
    output = tmp_path / "preparer.out"
    command = [sys.executable, "-c", LOOKS_OFTEN, str(line.work), "--workers", "0"]
    begun = start_in_background(command, output)
    assert begun.exit_code is None, begun.words
    wait_for(lambda: stage_of(line, begun.pid) == "waiting_consumer")
    os.truncate(output, ROTATE_BYTES + 1)
    wait_for(lambda: old_log(output).exists() and output.exists())
    os.kill(begun.pid, signal.SIGTERM)
    os.waitpid(begun.pid, 0)
    wait_for(lambda: "preparer: stopped" in output.read_text())
    assert output.stat().st_size < 1000
    assert old_log(output).stat().st_size > ROTATE_BYTES


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it(line: DataLine, number: int) -> None:
    child = start_preparer(line.work)
    wait_for(lambda: stage_of(line, child.pid) == "waiting_consumer")
    child.send_signal(number)
    child.communicate(timeout=WAIT_S)
    assert child.returncode == ExitCode.STOPPED
    assert stage_of(line, child.pid) == "stopped"


def test_the_end_of_its_parent_ends_it(line: DataLine) -> None:
    read_end, write_end = os.pipe()
    child = start_preparer(line.work, "--parent-fd", str(read_end), pass_fds=[read_end])
    os.close(read_end)
    wait_for(lambda: stage_of(line, child.pid) == "waiting_consumer")
    time.sleep(0.6)
    assert child.poll() is None
    os.close(write_end)
    child.communicate(timeout=WAIT_S)
    assert child.returncode == ExitCode.STOPPED
    assert stage_of(line, child.pid) == "stopped"


def test_it_stops_in_the_middle_of_a_cycle_and_leaves_no_half_of_it(line: DataLine) -> None:
    asked = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 4  # while the first cycle's files are opened

    assert run_preparer(line.work, stop=stop, workers=0) == ExitCode.STOPPED
    assert list((line.work / "cycles").iterdir()) == []
    assert list((line.work / "manifests").iterdir()) == []
    status = read_status(line.work)
    assert status is not None
    assert (status.stage, status.cycle) == ("stopped", 1)
    assert list((line.work / "open").rglob("*.tokens"))  # what was opened stays for the next time


def test_an_exhausted_source_ends_it_for_the_operator(tokenizer: Path, tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "web", prose_tree(1, {"a": 12}, words=40))
    line = make_line(tmp_path / "line", tokenizer, [source("web", tree, held_out=0.05)], 320, None)
    child = start_preparer(line.work, "--ahead", "99")
    _, err = child.communicate(timeout=WAIT_S)
    assert child.returncode == ExitCode.NEEDS_OPERATOR
    assert "source web runs out in cycle" in err
    assert "Traceback" not in err
    status = read_status(line.work)
    assert status is not None
    assert status.stage == "failed"
    assert status.error is not None
    assert status.error in err
    assert f"in cycle {status.cycle}:" in status.error
    with pytest.raises(Exhausted):
        run_preparer(line.work, 99, workers=0)

    # What it says is to be typed, as it stands.
    (command,) = re.findall(r"`nstrain data (extend [^`]*)`", status.error)
    assert CliRunner().invoke(app, shlex.split(command)).exit_code == ExitCode.DONE
    assert DataLine.open(line.work).cycle_count == status.cycle - 1
    assert run_preparer(line.work, 99, workers=0) == ExitCode.DONE


def test_an_unexpected_error_is_recorded_and_raised(line: DataLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cycles_module, "SourceDraw", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        run_preparer(line.work, workers=0)
    status = read_status(line.work)
    assert status is not None
    assert (status.stage, status.error) == ("failed", "RuntimeError: a bug")
    assert not preparer_lock(line.work).held_elsewhere()


def test_the_state_of_an_earlier_preparer_is_replaced_at_once(line: DataLine) -> None:
    run_preparer(line.work, until_cycle=1, workers=0)
    seen: list[PreparerStatus] = []
    Preparer(line.work, 1, until_cycle=2, on_status=seen.append, workers=0).run()
    assert (seen[0].stage, seen[0].cycle, seen[0].pid) == ("preparing", 2, os.getpid())
    assert 0 <= time.time() - seen[0].since < 60


def test_a_status_file_that_cannot_be_read_is_none(line: DataLine) -> None:
    assert read_status(line.work) is None
    for text in ("", "{}", "[1]", '{"pid": 1}'):
        (line.work / "preparer.json").write_text(text)
        assert read_status(line.work) is None


def test_what_is_no_data_line_is_refused(tmp_path: Path) -> None:
    child = start_preparer(tmp_path)
    _, err = child.communicate(timeout=WAIT_S)
    assert child.returncode == ExitCode.BAD_CONFIGURATION
    assert "is not a data line" in err
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ a full disk

LIMIT_BYTES = 2000


def test_it_waits_for_room_on_the_disk_and_goes_on_to_the_same_bytes(line: DataLine, original: DataLine) -> None:
    """A limit on the size of files stands for a full disk: the tokens of a cycle do not fit, its status does."""
    shutil.copytree(original.work, line.work.with_name("straight"))
    straight = DataLine.open(line.work.with_name("straight"))
    prepare(straight)
    assert len(prepared(straight)["cycles/000001/web.bin"]) > LIMIT_BYTES
    child = start_preparer(line.work, "--ahead", "99", limit_bytes=LIMIT_BYTES)
    wait_for(lambda: stage_of(line, child.pid) == "waiting_disk")
    status = read_status(line.work)
    assert status is not None
    assert status.error is not None
    assert "bytes are free there" in status.error
    assert status.cycle == 1
    assert not line.is_ready(1)
    time.sleep(0.5)
    assert child.poll() is None
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    child.communicate(timeout=WAIT_S)
    assert child.returncode == 0
    assert prepared(line) == prepared(straight)


def test_a_preparer_that_waits_for_the_disk_can_be_stopped(line: DataLine) -> None:
    child = start_preparer(line.work, "--ahead", "99", retry_s=60, limit_bytes=LIMIT_BYTES)
    wait_for(lambda: stage_of(line, child.pid) == "waiting_disk")
    child.terminate()
    child.communicate(timeout=10)
    assert child.returncode == ExitCode.STOPPED


def test_no_room_for_its_own_records_is_waited_for_too(line: DataLine, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 3
    real = preparer_module.atomic_write_json

    def full(path: Path, value: object, **options: bool) -> None:
        nonlocal failures
        if failures and path.name in ("state.json", "preparer.json"):  # nor to tell of it
            failures -= path.name == "state.json"
            raise DiskFull("no room")
        real(path, value, **options)

    monkeypatch.setattr(preparer_module, "DISK_RETRY_S", 0.01)
    monkeypatch.setattr(preparer_module, "POLL_S", 0.01)
    monkeypatch.setattr(preparer_module, "atomic_write_json", full)
    seen: list[PreparerStatus] = []
    assert run_preparer(line.work, until_cycle=2, on_status=seen.append, workers=0) == ExitCode.DONE
    assert failures == 0
    assert "waiting_disk" in [s.stage for s in seen]
    assert cycles_on_disk(line) == [1, 2]


def test_a_wait_for_the_disk_is_one_however_often_it_tries(line: DataLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try gets into the cycle and is shown to; `since` and `disk_full_since` are those of the first one's end."""
    from nstrain.data import preparer as preparer_module

    tries = 0
    real = preparer_module.prepare_cycle

    def full_at_first(*arguments: Any) -> Any:
        nonlocal tries
        if arguments[1] in (2, 3):
            tries += 1
            if tries in (1, 2, 3, 5):
                arguments[3](0.1 + 0.2 * (tries % 2))
                raise DiskFull("no room")
        return real(*arguments)

    monkeypatch.setattr(preparer_module, "DISK_RETRY_S", 0.05)
    monkeypatch.setattr(preparer_module, "POLL_S", 0.01)
    monkeypatch.setattr(preparer_module, "SHOW_EVERY_S", 0.0)
    monkeypatch.setattr(preparer_module, "prepare_cycle", full_at_first)
    seen: list[PreparerStatus] = []
    assert run_preparer(line.work, until_cycle=4, on_status=seen.append, workers=0) == ExitCode.DONE
    waits = [s for s in seen if s.stage == "waiting_disk"]
    assert [s.cycle for s in waits] == [2, 2, 2, 3]
    assert waits[0].since == waits[1].since == waits[2].since < waits[3].since
    assert all(s.disk_full_since == s.since for s in waits)
    assert [s.disk_full_tries for s in waits] == [1, 2, 3, 1], "a sign of life"
    for cycle, since in ((2, waits[0].since), (3, waits[3].since)):
        first = seen.index(waits[0] if cycle == 2 else waits[3])
        tried = [s for s in seen[first:] if s.cycle == cycle and s.stage == "preparing"]
        assert tried
        assert all(s.disk_full_since == since for s in tried), "until the cycle is finished it may be full again"
    assert {s.disk_full_since for s in seen if s.cycle in (1, 4)} == {None}


def test_the_lock_is_given_back_after_an_error(line: DataLine) -> None:
    (line.work / "tokenizer.json").unlink()
    with pytest.raises(NstrainError):
        run_preparer(line.work, workers=0)
    lock = preparer_lock(line.work)
    assert lock.try_acquire()
    lock.release()
