"""The mirror as a process, and as a command."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_tracker import FakeClock, FakeService, FakeTracker
from mirror_lines import Line, copier, fast_directory
from mirror_process import FileService
from run_json import changed, settings
from typer.testing import CliRunner, Result

import nstrain
from nstrain.base.disk import FileLock
from nstrain.base.errors import ExitCode, Refusal
from nstrain.cli.main import app
from nstrain.line.paths import LinePaths
from nstrain.mirror import opening
from nstrain.mirror.clock import MirrorPace
from nstrain.mirror.comparing import differing
from nstrain.mirror.contract import ServiceAway
from nstrain.mirror.state import read_state
from nstrain.mirror.whole import send_and_compare
from nstrain.settings.run import save_run

HERE = Path(__file__).parent


@pytest.fixture
def line() -> Iterator[Line]:
    with fast_directory() as directory:
        (directory / "service").mkdir()
        yield Line(directory / "trunk")


class Mirror:
    """The process, as the supervisor starts it."""

    def __init__(self, paths: LinePaths) -> None:
        read_end, self._write_end = os.pipe()
        self.log = paths.run_log
        path = os.pathsep.join(map(str, (Path(nstrain.__file__).parents[1], HERE)))
        command = [sys.executable, str(HERE / "mirror_process.py"), str(paths.root.parent / "service")]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, str(paths.root), "--parent-fd", str(read_end)],
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[read_end],
                env={**os.environ, "PYTHONPATH": path},
            )
        os.close(read_end)

    def parent_dies(self) -> None:
        os.close(self._write_end)
        self._write_end = -1

    def end(self) -> int:
        code = self.process.wait(30)
        if self._write_end >= 0:
            os.close(self._write_end)
        return code


def until(met: Callable[[], object], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not met():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.02)


def verified(paths: LinePaths) -> int | None:
    state = read_state(paths)
    return None if state is None else state.verified_through


def assert_copied(line: Line) -> None:
    state = read_state(line.paths)
    assert state is not None
    service, rows = FileService(line.paths.root.parent / "service"), line.rows()
    copied = service.runs[state.run_id].rows
    assert copied.keys() == rows.keys()
    assert [update for update, row in rows.items() if differing(row, copied[update])] == []


def test_the_process_copies_until_it_is_asked_to_end_or_its_parent_dies(line: Line) -> None:
    line.train(5)
    first = Mirror(line.paths)
    until(lambda: verified(line.paths) == 4 or line.paths.wandb_run.exists())
    state = read_state(line.paths)
    assert state is not None
    assert state.pid in (None, first.process.pid)
    second = Mirror(line.paths)
    until(lambda: f"mirror: process {first.process.pid} copies the journal now; waiting" in first.log.read_text())
    line.train(3)
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == ExitCode.DONE
    assert_copied(line)

    until(lambda: (found := read_state(line.paths)) is not None and found.pid == second.process.pid)
    line.train(2)
    second.parent_dies()
    assert second.end() == ExitCode.DONE
    assert_copied(line)
    assert (verified(line.paths), len(list((line.paths.root.parent / "service").iterdir()))) == (9, 1)
    assert all(text.startswith("mirror: ") for text in line.paths.run_log.read_text().splitlines())


def test_what_ends_the_process_is_told_and_kept(line: Line) -> None:
    line.train(3)
    line.paths.wandb_run.write_text("{")
    damaged = Mirror(line.paths)
    assert damaged.end() == ExitCode.BAD_CONFIGURATION
    assert "begins a new run on the service" in line.paths.run_log.read_text()

    line.paths.wandb_run.unlink()
    (line.paths.root.parent / "service" / "x.jsonl").write_text("{}\n")  # which the service's own code breaks at
    broken = Mirror(line.paths)
    assert broken.end() == ExitCode.FAILED
    *trace, last = line.paths.run_log.read_text().splitlines()
    assert last == "mirror: failed: KeyError: 'nstrain'"
    assert all(text.startswith("mirror: ") for text in trace)


@pytest.mark.slow
def test_real_kills_at_any_moment(line: Line) -> None:
    draw = random.Random(5)
    line.train(2)
    for number in range(25):
        mirror = Mirror(line.paths)
        for _ in range(draw.randrange(4)):
            line.train(draw.randrange(1, 30))
            time.sleep(draw.uniform(0, 0.2))
        if number % 5 == 4:
            line.roll_back(draw.randrange(max(line.rows())))
        time.sleep(draw.uniform(0, 0.5))
        mirror.process.kill()
        assert mirror.end() == -signal.SIGKILL, line.paths.run_log.read_text()
    last = Mirror(line.paths)
    until(lambda: verified(line.paths) == max(line.rows()), 60)
    last.process.terminate()
    assert last.end() == ExitCode.DONE
    assert_copied(line)
    state = read_state(line.paths)
    assert state is not None
    assert state.generation == 6
    replaced = [run.generation for run in state.superseded]
    assert replaced == sorted(set(replaced))


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeService:
    """The service that the command finds, in this process."""
    found = FakeService(FakeClock())
    monkeypatch.setattr(opening, "make_tracker", lambda settings: FakeTracker(found))
    return found


def command(line: Line, *options: str) -> Result:
    return CliRunner().invoke(app, ["mirror", str(line.paths.root), *options], catch_exceptions=False)


def report(line: Line) -> tuple[int, dict[str, Any]]:
    ran = command(line, "--json")
    return ran.exit_code, json.loads(ran.stdout)


def test_the_command_sends_what_is_missing_and_compares_every_row(line: Line, service: FakeService) -> None:
    line.train(5)
    code, found = report(line)
    run_id = found["run_id"]
    assert (code, found) == (0, {
        "run_id": run_id, "url": f"https://tracker/{run_id}", "generation": 1, "updates": 5, "sent": 5,
        "different": 0, "differences": [], "beyond": 0, "same": True,
    })  # fmt: skip
    line.train(2)
    printed = command(line).stdout
    assert f"trunk, generation 1: https://tracker/{run_id}" in printed
    assert [words for row in printed.splitlines() if (words := row.replace("│", " ").split())[:1] == ["sent"]] == [
        ["sent", "now", "2"]
    ]

    service.alter(run_id, 2, skipped=1)  # long after it was compared
    code, found = report(line)
    assert (code, found["different"], found["differences"]) == (1, 1, [[2, ["skipped"]]])
    state = read_state(line.paths)
    assert state is not None
    assert (state.differences, state.verified_through, state.pid) == (1, 6, None)
    assert "update 2 differs in skipped" in command(line).stdout
    assert service.wrongs == []


def test_a_row_that_was_lost_after_it_was_compared_is_found(line: Line, service: FakeService) -> None:
    line.train(5)
    first = report(line)[1]["run_id"]
    service.lose(first, 3)
    found = send_and_compare(copier(line, service, service.clock), line.paths)
    assert (found.same, found.updates, found.sent) == (True, 5, 5)
    assert service.runs[first].superseded == (found.run_id, "a hole at update 3")
    assert service.runs[found.run_id].sent == [0, 1, 2, 3, 4]


def test_a_journal_that_is_older_than_the_copy_is_not_the_same(line: Line, service: FakeService) -> None:
    line.train(3)
    old = line.paths.journal.read_bytes()
    line.train(3)
    report(line)
    line.paths.journal.write_bytes(old)
    code, found = report(line)
    assert (code, found["updates"], found["beyond"], found["same"]) == (1, 3, 3, False)
    assert "the service has updates that the journal does not have" in command(line).stdout


def test_a_line_of_rows_that_a_client_cannot_keep_at_once(line: Line, service: FakeService) -> None:
    line.train(1000)  # four looks
    pace = MirrorPace(directory_bytes=20_000)  # a row takes 100
    done: list[tuple[str, int, int]] = []
    mirror = copier(line, service, service.clock, pace, client_files=True)
    found = send_and_compare(mirror, line.paths, lambda *how: done.append(how))
    assert (found.same, found.updates, found.sent) == (True, 1000, 1000)
    assert service.calls.count("open") == 4
    assert done[-1] == ("comparing", 1000, 1000)
    assert ("sending", 512, 1000) in done


def test_what_the_command_refuses(line: Line, service: FakeService) -> None:
    with pytest.raises(Refusal, match="no such journal; it is made when the line is first run"):
        command(line)
    line.train(3)
    with FileLock(line.paths.mirror_lock).acquire("it"), pytest.raises(Refusal) as refused:
        command(line)
    assert f"process {os.getpid()} copies its journal now" in str(refused.value)
    assert service.calls == []

    service.away_for = {"send"}
    with pytest.raises(ServiceAway, match="send: no answer"):
        command(line)
    state = read_state(line.paths)
    assert state is not None
    assert (state.error, state.pid) == ("https://tracker: send: no answer", None)
    service.away_for = set()
    assert report(line)[0] == 0

    bare = Line(line.paths.root.parent / "bare")
    save_run(bare.paths.run_json, settings(changed("tracker", to=None)))
    with pytest.raises(Refusal, match="names no tracker"):
        command(bare)
    assert not bare.paths.mirror_lock.exists()
