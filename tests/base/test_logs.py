"""A log that several processes append to, rotated under them: no line lost, none cut, two files at most."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from nstrain.base.logs import old_log, rotate

WRITER = """
import sys, time
from pathlib import Path
from nstrain.base.logs import FollowedLog, write_whole_lines
write_whole_lines()
log = FollowedLog(Path(sys.argv[1]))
log.follow(0.01)
for number in range(int(sys.argv[3])):
    print(f"{sys.argv[2]} {number}", flush=True)
    time.sleep(0.001)
"""


def start(log: Path, name: str, lines: int) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", WRITER, str(log), name, str(lines)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )


def test_a_small_log_stays(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    assert not rotate(log, 10)
    log.write_text("0123456789")
    assert not rotate(log, 10)
    assert log.read_text() == "0123456789"


def test_a_large_log_is_put_aside_and_the_older_one_is_gone(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    for content in ("first, and large", "second, and large"):
        log.write_text(content)
        assert rotate(log, 10)
        assert log.read_text() == ""
    assert old_log(log).read_text() == "second, and large"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.log", "run.log.1"]


def test_writers_change_over_and_no_line_is_lost(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    writers = [start(log, name, 600) for name in "ab"]
    aside = []
    while any(writer.poll() is None for writer in writers):
        time.sleep(0.05)
        if len(aside) < 3 and log.exists() and log.stat().st_size > 1000 and rotate(log, 1000):
            # Kept from the next rotation, so that every line can be counted.
            kept = tmp_path / f"kept{len(aside)}"
            kept.hardlink_to(old_log(log))
            aside.append(kept)
    assert aside, "it was never rotated"
    lines = [line for path in (*aside, log) for line in path.read_text().splitlines()]
    assert sorted(lines) == sorted(f"{name} {number}" for name in "ab" for number in range(600))
    assert log.read_text(), "nobody changed over"


def test_a_process_of_its_own_log_bounds_it(tmp_path: Path) -> None:
    log = tmp_path / "own.out"
    rotating = WRITER.replace(
        "log.follow(0.01)", "nstrain.base.logs.rotate.__defaults__ = (500,)\nlog.follow(0.01, True)"
    )
    with log.open("ab") as output:
        command = [sys.executable, "-c", "import nstrain.base.logs\n" + rotating, str(log), "a", "400"]
        subprocess.run(command, stdout=output, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.out", "own.out.1"]
    last = [line for path in (old_log(log), log) for line in path.read_text().splitlines()]
    assert last == [f"a {number}" for number in range(400 - len(last), 400)], "the newest lines, whole and in order"
    assert len(last) < 400


def test_output_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    """And what its encoding does not have is replaced."""
    (tmp_path / "run.log").touch()
    command = [sys.executable, "-c", WRITER, str(tmp_path / "run.log"), "行", "3"]
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert ran.stdout.splitlines() == ["? 0", "? 1", "? 2"]
    assert (tmp_path / "run.log").read_text() == ""
