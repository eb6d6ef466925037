"""`nstrain run` and `nstrain data run-preparer` in the background: out of the terminal's reach, refused in it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from supervise_helpers import wait_until, work_of

from nstrain.base.detach import start_in_background
from nstrain.base.errors import ExitCode, NstrainError
from nstrain.base.process import alive, identify
from nstrain.data.preparer import read_status
from nstrain.line.paths import LinePaths
from nstrain.line.state_files import read_heartbeat, read_supervisor
from nstrain.ops.stop import stop_line
from nstrain.supervise import login

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(host: Path) -> dict[str, str]:
    return {**os.environ, "NSTRAIN_HOST": str(host), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def end_what_was_left(paths: LinePaths) -> Iterator[None]:
    """Nothing of a failed test runs on."""
    yield
    state = read_supervisor(paths)
    if state is not None and state.running():
        os.kill(state.supervisor.pid, 9)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "nstrain.cli.main", *map(str, arguments)]


def run_in_a_terminal(environment: dict[str, str], *arguments: object) -> str:
    """Run a command as a login shell would, on a terminal of its own that is closed when the command ends."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(*arguments), stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            block = os.read(ours, 4096)
        except OSError:
            break
        if not block:
            break
        said += block
        if process.poll() is not None and b"end:" in said:
            break
    os.close(ours)  # hangs up: SIGHUP for whoever has this terminal
    assert process.wait() == 0, said
    return said.decode()


def test_a_line_outlives_its_terminal(paths: LinePaths, environment: dict[str, str]) -> None:
    said = run_in_a_terminal(environment, "run", paths.root)
    state = read_supervisor(paths)
    assert state is not None
    pid = state.supervisor.pid
    assert f"runs in the background as process {pid}" in said
    assert os.getsid(pid) == pid, "a session of its own"
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[4] == "0", "it has a terminal"
    opened = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1, 2)}
    assert opened == {"/dev/null", str(paths.supervisor_out)}
    wait_until(lambda: (beat := read_heartbeat(paths)) is not None and beat.update >= 2)
    assert state.running()

    refused = subprocess.run(command("run", paths.root), env=environment, capture_output=True, text=True)
    assert refused.returncode == ExitCode.BAD_CONFIGURATION
    assert f"is run by process {pid} already" in refused.stderr

    stopped = stop_line(paths.root, 30.0)
    assert stopped.ended
    assert stopped.status.state == "stopped"
    wait_until(lambda: not alive(state.supervisor))


def test_what_is_refused_is_said_in_the_terminal(paths: LinePaths, environment: dict[str, str]) -> None:
    fields = json.loads(paths.run_json.read_text())
    paths.run_json.write_text(json.dumps(fields | {"metrics": 99}))
    refused = subprocess.run(command("run", paths.root), env=environment, capture_output=True, text=True)
    assert refused.returncode == ExitCode.BAD_CONFIGURATION
    assert "field 'metrics' is 99" in refused.stderr
    assert not paths.supervisor_json.exists()


@pytest.mark.parametrize(
    ("device", "settings", "words"),
    [
        ("cuda", {"gpu_reader": ["sh", "-c", "echo pip install nvidia-ml-py >&2; exit 2"]}, "pip install nvidia-ml-py"),
        ("cuda", {"gpu_reader": ["sh", "-c", "exit 7"]}, "the reader of the GPUs ended with exit code 7"),
        ("cuda", {"gpu_reader": ["/no/such/reader"]}, "/no/such/reader cannot be started"),
        ("cpu", {"notify": "/no/such/program"}, "field 'notify': expected a program that this user may run"),
    ],
)
def test_what_the_machine_lacks_is_said_in_the_terminal(
    paths: LinePaths, host: Path, environment: dict[str, str], device: str, settings: dict[str, Any], words: str
) -> None:
    """And not a moment after the line went to the background, where nobody looks."""
    paths.run_json.write_text(json.dumps(json.loads(paths.run_json.read_text()) | {"device": device}))
    host.write_text(json.dumps(settings))
    refused = subprocess.run(command("run", paths.root), env=environment, capture_output=True, text=True)
    assert refused.returncode == ExitCode.BAD_CONFIGURATION, refused.stdout
    assert words in refused.stderr
    assert "in the background" not in refused.stdout
    assert not paths.supervisor_json.exists()


def test_a_login_that_would_end_it_is_refused_before_anything_starts(
    paths: LinePaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nstrain.base.errors import Refusal
    from nstrain.cli.lines import run

    session = login.Login(True, "/user.slice/user-1000.slice/user@1000.service/a.scope", "ada", False)
    monkeypatch.setattr(login, "this_login", lambda: session)
    with pytest.raises(Refusal, match=f"systemd-run .* run {paths.root} --foreground"):
        run(str(paths.root))
    assert not paths.supervisor_out.exists()


def test_a_preparer_in_the_background(paths: LinePaths, environment: dict[str, str]) -> None:
    work = work_of(paths)
    arguments = ("data", "run-preparer", "--work", work, "--ahead", 1, "--workers", 0)
    said = run_in_a_terminal(environment, *arguments)
    status = read_status(work)
    wait_until(lambda: (now := read_status(work)) is not None and now.stage == "waiting_consumer")
    status = read_status(work)
    assert status is not None
    identity = identify(status.pid)
    assert f"in the background by process {status.pid}" in said
    assert identity is not None
    assert os.getsid(status.pid) == status.pid
    try:
        refused = subprocess.run(command(*arguments), env=environment, capture_output=True, text=True)
        assert refused.returncode == ExitCode.BAD_CONFIGURATION
        assert f"held by process {status.pid}" in refused.stderr
    finally:
        os.kill(status.pid, 15)
    wait_until(lambda: not alive(identity))
    assert (work / "preparer.out").exists()


# ---- the start itself ------------------------------------------------------------------------------------------------


def script(directory: Path, text: str) -> list[str]:
    path = directory / "program.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def test_ready(tmp_path: Path) -> None:
    begun = start_in_background(
        script(tmp_path, "import os, sys, time\nprint('hello')\nos.write(int(sys.argv[2]), b'R')\ntime.sleep(600)"),
        tmp_path / "out",
    )
    assert (begun.exit_code, begun.words) == (None, "hello")
    os.kill(begun.pid, 9)


def test_ended_before_it_was_ready(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("of an earlier start\n")
    begun = start_in_background(script(tmp_path, "print('no'); exit(2)"), tmp_path / "out")
    assert (begun.exit_code, begun.words) == (2, "no")


def test_neither(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(NstrainError, match="is not ready after 0 s"):
        start_in_background(script(tmp_path, "import time; time.sleep(5)"), tmp_path / "out", 0.3)
    assert time.monotonic() - began < 4


def test_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(NstrainError, match="cannot be started in the background"):
        start_in_background([str(tmp_path / "nothing")], tmp_path / "out")
