"""Notices: given to a program that may be anything, described by the schema in the documentation."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from notice_sink import notices, set_notify
from supervise_helpers import SupervisorProcess, supervise, wait_until, work_of
from typer.testing import CliRunner

from nstrain.base.disk import FileLock
from nstrain.base.errors import ExitCode, Interrupted, Refusal
from nstrain.cli.main import app
from nstrain.line.notices import LONGEST_TEXT, Event, Notice, Notifier, notice
from nstrain.line.paths import LinePaths
from nstrain.supervise.refused_start import refused_start_told

ROOT = Path(__file__).parents[2]
TOLD = notice("failed", "line", Path("/run"), "it failed", update=3, tokens=300)


def given(program: Path | None, told: Notice, limit_s: float = 5.0) -> list[str]:
    """Give one notice and wait for the program's end; what was said about it."""
    said: list[str] = []
    notifier = Notifier(None if program is None else str(program), said.append, limit_s)
    notifier.send(told)
    notifier.finish(limit_s)
    return said


def script(directory: Path, text: str) -> Path:
    path = directory / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_program_gets_one_object(tmp_path: Path) -> None:
    assert given(script(tmp_path, f"cat > {tmp_path}/got"), TOLD) == []
    value = json.loads((tmp_path / "got").read_text())
    assert (value["event"], value["text"], value["update"]) == ("failed", "it failed", 3)
    assert (value["checkpoint"], value["format"]) == (None, 1)
    assert value["time"] == TOLD.time


def test_nobody_to_tell(tmp_path: Path) -> None:
    assert given(None, TOLD) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo cannot reach the server >&2; exit 7", "ended with exit code 7: cannot reach the server"),
        ("kill -9 $$", "ended with exit code -9"),
    ],
)
def test_a_program_that_fails_is_told(tmp_path: Path, text: str, said: str) -> None:
    assert given(script(tmp_path, text), TOLD) == [f"the notice 'failed': {tmp_path}/program {said}"]


def test_a_program_that_is_not_there_or_may_not_be_run(tmp_path: Path) -> None:
    assert "could not be given to" in given(tmp_path / "nothing", TOLD)[0]
    path = script(tmp_path, "true")
    path.chmod(0o644)
    assert "could not be given to" in given(path, TOLD)[0]


def test_a_program_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    began = time.monotonic()
    said = given(script(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; wait"), TOLD, 0.5)
    assert time.monotonic() - began < 5
    assert said == [f"the notice 'failed': {tmp_path}/program took longer than 0 s and was killed"]
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not Path(f"/proc/{child}").exists() or _zombie(child))


def _zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_program_that_reads_nothing_and_prints_without_end(tmp_path: Path) -> None:
    long = notice("failed", "line", Path("/run"), "x" * 10 * LONGEST_TEXT + "what it died of")
    assert len(long.text) == LONGEST_TEXT
    assert long.text.endswith("what it died of")
    assert "was killed" in given(script(tmp_path, "exec yes"), long, 0.5)[0]


def test_sending_never_waits(tmp_path: Path) -> None:
    told: list[str] = []
    notifier = Notifier(str(script(tmp_path, "sleep 600")), told.append, 0.3)
    began = time.monotonic()
    for _ in range(5):
        notifier.send(TOLD)
        notifier.look()
    assert time.monotonic() - began < 2
    while len(told) < 5 and time.monotonic() - began < 20:  # a line may train for weeks until it finishes
        time.sleep(0.05)
        notifier.look()
    notifier.finish(0.0)
    assert [text.endswith("took longer than 0 s and was killed") for text in told] == [True] * 5
    assert time.monotonic() - began < 15


def test_the_schema_is_the_documented_one() -> None:
    page = (ROOT / "docs" / "reference" / "notices.md").read_text()
    found = re.search(r"```json schema\n(.*?)```", page, re.DOTALL)
    assert found is not None
    assert json.loads(found[1]) == Notice.model_json_schema(), "put the present schema into docs/reference/notices.md"
    for event in get_args(Event):
        assert f"| `{event}` |" in page, f"{event} is not explained"


# ---- of a line -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainer", "events"),
    [
        ("done", ["finished"]),
        ("refuses", ["failed"]),
        ("full", ["disk_full"]),
        ("crashes", ["failed"]),
        ("hangs,done", ["watchdog_restart", "finished"]),
        ("crashes,done", ["finished"]),
    ],
)
def test_each_end_is_one_notice(paths: LinePaths, tmp_path: Path, trainer: str, events: list[str]) -> None:
    sink = set_notify(tmp_path)
    supervise(paths, trainer)
    told = notices(sink)
    assert [one["event"] for one in told] == events
    assert all(one["run"] == str(paths.root) and one["line"] == "small" for one in told)


def test_a_refused_start_is_told_where_no_terminal_shows_it(
    paths: LinePaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a service after a restart of the machine, whose disk is not mounted yet."""
    sink = set_notify(tmp_path)
    work_of(paths).rename(tmp_path / "not mounted")
    start = ["run", str(paths.root), "--foreground"]
    assert CliRunner().invoke(app, start).exit_code != ExitCode.DONE
    (told,) = notices(sink)
    assert (told["event"], told["line"], told["run"]) == ("failed", "small", str(paths.root))
    assert re.search("was not started: .*is not a data line", told["text"])

    paths.root.rename(tmp_path / "not mounted either")
    assert CliRunner().invoke(app, start).exit_code != ExitCode.DONE
    assert [(one["line"], "no run.json" in one["text"]) for one in notices(sink)[1:]] == [("", True)]
    (tmp_path / "not mounted either").rename(paths.root)

    with FileLock(paths.supervisor_lock).acquire("another supervisor"):
        assert CliRunner().invoke(app, start).exit_code != ExitCode.DONE
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(Refusal), refused_start_told(paths.root):
        raise Refusal("seen by whoever typed the command")
    monkeypatch.undo()
    with pytest.raises(Interrupted), refused_start_told(paths.root):
        raise Interrupted("Ctrl-C")
    assert len(notices(sink)) == 2


@pytest.mark.parametrize(
    ("number", "failures"), [(signal.SIGTERM, 0), (signal.SIGKILL, 1), (signal.SIGSEGV, 1), (signal.SIGABRT, 1)]
)
def test_a_signal_from_elsewhere_is_notified(
    paths: LinePaths,
    start: Callable[..., SupervisorProcess],
    tmp_path: Path,
    number: signal.Signals,
    failures: int,
) -> None:
    sink = set_notify(tmp_path)
    running = start("works,done")
    os.kill(running.wait_for_trainer(), number)
    assert running.wait()[0] == ExitCode.DONE
    told = notices(sink)
    assert [one["event"] for one in told] == ["signal_restart", "finished"]
    assert (told[0]["launches"], told[0]["failures"]) == (1, failures)
    if number == signal.SIGTERM:
        assert told[0]["checkpoint"] is not None, "it saved"
    else:
        assert number.name in told[0]["text"]


@pytest.mark.parametrize("program", ["#!/bin/sh\nexit 1\n", "#!/bin/sh\nexec sleep 600\n", "no program\n"])
def test_no_program_disturbs_the_line(paths: LinePaths, tmp_path: Path, program: str) -> None:
    set_notify(tmp_path, program)
    ending, _ = supervise(paths, "done", notice_limit_s=0.5)
    assert ending.outcome == "done"
    assert "the notice 'finished'" in paths.run_log.read_text()


def test_the_example_posts_to_a_webhook(tmp_path: Path) -> None:
    got: list[bytes] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Hook)
    thread = threading.Thread(target=server.handle_request, daemon=True)
    thread.start()
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "notify" / "notify.py")],
        input=TOLD.model_dump_json(),
        text=True,
        capture_output=True,
        env={"NOTIFY_WEBHOOK": f"http://127.0.0.1:{server.server_port}/x", "no_proxy": "*"},
    )
    thread.join(10)
    server.server_close()
    assert ran.returncode == 0, ran.stderr
    assert "it failed" in json.loads(got[0])["text"], ran.stderr
