"""A process is recognised by more than its pid."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from nstrain.base.process import ProcessId, alive, identify, this_process


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_this_process_is_alive_and_survives_json() -> None:
    me = this_process()
    assert me.pid == os.getpid()
    assert alive(me)
    assert ProcessId.from_json(json.loads(json.dumps(me.to_json()))) == me


def test_a_child_is_alive_until_it_is_killed_also_as_a_zombie() -> None:
    child = sleeper()
    identity = identify(child.pid)
    assert identity is not None
    assert alive(identity)
    child.kill()
    deadline = time.monotonic() + 30
    while alive(identity):  # nobody has waited for it: it is a zombie
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert Path(f"/proc/{child.pid}").exists()
    child.wait()
    assert not alive(identity)
    assert identify(child.pid) is None


def test_another_start_time_or_boot_is_another_process() -> None:
    me = this_process()
    assert not alive(dataclasses.replace(me, start_ticks=me.start_ticks + 1))
    assert not alive(dataclasses.replace(me, boot_id="0" * 8))


def test_a_program_name_with_parentheses_and_spaces_is_read(tmp_path: Path) -> None:
    program = tmp_path / "a) R (b"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "60"])
    deadline = time.monotonic() + 30
    while "a) R" not in Path(f"/proc/{child.pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    identity = identify(child.pid)
    assert identity is not None
    assert alive(identity)
    assert identity.start_ticks >= this_process().start_ticks
    child.kill()
    child.wait()
