"""What is shown of a running line, and that showing it can harm nothing."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from foreground import QUICK, preparer_command, trainer_command
from rich.console import Console
from supervise_helpers import wait_until

from nstrain.base.errors import Refusal
from nstrain.base.logs import rotate
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import read_supervisor
from nstrain.supervise import display as display_module
from nstrain.supervise.display import Display, LogFollower
from nstrain.supervise.supervisor import Supervisor, run_foreground


class Broken(io.StringIO):
    """A terminal that is gone."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw often."""
    monkeypatch.setattr(display_module, "REFRESH_S", 0.05)


def run_shown(paths: LinePaths, console: Console, trainer: str = "done") -> str:
    """Run a line with a display; its outcome."""
    with Display(paths.root, console) as display:
        commands = trainer_command(trainer), preparer_command("idle")
        supervisor = Supervisor(paths.root, display.event, *commands, QUICK)
        return supervisor.run().outcome


def test_plain_lines_are_those_of_the_log(paths: LinePaths) -> None:
    paths.run_log.write_text("a line of the last run\n")
    out = io.StringIO()
    assert run_shown(paths, Console(file=out, width=20), "refuses") == "failed"
    lines = out.getvalue().splitlines()
    assert "u1 trained" in lines
    assert "bad_configuration: run.json: field 'x'" in lines, "a long line must not be wrapped"
    assert "a line of the last run" not in lines
    assert sum(line.startswith("trainer started as process") for line in lines) == 1
    assert lines[-1] == "has a second line", "the outcome comes last"


def test_page_on_a_terminal(paths: LinePaths) -> None:
    out = io.StringIO()
    assert run_shown(paths, Console(file=out, force_terminal=True, width=160), "crashes") == "failed"
    text = out.getvalue()
    assert "trainer started as process" in text
    assert "running" in text
    last_page = text[text.rindex(str(paths.root)) :]
    assert "failed" in last_page
    assert "ZeroDivisionError: a bug in the trainer" in last_page
    assert "running" not in last_page


def test_nothing_is_shown_of_a_line_that_is_refused(tmp_path: Path) -> None:
    out = io.StringIO()
    with pytest.raises(Refusal):
        run_foreground(tmp_path, Console(file=out, force_terminal=True))
    assert out.getvalue() == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_terminal_that_is_gone(paths: LinePaths, terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_shown(paths, Console(file=Broken(), force_terminal=terminal)) == "done"
    state = read_supervisor(paths)
    assert state is not None
    assert state.outcome == "done"
    notes = capsys.readouterr().err.splitlines()
    assert notes
    assert len(notes) == len(set(notes)), "a note is repeated"
    assert all("the line is not affected" in note for note in notes)


def test_terminal_that_takes_nothing_holds_up_nothing(paths: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display_module, "LAST_REFRESH_S", 0.2)
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write_fd, b"x" * 65536)
    os.set_blocking(write_fd, True)
    with os.fdopen(write_fd, "w") as pipe:
        began = time.monotonic()
        assert run_shown(paths, Console(file=pipe)) == "done"
        assert time.monotonic() - began < 20
        os.read(read_fd, 1 << 20)  # let the thread go on, so that the pipe can be closed
        os.set_blocking(read_fd, False)
        wait_until(lambda: not any(thread.name == "display" for thread in threading.enumerate()))
    os.close(read_fd)


def test_status_that_cannot_be_read_is_noted_once(
    paths: LinePaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def damaged(run: Path) -> None:
        raise Refusal("supervisor.json: damaged")

    monkeypatch.setattr(display_module, "status", damaged)
    assert run_shown(paths, Console(file=io.StringIO(), force_terminal=True)) == "done"
    assert capsys.readouterr().err.count("damaged") == 1


def test_log_follower_gives_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = LogFollower(log)
    assert follower.new_lines() == []
    log.write_text("one\ntw")
    assert follower.new_lines() == ["one"]
    with log.open("a") as file:
        file.write("o\nthree\n")
    assert follower.new_lines() == ["two", "three"]
    assert follower.new_lines() == []


def test_log_follower_over_rotations(tmp_path: Path) -> None:
    """No line is lost, shown twice or cut: also those that a child still writes to the file that was put aside."""
    log = tmp_path / "log"
    log.write_text("before it was followed\n")
    rotate(log, larger_than=0)
    log.write_text("also before\n")
    follower = LogFollower(log)
    child = log.open("a")
    shown: list[str] = []

    def look() -> None:
        shown.extend(follower.new_lines())

    written: list[str] = []
    for number in range(5):
        for text in (f"line {number} of the log, which is long", f"line {number}b, cut in"):
            child.write(f"{text}\n" if text.endswith("long") else text)
            child.flush()
            written.append(text)
            if number % 2:
                look()
        assert rotate(log, larger_than=0)
        with log.open("a") as supervisor:
            supervisor.write(f"the supervisor's {number}\n")
        if number % 2:
            look()
        child.write(" two\n")
        written[-1] += " two"
        child.close()
        written.append(f"the supervisor's {number}")
        look()
        child = log.open("a")
    child.write("the last\n")
    child.close()
    look()
    assert sorted(shown) == sorted([*written, "the last"])
    assert shown[-1] == "the last"


def test_plain_lines_go_on_over_a_rotation(paths: LinePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a service shows of a line that it runs in the foreground: the trainer's lines after the rotation too."""
    from nstrain.supervise import supervisor as supervisor_module

    paths.run_log.write_text("x" * 20_000 + "\n")
    monkeypatch.setattr(supervisor_module, "rotate", lambda log: rotate(log, larger_than=10_000))
    out = io.StringIO()
    assert run_shown(paths, Console(file=out, width=20), "crashes") == "failed"
    assert (paths.root / "run.log.1").exists()
    lines = out.getvalue().splitlines()
    assert sum(line == "ZeroDivisionError: a bug in the trainer" for line in lines) >= 5, "one a launch"


def test_run_foreground_returns_the_exit_code(paths: LinePaths) -> None:
    paths.run_json.write_text(paths.run_json.read_text().replace('"print_every": 10', '"print_every": 0'))
    code = (
        "import sys, pathlib; from nstrain.base.errors import NstrainError\n"
        "from nstrain.supervise.supervisor import run_foreground\n"
        "try: sys.exit(int(run_foreground(pathlib.Path(sys.argv[1]))))\n"
        "except NstrainError as error: print(error); sys.exit(int(error.exit_code))"
    )
    found = subprocess.run([sys.executable, "-c", code, str(paths.root)], capture_output=True, text=True)
    assert found.returncode == 2
    assert "print_every" in found.stdout
